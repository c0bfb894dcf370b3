//! The local DNS server: names from istiod, everything else from the nameservers of `resolv.conf`.
//!
//! The test plays istiod and a nameserver. Those listen on port 53, so they take loopback addresses of their
//! own; the agent sees a `resolv.conf` that names them.

mod resolv_conf;

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicU8, Ordering};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use mock_istiod::names::{self, NameInfo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

use super::ads::{Sotw, World, ask, request};
use crate::support::builder::Builder;
use crate::support::{LIMIT, TestAgent, eventually, free_port, root_for};

const LDS: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
const NDS: &str = names::TYPE;
pub(super) const A: u16 = 1;
const AAAA: u16 = 28;
const TXT: u16 = 16;
const NO_ERROR: u8 = 0;
const FORM_ERR: u8 = 1;
const SERV_FAIL: u8 = 2;

fn table(nonce: &str, host: &str, ip: &str) -> DiscoveryResponse {
    names::response(nonce, [(host.to_owned(), NameInfo::service(host, "ns", ip))])
}

fn name(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    for label in text.trim_end_matches('.').split('.') {
        out.push(u8::try_from(label.len()).unwrap());
        out.extend_from_slice(label.as_bytes());
    }
    out.push(0);
    out
}

/// A query with RD set.
pub(super) fn query(id: u16, host: &str, qtype: u16) -> Vec<u8> {
    let mut out = id.to_be_bytes().to_vec();
    out.extend_from_slice(&[1, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&name(host));
    out.extend_from_slice(&qtype.to_be_bytes());
    out.extend_from_slice(&[0, 1]);
    out
}

pub(super) fn rcode(reply: &[u8]) -> u8 {
    reply[3] & 0x0f
}

pub(super) fn answers(reply: &[u8]) -> u16 {
    u16::from_be_bytes([reply[6], reply[7]])
}

/// A nameserver of its own, at port 53 of a loopback address nobody else has.
pub(super) struct Nameserver {
    pub(super) ip: Ipv4Addr,
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Nameserver {
    /// Nothing where port 53 cannot be had.
    pub(super) async fn start() -> Option<Self> {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        if !root_for("a nameserver at port 53") {
            return None;
        }
        loop {
            let ip = Ipv4Addr::new(127, 53, 0, NEXT.fetch_add(1, Ordering::Relaxed));
            assert!(!ip.is_broadcast() && ip.octets()[3] < 250, "port 53 cannot be had");
            let udp = UdpSocket::bind((ip, 53)).await;
            let tcp = TcpListener::bind((ip, 53)).await;
            if let (Ok(udp), Ok(tcp)) = (udp, tcp) {
                return Some(Self { ip, udp, tcp });
            }
        }
    }

    /// The next query, and how it is answered.
    async fn answer(&self, make: impl Fn(&[u8]) -> Vec<Vec<u8>>) -> Vec<u8> {
        let mut buffer = vec![0; 4096];
        let received = tokio::time::timeout(LIMIT, self.udp.recv_from(&mut buffer)).await;
        let (length, from) = received.expect("no query came").unwrap();
        buffer.truncate(length);
        for reply in make(&buffer) {
            self.udp.send_to(&reply, from).await.unwrap();
        }
        buffer
    }

    /// Waits until so many resolvers have asked; none is answered.
    pub(super) async fn asked_by(&self, resolvers: usize) {
        let mut asked = HashSet::new();
        while asked.len() < resolvers {
            let received = tokio::time::timeout(LIMIT, self.udp.recv_from(&mut [0; 4096])).await;
            asked.insert(received.expect("no query came").unwrap().1);
        }
    }
}

/// A reply to `query` with nothing in it but this code.
fn bare(query: &[u8], rcode: u8) -> Vec<u8> {
    let mut out = query.to_vec();
    out[2] |= 0x80;
    out[3] = 0x80 | rcode;
    out
}

pub(super) struct Client {
    port: u16,
    udp: UdpSocket,
}

impl Client {
    pub(super) async fn to(port: u16) -> Self {
        let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        udp.connect(("127.0.0.1", port)).await.unwrap();
        Self { port, udp }
    }

    async fn send(&self, message: &[u8]) {
        self.udp.send(message).await.unwrap();
    }

    async fn receive(&self) -> Vec<u8> {
        let mut buffer = vec![0; 70_000];
        let received = tokio::time::timeout(LIMIT, self.udp.recv(&mut buffer)).await;
        let length = received.expect("no reply came").unwrap();
        buffer.truncate(length);
        buffer
    }

    pub(super) async fn ask(&self, message: &[u8]) -> Vec<u8> {
        self.send(message).await;
        self.receive().await
    }

    async fn ask_tcp(&self, message: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        let length = u16::try_from(message.len()).unwrap().to_be_bytes();
        stream.write_all(&[&length[..], message].concat()).await.unwrap();
        let mut reply = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut reply).await.unwrap();
        reply
    }
}

/// The agent with a server on `port` and these lines in its `resolv.conf`.
pub(super) fn serving(builder: Builder, port: u16, resolv: &str) -> Builder {
    let bind = "mount --bind resolv.conf /etc/resolv.conf && exec \"$@\"";
    builder
        .env("ISTIO_META_DNS_CAPTURE", "true")
        .env("DNS_PROXY_ADDR", format!("127.0.0.1:{port}"))
        .env("DNS_FORWARD_TIMEOUT", "300ms")
        .file("resolv.conf", resolv)
        .before(&["unshare", "--mount", "sh", "-c", bind, "sh"].map(ToOwned::to_owned))
}

pub(super) struct Dns {
    pub(super) world: World,
    envoy: Sotw,
    istiod: mock_istiod::AdsStream,
    pub(super) client: Client,
}

/// An agent that has asked for its name table.
async fn start(nameservers: &[&Nameserver]) -> Dns {
    start_with(nameservers, |b| b).await
}

pub(super) async fn start_with(nameservers: &[&Nameserver], change: impl Fn(Builder) -> Builder) -> Dns {
    let port = free_port();
    let lines: String = nameservers.iter().map(|n| format!("nameserver {}\n", n.ip)).collect();
    let resolv = format!("{lines}search ns.svc.cluster.local svc.cluster.local\n");
    let mut world = World::with(|b| change(serving(b, port, &resolv))).await;
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(LDS));
    assert_eq!(request(&mut istiod).await.type_url, LDS);
    assert_eq!(request(&mut istiod).await.type_url, NDS);
    Dns { world, envoy, istiod, client: Client::to(port).await }
}

impl Dns {
    pub(super) async fn tell(&mut self, table: &DiscoveryResponse) {
        self.istiod.responses.sotw(table).await.unwrap();
        let answer = request(&mut self.istiod).await;
        assert_eq!((answer.type_url.as_str(), answer.nonce.as_str()), (NDS, table.nonce.as_str()));
        assert!(answer.is_ack());
    }
}

#[tokio::test]
async fn names_are_answered_from_the_newest_table() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    let host = "shop.ns.svc.cluster.local";
    let early = dns.client.ask(&query(7, host, A)).await;
    assert_eq!((rcode(&early), early[2] & 1), (SERV_FAIL, 1), "no table yet; RD is copied");
    let ready = dns.world.agent.get("/healthz/ready").await.unwrap();
    assert_eq!(ready.status, 503);
    dns.tell(&table("1", host, "10.0.0.1")).await;
    eventually("the agent is ready", || async {
        dns.world.agent.get("/healthz/ready").await.ok().filter(|reply| reply.status.is_success())
    })
    .await;
    for short in [host, "SHOP.ns.svc.cluster.local", "shop.ns.svc", "shop.ns", "shop"] {
        for reply in
            [dns.client.ask(&query(8, short, A)).await, dns.client.ask_tcp(&query(8, short, A)).await]
        {
            assert_eq!((rcode(&reply), answers(&reply)), (NO_ERROR, 1), "{short}");
            assert_eq!(reply[2] & 4, 4, "we are the authority");
            assert!(reply.ends_with(&[10, 0, 0, 1]));
        }
    }
    let none = dns.client.ask(&query(9, host, AAAA)).await;
    assert_eq!((rcode(&none), answers(&none)), (NO_ERROR, 0), "known, but without such an address");
    dns.tell(&table("2", "other.ns.svc.cluster.local", "10.0.0.2")).await;
    let reply = dns.client.ask(&query(10, "other", A)).await;
    assert!(reply.ends_with(&[10, 0, 0, 2]));
    dns.client.send(&query(11, host, A)).await;
    nameserver.answer(|query| vec![bare(query, 3)]).await;
    assert_eq!(rcode(&dns.client.receive().await), 3, "the old table is gone whole");
    dns.tell(&table("3", "vm.ns.svc.cluster.local", "fe80::9%eth0")).await;
    let reply = dns.client.ask(&query(12, "vm", AAAA)).await;
    assert!(answers(&reply) == 1 && reply.ends_with(&[0, 9]), "an address's zone is of its own machine only");
    drop(dns.envoy);
    assert_eq!(answers(&dns.client.ask(&query(13, "vm", AAAA)).await), 1, "and the last one stays");
}

