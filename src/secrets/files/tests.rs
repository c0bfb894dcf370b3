use super::read::bytes;
use super::*;
use crate::secrets::Roots;
use crate::tls::cert;
use mock_istiod::{Authority, Leaf, Pair};
use std::fs;
use std::path::Path;

struct World {
    dir: tempfile::TempDir,
    store: Store,
    name: ResourceName,
    source: Source,
}

fn text(roots: &Roots) -> String {
    String::from_utf8_lossy(&roots.pem).trim().to_owned()
}

fn pair() -> Pair {
    Authority::new("files", 1).pair(&Leaf::workload("spiffe://files/ns/a/sa/b", Duration::from_secs(3600)))
}

impl World {
    fn pair() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
        let name = ResourceName::FileCert { cert: "c".to_owned(), key: "k".to_owned() };
        Self {
            dir,
            store: Store::new(Duration::from_millis(10), &Watches::default()),
            name,
            source: Source::Pair { cert, key },
        }
    }

    fn roots() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = Source::Roots(dir.path().join("ca.pem"));
        Self {
            dir,
            store: Store::new(Duration::ZERO, &Watches::default()),
            name: ResourceName::FileRoot("r".to_owned()),
            source,
        }
    }

    fn put(&self, file: &str, text: &str) {
        let path = self.dir.path().join(file);
        fs::write(path.with_extension("new"), text).unwrap();
        fs::rename(path.with_extension("new"), path).unwrap();
    }

    fn put_pair(&self, pair: &Pair) {
        self.put("key.pem", &pair.key);
        self.put("cert.pem", &pair.chain);
    }

    async fn follow(&mut self) -> Option<Event> {
        self.store.follow(&self.name, self.source.clone()).unwrap();
        self.store.look_at(std::slice::from_ref(&self.name)).await.pop()
    }

    // What half a minute brings, without the watcher.
    async fn later(&mut self) -> Event {
        for _ in 0..600 {
            tokio::time::advance(Duration::from_millis(50)).await;
            if let Some(event) = self.store.tick(Instant::now(), |_| 1).await.0.pop() {
                return event;
            }
        }
        panic!("nothing happened");
    }

    async fn next(&mut self) -> Event {
        let run = async {
            loop {
                let wake = self.store.wake().unwrap_or_else(|| Instant::now() + SLOW_CHECK);
                let events = tokio::select! {
                    () = self.store.changed() => self.store.look_all().await,
                    () = tokio::time::sleep_until(wake) => self.store.tick(Instant::now(), |_| 1).await.0,
                };
                if let Some(event) = events.into_iter().next() {
                    return event;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), run).await.expect("nothing happened")
    }
}

// What is wrong with the only resource.
fn wrong(store: &Store) -> String {
    store.overview().lock().unwrap().values().next().unwrap().clone()
}

