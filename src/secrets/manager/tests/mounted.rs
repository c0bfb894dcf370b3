//! Files that are mounted, in the CA's place and the other way round.

use futures_util::FutureExt;

use super::*;

/// Mounts a pair without a root.
pub(super) fn pair(dir: &Path) {
    let pair = mock_istiod::Authority::new("files", 1).pair(&mock_istiod::Leaf::workload(ID, DAY));
    std::fs::create_dir(dir.join("certs")).unwrap();
    std::fs::write(dir.join("certs/cert-chain.pem"), &pair.chain).unwrap();
    std::fs::write(dir.join("certs/key.pem"), &pair.key).unwrap();
}

#[tokio::test(start_paused = true)]
async fn mounted_files_come_before_the_ca() {
    let world = World::with(Act::Issue(DAY), |dir, config| {
        pair(dir);
        config
    });
    let (chain, _) = world.identity().await;
    assert_eq!(chain, std::fs::read(world.dir.path().join("certs/cert-chain.pem")).unwrap());
    // ROOTCA has no file, so it is the CA's.
    assert_eq!(world.roots().await.0, world.ca.root().trim_end());
    assert_eq!(world.ca.calls(), 1);
    world.pass(DAY * 2).await;
    assert_eq!(world.ca.calls(), 1, "the certificate is not the CA's, so it is not renewed there");
    // Gone for a moment is not gone; gone for good is the CA's turn.
    std::fs::remove_file(world.dir.path().join("certs/cert-chain.pem")).unwrap();
    let (kept, mut updates) = world.identity().await;
    assert_eq!(kept, chain);
    let mut changed = None;
    for _ in 0..100 {
        world.pass(Duration::from_millis(100)).await;
        changed = changed.or(news(&mut updates).await);
    }
    assert!(matches!(changed, Some(Change::Updated(_))), "{changed:?}");
    assert_ne!(world.identity().await.0, chain);
    // A pair that comes back and does not fit is no reason to let the CA's run out.
    let (file, key) = (world.dir.path().join("certs/cert-chain.pem"), world.dir.path().join("certs/key.pem"));
    let (right, calls) = (std::fs::read(&key).unwrap(), world.ca.calls());
    let other = mock_istiod::Authority::new("files", 1).pair(&mock_istiod::Leaf::workload(ID, DAY));
    std::fs::write(&key, &other.key).unwrap();
    std::fs::write(&file, &chain).unwrap();
    world.pass(DAY * 2).await;
    assert!(world.ca.calls() >= calls + 2, "renewed at the CA while the files cannot be served");
    let (issued, mut updates) = world.identity().await;
    assert_ne!(issued, chain);
    // One that fits is served without being asked for, and followed.
    std::fs::write(&key, &right).unwrap();
    world.pass(Duration::from_secs(60)).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("nothing came") };
    assert_eq!(chain_of(&secret), chain);
    let calls = world.ca.calls();
    world.pass(DAY * 2).await;
    assert_eq!(world.ca.calls(), calls, "the certificate is not the CA's again");
    std::fs::write(&key, &other.key).unwrap();
    std::fs::write(&file, &other.chain).unwrap();
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(world.identity().await.0, other.chain.as_bytes());
}

#[tokio::test(start_paused = true)]
async fn files_that_come_later_take_the_cas_place_at_once() {
    let world = World::new(Act::Issue(DAY));
    let (issued, mut updates) = world.identity().await;
    let folder = world.dir.path().join("certs");
    std::fs::create_dir(&folder).unwrap();
    let authority = mock_istiod::Authority::new("files", 1);
    let pair = authority.pair(&mock_istiod::Leaf::workload(ID, DAY));
    std::fs::write(folder.join("cert-chain.pem"), &pair.chain).unwrap();
    std::fs::write(folder.join("key.pem"), &pair.key).unwrap();
    world.pass(Duration::from_secs(60)).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("nothing came") };
    assert_ne!(chain_of(&secret), issued);
    std::fs::write(folder.join("root-cert.pem"), authority.root_pem()).unwrap();
    // For so long the look at the pair beside it is good for the root, too.
    tokio::time::advance(Duration::from_millis(10)).await;
    assert_eq!(world.roots().await.0, authority.root_pem().trim_end());
    // The root that is served does not wait for the CA's answer, nor is it the CA's.
    assert_eq!(world.identity().await.0, chain_of(&secret));
}