#[tokio::test]
async fn what_is_not_known_goes_on_and_comes_back_byte_for_byte() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    for (host, qtype) in [("www.Example.com", A), ("shop.ns.svc.cluster.local", TXT), ("shop.ns", 255)] {
        let sent = query(0x1234, host, qtype);
        dns.client.send(&sent).await;
        let seen = nameserver
            .answer(|query| {
                let mut other = bare(query, 0);
                other[0] ^= 0xff;
                // Whoever guesses a number does not know what was asked.
                let mut guessed = bare(query, 0);
                guessed[13] ^= 1;
                vec![other, guessed, bare(query, 5)]
            })
            .await;
        assert_eq!(seen, sent, "unchanged");
        assert_eq!(dns.client.receive().await, bare(&sent, 5), "a reply to another question is passed over");
    }
    let sent = query(0x4321, "www.example.com", A);
    let over_tcp = async {
        let (mut stream, _) = nameserver.tcp.accept().await.unwrap();
        let mut seen = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut seen).await.unwrap();
        let reply = bare(&seen, 0);
        let length = u16::try_from(reply.len()).unwrap().to_be_bytes();
        stream.write_all(&[&length[..], &reply].concat()).await.unwrap();
        seen
    };
    let (reply, seen) = tokio::join!(dns.client.ask_tcp(&sent), over_tcp);
    assert_eq!((seen, reply), (sent.clone(), bare(&sent, 0)), "over TCP as it came");
}

