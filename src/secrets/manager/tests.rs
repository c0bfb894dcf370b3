use std::path::Path;
use std::time::SystemTime;

use super::*;
use crate::base::clock::Fixed;
use crate::base::metrics::Metrics as Registry;
use crate::base::reading::pipe;
use crate::secrets::fake::{Act, DAY, FakeCa, ID};
use crate::secrets::{Change, Mounted, Secret, Updates, output};
use crate::tls::keys::{Algorithm, Curve, KeyOptions};

mod clocks;
mod mounted;
mod outlook;
mod written;

struct World {
    dir: tempfile::TempDir,
    ca: FakeCa,
    clock: Fixed,
    handle: Handle,
    registry: Registry,
    group: crate::base::tasks::Group,
}

fn config(dir: &Path) -> Config {
    Config {
        identity: ID.to_owned(),
        key: KeyOptions { algorithm: Algorithm::Ecdsa(Curve::P256), pkcs8: false },
        ttl: DAY,
        grace_ratio: 0.5,
        grace_jitter: 0.0,
        early: false,
        near_expiry: crate::secrets::NearExpiry::default(),
        watches: crate::base::files::Watches::default(),
        mounted: Mounted {
            cert: dir.join("certs/cert-chain.pem"),
            key: dir.join("certs/key.pem"),
            root: dir.join("certs/root-cert.pem"),
        },
        output: None,
        persist: None,
        file_debounce: Duration::from_millis(100),
        system_bundle: None,
        proxyless: false,
        call_bound: Duration::from_secs(120),
        eager: true,
        first_key: None,
        kept: None,
        bundle: Vec::new(),
        trouble: Arc::default(),
    }
}

impl World {
    fn new(act: Act) -> Self {
        Self::with(act, |_, c| c)
    }

    fn with(act: Act, change: impl FnOnce(&Path, Config) -> Config) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = Fixed::at(SystemTime::now());
        let ca = FakeCa::new(clock.clone());
        ca.act(act);
        let config = change(dir.path(), config(dir.path()));
        let registry = Registry::new();
        let (handle, manager) =
            Manager::new(config, Some(Arc::new(ca.clone())), &registry, Arc::new(clock.clone()));
        let group = crate::base::tasks::Group::new();
        group.spawn("secrets", manager.run(group.token()));
        Self { dir, ca, clock, handle, registry, group }
    }

    async fn fetch(&self, name: ResourceName) -> Result<Fetched, Arc<Error>> {
        self.handle.fetch(name).await
    }

    async fn identity(&self) -> (Vec<u8>, Updates) {
        let fetched = self.fetch(ResourceName::Default).await.unwrap();
        (chain_of(&fetched.secret), fetched.updates)
    }

    async fn roots(&self) -> (String, Updates) {
        let fetched = self.fetch(ResourceName::RootCa).await.unwrap();
        (roots_of(&fetched.secret), fetched.updates)
    }

    /// Both clocks go on, in steps small enough for every timer in between.
    async fn pass(&self, time: Duration) {
        self.pass_beside(0, time).await;
    }

    /// As [`World::pass`], while so many threads hang.
    async fn pass_beside(&self, hanging: usize, time: Duration) {
        let steps = 50;
        for _ in 0..steps {
            self.clock.advance(time / steps);
            tokio::time::advance(time / steps).await;
            settle().await;
            // Files are looked at on threads, which take real time; the paused clock stands still meanwhile.
            crate::base::lane::under_way::but(hanging).await;
        }
    }

    fn metric(&self, name: &str, label: &str) -> f64 {
        let families = self.registry.registry().gather();
        let family = families.iter().find(|f| f.name() == name);
        let metrics = family.map(|f| f.get_metric()).unwrap_or_default();
        let one =
            metrics.iter().find(|m| label.is_empty() || m.get_label().iter().any(|l| l.value() == label));
        one.map_or(0.0, |m| m.get_counter().get_value() + m.get_gauge().get_value())
    }
}

// Lets every ready task run; the fakes answer without waiting.
async fn settle() {
    for _ in 0..30 {
        tokio::task::yield_now().await;
    }
}

