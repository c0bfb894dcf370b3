//! The secret discovery service: what the Go agent gets wrong, files as they change, other servers' sockets.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DiscoveryRequest};
use envoy_types::pb::google::rpc::Status as Detail;
use rustix::process::Signal;

use crate::support::agent::SDS;
use crate::support::client::{EnvoyClient, Pem, ack, node, secret_request, secrets};
use crate::support::{MockIstiod, TestAgent, eventually};

const OLD_SDS: &str = "etc/istio/proxy/SDS";

fn builder(mock: &MockIstiod) -> crate::support::agent::Builder {
    TestAgent::with().istiod(mock).env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
}

async fn ask(client: &EnvoyClient, name: &str) -> Result<Pem, tonic::Status> {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request(name));
    Ok(secrets(&stream.next().await?).remove(0).1)
}

#[tokio::test]
async fn both_sockets_and_all_methods_give_the_same() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    let mut seen = Vec::new();
    for socket in [SDS, OLD_SDS] {
        let client = agent.client(socket).await;
        seen.push(ask(&client, "default").await.unwrap());
        let fetched = client.fetch_secrets(&secret_request("default")).await.unwrap();
        seen.push(secrets(&fetched).remove(0).1);
        let mut delta = client.delta_secrets();
        delta.send(&DeltaDiscoveryRequest {
            node: Some(node("sidecar~1")),
            resource_names_subscribe: vec!["ROOTCA".to_owned(), "default".to_owned()],
            ..DeltaDiscoveryRequest::default()
        });
        let names: Vec<_> = delta.next().await.unwrap().resources.into_iter().map(|r| r.name).collect();
        assert_eq!(names, ["ROOTCA", "default"]);
    }
    seen.dedup();
    assert_eq!(seen.len(), 1);
    assert_eq!(mock.record().signed().len(), 1);
}

#[tokio::test]
async fn the_socket_in_a_folder_for_everybody_is_the_agents_own() {
    let mock = MockIstiod::start().await;
    let agent = builder(&mock).start();
    let path = agent.path(OLD_SDS);
    let closed_to_others = async || {
        let mode = std::fs::metadata(&path).ok()?.permissions().mode();
        (mode & 0o007 == 0).then_some(())
    };
    eventually("the socket is there", closed_to_others).await;
    std::fs::remove_file(&path).unwrap();
    eventually("the socket is there again", closed_to_others).await;
}

#[tokio::test]
async fn what_ends_the_go_agent_is_answered() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    for name in ["file-cert:a~", "file-root:", "file-cert:", "nobody-knows-this", ""] {
        let status = ask(&client, name).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unknown, "{name}");
    }
    let mut stream = client.stream_secrets();
    let refusal = Detail { code: 13, message: "no".to_owned(), ..Detail::default() };
    stream.send(&DiscoveryRequest { error_detail: Some(refusal), ..secret_request("default") });
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    agent.assert_running();
    assert_eq!(agent.metric("istio_agent_pilot_total_xds_rejects{type=\"sds\"}").await, Some(1.0));
}

/// Injectors set the container's limit. What a client asks for is not what the agent is killed for.
#[tokio::test]
async fn a_large_file_that_does_not_fit_into_the_memory_is_not_read() {
    let mock = MockIstiod::start().await;
    let refused = async |limit: &str| {
        let mut agent = builder(&mock).env("GOMEMLIMIT", limit).start();
        let block = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        agent.put("large.pem", block.repeat((12 << 20) / block.len()));
        let client = agent.sds().await;
        let large = ask(&client, "file-root:large.pem").await.unwrap_err();
        let small = ask(&client, "file-root:var/run/secrets/istio/root-cert.pem").await.unwrap();
        assert_eq!(small, Pem::Roots(mock.root_pem()));
        ask(&client, "default").await.unwrap();
        agent.stop().await;
        large.message().to_owned()
    };
    let (without, with) = tokio::join!(refused("28MiB"), refused("1GiB"));
    assert!(without.contains("the memory that is left"), "{without}");
    // It is no certificate; to find that out takes an unoptimised build long.
    assert!(!with.contains("the memory that is left"), "{with}");
}