#[tokio::test]
async fn what_a_nameserver_answers_is_not_judged() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    // Signed; answered with an address of three bytes, and with more behind it.
    let (signed, odd) = (b"\0\0\xfa\0\xff\0\0\0\0\0\0", b"\xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x03\x0a\0\0more");
    let plain = query(9, "www.example.com", TXT);
    let reply = [&bare(&plain, 0)[..7], &[1], &plain[8..], odd].concat();
    let sent = [&plain[..11], &[1], &plain[12..], signed].concat();
    dns.client.send(&sent).await;
    assert_eq!(nameserver.answer(|_| vec![reply.clone()]).await, sent);
    assert_eq!(dns.client.receive().await, reply);
}

#[tokio::test]
async fn a_name_that_no_host_can_have_is_asked_of_the_nameserver() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    for (nonce, host) in [("1", "a(b.ns"), ("2", "a@b.ns"), ("3", "a\"b.ns")] {
        dns.tell(&table(nonce, host, "10.0.0.1")).await;
        let sent = query(7, host, A);
        dns.client.send(&sent).await;
        assert_eq!(nameserver.answer(|query| vec![bare(query, 3)]).await, sent);
        assert_eq!(rcode(&dns.client.receive().await), 3, "{host}");
    }
}

#[tokio::test]
async fn without_a_limit_a_query_has_that_of_the_go_agents_library() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start_with(&[&nameserver], |b| b.env("DNS_FORWARD_TIMEOUT", "0")).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    dns.client.send(&query(1, "www.example.com", A)).await;
    nameserver.answer(|query| vec![bare(query, 0)]).await;
    assert_eq!(rcode(&dns.client.receive().await), NO_ERROR);
}