/// Waits, in real time, for what a thread beside the runtime does.
async fn until(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        settle().await;
        if done() {
            return;
        }
        // The paused clock stands still meanwhile.
        crate::base::lane::begin("pause", || std::thread::sleep(Duration::from_millis(1)))
            .unwrap()
            .await
            .unwrap();
    }
    panic!("never came true: {what}");
}

fn chain_of(secret: &Secret) -> Vec<u8> {
    match secret {
        Secret::Identity(identity) => identity.chain.clone(),
        Secret::Roots(_) => panic!("roots"),
    }
}

fn roots_of(secret: &Secret) -> String {
    match secret {
        Secret::Roots(roots) => String::from_utf8(roots.pem.clone()).unwrap(),
        Secret::Identity(_) => panic!("identity"),
    }
}

async fn change(updates: &mut Updates) -> Change {
    tokio::time::timeout(Duration::from_secs(3600), updates.next()).await.expect("nothing came").unwrap()
}

/// What is there without waiting.
async fn news(updates: &mut Updates) -> Option<Change> {
    settle().await;
    let now = tokio::time::timeout(Duration::ZERO, updates.next()).await;
    now.ok().flatten()
}

#[tokio::test(start_paused = true)]
async fn requests_at_the_same_time_share_one_csr() {
    let world = World::new(Act::Slow(Duration::from_secs(3)));
    let all = futures_util::future::join_all(
        (0..20).map(|n| world.fetch(if n % 2 == 0 { ResourceName::Default } else { ResourceName::RootCa })),
    )
    .await;
    assert!(all.iter().all(Result::is_ok));
    assert_eq!(world.ca.calls(), 1);
    let (roots, _) = world.roots().await;
    assert_eq!(roots, world.ca.root().trim_end());
    assert!(world.group.stop(Duration::from_secs(1)).await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn every_useless_answer_at_start_is_told_and_heals() {
    let rows: Vec<(Act, &str, &str)> = vec![
        (Act::Refuse(tonic::Code::PermissionDenied), "PERMISSION_DENIED", "PERMISSION_DENIED"),
        (Act::Refuse(tonic::Code::Unavailable), "UNAVAILABLE", "UNAVAILABLE"),
        (Act::Refuse(tonic::Code::Unknown), "UNKNOWN", "UNKNOWN"),
        (Act::Expired, "answer", "expired already"),
        (Act::WrongKey, "answer", "not for the key"),
        (Act::OutOfOrder, "answer", "out of order"),
        (Act::Entries(vec![]), "answer", "no certificate"),
        (Act::Entries(vec!["garbage", "more"]), "answer", "no certificate"),
        (
            Act::Entries(vec!["-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", ""]),
            "answer",
            "does not parse",
        ),
        (Act::Hang, "deadline", "no end of the CA call"),
    ];
    for (act, label, words) in rows {
        let world = World::new(act.clone());
        for name in [ResourceName::Default, ResourceName::RootCa] {
            let error = world.fetch(name).await.unwrap_err();
            let text = chain(error.as_ref());
            assert!(
                text.contains(words) && text.contains("failed to generate workload certificate"),
                "{act:?}: {text}"
            );
        }
        assert!(world.metric("cert_renewal_failures_total", label) >= 1.0, "{act:?}");
        assert!(!world.handle.status().last_error.is_empty());
        // Nobody asks, and still it heals.
        world.ca.act(Act::Issue(DAY));
        world.pass(Duration::from_secs(240)).await;
        let calls = world.ca.calls();
        world.identity().await;
        assert_eq!(world.ca.calls(), calls, "{act:?}: it had not healed by itself");
        assert_eq!(world.handle.status().last_error, "");
        world.group.stop(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn every_useless_answer_at_renewal_leaves_the_last_good_certificate() {
    let rows = vec![
        Act::Refuse(tonic::Code::PermissionDenied),
        Act::Refuse(tonic::Code::Unavailable),
        Act::Expired,
        Act::WrongKey,
        Act::OutOfOrder,
        Act::Entries(vec![]),
        Act::Entries(vec!["garbage", "more"]),
        Act::Hang,
    ];
    for act in rows {
        let world = World::new(Act::Issue(DAY));
        let (first, mut updates) = world.identity().await;
        let (_, mut root_updates) = world.roots().await;
        world.ca.act(act.clone());
        world.pass(DAY / 2 + Duration::from_secs(60)).await;
        if matches!(act, Act::Hang) {
            // While the call hangs, what is known is served at once.
            world.roots().await;
            world.pass(Duration::from_secs(180)).await;
        }
        assert!(matches!(news(&mut updates).await, Some(Change::Failed(_))), "{act:?}: followers are told");
        assert!(news(&mut updates).await.is_none(), "{act:?}: once");
        assert_eq!(world.identity().await.0, first, "{act:?}: the last good one is served");
        world.roots().await;
        assert!(news(&mut root_updates).await.is_none(), "{act:?}: ROOTCA is not concerned");
        world.ca.act(Act::Issue(DAY));
        world.pass(Duration::from_secs(300)).await;
        let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("{act:?}: no renewal") };
        assert_ne!(chain_of(&secret), first);
        world.group.stop(Duration::from_secs(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn another_identity_is_served_because_the_ca_decides() {
    let world = World::new(Act::OtherIdentity);
    world.identity().await;
    assert_eq!(world.handle.status().certificate.unwrap().identities, ["spiffe://other/ns/x/sa/y"]);
}

#[tokio::test(start_paused = true)]
async fn after_expiry_there_is_an_error_and_a_prompt_retry() {
    let world = World::new(Act::Issue(DAY));
    world.identity().await;
    world.ca.act(Act::Refuse(tonic::Code::Unavailable));
    world.pass(DAY + Duration::from_secs(5)).await;
    assert!(world.fetch(ResourceName::Default).await.is_err());
    world.roots().await;
    assert!(world.metric("cert_expiry_seconds", "default") < 0.0);
    world.ca.act(Act::Issue(DAY));
    let before = tokio::time::Instant::now();
    world.identity().await;
    assert!(before.elapsed() <= Duration::from_secs(6), "the request did not hurry the retry");
}

/// A good token takes the place of one that has expired: nobody waits out a minute for that.
#[tokio::test(start_paused = true)]
async fn what_may_mend_it_hurries_a_request_that_fails_and_no_other() {
    let world = World::new(Act::Issue(DAY));
    let (mut last, mut updates) = world.identity().await;
    world.handle.mended();
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(world.ca.calls(), 1, "nothing was wrong");
    // Pauses are drawn up to a minute: of several in a row one would be long.
    for _ in 0..6 {
        world.ca.act(Act::Refuse(tonic::Code::Unauthenticated));
        world.pass(DAY / 2).await;
        world.pass(Duration::from_secs(600)).await;
        assert!(matches!(news(&mut updates).await, Some(Change::Failed(_))));
        world.ca.act(Act::Issue(DAY));
        world.handle.mended();
        world.pass(Duration::from_secs(6)).await;
        let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("it was not hurried") };
        let before = std::mem::replace(&mut last, chain_of(&secret));
        assert_ne!(before, last);
    }
}

#[tokio::test(start_paused = true)]
async fn renewal_needs_somebody_who_asked_once_or_a_file_that_is_read() {
    let world = World::new(Act::Issue(DAY));
    world.roots().await;
    world.pass(DAY * 2).await;
    assert_eq!(world.ca.calls(), 1, "nobody ever asked for the certificate");
    let (_, updates) = world.identity().await;
    drop(updates);
    assert_eq!(world.ca.calls(), 2);
    world.pass(DAY * 2).await;
    assert!(world.ca.calls() >= 5, "nobody listens now, but somebody did");

    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        config.output = Some(output::Config { dir: dir.to_owned(), mode: 0o600, seal: None });
        config
    });
    let chain = || std::fs::read(world.dir.path().join("cert-chain.pem")).unwrap_or_default();
    until("the first files", || !chain().is_empty()).await;
    let first = chain();
    world.pass(DAY).await;
    until("files that were renewed", || chain() != first).await;
}

/// A root that the CA has replaced reaches those who ask for nothing else, or whose certificate is mounted.
#[tokio::test(start_paused = true)]
async fn who_asks_for_roots_alone_brings_new_ones_when_they_are_due() {
    for pair in [false, true] {
        let world = World::with(Act::Issue(DAY), |dir, config| {
            if pair {
                mounted::pair(dir);
            }
            config
        });
        let (old, mut updates) = world.roots().await;
        world.ca.act(Act::NewRoot);
        world.pass(DAY / 4).await;
        assert_eq!(world.roots().await.0, old);
        world.pass(DAY).await;
        assert_eq!(world.ca.calls(), 1, "not before somebody asks when it is due");
        assert_eq!(world.roots().await.0, old, "nobody waits for it");
        world.pass(Duration::from_secs(5)).await;
        let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("no new root") };
        assert_ne!(roots_of(&secret), old);
        assert_eq!(world.roots().await.0, roots_of(&secret));
        world.pass(DAY * 2).await;
        assert_eq!(world.ca.calls(), 2, "it was one for who has asked");
        // A CA that does not answer is asked again until it does.
        world.ca.act(Act::Unreachable);
        let mut mounted = if pair { Some(world.identity().await.1) } else { None };
        world.roots().await;
        world.pass(Duration::from_secs(300)).await;
        assert!(world.ca.calls() > 4, "{}", world.ca.calls());
        if let Some(updates) = &mut mounted {
            assert!(news(updates).await.is_none(), "what lies in files is not the CA's to fail");
        }
        world.ca.act(Act::NewRoot);
        world.pass(Duration::from_secs(120)).await;
        assert_ne!(world.roots().await.0, roots_of(&secret));
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_cannot_be_written_is_told_of_the_setting_that_wants_it() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        let folder = dir.join("kept");
        std::fs::create_dir_all(folder.join("key.pem/full")).unwrap();
        config.persist = Some(crate::secrets::persist::Config { folder, seal: None });
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    until("it is told", || troubles.verdict().is_some()).await;
    let told = troubles.verdict().unwrap();
    assert!(told.detail.starts_with("IDENTITY_PERSIST: cannot write"), "{told:?}");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_due_because_nobody_asked_is_renewed_first() {
    let world = World::new(Act::Issue(DAY));
    settle().await;
    world.pass(DAY * 3 / 4).await;
    assert_eq!(world.ca.calls(), 1);
    world.identity().await;
    assert_eq!(world.ca.calls(), 2);
    // And if the CA does not answer, the old one is good enough after a moment.
    let world = World::new(Act::Issue(DAY));
    settle().await;
    world.pass(DAY * 3 / 4).await;
    world.ca.act(Act::Hang);
    world.identity().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_root_is_published_before_the_certificate() {
    let world = World::new(Act::Issue(DAY));
    let (_, mut identity) = world.identity().await;
    let (old, mut roots) = world.roots().await;
    world.ca.act(Act::NewRoot);
    // Whoever is woken by the certificate finds the root there already.
    let follower = async {
        identity.next().await;
        assert!(matches!(news(&mut roots).await, Some(Change::Updated(s)) if roots_of(&s) != old));
    };
    tokio::join!(follower, world.pass(DAY * 3 / 4));
}

#[tokio::test(start_paused = true)]
async fn the_same_root_is_not_pushed() {
    let world = World::new(Act::Issue(DAY));
    let (_, mut identity) = world.identity().await;
    let (_, mut roots) = world.roots().await;
    world.pass(DAY * 3 / 4).await;
    assert!(matches!(news(&mut identity).await, Some(Change::Updated(_))));
    assert!(news(&mut roots).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_ratio_of_one_does_not_flood_the_ca() {
    let world = World::with(Act::Issue(DAY), |_, c| Config { grace_ratio: 1.0, ..c });
    world.identity().await;
    world.pass(Duration::from_secs(3600)).await;
    assert!((5..40).contains(&world.ca.calls()), "{} requests in an hour", world.ca.calls());
    // Lives of a second are renewed about as often, and never run out.
    let world = World::with(Act::Issue(Duration::from_secs(4)), |_, c| Config { grace_ratio: 0.9, ..c });
    world.identity().await;
    world.pass(Duration::from_secs(20)).await;
    assert!((10..45).contains(&world.ca.calls()), "{} requests in 20 s", world.ca.calls());
    let calls = world.ca.calls();
    world.identity().await;
    assert!(world.ca.calls() <= calls + 1);
}

#[tokio::test(start_paused = true)]
async fn the_trust_bundle_joins_the_root_and_leaves_again() {
    let world = World::new(Act::Issue(DAY));
    let (alone, mut updates) = world.roots().await;
    let other = mock_istiod::Authority::new("other", 0).root_pem().to_owned();
    world.handle.update_trust_bundle(vec![other.clone(), "junk".to_owned()]);
    let Change::Updated(secret) = change(&mut updates).await else { panic!("failed") };
    let merged = roots_of(&secret);
    assert!(merged.contains(other.trim()) && merged.contains(&alone));
    world.handle.update_trust_bundle(vec![other.clone(), "junk".to_owned()]);
    assert!(news(&mut updates).await.is_none(), "the same again is no change");
    world.handle.update_trust_bundle(Vec::new());
    let Change::Updated(secret) = change(&mut updates).await else { panic!("failed") };
    assert_eq!(roots_of(&secret), alone);
    world.handle.update_trust_bundle(vec![world.ca.root()]);
    let Change::Updated(secret) = change(&mut updates).await else { panic!("failed") };
    assert_eq!(roots_of(&secret), alone, "a bundle that adds nothing is announced all the same");
    assert_eq!(world.ca.calls(), 1, "no new certificate is needed for a new bundle");
}

#[tokio::test(start_paused = true)]
async fn a_trust_bundle_that_was_handed_over_joins_a_mounted_root_too() {
    let root = |trust_domain| mock_istiod::Authority::new(trust_domain, 0).root_pem().trim().to_owned();
    let (mounted, other) = (root("mounted"), root("other"));
    // No certificate of a CA's was handed over with it.
    let world = World::with(Act::Unreachable, |dir, mut config| {
        std::fs::create_dir(dir.join("certs")).unwrap();
        std::fs::write(dir.join("certs/root-cert.pem"), &mounted).unwrap();
        config.bundle = vec![other.clone(), "junk".to_owned()];
        config
    });
    let (roots, mut updates) = world.roots().await;
    assert!(roots.contains(&mounted) && roots.contains(&other), "{roots}");
    assert!(world.handle.kept().is_none());
    assert_eq!(world.handle.bundle(), [other.as_str(), "junk"], "the next one is given it as well");
    world.handle.update_trust_bundle(Vec::new());
    let Change::Updated(secret) = change(&mut updates).await else { panic!("failed") };
    assert!(!roots_of(&secret).contains(&other));
    assert!(world.handle.bundle().is_empty());
}

#[tokio::test(start_paused = true)]
async fn files_and_known_names_never_wait_for_a_hanging_ca() {
    let world = World::new(Act::Hang);
    std::fs::write(world.dir.path().join("ca.pem"), world.ca.root()).unwrap();
    let path = world.dir.path().join("ca.pem").to_str().unwrap().to_owned();
    let file = world.fetch(ResourceName::FileRoot(path)).await.unwrap();
    assert_eq!(roots_of(&file.secret), world.ca.root().replace("\r\n", "\n"));
}

#[tokio::test(start_paused = true)]
async fn a_key_that_cannot_be_made_is_no_call_and_no_end() {
    let world = World::with(Act::Issue(DAY), |_, mut config| {
        config.key.algorithm = Algorithm::Rsa(1024);
        config
    });
    let error = world.fetch(ResourceName::Default).await.unwrap_err();
    assert!(chain(error.as_ref()).contains("(requested: 1024)"));
    assert_eq!(world.ca.calls(), 0);
    assert_eq!(world.metric("num_outgoing_requests", "csr"), 0.0);
}

#[tokio::test(start_paused = true)]
async fn a_key_is_used_again_only_where_no_ca_has_seen_its_request() {
    let world = World::new(Act::Unreachable);
    for act in [Act::Unreachable, Act::Refuse(tonic::Code::Unavailable), Act::Issue(DAY)] {
        assert!(world.fetch(ResourceName::Default).await.is_err());
        world.ca.act(act);
    }
    world.identity().await;
    let keys = world.ca.keys();
    assert!(keys.len() >= 4, "{} requests", keys.len());
    // Refused by code: what comes next is another key.
    let refused = keys.len() - 2;
    assert!(keys[..refused].iter().all(|key| *key == keys[0]), "one key while nothing leaves");
    assert_eq!(keys[refused], keys[0], "it is sent once the CA is there");
    assert_ne!(keys[refused + 1], keys[refused]);
    // What was signed is thrown away with its key, though the call for the roots never left.
    let world = World::new(Act::NoBundle);
    for _ in 0..2 {
        assert!(world.fetch(ResourceName::Default).await.is_err());
    }
    let keys = world.ca.keys();
    assert!(keys.len() >= 2 && keys[0] != keys[1]);
}

/// Whoever asks and leaves, again and again, while a CA hangs.
#[tokio::test(start_paused = true)]
async fn who_has_left_takes_no_room_while_a_ca_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let ca = FakeCa::new(Fixed::at(SystemTime::now()));
    let clock = Arc::new(Fixed::at(SystemTime::now()));
    let (_handle, mut manager) =
        Manager::new(config(dir.path()), Some(Arc::new(ca)), &Registry::new(), clock);
    let mut patient = Vec::new();
    for nth in 0..100_000 {
        let (reply, answer) = tokio::sync::oneshot::channel();
        manager.fetch_from_ca(ResourceName::Default, reply);
        if nth % 1000 == 0 {
            patient.push(answer);
        }
    }
    assert!(manager.waiting.capacity() <= 1000, "{}", manager.waiting.capacity());
    let waits = manager.waiting.iter().filter(|waiter| !waiter.reply.is_closed()).count();
    assert_eq!(waits, patient.len(), "nobody else is forgotten");
}

#[tokio::test(start_paused = true)]
async fn nothing_printed_holds_a_key() {
    let world = World::new(Act::Issue(DAY));
    let fetched = world.fetch(ResourceName::Default).await.unwrap();
    let Secret::Identity(identity) = &fetched.secret else { panic!("roots") };
    let key = String::from_utf8(identity.key.to_vec()).unwrap();
    let inner = key.lines().nth(1).unwrap();
    let numbers = identity.key[..16].iter().map(u8::to_string).collect::<Vec<_>>().join(", ");
    for printed in
        [format!("{fetched:?}"), format!("{:?}", world.handle), format!("{:?}", world.handle.status())]
    {
        assert!(!printed.contains(inner) && !printed.contains(&numbers), "{printed}");
    }
}

/// A pipe whose opener goes on as soon as this is dropped.
struct Unblocked(std::path::PathBuf);

impl Drop for Unblocked {
    fn drop(&mut self) {
        // None when nobody waits: then there is nobody to let go on.
        drop(pipe::writer(&self.0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_hanging_disk_holds_up_nobody() {
    // A pipe that nobody reads from, in the place of a file: opening it waits for ever.
    let world = World::with(Act::Issue(DAY), |dir, mut config| {
        let key = dir.join("key.pem");
        pipe::make(&key);
        config.output = Some(output::Config { dir: dir.to_owned(), mode: 0o600, seal: None });
        config
    });
    // A failed test ends, too: without this the runtime would wait for the thread.
    let pipe = Unblocked(world.dir.path().join("key.pem"));
    let (first, _updates) = world.identity().await;
    // Time stands still for a paused clock while a thread of the runtime is busy, so it is moved by hand.
    world.pass_beside(1, Duration::from_secs(11)).await;
    assert!(world.handle.status().output_error.contains("has not ended"), "{:?}", world.handle.status());
    world.pass_beside(1, DAY * 3 / 4).await;
    assert_ne!(world.identity().await.0, first, "renewal does not wait for the disk");
    // Somebody opens the pipe's other end at last; the thread goes on, and the newest certificate is written.
    drop(pipe);
    let chain = || std::fs::read(world.dir.path().join("cert-chain.pem")).unwrap_or_default();
    let newest = world.identity().await.0;
    until("the newest certificate's files", || chain() == newest).await;
}