#[tokio::test]
async fn a_new_root_comes_before_the_certificate() {
    let mock = MockIstiod::start().await;
    // Half of it must be enough for what comes before the renewal, on a slow machine too.
    mock.set_ttl(Some(Duration::from_secs(20)));
    let mut agent = builder(&mock).env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0").start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    let mut both = secret_request("default");
    both.resource_names.push("ROOTCA".to_owned());
    stream.send(&both);
    let first = stream.next().await.unwrap();
    stream.send(&ack(&first, &["default", "ROOTCA"]));
    mock.rotate_root(true);
    agent.put("var/run/secrets/istio/root-cert.pem", mock.root_pem());
    let (one, two) = (stream.next().await.unwrap(), stream.next().await.unwrap());
    let names = [secrets(&one).remove(0).0, secrets(&two).remove(0).0];
    assert_eq!(names, ["ROOTCA", "default"]);
}

#[tokio::test]
async fn a_certificate_due_at_once_is_not_asked_for_without_pause() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock)
        .env("SECRET_GRACE_PERIOD_RATIO", "1")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
        .start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    for _ in 0..4 {
        stream.next().await.unwrap();
    }
    let calls = mock.record().ca_calls();
    let span = calls[3].received.duration_since(calls[0].received).unwrap();
    assert!(span > Duration::from_secs(1), "four requests in {span:?}");
    agent.wait_log("SECRET_GRACE_PERIOD_RATIO").await;
}

#[tokio::test]
async fn a_removed_socket_is_bound_again() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    drop(agent.sds().await);
    std::fs::remove_file(agent.path(SDS)).unwrap();
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    drop(client);
    agent.stop().await;
}

/// As a volume is that somebody puts elsewhere: the folder of the socket stays as it is, under another name.
#[tokio::test]
async fn a_socket_is_bound_again_when_a_folder_far_above_is_replaced() {
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    drop(agent.sds().await);
    for (round, folder) in ["var", "var/run/secrets", "var/run"].into_iter().enumerate() {
        // The look that the socket begins with is over.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let away = agent.path(&format!("away-{round}"));
        std::fs::rename(agent.path(folder), &away).unwrap();
        let again =
            eventually("the socket is bound again", || async { agent.path(SDS).exists().then_some(()) });
        again.await;
        ask(&agent.sds().await, "default").await.unwrap();
        // What else lies there is for the rest of the test.
        for below in ["run/secrets/istio", "secrets/istio", "istio"] {
            if away.join(below).exists() {
                let _ = std::fs::rename(away.join(below), agent.path("var/run/secrets/istio"));
            }
        }
    }
    agent.stop().await;
}

/// Whoever gives the workload its identity gives it without Envoy, too: no certificate of istiod beside his.
#[tokio::test]
async fn who_owns_the_workloads_socket_counts_without_envoy_too() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::Builder::new().prefix("agent-").tempdir().unwrap();
    let socket = dir.path().join(SDS);
    std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    let theirs = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        let mut clients = Vec::new();
        while let Ok((mut client, _)) = theirs.accept() {
            client.write_all(b"\0\0\0\x04\0\0\0\0\0").unwrap();
            clients.push(client);
        }
    });
    let mut agent = builder(&mock).env("DISABLE_ENVOY", "true").start_in(dir);
    agent.wait_log("is served by somebody else").await;
    let _stream = agent.xds().await.ads();
    eventually("the start is over", || async { mock.record().ads_streams().pop() }).await;
    assert!(mock.record().ca_calls().is_empty());
    assert!(socket.exists(), "it is theirs");
    let mut demanding =
        builder(&mock).env("DISABLE_ENVOY", "true").env("WORKLOAD_IDENTITY_SOCKET_FILE", "spire").start();
    assert_eq!(demanding.wait_exit().await.code(), Some(255));
}

#[tokio::test]
async fn files_stay_fresh_without_a_client() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(Duration::from_secs(6)));
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let agent = builder(&mock).env("OUTPUT_CERTS", "out").start_in(dir);
    let chain = || async { std::fs::read(agent.path("out/cert-chain.pem")).ok() };
    let first = eventually("the first files", chain).await;
    eventually("renewed files", || async { chain().await.filter(|now| *now != first) }).await;
    let key = std::fs::metadata(agent.path("out/key.pem")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&key.permissions()) & 0o777, 0o600);
}

const WRITTEN: [&str; 3] = ["out/key.pem", "out/cert-chain.pem", "out/root-cert.pem"];