#[tokio::test]
async fn a_silent_nameserver_costs_its_time_and_no_answer() {
    let (Some(silent), Some(good)) = (Nameserver::start().await, Nameserver::start().await) else { return };
    let mut dns = start(&[&silent, &good]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    for id in 1..6 {
        let sent = query(id, "www.example.com", A);
        let (reply, _) = tokio::join!(dns.client.ask(&sent), good.answer(|query| vec![bare(query, 0)]));
        assert_eq!(reply, bare(&sent, 0), "whichever was asked first");
    }
    drop(good);
    let reply = dns.client.ask(&query(9, "www.example.com", A)).await;
    assert_eq!((rcode(&reply), answers(&reply), reply[2] & 1), (SERV_FAIL, 0, 1));
    let reply = dns.client.ask_tcp(&query(9, "www.example.com", A)).await;
    assert_eq!(rcode(&reply), SERV_FAIL, "connections are accepted and never answered");
}

#[tokio::test]
async fn a_nameserver_with_a_zone_is_asked_and_served_in_its_family() {
    if !root_for("a resolv.conf of its own") {
        return;
    }
    let port = free_port();
    let with = |b| serving(b, port, "nameserver 127.53.1.1\nnameserver fe80::1%lo\n");
    let mut world = World::with(|b| with(b).env("DNS_PROXY_ADDR", format!("localhost:{port}"))).await;
    world.agent.wait_log("local DNS server listens on").await;
    let udp = UdpSocket::bind("[::1]:0").await.unwrap();
    udp.connect(("::1", port)).await.unwrap();
    let client = Client { port, udp };
    assert_eq!(rcode(&client.ask(&query(1, "www.example.com", A)).await), SERV_FAIL, "no table yet");
    world.agent.stop().await;
}

#[tokio::test]
async fn a_server_on_a_wildcard_address_answers_from_the_one_that_was_asked() {
    if !root_for("a resolv.conf of its own") {
        return;
    }
    for (host, at, of) in [
        ("0.0.0.0", "127.0.0.2", "0.0.0.0:0"),
        ("0.0.0.0", "::1", "[::1]:0"),
        ("", "127.0.0.2", "0.0.0.0:0"),
        ("[::]", "::1", "[::1]:0"),
    ] {
        let port = free_port();
        let with = |b| serving(b, port, "").env("DNS_PROXY_ADDR", format!("{host}:{port}"));
        let mut world = World::with(with).await;
        world.agent.wait_log("local DNS server listens on").await;
        // Connected, so that the kernel drops what comes from elsewhere.
        let udp = UdpSocket::bind(of).await.unwrap();
        udp.connect((at, port)).await.unwrap();
        let client = Client { port, udp };
        assert_eq!(rcode(&client.ask(&query(1, "www.example.com", A)).await), SERV_FAIL, "no table yet");
        world.agent.stop().await;
    }
}

#[tokio::test]
async fn without_a_nameserver_the_answer_is_a_failure_in_both_modes() {
    if !root_for("a resolv.conf of its own") {
        return;
    }
    for parallel in ["false", "true"] {
        let port = free_port();
        let with =
            |b| serving(b, port, "search ns.svc.cluster.local\n").env("DNS_FORWARD_PARALLEL", parallel);
        let mut world = World::with(with).await;
        let (envoy, istiod) = world.sotw().await;
        envoy.send(&ask(LDS));
        let mut dns = Dns { world, envoy, istiod, client: Client::to(port).await };
        assert_eq!(request(&mut dns.istiod).await.type_url, LDS);
        assert_eq!(request(&mut dns.istiod).await.type_url, NDS);
        dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
        assert_eq!(rcode(&dns.client.ask(&query(1, "www.example.com", A)).await), SERV_FAIL, "{parallel}");
    }
}

#[tokio::test]
async fn dead_nameservers_and_idle_connections_take_what_is_theirs_and_no_more() {
    let Some(silent) = Nameserver::start().await else { return };
    let mut dns = start(&[&silent]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    // More queries at once than go on: the rest is told at once, and what is known is answered all the same.
    for id in 0..700 {
        dns.client.send(&query(id, "www.example.com", A)).await;
    }
    assert_eq!(rcode(&dns.client.receive().await), SERV_FAIL);
    let fds =
        std::fs::read_dir(format!("/proc/{}/fd", dns.world.agent.pid().as_raw_nonzero())).unwrap().count();
    assert!(fds < 512 + 200, "{fds} descriptors");
    assert_eq!(answers(&Client::to(dns.client.port).await.ask(&query(9, "shop.ns", A)).await), 1);
    // More connections than are served: those that say nothing make place.
    let mut idle = Vec::new();
    for _ in 0..128 {
        idle.push(TcpStream::connect(("127.0.0.1", dns.client.port)).await.unwrap());
    }
    let asked = Client::to(dns.client.port).await;
    let reply = tokio::time::timeout(LIMIT, asked.ask_tcp(&query(8, "shop.ns", A))).await;
    assert_eq!(answers(&reply.expect("the flood has nothing to say")), 1);
    drop(idle);
}

#[tokio::test]
async fn nameservers_asked_in_parallel_leave_descriptors_for_others() {
    let mut silent = Vec::new();
    for _ in 0..3 {
        let Some(nameserver) = Nameserver::start().await else { return };
        silent.push(nameserver);
    }
    let few = |b: Builder| {
        let b = b.env("DNS_FORWARD_PARALLEL", "true").env("DNS_FORWARD_TIMEOUT", "60s");
        b.within(&["prlimit", "--nofile=1024"])
    };
    let mut dns = start_with(&silent.iter().collect::<Vec<_>>(), few).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    for id in 0..400 {
        dns.client.send(&query(id, "www.example.com", A)).await;
    }
    // Told at once, while the others wait for their nameservers.
    assert_eq!(rcode(&dns.client.receive().await), SERV_FAIL);
    let fds =
        std::fs::read_dir(format!("/proc/{}/fd", dns.world.agent.pid().as_raw_nonzero())).unwrap().count();
    assert!(fds < 512, "{fds} of 1024 descriptors");
    assert!(dns.world.agent.get("/healthz/ready").await.is_ok());
}

#[tokio::test]
async fn what_is_no_query_is_refused_or_ignored_and_harms_nobody() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    let good = query(1, "shop.ns", A);
    let mut none = good.clone();
    none[5] = 0;
    let mut cut = good.clone();
    cut.truncate(good.len() - 3);
    for bad in [none, cut] {
        assert_eq!(rcode(&dns.client.ask(&bad).await), FORM_ERR);
    }
    let mut reply = good.clone();
    reply[2] |= 0x80;
    for ignored in [&good[..5], &reply, &[]] {
        dns.client.send(ignored).await;
    }
    // Connections that say nothing, or half of something.
    let _idle = TcpStream::connect(("127.0.0.1", dns.client.port)).await.unwrap();
    let mut half = TcpStream::connect(("127.0.0.1", dns.client.port)).await.unwrap();
    half.write_all(&[0, 99, 1]).await.unwrap();
    assert_eq!(answers(&dns.client.ask(&query(77, "shop.ns", A)).await), 1, "the first reply is to this one");
    assert_eq!(answers(&dns.client.ask_tcp(&good).await), 1);
    let closed = tokio::time::timeout(LIMIT, half.read_u8()).await;
    assert!(closed.expect("half a query is not waited for without end").is_err());
    dns.world.agent.stop().await;
}

#[tokio::test]
async fn a_port_that_is_taken_and_a_missing_resolv_conf_end_the_start() {
    let taken = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let with = |address: String| {
        TestAgent::with().env("ISTIO_META_DNS_CAPTURE", "true").env("DNS_PROXY_ADDR", address)
    };
    let mut agent = with(format!("127.0.0.1:{port}")).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    let mut agent = with("nonsense".to_owned()).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    if !root_for("a mount namespace") {
        return;
    }
    let gone = "mount -t tmpfs tmpfs /etc && exec \"$@\"";
    let words = ["unshare", "--mount", "sh", "-c", gone, "sh"].map(ToOwned::to_owned);
    let mut agent = with(format!("127.0.0.1:{}", free_port())).before(&words).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
}

/// A reply with one address that may be kept so long.
fn address(query: &[u8], last: u8, ttl: u32) -> Vec<u8> {
    let mut out = bare(query, 0);
    out[7] = 1;
    out.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01");
    out.extend_from_slice(&ttl.to_be_bytes());
    out.extend_from_slice(&[0, 4, 10, 0, 0, last]);
    out
}

const ADAPTIVE: (&str, &str) = ("DNS_FORWARD_ADAPTIVE", "true");

#[tokio::test]
async fn a_query_that_was_lost_is_sent_again_and_a_cut_answer_is_fetched_whole() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns =
        start_with(&[&nameserver], |b| b.env(ADAPTIVE.0, ADAPTIVE.1).env("DNS_FORWARD_TIMEOUT", "20s")).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    let sent = query(1, "www.example.com", A);
    dns.client.send(&sent).await;
    nameserver.answer(|_| Vec::new()).await;
    nameserver.answer(|query| vec![address(query, 7, 60)]).await;
    assert_eq!(dns.client.receive().await, address(&sent, 7, 60));
    let over_tcp = async {
        let cut = |query: &[u8]| {
            let mut reply = bare(query, 0);
            reply[2] |= 2;
            vec![reply]
        };
        nameserver.answer(cut).await;
        let (mut stream, _) = nameserver.tcp.accept().await.unwrap();
        let mut seen = vec![0; usize::from(stream.read_u16().await.unwrap())];
        stream.read_exact(&mut seen).await.unwrap();
        let reply = address(&seen, 8, 60);
        let length = u16::try_from(reply.len()).unwrap().to_be_bytes();
        stream.write_all(&[&length[..], &reply].concat()).await.unwrap();
    };
    let (reply, ()) = tokio::join!(dns.client.ask(&sent), over_tcp);
    assert_eq!(reply, address(&sent, 8, 60));
    dns.world.agent.stop().await;
}

