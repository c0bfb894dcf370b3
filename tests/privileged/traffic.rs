//! Real connections through a real Envoy that our agent runs, in a pod of one namespace, with clients and
//! servers in another.
//!
//! What comes through Envoy begins with a PROXY line that names both ends of the captured connection (see
//! `capture.yaml`); servers answer with the first line they read and the peer they saw. So one answer
//! proves both: captured or not, and with which source address.

use std::time::Duration;

use mock_istiod::{Resource, Set, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use crate::support::{Envoy, MockIstiod, TestAgent, envoy_bin};
use crate::world::{Backend, Listener, Outside, World};

const APP: u32 = 2000;
const PROXY: u32 = 1337;

/// The pod's own address and the outside's, by family; the outside has a second one in an excluded range.
const POD: [&str; 2] = ["10.77.20.2", "fd00:77:20::2"];
const OUT: [&str; 2] = ["10.77.20.1", "fd00:77:20::1"];
const EXCLUDED: [&str; 2] = ["10.77.20.129", "fd00:77:21::1"];

const RULES: &str = "-p 15001 -z 15006 -u 1337 -i * -b * -d 15090,15021,15020,9080 -o 9999 --dual-stack \
                     -x 10.77.20.128/25,fd00:77:21::/64 --redirect-dns";

/// The pod, with its application's servers, and the outside with its own.
struct Stage {
    world: World,
    outside: Outside,
    _servers: [Listener; 2],
}

impl Stage {
    fn set(mode: &str) -> Option<Self> {
        let world = World::new(Backend::Nft, &["10.77.20.2/24", "fd00:77:20::2/64"])?;
        let outside =
            world.outside(&["10.77.20.1/24", "fd00:77:20::1/64", "10.77.20.129/24", "fd00:77:21::1/64"]);
        world.resolvers(&[OUT[0]]);
        // A transparent proxy sends with other people's addresses over the loopback device.
        world.inside("ip route add fd00:77:21::/64 dev eth0");
        world.inside("for c in all default lo eth0; do echo 0 >/proc/sys/net/ipv4/conf/$c/rp_filter; done");
        world.apply(&format!("{RULES} {mode}"), 0);
        let servers = [world.serve(APP, &["80", "9080"]), outside.serve(&["8080", "9999", "dns"])];
        Some(Self { world, outside, _servers: servers })
    }

    /// Runs `test` in a thread inside the pod's namespace, with Envoy ready.
    fn play(&self, transparent: bool, test: impl AsyncFnOnce() + Send) {
        // Found, and fetched if need be, where there is a network.
        let envoy = Envoy::Binary(self.world.reachable(&envoy_bin(), "envoy"));
        let (namespace, resolv) = (self.world.namespace(), self.world.path("resolv.conf"));
        let before = [
            "/usr/bin/unshare",
            "-m",
            "/bin/sh",
            "-c",
            &format!("mount --bind {} /etc/resolv.conf && exec \"$@\"", resolv.display()),
            "sh",
            "/usr/bin/setpriv",
            // The injector runs a transparent proxy as root: what root sends over the loopback device returns
            // before the rule that would redirect the group's.
            if transparent { "--reuid=0" } else { "--reuid=1337" },
            "--regid=1337",
            "--clear-groups",
            "--inh-caps=+net_admin",
            "--ambient-caps=+net_admin",
        ]
        .map(str::to_owned);
        let inside = move || {
            let namespace = std::fs::File::open(namespace).expect("it is mounted");
            let kind = Some(rustix::thread::LinkNameSpaceType::Network);
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), kind)
                .expect("we are root");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let mock = MockIstiod::start().await;
                mock.resources().replace(Set { common: resources(transparent), ..Set::default() });
                let agent = TestAgent::with()
                    .istiod(&mock)
                    .envoy(envoy)
                    .owner(if transparent { 0 } else { PROXY })
                    .before(&before);
                let mut agent = agent.env("ISTIO_META_DNS_CAPTURE", "true").start();
                agent.wait_ready().await;
                test().await;
                agent.stop().await;
            });
        };
        let ended = std::thread::scope(|scope| scope.spawn(inside).join());
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    }

    /// The application speaks to the outside.
    fn outbound(&self, uid: u32, to: &str, port: u16) -> String {
        self.world.say(uid, to, port)
    }
}

/// What istiod tells.
fn resources(transparent: bool) -> Vec<Resource> {
    let source = "{ name: envoy.filters.listener.original_src, typed_config: { \"@type\": \
                  type.googleapis.com/envoy.extensions.filters.listener.original_src.v3.OriginalSrc, mark: 1337 } }";
    let destination = "{ name: envoy.filters.listener.original_dst, typed_config: { \"@type\": \
                       type.googleapis.com/envoy.extensions.filters.listener.original_dst.v3.OriginalDst } }";
    // With the client's source address, or with the pass-through one.
    let bind = |address| format!("{{ source_address: {{ address: \"{address}\", port_value: 0 }} }}");
    let (filters, sources) = if transparent {
        (format!("[{destination}, {source}]"), ["null".to_owned(), "null".to_owned()])
    } else {
        (format!("[{destination}]"), [bind("127.0.0.6"), bind("::6")])
    };
    let text = include_str!("capture.yaml")
        .replace("\"{{transparent}}\"", if transparent { "true" } else { "false" })
        .replace("\"{{inbound filters}}\"", &filters)
        .replace("\"{{source v4}}\"", &sources[0])
        .replace("\"{{source v6}}\"", &sources[1]);
    json::parse(&text).expect("capture.yaml is understood")
}

