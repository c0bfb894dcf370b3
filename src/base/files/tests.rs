use super::*;
use std::fs;
use std::os::unix::fs::symlink;

struct World {
    dir: tempfile::TempDir,
    watcher: Watcher,
}

impl World {
    fn new(make: impl FnOnce(&Path), watched: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path());
        let mut watcher = Watcher::new(&Watches::default(), Duration::from_millis(1));
        watcher.set(BTreeSet::from([dir.path().join(watched)]));
        assert_eq!(watcher.failures(), 0);
        Self { dir, watcher }
    }

    // A report must follow; only a broken watcher runs into the deadline.
    async fn seen(&mut self, what: &str, change: impl FnOnce(&Path)) {
        change(self.dir.path());
        let report = tokio::time::timeout(Duration::from_secs(20), self.watcher.changed()).await;
        assert!(report.is_ok(), "{what} was not seen");
    }
}

impl World {
    // What has happened is told, and then nothing more.
    async fn silent(&mut self) {
        for _ in 0..50 {
            let report = tokio::time::timeout(Duration::from_millis(20), self.watcher.changed());
            if report.await.is_err() {
                return;
            }
        }
        panic!("there is always news");
    }
}

fn replace(path: &Path, text: &str) {
    let beside = path.with_extension("new");
    fs::write(&beside, text).unwrap();
    fs::rename(&beside, path).unwrap();
}

fn relink(path: &Path, target: &str) {
    let beside = path.with_extension("new");
    symlink(target, &beside).unwrap();
    fs::rename(&beside, path).unwrap();
}

#[tokio::test]
async fn a_plain_file_again_and_again() {
    let mut world = World::new(|d| fs::write(d.join("f"), "1").unwrap(), "f");
    for round in 0..3 {
        world.seen("replacement", |d| replace(&d.join("f"), &format!("a{round}"))).await;
        world.seen("rewriting", |d| fs::write(d.join("f"), format!("b{round}")).unwrap()).await;
        world.seen("removal", |d| fs::remove_file(d.join("f")).unwrap()).await;
        world.seen("re-creation", |d| fs::write(d.join("f"), "c").unwrap()).await;
        world.seen("moving away", |d| fs::rename(d.join("f"), d.join("old")).unwrap()).await;
        world.seen("moving in", |d| fs::rename(d.join("old"), d.join("f")).unwrap()).await;
    }
}

#[tokio::test]
async fn a_file_in_the_place_of_a_folder_on_the_way() {
    let mut world = World::new(|d| fs::write(d.join("top"), "").unwrap(), "top/f");
    for _ in 0..2 {
        world.seen("removal of the file", |d| fs::remove_file(d.join("top")).unwrap()).await;
        world.seen("the folder", |d| fs::create_dir(d.join("top")).unwrap()).await;
        world.seen("the file in it", |d| fs::write(d.join("top/f"), "1").unwrap()).await;
        world
            .seen("another file in the folder's place", |d| {
                fs::rename(d.join("top"), d.join("away")).unwrap();
                fs::write(d.join("top"), "").unwrap();
                fs::remove_dir_all(d.join("away")).unwrap();
            })
            .await;
        assert_eq!(world.watcher.failures(), 0);
    }
}

#[tokio::test]
async fn the_target_of_a_link_twice() {
    let mut world = World::new(
        |d| {
            fs::create_dir(d.join("real")).unwrap();
            fs::write(d.join("real/f"), "1").unwrap();
            symlink("real/f", d.join("f")).unwrap();
        },
        "f",
    );
    for _ in 0..3 {
        world.seen("target replaced", |d| replace(&d.join("real/f"), "x")).await;
    }
    world.seen("link moved", |d| relink(&d.join("f"), "real/g")).await;
    world.seen("new target", |d| fs::write(d.join("real/g"), "2").unwrap()).await;
}