#[tokio::test]
async fn answers_are_kept_where_that_is_wanted() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let wanted = |b: Builder| b.env("DNS_CACHE_MAX_TTL", "60s").env("DNS_SERVE_STALE", "30s");
    let mut dns = start_with(&[&nameserver], wanted).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    let sent = query(1, "fresh.example.com", A);
    let (reply, _) = tokio::join!(dns.client.ask(&sent), nameserver.answer(|q| vec![address(q, 1, 600)]));
    assert_eq!(reply, address(&sent, 1, 600));
    // Nobody is asked, and the number is that of the question.
    let again = dns.client.ask(&query(77, "fresh.example.com", A)).await;
    assert_eq!((rcode(&again), answers(&again), &again[..2]), (NO_ERROR, 1, &[0, 77][..]));
    let sent = query(2, "stale.example.com", A);
    let (_, _) = tokio::join!(dns.client.ask(&sent), nameserver.answer(|q| vec![address(q, 2, 1)]));
    let none = query(3, "none.example.com", A);
    let (_, _) = tokio::join!(dns.client.ask(&none), nameserver.answer(|q| vec![bare(q, 3)]));
    drop(nameserver);
    eventually("its time is over, and it is told all the same", || async {
        let stale = dns.client.ask(&query(4, "stale.example.com", A)).await;
        assert!(rcode(&stale) == NO_ERROR && stale.ends_with(&[10, 0, 0, 2]));
        dns.world.agent.metric("istio_agent_dns_kept_answers_total{kind=\"stale\"}").await
    })
    .await;
    assert_eq!(rcode(&dns.client.ask(&none).await), SERV_FAIL, "that there is none is not kept");
    dns.world.agent.stop().await;
}

