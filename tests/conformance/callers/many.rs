//! A thousand callers at a time: memory and descriptors are bounded, and come back.

use serde_json::Value;

use super::{SOCKET, given, identity};
use crate::support::client::{Pem, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

const CALLERS: usize = 1000;
/// Those of a second round, which must find the room of the first.
const AGAIN: usize = 300;
/// What a caller may take of the agent's memory, in kB, its stream, its manager and its keys together.
const EACH: usize = 200;

struct Size {
    anon: usize,
    descriptors: usize,
}

fn size(agent: &TestAgent) -> Size {
    let proc = format!("/proc/{}", agent.pid().as_raw_pid());
    Size {
        anon: agent.memory("RssAnon"),
        descriptors: std::fs::read_dir(format!("{proc}/fd")).unwrap().count(),
    }
}

async fn streams(agent: &TestAgent) -> u64 {
    let document: Value = serde_json::from_slice(&agent.get("/debug/agentz").await.unwrap().body).unwrap();
    document["callerTokens"]["streams"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_callers_take_a_bounded_place_and_give_it_back() {
    let mock = MockIstiod::start().await;
    let (mut agent, first) = super::agent(&mock, "all:info").await;
    given(&first.with_headers(&[("authorization", &mock.mint("team", "first"))])).await.unwrap();
    let idle = size(&agent);
    let mut peaks = Vec::new();
    for (round, callers) in [CALLERS, AGAIN].into_iter().enumerate() {
        let mut clients = Vec::new();
        for _ in 0..20 {
            clients.push(agent.client(SOCKET).await);
        }
        let mut asked = Vec::new();
        for n in 0..callers {
            let account = format!("account-{n}");
            let client =
                clients[n % clients.len()].with_headers(&[("authorization", &mock.mint("team", &account))]);
            let stream = client.stream_secrets();
            stream.send(&secret_request("default"));
            asked.push((account, stream));
        }
        for (account, stream) in &mut asked {
            let response = stream.next().await.unwrap();
            let (_, pem) = secrets(&response).remove(0);
            let Pem::Identity { chain, .. } = pem else { panic!("{pem:?}") };
            assert_eq!(identity(&chain), mock.identity("team", account));
        }
        assert!(streams(&agent).await >= u64::try_from(callers).unwrap());
        let full = size(&agent);
        println!(
            "round {round}: {} kB a caller, {} descriptors for {callers} callers",
            full.anon.saturating_sub(idle.anon) / callers,
            full.descriptors - idle.descriptors
        );
        assert!(full.anon < idle.anon + CALLERS * EACH, "{} kB, then {} kB", idle.anon, full.anon);
        peaks.push(full.anon);
        drop(asked);
        drop(clients);
        eventually("every stream is over", async || (streams(&agent).await == 0).then_some(())).await;
        eventually("every connection is closed", async || {
            (size(&agent).descriptors < idle.descriptors + 50).then_some(())
        })
        .await;
    }
    // The allocator may keep what was freed; the next callers find it there.
    assert!(peaks[1] < peaks[0] + peaks[0] / 10, "what the first callers had was not freed: {peaks:?} kB");
    agent.stop().await;
}
