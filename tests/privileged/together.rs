//! Several runs at once in one network namespace, as an init container that is started again beside its last run.

use crate::SIDECAR;
use crate::world::{Backend, World};

const V4: &[&str] = &["10.77.4.2/24"];

fn at_once(world: &World, options: &str) {
    let runs = [(); 3].map(|()| world.spawn(options));
    for mut run in runs {
        let status = run.wait().expect("it ends");
        assert!(status.success(), "{options}: {status}");
    }
}

#[test]
fn runs_at_once_end_as_one() {
    for backend in [Backend::Nft, Backend::Legacy] {
        let (Some(one), Some(many)) = (World::new(backend, V4), World::new(backend, V4)) else { return };
        one.apply(SIDECAR, 0);
        for _ in 0..3 {
            at_once(&many, SIDECAR);
            assert_eq!(many.everything(), one.everything(), "{backend:?}: the first");
            many.apply("--cleanup-only --reconcile", 0);
            many.apply("-u 1337 -m REDIRECT -b 80", 0);
            at_once(&many, &format!("{SIDECAR} --reconcile"));
            assert_eq!(many.everything(), one.everything(), "{backend:?}: over other rules");
            many.apply("--cleanup-only --reconcile", 0);
        }
    }
}

// Rules would stay that nobody serves: a service manager ends a clean-up that waits for longer than it may.
#[test]
fn a_user_who_has_the_name_holds_up_no_run() {
    let Some(world) = World::new(Backend::Nft, V4) else { return };
    let before = world.everything();
    let holder = world.serve(65534, &["run"]);
    let made = world.apply(SIDECAR, 0);
    assert_ne!(world.everything(), before);
    let clean = world.command_of(&["vm", "clean"]).output().unwrap();
    let after = world.everything();
    drop(holder);
    for text in [made, String::from_utf8_lossy(&clean.stdout).into_owned()] {
        assert!(text.contains("(user 65534 has its name, and is not root): not waiting"), "{text}");
    }
    assert!(clean.status.success());
    assert_eq!(after, before, "something was left behind");
}