fn chain(event: &Event) -> &str {
    match event {
        Event::Loaded(_, Loaded::Pair(identity)) => std::str::from_utf8(&identity.chain).unwrap(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_wrong_now_is_told_where_something_else_was_wrong_before() {
    let mut world = World::pair();
    let other = pair();
    world.put_pair(&pair());
    assert!(matches!(world.follow().await, Some(Event::Loaded(..))));
    world.put("cert.pem", &other.chain[..100]);
    assert!(world.store.look_all().await.is_empty(), "it may be on its way");
    let Event::Troubled { error: first, .. } = world.later().await else { panic!("it is told") };
    world.put("cert.pem", &other.chain);
    let events = world.store.look_all().await;
    let [Event::Suspect { error: second, .. }] = &events[..] else { panic!("{events:?}") };
    assert!(
        second.to_string().contains("key") && first.to_string() != second.to_string(),
        "{first}, {second}"
    );
    assert!(world.store.look_all().await.is_empty(), "once");
    world.put("key.pem", &other.key);
    assert!(matches!(world.store.look_all().await[..], [Event::Loaded(..)]));
}

#[tokio::test(start_paused = true)]
async fn a_large_file_of_no_use_is_read_again_when_it_has_changed() {
    let mut world = World::roots();
    let good = pair().chain;
    let still = |world: &World| {
        let entry = &world.store.entries[&world.name];
        let found = entry.wanted(&world.name).look(&mut MAX_LOADED.clone());
        matches!(found.read, Err(Unreadable::Still))
    };
    world.put("ca.pem", &"no certificate\n".repeat(200_000));
    assert!(world.follow().await.is_none());
    assert!(!still(&world), "once may be too soon to tell");
    assert!(
        matches!(world.later().await, Event::Troubled { error, .. } if error.to_string().contains("failed to parse"))
    );
    assert!(still(&world));
    // Another one in its place, as long as that.
    world.put("ca.pem", &"no certificates".repeat(200_000));
    assert!(!still(&world));
    // What was told stays told while it is not read.
    for _ in 0..3 {
        assert!(world.store.look_all().await.is_empty());
    }
    assert!(still(&world));
    let reason = world.store.overview().lock().unwrap().values().next().unwrap().clone();
    assert!(reason.starts_with("failed to parse"), "{reason}");
    // Without descriptors nothing can be opened, which says nothing of what it holds.
    let stamp = world.store.entries[&world.name].bad.clone();
    for _ in 0..2 {
        let error = Unreadable::Io { path: "ca.pem".into(), source: std::io::Error::from_raw_os_error(24) };
        world.store.entries.get_mut(&world.name).unwrap().wrong(&error, stamp.clone());
        assert!(!still(&world));
    }
    world.put("ca.pem", &good.repeat(2_000_000 / good.len()));
    assert!(matches!(&world.store.look_all().await[..], [Event::Loaded(..)]));
}

#[tokio::test]
async fn pairs_are_published_whole_or_not_at_all() {
    let mut world = World::pair();
    let (one, two, three) = (pair(), pair(), pair());
    world.put_pair(&one);
    assert_eq!(chain(&world.follow().await.unwrap()), one.chain);
    assert!(world.follow().await.is_none(), "the same again is no event");
    // A key alone is half of a change: nothing, not even trouble.
    world.put("key.pem", &two.key);
    assert!(world.store.look_all().await.is_empty());
    assert_eq!(wrong(&world.store), "");
    // The other half completes it.
    world.put("cert.pem", &two.chain);
    assert_eq!(chain(&world.next().await), two.chain);
    // A certificate before its key waits for it, and the old pair stays.
    world.put("cert.pem", &three.chain);
    assert!(world.store.look_all().await.is_empty());
    assert!(wrong(&world.store).contains("does not match"));
    assert!(
        matches!(world.store.loaded(&world.name), Some(Loaded::Pair(i)) if i.chain == two.chain.as_bytes())
    );
    world.put("key.pem", &three.key);
    assert_eq!(chain(&world.next().await), three.chain);
    assert_eq!(wrong(&world.store), "");
}

#[tokio::test(start_paused = true)]
async fn what_was_reported_is_over_when_the_same_lies_there_again() {
    let mut world = World::pair();
    world.name = ResourceName::Default;
    let (one, two) = (pair(), pair());
    world.put_pair(&one);
    assert_eq!(chain(&world.follow().await.unwrap()), one.chain);
    // Half of a change that stays half: the agent could not start again with it.
    world.put("key.pem", &two.key);
    assert!(world.store.look_all().await.is_empty(), "the other half may be on its way");
    assert!(matches!(world.later().await, Event::Troubled { gone: false, .. }));
    assert!(wrong(&world.store).contains("does not match"), "{}", wrong(&world.store));
    world.put("key.pem", &one.key);
    assert!(matches!(world.later().await, Event::Mended(_)));
    assert_eq!(wrong(&world.store), "");
    for file in ["cert.pem", "key.pem"] {
        fs::remove_file(world.dir.path().join(file)).unwrap();
        assert!(matches!(world.later().await, Event::Troubled { gone: true, .. }), "{file}");
        world.put_pair(&one);
        assert!(matches!(world.later().await, Event::Mended(_)), "{file}");
    }
}

#[tokio::test]
async fn a_chain_is_whole_or_none_and_may_follow_its_key() {
    let mut world = World::pair();
    let one = pair();
    let both = format!("{}{}", one.key, one.chain);
    world.put("key.pem", &one.key);
    world.put("cert.pem", &both);
    assert_eq!(chain(&world.follow().await.unwrap()), both);
    let junk = format!("{}-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", one.chain);
    world.put("cert.pem", &junk);
    assert!(world.store.look_all().await.is_empty());
    assert_ne!(wrong(&world.store), "");
}

#[tokio::test]
async fn removed_files_leave_what_was_read() {
    let mut world = World::pair();
    let (one, two) = (pair(), pair());
    world.put_pair(&one);
    world.follow().await;
    fs::remove_file(world.dir.path().join("cert.pem")).unwrap();
    assert!(world.store.look_all().await.is_empty());
    assert!(world.store.loaded(&world.name).is_some());
    world.put_pair(&two);
    assert_eq!(chain(&world.next().await), two.chain);
}

#[tokio::test]
async fn what_is_written_again_as_it_was_is_not_sent_again() {
    let mut world = World::pair();
    let one = pair();
    world.put_pair(&one);
    world.follow().await;
    world.put_pair(&one);
    assert!(world.store.look_all().await.is_empty());
}

#[tokio::test]
async fn in_place_writing_in_pieces_gives_the_whole() {
    use std::io::Write;
    let mut world = World::pair();
    world.put_pair(&pair());
    world.follow().await;
    let new = pair();
    fs::write(world.dir.path().join("key.pem"), &new.key).unwrap();
    let mut file = fs::File::create(world.dir.path().join("cert.pem")).unwrap();
    for piece in new.chain.as_bytes().chunks(new.chain.len() / 5) {
        file.write_all(piece).unwrap();
        file.flush().unwrap();
        // Each look finds something unfinished, or at worst the leaf without its intermediate.
        for event in world.store.look_all().await {
            assert!(new.chain.starts_with(chain(&event)));
        }
    }
    drop(file);
    let last = world.store.look_all().await.pop();
    let got = match &last {
        Some(event) => chain(event).to_owned(),
        None => match world.store.loaded(&world.name) {
            Some(Loaded::Pair(i)) => String::from_utf8(i.chain.clone()).unwrap(),
            other => panic!("{other:?}"),
        },
    };
    assert_eq!(got, new.chain);
}

#[tokio::test]
async fn roots_keep_what_is_readable() {
    let mut world = World::roots();
    let (a, b) = (Authority::new("a", 0), Authority::new("b", 0));
    let mixed = format!(
        "# x\n{}-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\ntext\n{}",
        a.root_pem(),
        b.root_pem()
    );
    world.put("ca.pem", &mixed);
    let event = world.follow().await.unwrap();
    let Event::Loaded(_, Loaded::Roots(pem)) = event else { panic!("{event:?}") };
    assert_eq!(
        text(&pem).replace("\r\n", "\n"),
        format!("{}{}", a.root_pem(), b.root_pem()).trim().replace("\r\n", "\n")
    );
    for useless in ["", "text", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        world.put("ca.pem", useless);
        assert!(world.store.look_all().await.is_empty());
        assert!(wrong(&world.store).contains("failed to parse root certs"), "{:?}", world.store.overview());
    }
    assert!(matches!(world.store.loaded(&world.name), Some(Loaded::Roots(p)) if *p == pem));
}

#[tokio::test]
async fn a_root_file_cut_off_is_taken_only_if_it_stays_so() {
    let mut world = World::roots();
    let a = Authority::new("a", 0);
    let cut = format!("{0}{1}", a.root_pem(), &a.root_pem()[..200]);
    world.put("ca.pem", &cut);
    assert!(world.follow().await.is_none());
    let event = world.next().await;
    assert!(matches!(event, Event::Loaded(_, Loaded::Roots(_))), "{event:?}");
}

#[tokio::test(start_paused = true)]
async fn whoever_writes_roots_has_time_however_often_somebody_asks_for_them() {
    let mut world = World::roots();
    world.store = Store::new(Duration::from_millis(100), &Watches::default());
    let a = Authority::new("a", 0);
    world.put("ca.pem", &format!("{0}{1}", a.root_pem(), &a.root_pem()[..200]));
    let start = Instant::now();
    let taken = loop {
        if let Some(Event::Loaded(..)) = world.follow().await {
            break start.elapsed();
        }
        tokio::time::advance(Duration::from_millis(1)).await;
    };
    assert!((50..60).contains(&taken.as_millis()), "{taken:?}");
}

#[tokio::test(start_paused = true)]
async fn half_a_root_file_that_comes_anew_is_not_the_half_of_before() {
    let mut world = World::roots();
    let a = Authority::new("a", 0);
    let half = format!("{0}{1}", a.root_pem(), &a.root_pem()[..200]);
    world.put("ca.pem", &half);
    assert!(world.follow().await.is_none());
    std::fs::remove_file(world.dir.path().join("ca.pem")).unwrap();
    assert!(world.follow().await.is_none());
    tokio::time::advance(Duration::from_secs(1)).await;
    world.put("ca.pem", &half);
    assert!(!matches!(world.follow().await, Some(Event::Loaded(..))));
}

#[test]
fn those_who_are_gone_take_no_room_and_all_others_keep_theirs() {
    let mut waiting = Vec::new();
    for nth in 0..100_000_u32 {
        hold_back(&mut waiting, nth, |one| one % 1000 != 0);
    }
    assert!(waiting.capacity() <= 512, "{}", waiting.capacity());
    assert_eq!(waiting.iter().filter(|one| **one % 1000 == 0).count(), 100);
}

#[tokio::test(start_paused = true)]
async fn trouble_is_reported_once_after_ten_seconds() {
    let mut world = World::pair();
    world.put_pair(&pair());
    world.follow().await;
    world.put("cert.pem", "x");
    assert!(world.store.look_all().await.is_empty());
    let mut reports = Vec::new();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(120) {
        tokio::time::advance(Duration::from_millis(50)).await;
        reports.extend(
            world.store.tick(Instant::now(), |_| 1).await.0.into_iter().map(|e| (start.elapsed(), e)),
        );
    }
    let [(at, Event::Troubled { .. })] = &reports[..] else { panic!("{reports:?}") };
    assert!((9..12).contains(&at.as_secs()), "{at:?}");
    let good = pair();
    world.put_pair(&good);
    tokio::time::advance(SLOW_CHECK).await;
    let events = world.store.tick(Instant::now(), |_| 1).await.0;
    assert_eq!(chain(&events[0]), good.chain, "the slow check finds it without the watcher");
}

#[tokio::test(start_paused = true)]
async fn files_that_go_after_a_report_are_reported_as_gone_once() {
    let mut world = World::pair();
    world.name = ResourceName::Default;
    world.put_pair(&pair());
    world.follow().await;
    let mut told = Vec::new();
    // Bad, away, bad, away.
    for step in 0..4 {
        match step % 2 {
            0 => world.put("cert.pem", "x"),
            _ => fs::remove_file(world.dir.path().join("cert.pem")).unwrap(),
        }
        let early = world.store.look_all().await;
        // What is told already is told by its new name at once.
        let renamed = |event: &Event| step > 1 && matches!(event, Event::Suspect { .. });
        assert!(early.iter().all(renamed), "{early:?} without patience");
        for _ in 0..600 {
            tokio::time::advance(Duration::from_millis(50)).await;
            for event in world.store.tick(Instant::now(), |_| 1).await.0 {
                let Event::Troubled { gone, .. } = event else { panic!("{event:?}") };
                told.push((step, gone));
            }
        }
    }
    assert_eq!(told, [(0, false), (1, true)]);
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_refused_after_ten_seconds() {
    let mut world = World::pair();
    assert!(world.follow().await.is_none());
    let (reply, mut answer) = oneshot::channel();
    world.store.wait(&world.name, reply);
    tokio::time::advance(PATIENCE - Duration::from_millis(1)).await;
    assert_eq!(world.store.tick(Instant::now(), |_| 1).await.1, 0);
    assert!(answer.try_recv().is_err());
    tokio::time::advance(Duration::from_millis(1)).await;
    assert_eq!(world.store.tick(Instant::now(), |_| 1).await.1, 1);
    let error = answer.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("No such file"), "{error}");
}

#[test]
fn odd_files_are_errors_not_waits() {
    let dir = tempfile::tempdir().unwrap();
    assert!(bytes(dir.path()).unwrap_err().to_string().contains("not a regular file"));
    assert!(bytes(Path::new("/dev/zero")).unwrap_err().to_string().contains("not a regular file"));
    assert!(bytes(&dir.path().join("none")).unwrap_err().to_string().contains("No such file"));
}

#[tokio::test(start_paused = true)]
async fn resources_nobody_follows_are_forgotten_and_bounded() {
    let mut store = Store::new(Duration::from_millis(100), &Watches::default());
    let mut names = Vec::new();
    for n in 0..MAX_RESOURCES {
        let path = format!("/nowhere/{n}");
        names.push(ResourceName::FileRoot(path.clone()));
        store.follow(&names[n], Source::Roots(path.into())).unwrap();
    }
    assert!(store.look_at(&names).await.is_empty());
    let more = store.follow(&ResourceName::FileRoot("x".to_owned()), Source::Roots("x".into()));
    assert!(matches!(more, Err(Error::TooMany(_))));
    assert_eq!(store.unsettled.len(), MAX_RESOURCES, "none of them can be read");
    tokio::time::advance(IDLE).await;
    store.tick(Instant::now(), |_| 0).await;
    assert!(store.overview().lock().unwrap().is_empty());
    assert!(store.unsettled.is_empty());
}

#[tokio::test]
async fn many_are_read_together_and_each_gets_its_own() {
    const MANY: usize = 3 * AT_ONCE + 1;
    let mut world = World::roots();
    let pems: Vec<String> =
        (0..4).map(|n| Authority::new(&format!("root-{n}"), 1).root_pem().to_owned()).collect();
    let mut names = Vec::new();
    for n in 0..MANY {
        let path = world.dir.path().join(format!("{n}.pem"));
        // Some are not there.
        if n % 5 != 4 {
            fs::write(&path, &pems[n % 5]).unwrap();
        }
        names.push(ResourceName::FileRoot(format!("root {n}")));
        world.store.follow(&names[n], Source::Roots(path)).unwrap();
    }
    let events = world.store.look_at(&names).await;
    assert_eq!(world.store.groups, 4 - 1, "the last is alone");
    assert_eq!(events.len(), (0..MANY).filter(|n| n % 5 != 4).count());
    for (n, name) in names.iter().enumerate() {
        match world.store.loaded(name) {
            Some(Loaded::Roots(p)) => assert_eq!(text(p), pems[n % 5].trim(), "{name}"),
            other => assert!(other.is_none() && n % 5 == 4, "{name}: {other:?}"),
        }
    }
    assert!(world.store.look_all().await.is_empty(), "nothing has changed");
    // One of them changes, and one comes.
    fs::write(world.dir.path().join("7.pem"), &pems[0]).unwrap();
    fs::write(world.dir.path().join("9.pem"), &pems[1]).unwrap();
    let mut changed: Vec<_> = world
        .store
        .look_all()
        .await
        .into_iter()
        .filter_map(|event| match event {
            Event::Loaded(name, Loaded::Roots(p)) => Some((name, text(&p))),
            _ => None,
        })
        .collect();
    changed.sort();
    let expected = [(7, &pems[0]), (9, &pems[1])].map(|(n, pem)| (names[n].clone(), pem.trim().to_owned()));
    assert_eq!(changed, expected);
}

#[tokio::test(start_paused = true)]
async fn names_are_bounded_in_bytes_too() {
    let mut store = Store::new(Duration::from_millis(100), &Watches::default());
    let long = |n: usize| format!("/nowhere/{n:04000}");
    let count = MAX_NAMES / ("file-root:".len() + long(0).len());
    let ask = |n| (ResourceName::FileRoot(long(n)), Source::Roots(long(n).into()));
    for again in 0..2 {
        for n in 0..count {
            let (name, source) = ask(n);
            store.follow(&name, source).unwrap();
        }
        let (name, source) = ask(0);
        store.follow(&name, source).unwrap();
        let (name, source) = ask(count);
        assert!(matches!(store.follow(&name, source), Err(Error::TooLong(_))), "time {again}");
        if again == 0 {
            store.forget(&ask(0).0).await;
            store.follow(&ask(count).0, ask(count).1).unwrap();
        }
        tokio::time::advance(IDLE).await;
        store.tick(Instant::now(), |_| 0).await;
        assert_eq!(store.names, 0);
    }
}

#[tokio::test(start_paused = true)]
async fn of_a_crowd_of_names_those_that_nothing_was_read_of_go_first() {
    let mut world = World::roots();
    world.put("ca.pem", Authority::new("root", 1).root_pem());
    let good = ResourceName::FileRoot("good".to_owned());
    world.store.follow(&good, Source::Roots(world.dir.path().join("ca.pem"))).unwrap();
    let long = "n".repeat(3900);
    let follow = |store: &mut Store, many: usize| {
        let names: Vec<_> = (0..many).map(|n| ResourceName::FileRoot(format!("/{n}{long}"))).collect();
        names.iter().for_each(|name| store.follow(name, Source::Roots("/nowhere".into())).unwrap());
        names
    };
    for (many, is_crowd) in [(CROWD / 3900 - 1, false), (CROWD / 3900 + 1, true)] {
        let names = follow(&mut world.store, many);
        world.store.look_at(&[&names[..], std::slice::from_ref(&good)].concat()).await;
        // While somebody follows them they stay.
        for (followers, stay) in [(1, true), (0, !is_crowd)] {
            tokio::time::advance(SLOW_CHECK).await;
            world.store.tick(Instant::now(), |_| followers).await;
            assert_eq!(names.iter().all(|name| world.store.holds(name)), stay, "{many}, {followers}");
            assert!(stay || world.store.names < 100);
        }
        assert!(world.store.loaded(&good).is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn when_memory_is_short_nothing_stays_that_nobody_follows() {
    let mut world = World::roots();
    world.put("ca.pem", Authority::new("root", 1).root_pem());
    let names = ["left", "followed", "asked"].map(|name| ResourceName::FileRoot(name.to_owned()));
    for (n, name) in names.iter().enumerate() {
        if n == 2 {
            tokio::time::advance(ASKED).await;
        }
        world.store.follow(name, Source::Roots(world.dir.path().join("ca.pem"))).unwrap();
    }
    world.store.follow(&ResourceName::RootCa, world.source.clone()).unwrap();
    world.store.look_all().await;
    world.store.shed(|name| usize::from(*name == names[1])).await;
    assert_eq!(names.each_ref().map(|name| world.store.loaded(name).is_some()), [false, true, true]);
    assert!(world.store.holds(&ResourceName::RootCa), "the mesh's own stays");
}

#[tokio::test(start_paused = true)]
async fn what_is_loaded_is_bounded_in_bytes_too() {
    let mut world = World::roots();
    // A bundle of a megabyte, by as many spellings of its path as somebody likes.
    let root = Authority::new("root", 1).root_pem().to_owned();
    let bundle = root.repeat((1 << 20) / root.len());
    world.put("ca.pem", &bundle);
    let spelled =
        |dir: &Path, n: usize| Source::Roots(format!("{}{}ca.pem", dir.display(), "/".repeat(n + 1)).into());
    let most = MAX_LOADED / cert::readable_certs(bundle.as_bytes()).pem.len();
    let names: Vec<_> = (0..most + 2).map(|n| ResourceName::FileRoot(format!("{n}"))).collect();
    for (n, name) in names.iter().enumerate() {
        world.store.follow(name, spelled(world.dir.path(), n)).unwrap();
    }
    // Some together and some alone.
    let (together, alone) = names.split_at(most - 1);
    let mut events = world.store.look_at(together).await;
    for name in alone {
        events.extend(world.store.look_at(std::slice::from_ref(name)).await);
    }
    let held = |store: &Store| -> usize {
        store.entries.values().filter_map(|e| e.loaded.as_ref()).map(Loaded::size).sum()
    };
    assert_eq!((events.len(), world.store.held), (most, held(&world.store)));
    assert!(world.store.loaded(&names[most]).is_none());
    let overview = world.store.overview().lock().unwrap()[&names[most].to_string()].clone();
    assert!(overview.contains("would take more than 33554432 bytes"), "{overview}");
    // All of them changed: each takes the room of what it was.
    world.put("ca.pem", &bundle[root.len()..]);
    assert_eq!(world.store.look_all().await.len(), most);
    // Room is given back with a name, and taken by another one.
    world.store.forget(&names[0]).await;
    assert_eq!(world.store.look_all().await.len(), 1);
    assert_eq!(world.store.held, held(&world.store));
    tokio::time::advance(IDLE).await;
    world.store.tick(Instant::now(), |_| 0).await;
    assert_eq!(world.store.held, 0);
    // The mesh's own certificate has its place whatever clients ask for.
    world.store.held = MAX_LOADED;
    world.store.follow(&ResourceName::RootCa, world.source.clone()).unwrap();
    assert_eq!(world.store.look_at(&[ResourceName::RootCa]).await.len(), 1);
}
