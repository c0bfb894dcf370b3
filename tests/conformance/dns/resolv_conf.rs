//! What `resolv.conf` says, and what becomes of it.

use super::*;

#[tokio::test]
async fn resolv_conf_is_read_again_when_it_changes() {
    for parallel in ["false", "true"] {
        let (Some(old), Some(new)) = (Nameserver::start().await, Nameserver::start().await) else { return };
        read_again(&old, &new, parallel).await;
    }
}

async fn read_again(old: &Nameserver, new: &Nameserver, parallel: &str) {
    let wanted = |b: Builder| b.env(ADAPTIVE.0, ADAPTIVE.1).env("DNS_FORWARD_PARALLEL", parallel);
    let mut dns = start_with(&[old], wanted).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    // In its place, as a mount is written.
    let path = dns.world.agent.path("resolv.conf");
    std::fs::write(&path, "search a.b\n").unwrap();
    dns.world.agent.wait_log("names no nameserver any more").await;
    std::fs::write(&path, format!("nameserver {}\nsearch other\n", new.ip)).unwrap();
    dns.world.agent.wait_log("has changed: resolvers are").await;
    let sent = query(1, "www.example.com", A);
    let (reply, _) = tokio::join!(dns.client.ask(&sent), new.answer(|query| vec![bare(query, 3)]));
    assert_eq!(reply, bare(&sent, 3));
    // The search domain is the new one, too.
    let known = dns.client.ask(&query(2, "shop.ns.svc.cluster.local.other", A)).await;
    assert_eq!((rcode(&known), answers(&known)), (NO_ERROR, 2), "an alias and an address");
    dns.world.agent.stop().await;
}

#[tokio::test]
async fn a_resolv_conf_that_cannot_be_read_any_more_is_said_once_and_the_last_resolvers_stay() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start_with(&[&nameserver], |b| b.env(ADAPTIVE.0, ADAPTIVE.1)).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    let path = dns.world.agent.path("resolv.conf");
    // In its place, as a mount is written: no such file is read to its end.
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(17 << 20).unwrap();
    dns.world.agent.wait_log("cannot be read any more").await;
    let sent = query(1, "www.example.com", A);
    let (reply, _) = tokio::join!(dns.client.ask(&sent), nameserver.answer(|query| vec![bare(query, 3)]));
    assert_eq!(reply, bare(&sent, 3));
    std::fs::write(&path, format!("nameserver {}\nsearch other\n", nameserver.ip)).unwrap();
    dns.world.agent.wait_log("has changed: resolvers are").await;
    assert_eq!(dns.world.agent.log().text().matches("cannot be read any more").count(), 1);
    dns.world.agent.stop().await;
}

/// As on a machine whose programs ask the agent, and whose own nameservers nobody has written down.
#[tokio::test]
async fn a_resolv_conf_that_names_the_agent_itself_is_told_and_no_query_goes_round() {
    // Only its address is needed.
    let Some(nameserver) = Nameserver::start().await else { return };
    let ip = nameserver.ip;
    drop(nameserver);
    let resolv = format!("nameserver {ip}\n");
    // At this port an Envoy of the agent's would be another user's.
    let with =
        |b| serving(b, 53, &resolv).env("DNS_PROXY_ADDR", format!("{ip}:53")).env("ENVOY_EXTERNAL", "true");
    let mut world = World::with(with).await;
    world.agent.wait_log(&format!("names this DNS server itself ({ip})")).await;
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    udp.connect((ip, 53)).await.unwrap();
    let client = Client { port: 53, udp };
    for id in 1..=3 {
        assert_eq!(rcode(&client.ask(&query(id, "example.com", A)).await), SERV_FAIL);
    }
    eventually("DnsUpstreamFailed, with its cause", || async {
        let document = world.agent.get("/debug/agentz").await.ok()?.text();
        let told = ["DnsUpstreamFailed", "no nameserver but this agent itself"];
        told.iter().all(|word| document.contains(word)).then_some(())
    })
    .await;
    assert_eq!(world.agent.metric("istio_agent_dns_requests_total").await, Some(3.0), "none came back");
    world.agent.stop().await;
}

/// DNS capture of IPv4 leads to the port on 127.0.0.1, whatever else the name has.
#[tokio::test]
async fn a_host_name_with_both_families_is_taken_in_ipv4() {
    if !root_for("a resolv.conf and hosts of its own") {
        return;
    }
    let mounts = "mount --bind hosts /etc/hosts && mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"";
    let words = ["unshare", "--mount", "sh", "-c", mounts, "sh"].map(ToOwned::to_owned);
    // The first as where no nameserver has an address.
    for (host, resolv) in [("localhost", ""), ("both.test", "nameserver 192.0.2.1\n")] {
        let port = free_port();
        let with = |b: Builder| {
            b.env("ISTIO_META_DNS_CAPTURE", "true")
                .env("DNS_PROXY_ADDR", format!("{host}:{port}"))
                .file("hosts", format!("::1 localhost {host}\n127.0.0.1 localhost {host}\n"))
                .file("resolv.conf", resolv)
                .before(&words)
        };
        let mut world = World::with(with).await;
        world.agent.wait_log("local DNS server listens on").await;
        let client = Client::to(port).await;
        let asked = query(1, "shop.ns.svc.cluster.local", A);
        assert_eq!(rcode(&client.ask(&asked).await), SERV_FAIL, "{host}: no table yet");
        assert_eq!(rcode(&client.ask_tcp(&asked).await), SERV_FAIL, "{host}: no table yet");
        world.agent.stop().await;
    }
}