async fn files(agent: &TestAgent) -> [Vec<u8>; 3] {
    eventually("the files", || async {
        let read = WRITTEN.map(|name| std::fs::read(agent.path(name)).unwrap_or_default());
        read.iter().all(|file| !file.is_empty()).then_some(read)
    })
    .await
}

#[tokio::test]
async fn a_written_file_that_is_removed_is_back_with_the_next_request() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let mut agent = builder(&mock).env("OUTPUT_CERTS", "out").start_in(dir);
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    let first = files(&agent).await;
    for name in WRITTEN {
        std::fs::remove_file(agent.path(name)).unwrap();
    }
    ask(&client, "default").await.unwrap();
    assert_eq!(files(&agent).await, first);
    drop(client);
    agent.stop().await;
}

#[tokio::test]
async fn a_kept_certificate_is_written_while_the_ca_is_away() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("out")).unwrap();
    let start = |dir| builder(&mock).env("IDENTITY_PERSIST", "true").env("OUTPUT_CERTS", "out").start_in(dir);
    let mut agent = start(dir);
    ask(&agent.sds().await, "default").await.unwrap();
    let first = files(&agent).await;
    let kept = agent.path("etc/istio/proxy/last-good/identity");
    let kept = || std::fs::read_to_string(kept.join("cert-chain.pem")).unwrap_or_default();
    let chain = String::from_utf8_lossy(&first[1]);
    eventually("it is kept", || async { kept().contains(chain.trim()).then_some(()) }).await;
    mock.down().await;
    agent.signal(Signal::KILL);
    agent.wait_exit().await;
    for name in WRITTEN {
        std::fs::remove_file(agent.path(name)).unwrap();
    }
    let agent = start(agent.take_dir());
    let again = files(&agent).await;
    assert_eq!(again[..2], first[..2]);
    assert_eq!(again[2].trim_ascii(), first[2].trim_ascii());
    agent.stop().await;
}

fn write_pair(dir: &Path, pair: &mock_istiod::Pair) {
    for (name, text) in [("key.pem", &pair.key), ("cert-chain.pem", &pair.chain)] {
        std::fs::write(dir.join("fresh"), text).unwrap();
        std::fs::rename(dir.join("fresh"), dir.join(name)).unwrap();
    }
}

/// Each way to change a mounted pair, several times over; the Go agent loses some of them.
#[tokio::test]
async fn mounted_files_are_followed_however_they_change() {
    use std::os::unix::fs::symlink;
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    let fresh = || mock.issue("spiffe://cluster.local/ns/ns/sa/sa", Duration::from_secs(3600));

    type Change = fn(&Path, u32, &mock_istiod::Pair);
    let ways: [(&str, &str, Change); 5] = [
        ("plain", "certs", |d, _, pair| {
            std::fs::create_dir_all(d.join("certs")).unwrap();
            write_pair(&d.join("certs"), pair);
        }),
        ("moved", "moved", |d, n, pair| {
            std::fs::create_dir_all(d.join("moved")).unwrap();
            std::fs::create_dir_all(d.join(format!("stage{n}"))).unwrap();
            for name in ["key.pem", "cert-chain.pem"] {
                let _ = std::fs::rename(d.join("moved").join(name), d.join("moved").join(format!("old{n}")));
            }
            write_pair(&d.join(format!("stage{n}")), pair);
            for name in ["key.pem", "cert-chain.pem"] {
                std::fs::rename(d.join(format!("stage{n}")).join(name), d.join("moved").join(name)).unwrap();
            }
        }),
        ("behind links", "links", |d, n, pair| {
            std::fs::create_dir_all(d.join("real")).unwrap();
            if n == 0 {
                std::fs::create_dir_all(d.join("links")).unwrap();
                for name in ["key.pem", "cert-chain.pem"] {
                    symlink(format!("../real/{name}"), d.join("links").join(name)).unwrap();
                }
            }
            write_pair(&d.join("real"), pair);
        }),
        ("upper folder", "top/certs", |d, n, pair| {
            let version = format!("v{n}");
            std::fs::create_dir_all(d.join(&version).join("certs")).unwrap();
            write_pair(&d.join(&version).join("certs"), pair);
            symlink(&version, d.join("top.new")).unwrap();
            std::fs::rename(d.join("top.new"), d.join("top")).unwrap();
        }),
        ("kubernetes", "volume", |d, n, pair| {
            let (volume, version) = (d.join("volume"), format!("..v{n}"));
            std::fs::create_dir_all(volume.join(&version)).unwrap();
            write_pair(&volume.join(&version), pair);
            symlink(&version, volume.join("..data_tmp")).unwrap();
            std::fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
            if n == 0 {
                for name in ["key.pem", "cert-chain.pem"] {
                    symlink(format!("..data/{name}"), volume.join(name)).unwrap();
                }
            } else {
                std::fs::remove_dir_all(volume.join(format!("..v{}", n - 1))).unwrap();
            }
        }),
    ];
    for (way, folder, change) in ways {
        let name = format!("file-cert:{folder}/cert-chain.pem~{folder}/key.pem");
        change(&agent.path(""), 0, &fresh());
        let mut stream = client.stream_secrets();
        stream.send(&secret_request(&name));
        stream.next().await.unwrap_or_else(|e| panic!("{way}: {e:?}"));
        for n in 1..4 {
            let pair = fresh();
            change(&agent.path(""), n, &pair);
            let response = stream.next().await.unwrap_or_else(|e| panic!("{way} {n}: {e:?}"));
            let [(_, Pem::Identity { chain, key })] = &secrets(&response)[..] else { panic!("{way}") };
            assert_eq!((chain, key), (&pair.chain, &pair.key), "{way} {n}");
        }
    }
    // A user may have 128 lists of watched files on a node: its agents have one each, for sockets, tokens and all of these.
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", agent.pid().as_raw_pid())).unwrap();
    let lists = descriptors.flatten().filter_map(|fd| std::fs::read_link(fd.path()).ok());
    assert_eq!(lists.filter(|to| to.to_string_lossy().contains("inotify")).count(), 1);
    agent.assert_running();
}

