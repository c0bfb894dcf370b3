//! Before a certificate is due, and when it is about to expire.

use super::*;
use crate::secrets::{NearExpiry, NearExpiryAction};
use crate::trouble::{Kind, Troubles};

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn trouble_on_the_way_to_istiod_brings_a_renewal_forward_and_its_failures_harm_nobody() {
    let list = Troubles::default();
    let trouble = list.reporter("xdsproxy");
    let world = World::with(Act::Issue(DAY), |_, c| Config {
        early: true,
        trouble: Arc::new(list.reporter("ca")),
        ..c
    });
    let (first, mut updates) = world.identity().await;
    world.ca.act(Act::Unreachable);
    world.pass(DAY / 4).await;
    assert_eq!(world.ca.calls(), 1, "nothing is wrong");
    trouble.report((Kind::ConnectionRefused, "refused"));
    world.pass(60 * MINUTE).await;
    assert!((3..=12).contains(&(world.ca.calls() - 1)), "{} attempts in an hour", world.ca.calls() - 1);
    assert!(news(&mut updates).await.is_none(), "it is good, and not due");
    assert_eq!(world.handle.status().failures, 0);
    // Istiod is back: the next attempt, and no other.
    trouble.end();
    world.ca.act(Act::Issue(DAY));
    world.pass(20 * MINUTE).await;
    let Some(Change::Updated(secret)) = news(&mut updates).await else { panic!("it was not renewed early") };
    assert_ne!(chain_of(&secret), first);
    let calls = world.ca.calls();
    world.pass(DAY / 4).await;
    assert_eq!(world.ca.calls(), calls);
    assert!(world.metric("cert_early_renewals_total", "issued") >= 1.0);
}

/// Counts the looks at it: the manager looks each time that it wakes.
#[derive(Debug)]
struct Counted(Fixed, std::sync::atomic::AtomicUsize);

impl Clock for Counted {
    fn now(&self) -> SystemTime {
        self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.0.now()
    }
}

#[tokio::test(start_paused = true)]
async fn files_that_take_the_place_of_what_was_to_be_renewed_early_leave_the_manager_idle() {
    let list = Troubles::default();
    let trouble = list.reporter("xdsproxy");
    let (dir, clock, registry) =
        (tempfile::tempdir().unwrap(), Fixed::at(SystemTime::now()), Registry::new());
    let ca = FakeCa::new(clock.clone());
    ca.act(Act::Issue(DAY));
    let config = Config { early: true, trouble: Arc::new(list.reporter("ca")), ..config(dir.path()) };
    let counted = Arc::new(Counted(clock.clone(), 0.into()));
    let (handle, manager) = Manager::new(config, Some(Arc::new(ca.clone())), &registry, counted.clone());
    let group = crate::base::tasks::Group::new();
    group.spawn("secrets", manager.run(group.token()));
    let world = World { dir, ca, clock, handle, registry, group };
    let (first, _) = world.identity().await;
    world.ca.act(Act::Unreachable);
    trouble.report((Kind::ConnectionRefused, "refused"));
    world.pass(DAY / 8).await;
    assert!(world.ca.calls() > 1, "it is renewed early");
    let folder = world.dir.path().join("certs");
    std::fs::create_dir(&folder).unwrap();
    let pair = mock_istiod::Authority::new("files", 1).pair(&mock_istiod::Leaf::workload(ID, 2 * DAY));
    std::fs::write(folder.join("cert-chain.pem"), &pair.chain).unwrap();
    std::fs::write(folder.join("key.pem"), &pair.key).unwrap();
    world.pass(60 * MINUTE).await;
    assert_ne!(world.identity().await.0, first);
    settle().await;
    let before = counted.1.load(std::sync::atomic::Ordering::Relaxed);
    settle().await;
    assert_eq!(counted.1.load(std::sync::atomic::Ordering::Relaxed), before, "it wakes without a pause");
}

#[tokio::test(start_paused = true)]
async fn without_the_switch_nothing_is_brought_forward() {
    let list = Troubles::default();
    let trouble = list.reporter("xdsproxy");
    let world = World::with(Act::Issue(DAY), |_, c| Config { trouble: Arc::new(list.reporter("ca")), ..c });
    world.identity().await;
    trouble.report((Kind::ConnectionRefused, "refused"));
    world.pass(DAY / 3).await;
    assert_eq!(world.ca.calls(), 1);
}