#[tokio::test]
async fn an_upper_folder_pointed_elsewhere() {
    let mut world = World::new(
        |d| {
            for v in ["v1", "v2"] {
                fs::create_dir_all(d.join(v).join("certs")).unwrap();
                fs::write(d.join(v).join("certs/f"), v).unwrap();
            }
            symlink("v1", d.join("top")).unwrap();
        },
        "top/certs/f",
    );
    for target in ["v2", "v1", "v2"] {
        world.seen("top", |d| relink(&d.join("top"), target)).await;
        world.seen("file below", |d| replace(&d.join(target).join("certs/f"), "x")).await;
    }
}

#[tokio::test]
async fn a_kubernetes_volume() {
    fn publish(d: &Path, n: u32) {
        let version = format!("..v{n}");
        fs::create_dir(d.join(&version)).unwrap();
        fs::write(d.join(&version).join("f"), version.as_bytes()).unwrap();
        symlink(&version, d.join("..data_tmp")).unwrap();
        fs::rename(d.join("..data_tmp"), d.join("..data")).unwrap();
        let _ = fs::remove_dir_all(d.join(format!("..v{}", n - 1)));
    }
    let mut world = World::new(
        |d| {
            publish(d, 1);
            symlink("..data/f", d.join("f")).unwrap();
        },
        "f",
    );
    for n in 2..5 {
        world.seen("swap", |d| publish(d, n)).await;
    }
}

#[tokio::test]
async fn a_folder_that_comes_later_and_again() {
    let mut world = World::new(|_| (), "a/b/f");
    for _ in 0..2 {
        world.seen("upper folder", |d| fs::create_dir(d.join("a")).unwrap()).await;
        world.seen("folder", |d| fs::create_dir(d.join("a/b")).unwrap()).await;
        world.seen("file", |d| fs::write(d.join("a/b/f"), "1").unwrap()).await;
        world.seen("removal of all", |d| fs::remove_dir_all(d.join("a")).unwrap()).await;
        // What is left of the burst.
        while tokio::time::timeout(Duration::from_millis(50), world.watcher.changed()).await.is_ok() {}
    }
}

#[tokio::test]
async fn neighbours_and_readers_are_not_reported() {
    let mut world = World::new(|d| fs::write(d.join("f"), "1").unwrap(), "f");
    fs::write(world.dir.path().join("neighbour"), "x").unwrap();
    let _ = fs::read(world.dir.path().join("f")).unwrap();
    // What was done is in the kernel's list already.
    assert!(!world.watcher.member.take());
    world.seen("change", |d| replace(&d.join("f"), "2")).await;
    assert!(!world.watcher.member.take());
}

#[test]
fn a_loop_of_links_ends() {
    let dir = tempfile::tempdir().unwrap();
    symlink("b", dir.path().join("a")).unwrap();
    symlink("a", dir.path().join("b")).unwrap();
    let mut ways = Ways::default();
    ways.trace(&dir.path().join("a/f"));
    assert!(ways.folders.contains(dir.path()));
}

#[tokio::test]
async fn paths_that_come_one_by_one_are_watched_like_those_that_came_together() {
    let mut world = World::new(|d| fs::write(d.join("f"), "1").unwrap(), "f");
    let (more, elsewhere) = (world.dir.path().join("more"), world.dir.path().join("folder/file"));
    world.watcher.add([more, elsewhere]);
    world.seen("a file that was added and is made", |d| fs::write(d.join("more"), "2").unwrap()).await;
    world.seen("its folder", |d| fs::create_dir(d.join("folder")).unwrap()).await;
    world.seen("a file in it", |d| fs::write(d.join("folder/file"), "3").unwrap()).await;
    world.seen("the first", |d| replace(&d.join("f"), "4")).await;
    assert_eq!(world.watcher.failures(), 0);
}

/// What is on the list of the kernel: folders, and how many members need each.
fn listed(watches: &Watches) -> Vec<(PathBuf, usize)> {
    watches.folders().collect()
}