/// As the Envoy of a gateway asks when it starts: for a pair of files for each of its listeners.
#[tokio::test]
async fn hundreds_of_pairs_asked_for_at_once_are_each_their_own() {
    const MANY: usize = 300;
    const MISSING: usize = 7;
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    let fresh = || mock.issue("spiffe://cluster.local/ns/ns/sa/sa", Duration::from_secs(3600));
    let folder = agent.path("listeners");
    std::fs::create_dir(&folder).unwrap();
    let put = |n: usize, pair: &mock_istiod::Pair| {
        for (end, text) in [("key", &pair.key), ("pem", &pair.chain)] {
            std::fs::write(folder.join("fresh"), text).unwrap();
            std::fs::rename(folder.join("fresh"), folder.join(format!("{n}.{end}"))).unwrap();
        }
    };
    let name = |n: usize| format!("file-cert:listeners/{n}.pem~listeners/{n}.key");
    let pairs = [(); 3].map(|()| fresh());
    for n in (0..MANY).filter(|n| *n != MISSING) {
        put(n, &pairs[n % 3]);
    }
    let asked = |n| {
        let stream = client.stream_secrets();
        stream.send(&secret_request(&name(n)));
        stream
    };
    let mut open: Vec<_> = (0..MANY).map(asked).collect();
    for (n, stream) in open.iter_mut().enumerate().filter(|(n, _)| *n != MISSING) {
        let response = stream.next().await.unwrap_or_else(|e| panic!("{n}: {e:?}"));
        let [(of, Pem::Identity { chain, key })] = &secrets(&response)[..] else { panic!("{n}") };
        assert_eq!((of, chain, key), (&name(n), &pairs[n % 3].chain, &pairs[n % 3].key));
        stream.send(&ack(&response, &[&name(n)]));
    }
    // What was not there has held up nobody, and is served once it is.
    put(MISSING, &pairs[0]);
    asked(MISSING).next().await.unwrap();
    let renewed = fresh();
    put(200, &renewed);
    let response = open[200].next().await.unwrap();
    let [(_, Pem::Identity { chain, key })] = &secrets(&response)[..] else { panic!() };
    assert_eq!((chain, key), (&renewed.chain, &renewed.key));
    for (n, stream) in open.iter_mut().enumerate().filter(|(n, _)| *n != MISSING) {
        assert!(stream.is_silent(), "{n} has not changed");
    }
    agent.assert_running();
}
