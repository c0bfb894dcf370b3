//! An agent that is short of memory says so, and goes on with what is asked of it.

use mock_istiod::names::{self, NameInfo};

use super::dns::{A, answers, query, start_with};
use crate::support::client::{secret_request, secrets};
use crate::support::eventually;

/// Some 28 MB of the agent's once they are held.
const HOSTS: usize = 200_000;
/// So that a quarter of it is not left.
const LIMIT: &str = "30MiB";
/// It looks while so many are there.
const STREAMS: usize = 40;

#[tokio::test]
async fn a_shortage_of_memory_is_told_and_nobody_loses_anything_by_it() {
    let mut dns =
        start_with(&[], |builder| builder.env("GOMEMLIMIT", LIMIT).env("ECC_SIGNATURE_ALGORITHM", "ECDSA"))
            .await;
    let name = |n| format!("host-{n}.ns.svc.cluster.local");
    let hosts = (0..HOSTS).map(|n| (name(n), NameInfo::service(&name(n), "ns", "10.0.0.1")));
    dns.tell(&names::response("1", hosts)).await;
    let troubles = async |dns: &super::dns::Dns| {
        let json = dns.world.agent.run(&["status", "--json"]).await.json();
        let troubles = json["troubles"].as_array().cloned().unwrap_or_default();
        troubles.into_iter().find(|trouble| trouble["kind"] == "MemoryShort")
    };
    assert!(troubles(&dns).await.is_none(), "nobody is there who could give up anything");
    let client = dns.world.agent.sds().await;
    let mut streams: Vec<_> = (0..STREAMS).map(|_| client.stream_secrets()).collect();
    for stream in &mut streams {
        stream.send(&secret_request("default"));
        assert_eq!(secrets(&stream.next().await.unwrap()).len(), 1);
    }
    let told = eventually("the shortage is told", || troubles(&dns)).await;
    let detail = told["detail"].as_str().unwrap_or_default();
    assert!(detail.starts_with("memory is short: ") && detail.contains(" MB left of 31 MB"), "{told}");
    assert!(told["hint"].as_str().unwrap_or_default().contains("GOMEMLIMIT"), "{told}");
    // Whoever has few streams is not to blame, and a name costs nothing.
    for stream in &mut streams {
        stream.send(&secret_request("ROOTCA"));
        assert_eq!(secrets(&stream.next().await.unwrap()).len(), 1);
    }
    assert_eq!(answers(&dns.client.ask(&query(1, &name(HOSTS - 1), A)).await), 1);
    assert!(dns.world.agent.metric("istio_agent_memory_shortages_total").await > Some(0.0));
}
