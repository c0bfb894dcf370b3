//! Files that somebody removes behind the agent's back.

use std::sync::atomic::AtomicBool;

use super::*;

#[tokio::test]
async fn what_was_removed_may_have_become_another_module_meanwhile() {
    let changed = Arc::new(AtomicBool::new(false));
    let now = changed.clone();
    let server = Server::start(move |_| answer(200, "", if now.load(Relaxed) { TWO } else { ONE })).await;
    let rig = rig(|_| {});
    let wanted = wanted(&format!("http://{}/m", server.addr));
    let first = rig.get(&wanted).await.unwrap();
    std::fs::remove_file(&first).unwrap();
    changed.store(true, Relaxed);
    let second = rig.get(&wanted).await.unwrap();
    assert_eq!(std::fs::read(&second).unwrap(), TWO);
    assert_eq!(rig.get(&wanted).await.unwrap(), second);
    assert_eq!(server.heads().len(), 2);
    // Who says which one it must be is not given another.
    std::fs::remove_file(&second).unwrap();
    let pinned = Wanted { checksum: sha256::of(ONE), ..wanted };
    assert!(rig.get(&pinned).await.unwrap_err().contains("checksum"));
}