/// Asks for the A record of a name; the address in the answer's last bytes.
async fn ask(server: &str, name: &str, tcp: bool) -> String {
    let mut query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    for label in name.split('.') {
        query.push(u8::try_from(label.len()).expect("short"));
        query.extend_from_slice(label.as_bytes());
    }
    query.extend_from_slice(b"\0\0\x01\0\x01");
    let exchange = async {
        if tcp {
            let mut stream = TcpStream::connect((server, 53)).await?;
            stream.write_u16(u16::try_from(query.len()).expect("short")).await?;
            stream.write_all(&query).await?;
            let mut reply = vec![0; stream.read_u16().await?.into()];
            stream.read_exact(&mut reply).await?;
            return Ok(reply);
        }
        let socket = UdpSocket::bind("0.0.0.0:0").await?;
        socket.connect((server, 53)).await?;
        socket.send(&query).await?;
        let mut reply = vec![0; 512];
        let length = socket.recv(&mut reply).await?;
        reply.truncate(length);
        std::io::Result::Ok(reply)
    };
    match tokio::time::timeout(Duration::from_secs(10), exchange).await {
        Ok(Ok(reply)) if reply.len() > 4 => {
            let octets: [u8; 4] = *reply.last_chunk().expect("longer than that");
            std::net::Ipv4Addr::from(octets).to_string()
        }
        other => format!("no answer: {other:?}"),
    }
}

// `PROXY TCP4 <from> <to> <port> <port>`, with the parts that are known beforehand.
fn through_envoy(answer: &str, from: &str, to: &str) -> bool {
    let family = if to.contains(':') { "TCP6" } else { "TCP4" };
    answer.starts_with(&format!("PROXY {family} {from} {to} "))
}

#[test]
fn redirect_captures_both_ways_and_both_families() {
    for native in ["", "--native-nftables"] {
        let Some(stage) = Stage::set(native) else { return };
        stage.play(false, async || {
            for (family, passthrough) in [(0, "127.0.0.6"), (1, "::6")] {
                let (pod, out) = (POD[family], OUT[family]);
                let answer = stage.outbound(APP, out, 8080);
                assert!(through_envoy(&answer, pod, out), "{native} to {out}: {answer}");
                let answer = stage.outside.say(pod, 80);
                assert!(through_envoy(&answer, out, pod), "{native} to {pod}: {answer}");
                assert!(answer.ends_with(&format!(" from {passthrough}")), "{native}: {answer}");
            }
        });
    }
}

#[test]
fn excluded_ports_and_ranges_and_the_proxys_own_connections_bypass() {
    for native in ["", "--native-nftables"] {
        let Some(stage) = Stage::set(native) else { return };
        stage.play(false, async || {
            for family in 0..2 {
                let (pod, out) = (POD[family], OUT[family]);
                let direct = format!("hello from {pod}");
                assert_eq!(stage.outbound(APP, out, 9999), direct, "{native}: an excluded outbound port");
                assert_eq!(
                    stage.outbound(APP, EXCLUDED[family], 8080),
                    direct,
                    "{native}: an excluded range"
                );
                assert_eq!(stage.outbound(PROXY, out, 8080), direct, "{native}: the proxy's own");
                let inbound = stage.outside.say(pod, 9080);
                assert_eq!(inbound, format!("hello from {out}"), "{native}: an excluded inbound port");
            }
        });
    }
}

#[test]
fn dns_goes_to_the_agent_and_from_there_to_the_resolver() {
    for native in ["", "--native-nftables"] {
        let Some(stage) = Stage::set(native) else { return };
        stage.play(false, async || {
            for tcp in [false, true] {
                // Only istiod's name table knows this address.
                assert_eq!(ask(OUT[0], "mesh.example", tcp).await, "240.0.0.7", "{native} tcp: {tcp}");
                // Everything else is asked of the resolver by the agent, whose queries are not captured.
                assert_eq!(ask(OUT[0], "elsewhere.example", tcp).await, "203.0.113.9", "{native} tcp: {tcp}");
            }
            // Another server than the resolver's is none of our business.
            assert_eq!(ask(EXCLUDED[0], "mesh.example", true).await, "203.0.113.9", "{native}");
        });
    }
}

#[test]
fn tproxy_keeps_the_source_address() {
    for native in ["", "--native-nftables"] {
        let Some(stage) = Stage::set(&format!("-m TPROXY {native}")) else { return };
        stage.play(true, async || {
            for family in 0..2 {
                let (pod, out) = (POD[family], OUT[family]);
                let answer = stage.outside.say(pod, 80);
                assert!(through_envoy(&answer, out, pod), "{native} to {pod}: {answer}");
                assert!(answer.ends_with(&format!(" from {out}")), "{native}: {answer}");
                let answer = stage.outbound(APP, out, 8080);
                assert!(through_envoy(&answer, pod, out), "{native} to {out}: {answer}");
                assert_eq!(stage.outside.say(pod, 9080), format!("hello from {out}"), "{native}");
            }
        });
    }
}