#[tokio::test]
async fn nameservers_that_do_not_answer_are_told_until_one_does() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start(&[&nameserver]).await;
    dns.tell(&table("1", "shop.ns.svc.cluster.local", "10.0.0.1")).await;
    for id in 1..=3 {
        assert_eq!(rcode(&dns.client.ask(&query(id, "example.com", A)).await), SERV_FAIL);
    }
    super::why::beside::told(&dns.world.agent, "DnsUpstreamFailed", &nameserver.ip.to_string()).await;
    let last = query(4, "example.com", A);
    let answered = async {
        // Those that nobody waits for any more come first.
        for _ in 0..4 {
            nameserver.answer(|query| vec![bare(query, NO_ERROR)]).await;
        }
    };
    let (reply, ()) = tokio::join!(dns.client.ask(&last), answered);
    assert_eq!(rcode(&reply), NO_ERROR);
    dns.world.agent.wait_log("over: DnsUpstreamFailed").await;
}

#[tokio::test]
async fn names_are_answered_throughout_an_upgrade() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let mut dns = start_with(&[&nameserver], |b| b.env("AGENT_UPGRADE", "true")).await;
    let host = "shop.ns.svc.cluster.local";
    dns.tell(&table("1", host, "10.0.0.1")).await;
    let agent = &dns.world.agent;
    let upgrade = agent.run(&["upgrade"]);
    tokio::pin!(upgrade);
    let mut id = 100;
    let said = loop {
        let asked = query(id, host, A);
        tokio::select! {
            said = &mut upgrade => break said,
            reply = dns.client.ask(&asked) => assert!(reply.ends_with(&[10, 0, 0, 1])),
        }
        id += 1;
    };
    assert_eq!(said.code, Some(0), "{said:?}");
    // Nobody has told the new program of it, and istiod does not answer.
    for reply in [dns.client.ask(&query(7, host, A)).await, dns.client.ask_tcp(&query(8, host, A)).await] {
        assert!(reply.ends_with(&[10, 0, 0, 1]));
    }
}