#[tokio::test(start_paused = true)]
async fn files_that_come_are_given_to_those_who_wait_for_the_ca() {
    let list = crate::trouble::Troubles::default();
    let refuses = Act::Refuse(tonic::Code::PermissionDenied);
    let world = World::with(refuses, |_, c| Config { trouble: Arc::new(list.reporter("ca")), ..c });
    assert!(world.fetch(ResourceName::Default).await.is_err());
    let mut waits = Box::pin(world.fetch(ResourceName::Default));
    assert!((&mut waits).now_or_never().is_none() && list.any(|_| true));
    settle().await;
    let folder = world.dir.path().join("certs");
    std::fs::create_dir(&folder).unwrap();
    let authority = mock_istiod::Authority::new("files", 1);
    let pair = authority.pair(&mock_istiod::Leaf::workload(ID, DAY));
    for (file, text) in
        [("root-cert.pem", authority.root_pem()), ("key.pem", &pair.key), ("cert-chain.pem", &pair.chain)]
    {
        std::fs::write(folder.join(file), text).unwrap();
    }
    world.pass(Duration::from_secs(60)).await;
    let fetched = waits.now_or_never().expect("it waits no more").unwrap();
    assert_eq!(chain_of(&fetched.secret), pair.chain.as_bytes());
    assert!(!list.any(|_| true), "nobody asks the CA any more");
}

#[tokio::test(start_paused = true)]
async fn what_was_wrong_with_the_ca_is_over_when_a_pair_alone_takes_its_place() {
    let list = crate::trouble::Troubles::default();
    let world = World::with(Act::Issue(DAY), |_, c| Config { trouble: Arc::new(list.reporter("ca")), ..c });
    world.identity().await;
    world.ca.act(Act::Refuse(tonic::Code::Unavailable));
    world.pass(DAY / 2 + Duration::from_secs(60)).await;
    assert!(list.any(|_| true));
    pair(world.dir.path());
    world.pass(Duration::from_secs(120)).await;
    let calls = world.ca.calls();
    world.pass(Duration::from_secs(600)).await;
    assert_eq!(world.ca.calls(), calls, "it is asked no more");
    assert!(!list.any(|_| true), "{list:?}");
    assert!(world.ca.left(), "its client is told as well");
}

// A certificate that is the CA's, and then files in its place.
async fn files_in_the_cas_place(world: &World) -> (Vec<u8>, String, Updates) {
    let (issued, mut updates) = world.identity().await;
    let folder = world.dir.path().join("certs");
    std::fs::create_dir(&folder).unwrap();
    let pair = mock_istiod::Authority::new("files", 1).pair(&mock_istiod::Leaf::workload(ID, 30 * DAY));
    std::fs::write(folder.join("key.pem"), &pair.key).unwrap();
    std::fs::write(folder.join("cert-chain.pem"), &pair.chain).unwrap();
    world.pass(Duration::from_secs(60)).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("nothing came") };
    assert_eq!(chain_of(&secret), pair.chain.as_bytes());
    (issued, pair.chain, updates)
}

#[tokio::test(start_paused = true)]
async fn files_that_go_are_not_followed_by_a_certificate_that_is_over() {
    let world = World::new(Act::Issue(DAY));
    let (first, files, mut updates) = files_in_the_cas_place(&world).await;
    // Nobody renews it meanwhile.
    world.pass(DAY * 2).await;
    world.ca.act(Act::Refuse(tonic::Code::Unavailable));
    std::fs::remove_dir_all(world.dir.path().join("certs")).unwrap();
    world.pass(Duration::from_secs(60)).await;
    while let Some(change) = news(&mut updates).await {
        assert!(matches!(change, Change::Failed(_)), "the old one was pushed");
    }
    // Who asks now is told so. The CA is asked until it answers, and then there is a new one.
    assert!(world.fetch(ResourceName::Default).await.is_err());
    world.ca.act(Act::Issue(DAY));
    world.pass(Duration::from_secs(120)).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("nothing came") };
    assert!(chain_of(&secret) != first && chain_of(&secret) != files.as_bytes());
}

#[tokio::test(start_paused = true)]
async fn files_that_go_after_they_were_bad_are_the_cas_turn_too() {
    let world = World::new(Act::Issue(DAY));
    let (first, _, mut updates) = files_in_the_cas_place(&world).await;
    std::fs::write(world.dir.path().join("certs/cert-chain.pem"), "garbage").unwrap();
    world.pass(Duration::from_secs(15)).await;
    assert!(matches!(news(&mut updates).await, Some(Change::Failed(_))), "it was not told");
    std::fs::remove_dir_all(world.dir.path().join("certs")).unwrap();
    world.pass(Duration::from_secs(15)).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("nothing came") };
    assert_eq!(chain_of(&secret), first, "it is still good");
}

