//! Certificates that are written to files, too.

use super::*;

#[tokio::test(start_paused = true)]
async fn the_written_root_is_the_one_that_was_served_last() {
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        config.output = Some(output::Config { dir: dir.to_owned(), mode: 0o600, seal: None });
        config
    });
    let written = || std::fs::read_to_string(world.dir.path().join("root-cert.pem")).unwrap_or_default();
    world.identity().await;
    world.pass(DAY / 2 + Duration::from_secs(60)).await;
    until("the CA's own text is written", || written() == world.ca.root()).await;
    world.roots().await;
    until("the merged text is written", || written() == world.ca.root().trim_end()).await;
}

#[tokio::test(start_paused = true)]
async fn a_written_file_that_somebody_removed_is_back_with_the_next_request() {
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        config.output = Some(output::Config { dir: dir.to_owned(), mode: 0o600, seal: None });
        config
    });
    let names = ["key.pem", "cert-chain.pem", "root-cert.pem"];
    let path = |name: &str| world.dir.path().join(name);
    let read = || names.map(|name| std::fs::read(path(name)).unwrap_or_default());
    world.identity().await;
    world.roots().await;
    until("the files are there", || read().iter().all(|text| !text.is_empty())).await;
    let first = read();
    world.pass(Duration::from_secs(60)).await;
    for name in names {
        std::fs::remove_file(path(name)).unwrap();
        world.pass(Duration::from_secs(60)).await;
        assert!(!path(name).exists(), "nobody has asked");
        if name == "root-cert.pem" {
            drop(world.roots().await)
        } else {
            drop(world.identity().await)
        }
        until("it is back", || read() == first).await;
    }
    // What another has written there goes, and nothing is written where the files are as they should be.
    std::fs::write(path("key.pem"), "another's").unwrap();
    world.pass(Duration::from_secs(60)).await;
    world.identity().await;
    until("it is ours again", || read() == first).await;
    let inodes = || names.map(|name| std::os::unix::fs::MetadataExt::ino(&path(name).metadata().unwrap()));
    let before = inodes();
    world.pass(Duration::from_secs(60)).await;
    world.identity().await;
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(inodes(), before);
}

#[tokio::test(start_paused = true)]
async fn output_goes_on_when_the_disk_is_back() {
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        config.output = Some(output::Config { dir: dir.join("later"), mode: 0o644, seal: None });
        config
    });
    world.identity().await;
    until("the error is shown", || world.handle.status().output_error.contains("later")).await;
    std::fs::create_dir(world.dir.path().join("later")).unwrap();
    world.pass(Duration::from_secs(30)).await;
    let root = || std::fs::read_to_string(world.dir.path().join("later/root-cert.pem")).unwrap_or_default();
    until("the files are there", || root() == world.ca.root().trim_end()).await;
    until("the error is gone", || world.handle.status().output_error.is_empty()).await;
    // The Go agent's file follows the last thing generated: at a renewal that is the CA's own text.
    world.pass(DAY * 3 / 4).await;
    until("the CA's own text", || root() == world.ca.root()).await;
}
