//! Two Envoys of the agent's own side by side, as in a hot restart, of which one configuration is kept.

use super::*;

async fn rig() -> Rig {
    Rig::with(|c| {
        c.replay = Some(Replay { after: Duration::ZERO, most: 1 << 20, disk: None, left: None });
    })
    .await
}

/// An epoch that asks for clusters and listeners.
async fn asking(rig: &Rig, own: u64) -> Envoy {
    let mut envoy = rig.epoch(own).await;
    for of in [CDS, types::LISTENER] {
        envoy.send(&delta_request(of)).await;
    }
    envoy
}

async fn accepts(envoy: &mut Envoy, istiod: &mut Istiod, of: &str, nonce: &str, names: &[&str]) {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let sent = delta(of, nonce, &names, "1");
    istiod.push(&sent).await;
    while envoy.delta().await != sent {}
    envoy.send(&delta_answer(of, nonce)).await;
    while istiod.delta().await.response_nonce != nonce {}
}

async fn served(rig: &mut Rig, own: u64) -> (Envoy, Istiod) {
    let mut envoy = asking(rig, own).await;
    let mut istiod = rig.istiod().await;
    accepts(&mut envoy, &mut istiod, CDS, "c", &["a"]).await;
    accepts(&mut envoy, &mut istiod, types::LISTENER, "l", &["l"]).await;
    (envoy, istiod)
}

/// What an Envoy is told that comes without anything while istiod is away.
async fn kept(rig: &Rig) -> Vec<String> {
    let mut envoy = asking(rig, 9).await;
    envoy.delta().await.resources.into_iter().map(|r| r.name).collect()
}

#[tokio::test]
async fn an_epoch_that_outlives_the_next_is_kept_in_its_place() {
    let mut rig = rig().await;
    let (mut first, mut istiod) = served(&mut rig, 1).await;
    let (second, mut other) = served(&mut rig, 2).await;
    accepts(&mut first, &mut istiod, CDS, "c1", &["beside"]).await;
    drop(second);
    other.ended().await;
    // What comes now would be that of nobody.
    istiod.push(&delta(CDS, "c2", &["b".to_owned()], "1")).await;
    let end = first.status().await;
    assert_eq!(end.0, Code::Unavailable, "{end:?}");
    let (mut first, mut istiod) = served(&mut rig, 1).await;
    accepts(&mut first, &mut istiod, CDS, "c3", &["b"]).await;
    rig.way.open.store(false, Ordering::SeqCst);
    istiod.cut.cancel();
    first.status().await;
    assert_eq!(kept(&rig).await, ["a", "b"]);
}

#[tokio::test]
async fn an_older_epoch_that_is_handed_over_last_does_not_take_the_place_of_the_next() {
    let mut rig = rig().await;
    let (first, mut istiod) = served(&mut rig, 1).await;
    drop(first);
    istiod.ended().await;
    // Istiod is slow: both are answered from memory, and it is asked in the name of both.
    let mut second = asking(&rig, 2).await;
    let mut of_second = rig.istiod().await;
    of_second.delta().await;
    let _first = asking(&rig, 1).await;
    let mut of_first = rig.istiod().await;
    of_first.delta().await;
    accepts(&mut second, &mut of_second, CDS, "c", &["a", "b"]).await;
    rig.way.open.store(false, Ordering::SeqCst);
    of_second.cut.cancel();
    second.status().await;
    assert_eq!(kept(&rig).await, ["a", "b"]);
}