#[tokio::test]
async fn watchers_share_one_list_and_each_hears_what_is_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let watches = Watches::default();
    let [mut one, mut other] = ["one", "other"].map(|name| {
        let mut watcher = Watcher::new(&watches, Duration::from_millis(1));
        watcher.set(BTreeSet::from([at(name)]));
        watcher
    });
    assert_eq!(listed(&watches), [(dir.path().to_owned(), 2)]);
    for _ in 0..2 {
        replace(&at("one"), "x");
        replace(&at("other"), "x");
        // Whoever reads first has told the other, too.
        for watcher in [&mut one, &mut other] {
            tokio::time::timeout(Duration::from_secs(20), watcher.changed()).await.expect("a report");
        }
        replace(&at("neither"), "x");
        assert!(!one.member.take() && !other.member.take());
    }
    // The folder goes and comes back as another one: both are told, and one watch is enough again.
    fs::remove_dir_all(dir.path()).unwrap();
    fs::create_dir(dir.path()).unwrap();
    for watcher in [&mut one, &mut other] {
        tokio::time::timeout(Duration::from_secs(20), watcher.changed()).await.expect("a report");
    }
    for watcher in [&mut one, &mut other] {
        watcher.member.take();
        watcher.refresh();
    }
    assert!(listed(&watches).contains(&(dir.path().to_owned(), 2)), "{:?}", listed(&watches));
    fs::write(at("other"), "y").unwrap();
    tokio::time::timeout(Duration::from_secs(20), other.changed()).await.expect("a report");
    assert!(!one.member.take());
    drop(one);
    fs::write(at("other"), "z").unwrap();
    tokio::time::timeout(Duration::from_secs(20), other.changed()).await.expect("a report");
    drop(other);
    assert_eq!(listed(&watches), []);
}

#[tokio::test]
async fn a_list_that_is_given_up_is_made_anew() {
    let mut world = World::new(|d| fs::write(d.join("f"), "1").unwrap(), "f");
    world.watcher.member.close();
    tokio::time::timeout(Duration::from_secs(20), world.watcher.changed()).await.expect("a report");
    world.seen("change", |d| replace(&d.join("f"), "2")).await;
    assert!(!world.watcher.blind());
}

#[tokio::test]
async fn a_folder_above_that_is_moved_is_news_where_that_is_wanted_and_nothing_else_in_it_is() {
    let make = |d: &Path| {
        fs::create_dir_all(d.join("a/b/c")).unwrap();
        fs::write(d.join("a/b/c/f"), "1").unwrap();
    };
    let mut world = World::new(make, "a/b/c/f");
    world.watcher = Watcher::new(&Watches::default(), Duration::from_millis(1)).with_above();
    world.watcher.set(BTreeSet::from([world.dir.path().join("a/b/c/f")]));
    for round in 0..3 {
        for above in ["a", "a/b"] {
            let away = format!("away {round} {}", above.len());
            world.seen("moving", |d| fs::rename(d.join(above), d.join(&away)).unwrap()).await;
            world.seen("another in its place", |d| make(d)).await;
            world.seen("a file in it", |d| fs::write(d.join("a/b/c/f"), "2").unwrap()).await;
            world.silent().await;
            // Of what happens beside the way the kernel tells nothing at all.
            for beside in ["a/x", "a/b/x", "x"] {
                fs::write(world.dir.path().join(beside), "").unwrap();
                fs::remove_file(world.dir.path().join(beside)).unwrap();
            }
            let silence = tokio::time::timeout(Duration::from_millis(20), world.watcher.member.events());
            assert!(silence.await.is_err(), "{above}");
        }
    }
    assert_eq!(world.watcher.failures(), 0);
}

#[tokio::test]
async fn a_watched_folder_that_is_moved_is_news_once() {
    let make =
        |d: &Path| fs::create_dir_all(d.join("a")).and_then(|()| fs::write(d.join("a/f"), "1")).unwrap();
    let mut world = World::new(make, "a/f");
    for round in 0..3 {
        world.seen("moving", |d| fs::rename(d.join("a"), d.join(format!("away {round}"))).unwrap()).await;
        world.silent().await;
        world.seen("another in its place", make).await;
        world.silent().await;
    }
}