#[tokio::test(start_paused = true)]
async fn what_takes_the_place_of_files_is_written_too() {
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        config.output = Some(output::Config { dir: dir.to_owned(), mode: 0o600, seal: None });
        config
    });
    let (first, files, _updates) = files_in_the_cas_place(&world).await;
    let chain = || std::fs::read(world.dir.path().join("cert-chain.pem")).unwrap_or_default();
    until("the mounted one", || chain() == files.as_bytes()).await;
    std::fs::remove_dir_all(world.dir.path().join("certs")).unwrap();
    world.pass(Duration::from_secs(15)).await;
    assert_eq!(world.identity().await.0, first);
    until("the CA's", || chain() == first).await;
}

#[tokio::test(start_paused = true)]
async fn without_a_ca_missing_files_are_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Arc::new(Fixed::at(SystemTime::now()));
    let (handle, manager) = Manager::new(config(dir.path()), None, &Registry::new(), clock);
    let group = crate::base::tasks::Group::new();
    group.spawn("secrets", manager.run(group.token()));
    for name in [ResourceName::Default, ResourceName::RootCa] {
        let asked = tokio::time::timeout(Duration::from_secs(1), handle.fetch(name)).await.unwrap();
        assert!(matches!(*asked.unwrap_err(), Error::NoCa(_)));
    }
    group.stop(Duration::from_secs(1)).await;
    assert!(matches!(*handle.fetch(ResourceName::Default).await.unwrap_err(), Error::Stopped));
}

// What an agent has left for another, whose disk is busy for so long; what that one serves then, and the first did.
async fn left_on_a_slow_disk(life: Duration, busy: Duration) -> (Option<Vec<u8>>, Vec<u8>) {
    let folder = tempfile::tempdir().unwrap();
    let persistent = |_: &Path, mut config: Config| {
        let folder = folder.path().join("kept");
        config.persist = Some(crate::secrets::persist::Config { folder, seal: None });
        config
    };
    let world = World::with(Act::Issue(life), persistent);
    let (left, _) = world.identity().await;
    until("it is written", || folder.path().join("kept/root-cert.pem").exists()).await;
    world.group.stop(Duration::from_secs(5)).await;
    // A machine that has just been started, and its disk has much to do.
    let (let_go, hold) = std::sync::mpsc::channel::<()>();
    let mut others = Box::pin(crate::secrets::manager::mounted::FOLDERS.run(move || {
        let _ = hold.recv();
    }));
    assert!(futures_util::poll!(&mut others).is_pending());
    let world = World::with(Act::Hang, persistent);
    let disk = async {
        world.pass_beside(1, busy).await;
        drop(let_go);
        world.pass(Duration::from_secs(1)).await;
    };
    let (found, ()) = tokio::join!(world.fetch(ResourceName::Default), disk);
    (found.ok().map(|fetched| chain_of(&fetched.secret)), left)
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_agent_left_on_a_slow_disk_is_used_when_it_was_read() {
    let (found, left) = left_on_a_slow_disk(DAY, Duration::from_secs(5)).await;
    assert_eq!(found, Some(left));
}

#[tokio::test(start_paused = true)]
async fn what_is_over_when_a_slow_disk_was_read_is_not_used() {
    let (found, _) = left_on_a_slow_disk(Duration::from_secs(20), Duration::from_secs(21)).await;
    assert_eq!(found, None);
}

#[tokio::test(start_paused = true)]
async fn roots_beside_a_pair_that_cannot_be_read_are_asked_for_when_somebody_wants_them() {
    let world = World::with(Act::Issue(DAY), |dir, config| {
        std::fs::create_dir(dir.join("certs")).unwrap();
        std::fs::write(dir.join("certs/cert-chain.pem"), "x").unwrap();
        std::fs::write(dir.join("certs/key.pem"), "y").unwrap();
        config
    });
    assert!(world.fetch(ResourceName::Default).await.is_err());
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(world.ca.calls(), 0, "a certificate that nobody would be given");
    assert_eq!(world.roots().await.0, world.ca.root().trim_end());
    assert_eq!(world.ca.calls(), 1);
}