#[tokio::test(start_paused = true)]
async fn near_the_end_a_fault_of_our_own_is_told_and_others_are_not() {
    for (kind, own) in [(Kind::TokenExpired, true), (Kind::ConnectionRefused, false)] {
        let list = Troubles::default();
        let trouble = list.reporter("xdsproxy");
        let near_expiry =
            NearExpiry { action: NearExpiryAction::Unready, before: 30 * MINUTE, jitter: Duration::ZERO };
        let world = World::with(Act::Issue(DAY), |_, c| Config {
            near_expiry,
            trouble: Arc::new(list.reporter("ca")),
            ..c
        });
        world.identity().await;
        world.ca.act(Act::Unreachable);
        trouble.report((kind, "so it is"));
        world.pass(DAY - 60 * MINUTE).await;
        assert_eq!(world.handle.status().unfit, None, "{kind}: an hour is left");
        world.pass(40 * MINUTE).await;
        let unfit = world.handle.status().unfit;
        assert_eq!(unfit.is_some(), own, "{kind}: {unfit:?}");
        assert_eq!(list.any(|k| k == Kind::IdentityNearExpiry), own, "{kind}");
        trouble.end();
        world.ca.act(Act::Issue(DAY));
        world.pass(5 * MINUTE).await;
        assert_eq!(world.handle.status().unfit, None, "{kind}: it was renewed");
        assert!(!list.any(|k| k == Kind::IdentityNearExpiry));
    }
}

/// It is served, as by the Go agent, and peers refuse it.
#[tokio::test(start_paused = true)]
async fn a_chain_with_a_gap_is_served_and_told_until_it_has_none() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::OtherSigner, |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    let (first, _updates) = world.identity().await;
    until("it is told", || troubles.verdict().is_some()).await;
    let told = troubles.verdict().unwrap();
    assert_eq!(told.kind, crate::trouble::Kind::CertificateChain, "{told:?}");
    assert!(told.detail.contains("it has a gap"), "{told:?}");
    // The next one is no better, and the one after it is.
    world.pass(DAY * 9 / 16).await;
    let (second, _updates) = world.identity().await;
    assert_ne!(first, second);
    let lines = || troubles.events().into_iter().filter(|e| e.what == crate::trouble::What::Trouble).count();
    assert_eq!(lines(), 1, "{:?}", troubles.events());
    world.ca.act(Act::Issue(DAY));
    world.pass(DAY * 9 / 16).await;
    assert_ne!(world.identity().await.0, second);
    assert_eq!(troubles.verdict(), None);
}

/// What is served beside the CA's own root counts, from the mesh and from a file.
#[tokio::test(start_paused = true)]
async fn a_root_of_the_mesh_or_of_a_file_closes_the_gap() {
    for mounted in [false, true] {
        let troubles = Arc::new(crate::trouble::Troubles::default());
        let mut file = None;
        let world = World::with(Act::OtherSigner, |_, mut config| {
            config.trouble = troubles.reporter("cache").into();
            file = Some(config.mounted.root.clone());
            config
        });
        world.identity().await;
        until("it is told", || troubles.verdict().is_some()).await;
        let other = world.ca.other_root();
        if mounted {
            let file = file.unwrap();
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, other).unwrap();
            let _ = world.roots().await;
        } else {
            world.handle.update_trust_bundle(vec![other]);
        }
        world.pass(Duration::from_secs(60)).await;
        until("it is over", || troubles.verdict().is_none()).await;
    }
}

/// The intermediate is good for ten years, the certificate in use for longer.
#[tokio::test(start_paused = true)]
async fn a_chain_that_ends_before_its_certificate_is_told_when_it_does() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::Issue(DAY * 40_000), |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    settle().await;
    assert_eq!(troubles.verdict(), None);
    world.clock.advance(DAY * 3651);
    world.pass(Duration::from_secs(60)).await;
    let told = troubles.verdict().expect("told");
    assert_eq!(told.kind, crate::trouble::Kind::CertificateChain, "{told:?}");
    assert!(told.detail.contains(" expired at "), "{told:?}");
    world.clock.set(SystemTime::now());
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(troubles.verdict(), None);
}
