//! Dials against small servers of this process; every failure first.

use std::io;
use std::path::Path;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::ServerConfig;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::super::Tls;
use super::*;
use crate::istiod::{ClientFiles, Compliance, Roots};

const LOOPBACK: &str = "127.0.0.1:0";

/// A root that signs, and its PEM.
struct Pki {
    root: Issuer<'static, KeyPair>,
    root_pem: String,
}

impl Pki {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let root_pem = params.self_signed(&key).unwrap().pem();
        Self { root: Issuer::new(params, key), root_pem }
    }

    /// A leaf's chain and key in PEM, expired on request.
    fn leaf(&self, names: &[&str], expired: bool) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params =
            CertificateParams::new(names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>()).unwrap();
        if expired {
            params.not_before = rcgen::date_time_ymd(2020, 1, 1);
            params.not_after = rcgen::date_time_ymd(2020, 1, 2);
        }
        let uri = "spiffe://cluster.local/ns/default/sa/a".try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(uri));
        let cert = params.signed_by(&key, &self.root).unwrap();
        (cert.pem(), key.serialize_pem())
    }

    fn acceptor(&self, names: &[&str], alpn: &[&[u8]], ask: bool) -> TlsAcceptor {
        let (chain, key) = self.leaf(names, false);
        let (provider, _) = crate::tls::provider::provider(Compliance::None);
        let builder = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if ask {
            let mut roots = rustls::RootCertStore::empty();
            roots.add_parsable_certificates(
                CertificateDer::pem_slice_iter(self.root_pem.as_bytes()).map(Result::unwrap),
            );
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                .allow_unauthenticated();
            builder.with_client_cert_verifier(verifier.build().unwrap())
        } else {
            builder.with_no_client_auth()
        };
        let chain = CertificateDer::pem_slice_iter(chain.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let mut config = builder.with_single_cert(chain, key).unwrap();
        config.alpn_protocols = alpn.iter().map(|p| p.to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

/// Accepts once; tells whether a client certificate came and the SNI, and echoes four bytes.
async fn serve(listener: &TcpListener, acceptor: &TlsAcceptor) -> io::Result<(bool, Option<String>)> {
    let (io, _) = listener.accept().await?;
    let mut io = acceptor.accept(io).await?;
    let (_, session) = io.get_ref();
    let seen = (session.peer_certificates().is_some(), session.server_name().map(str::to_owned));
    let mut buffer = [0; 4];
    io.read_exact(&mut buffer).await?;
    io.write_all(&buffer).await?;
    io.shutdown().await?;
    Ok(seen)
}

async fn echo(connection: &mut Connection) -> io::Result<[u8; 4]> {
    connection.io.write_all(b"ping").await?;
    connection.io.flush().await?;
    let mut buffer = [0; 4];
    connection.io.read_exact(&mut buffer).await?;
    Ok(buffer)
}

fn config(address: &str, root: &Path, name: Option<&str>) -> Config {
    Config {
        address: address.to_owned(),
        transport: Transport::Tls(Tls {
            roots: Roots::File(root.to_owned()),
            server_name: name.map(str::to_owned),
            client: None,
            compliance: Compliance::None,
        }),
        connect_timeout: Duration::from_secs(5),
        shuffle: false,
        user_timeout: None,
        proxy: None,
    }
}

fn with_client(mut config: Config, files: ClientFiles) -> Config {
    if let Transport::Tls(tls) = &mut config.transport {
        tls.client = Some(files);
    }
    config
}

#[tokio::test]
async fn localhost_means_istiod_and_speaks_h2() {
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    // Blocks that cannot be read are passed over.
    let junk = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    std::fs::write(&root, format!("{junk}{}", pki.root_pem)).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let acceptor = pki.acceptor(&["istiod.istio-system.svc"], &[b"h2"], false);
    let address = format!("localhost:{}", listener.local_addr().unwrap().port());
    let connector = Connector::new(config(&address, &root, None)).unwrap();
    let (seen, made) = tokio::join!(serve(&listener, &acceptor), async {
        let mut made = connector.connect().await.unwrap();
        assert_eq!(&echo(&mut made).await.unwrap(), b"ping");
        made
    });
    assert_eq!(seen.unwrap(), (false, Some("istiod.istio-system.svc".to_owned())));
    assert_eq!((made.scheme, made.authority.as_str()), ("https", "istiod.istio-system.svc"));
    assert_eq!(made.peer, listener.local_addr().unwrap());
}

#[tokio::test]
async fn each_tls_failure_has_its_hint() {
    let (pki, other, dir) = (Pki::new(), Pki::new(), tempfile::tempdir().unwrap());
    let (root, wrong) = (dir.path().join("root.pem"), dir.path().join("wrong.pem"));
    std::fs::write(&root, &pki.root_pem).unwrap();
    std::fs::write(&wrong, &other.root_pem).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let h2: &[&[u8]] = &[b"h2"];
    for (names, alpn, root, name, hint) in [
        (["istiod"], h2, &root, Some("other"), "set ISTIOD_SAN to a name that it has"),
        (["istiod"], h2, &root, None, "set ISTIOD_SAN to a name that it has"),
        (["istiod"], h2, &wrong, Some("istiod"), "is it the root of this istiod?"),
        (["istiod"], &[], &root, Some("istiod"), "ALPN h2"),
        (["istiod"], &[b"http/1.1"], &root, Some("istiod"), "ALPN h2"),
    ] {
        let acceptor = pki.acceptor(&names, alpn, false);
        let connector = Connector::new(config(&address, root, name)).unwrap();
        let (_, made) = tokio::join!(serve(&listener, &acceptor), connector.connect());
        let error = made.unwrap_err();
        assert_eq!(error.label(), "tls");
        let error = error.to_string();
        assert!(error.contains(hint), "{error}");
        assert!(error.starts_with(&format!("cannot connect to {address}: TLS handshake: ")), "{error}");
    }
    // A port that speaks something else.
    let connector = Connector::new(config(&address, &root, Some("istiod"))).unwrap();
    let plain = async {
        let (mut io, _) = listener.accept().await.unwrap();
        io.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
        io
    };
    let (_, made) = tokio::join!(plain, connector.connect());
    let error = made.unwrap_err().to_string();
    assert!(error.contains("does not seem to speak TLS"), "{error}");
}

#[tokio::test]
async fn the_client_certificate_is_examined_at_each_handshake() {
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let path = |name: &str| dir.path().join(name);
    std::fs::write(path("root.pem"), &pki.root_pem).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = pki.acceptor(&["istiod"], &[b"h2"], true);
    let files = ClientFiles { cert: path("cert.pem"), key: path("key.pem"), written: false };
    let connector =
        Connector::new(with_client(config(&address, &path("root.pem"), Some("istiod")), files)).unwrap();

    let (good, good_key) = pki.leaf(&[], false);
    let (old, old_key) = pki.leaf(&[], true);
    let (_, stranger) = pki.leaf(&[], false);
    // What the files hold, and whether a certificate is shown; None where the connection must fail.
    let key_first = format!("{good_key}{good}");
    let rows: [(Option<&str>, Option<&str>, Option<bool>); 8] = [
        (None, None, Some(false)),
        (Some(&key_first), Some(&good_key), Some(false)),
        (Some("no pem"), Some(&good_key), Some(false)),
        (Some(&old), Some(&old_key), Some(false)),
        (Some(&good), Some(&good_key), Some(true)),
        (Some(&good), None, None),
        (Some(&good), Some(&stranger), None),
        (Some(&good), Some(&good_key), Some(true)),
    ];
    for (n, (cert, key, shown)) in rows.into_iter().enumerate() {
        for (path, content) in [("cert.pem", cert), ("key.pem", key)] {
            match content {
                Some(content) => std::fs::write(dir.path().join(path), content).unwrap(),
                None => drop(std::fs::remove_file(dir.path().join(path))),
            }
        }
        let (seen, made) = tokio::join!(serve(&listener, &acceptor), async {
            let mut made = connector.connect().await?;
            echo(&mut made).await.unwrap();
            Ok::<_, Error>(made)
        });
        match (shown, made) {
            (Some(shown), Ok(_)) => assert_eq!(seen.unwrap().0, shown, "row {n}"),
            (None, Err(error)) => {
                assert_eq!(error.label(), "client_certificate", "row {n}");
                assert!(error.to_string().contains("key.pem"), "row {n}: {error}");
            }
            (_, made) => panic!("row {n}: {made:?}"),
        }
    }
}

#[tokio::test]
async fn a_key_that_this_machine_does_not_give_is_no_broken_file() {
    use rustls::client::ResolvesClientCert;
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    std::fs::write(&root, &pki.root_pem).unwrap();
    let connector = Connector::new(config("127.0.0.1:1", &root, Some("istiod"))).unwrap();
    let aim = Aim::new(connector.config()).unwrap();
    let target = Target { aim, tls: None, seen: None };
    for (number, kind) in [(24, Kind::OpenFiles), (13, Kind::CertificateFiles)] {
        let files = ClientFiles { cert: "cert.pem".into(), key: "key.pem".into(), written: false };
        let read = Read::without_key(&pki.leaf(&[], false).0, std::io::Error::from_raw_os_error(number));
        let identity = Identity::new(files, read, connector.inner.clock.clone());
        let peer = "127.0.0.1:1".parse().unwrap();
        assert!(target.without(peer, &identity).is_none(), "nobody has asked for one");
        identity.resolve(&[], &[]);
        assert_eq!(target.without(peer, &identity).unwrap().report().kind, kind);
        // Nor are roots broken then.
        let reason = std::io::Error::from_raw_os_error(number).to_string();
        let roots = Error::Roots { path: "root.pem".into(), reason }.report().kind;
        assert_eq!(roots, if number == 24 { kind } else { Kind::RootBroken });
    }
}

#[tokio::test]
async fn compliance_policies_narrow_the_handshake() {
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    std::fs::write(&root, &pki.root_pem).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let acceptor = pki.acceptor(&["istiod"], &[b"h2"], false);
    for (policy, version, group) in [
        (Compliance::None, rustls::ProtocolVersion::TLSv1_3, rustls::NamedGroup::X25519MLKEM768),
        (Compliance::Fips140_2, rustls::ProtocolVersion::TLSv1_2, rustls::NamedGroup::secp256r1),
        (Compliance::Fips140_3, rustls::ProtocolVersion::TLSv1_3, rustls::NamedGroup::secp256r1),
        (Compliance::Pqc, rustls::ProtocolVersion::TLSv1_3, rustls::NamedGroup::X25519MLKEM768),
    ] {
        let mut config = config(&address, &root, Some("istiod"));
        if let Transport::Tls(tls) = &mut config.transport {
            tls.compliance = policy;
        }
        let connector = Connector::new(config).unwrap();
        let (_, made) = tokio::join!(serve(&listener, &acceptor), async {
            let mut made = connector.connect().await.unwrap();
            echo(&mut made).await.unwrap();
            made
        });
        let Stream::Tls(io) = &made.io else { panic!("plain") };
        let session = io.get_ref().1;
        assert_eq!(session.protocol_version(), Some(version), "{policy:?}");
        assert_eq!(session.negotiated_key_exchange_group().map(|g| g.name()), Some(group), "{policy:?}");
    }
}

#[tokio::test]
async fn roots_must_be_there_at_start_and_the_last_good_ones_stay() {
    let (pki, next, dir) = (Pki::new(), Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    let error = Connector::new(config("127.0.0.1:1", &root, None)).unwrap_err().to_string();
    assert!(error.starts_with("failed to create TLS dial option with root certificates"), "{error}");
    assert!(error.contains("root.pem"), "{error}");
    std::fs::write(&root, "junk").unwrap();
    assert_eq!(Connector::new(config("127.0.0.1:1", &root, None)).unwrap_err().label(), "roots");

    std::fs::write(&root, &pki.root_pem).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let connector = Connector::new(config(&address, &root, Some("istiod"))).unwrap();
    let acceptor = pki.acceptor(&["istiod"], &[b"h2"], false);
    for broken in [None, Some("junk")] {
        match broken {
            Some(text) => std::fs::write(&root, text).unwrap(),
            None => std::fs::remove_file(&root).unwrap(),
        }
        let (_, made) = tokio::join!(serve(&listener, &acceptor), async {
            echo(&mut connector.connect().await.unwrap()).await.unwrap()
        });
        assert_eq!(&made, b"ping", "{broken:?}");
    }
    // A rotated file counts at the next dial.
    std::fs::write(&root, &next.root_pem).unwrap();
    let (_, made) = tokio::join!(serve(&listener, &acceptor), connector.connect());
    assert_eq!(made.unwrap_err().label(), "tls");
    let acceptor = next.acceptor(&["istiod"], &[b"h2"], false);
    let (_, made) = tokio::join!(serve(&listener, &acceptor), async {
        echo(&mut connector.connect().await.unwrap()).await.unwrap()
    });
    assert_eq!(&made, b"ping");
}

fn plain(address: String, timeout: Duration, proxy: Option<(String, String)>) -> Connector {
    Connector::new(Config {
        address,
        transport: Transport::Plaintext,
        connect_timeout: timeout,
        shuffle: false,
        user_timeout: None,
        proxy,
    })
    .unwrap()
}

#[tokio::test]
async fn failures_name_the_phase() {
    let closed = std::net::TcpListener::bind(LOOPBACK).unwrap().local_addr().unwrap();
    let second = Duration::from_secs(1);
    for (address, label, words) in [
        (closed.to_string(), "connect", "is istiod running"),
        ("istiod".to_owned(), "address", "it has no port"),
        ("istiod:https".to_owned(), "address", "\"https\" is no port number"),
        ("name.invalid:15012".to_owned(), "resolve", "name.invalid"),
    ] {
        let error = plain(address.clone(), second * 20, None).connect().await.unwrap_err();
        assert_eq!(error.label(), label, "{error}");
        assert!(error.to_string().contains(&address), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test]
async fn no_thread_for_a_name_is_not_the_resolvers_fault() {
    let _none = crate::base::lane::scarce::NoThreads::from_now_on();
    let connector = plain("localhost:15012".to_owned(), Duration::from_secs(20), None);
    let report = connector.connect().await.unwrap_err().report();
    assert_eq!((report.kind, report.hint_text()), (Kind::Processes, Kind::Processes.hint()));
}

#[tokio::test]
async fn a_silent_server_ends_at_the_bound() {
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    std::fs::write(&root, &pki.root_pem).unwrap();
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let mut config = config(&listener.local_addr().unwrap().to_string(), &root, Some("istiod"));
    config.connect_timeout = Duration::from_millis(100);
    let error = Connector::new(config).unwrap().connect().await.unwrap_err();
    assert_eq!(error.label(), "timeout");
    assert!(error.to_string().ends_with("no answer within 100ms (TLS handshake)"), "{error}");
}

#[tokio::test]
async fn a_silent_address_does_not_hold_up_the_next() {
    let (pki, dir) = (Pki::new(), tempfile::tempdir().unwrap());
    let root = dir.path().join("root.pem");
    std::fs::write(&root, &pki.root_pem).unwrap();
    let silent = TcpListener::bind(LOOPBACK).await.unwrap();
    let good = TcpListener::bind(LOOPBACK).await.unwrap();
    let closed = std::net::TcpListener::bind(LOOPBACK).unwrap().local_addr().unwrap();
    let mut config = config("istiod:1", &root, None);
    // Far above what the two others take together, so only the silent one could reach it.
    config.connect_timeout = Duration::from_secs(60);
    let connector = Connector::new(config).unwrap();
    let acceptor = pki.acceptor(&["istiod"], &[b"h2"], false);
    let aim = Aim::new(connector.config()).unwrap();
    let target = Target { tls: connector.inner.trust(&aim).await.unwrap(), aim, seen: None };
    let progress = Progress(Mutex::new((Phase::Connect, Instant::now())));
    let all = vec![silent.local_addr().unwrap(), closed, good.local_addr().unwrap()];
    let (_, made) = tokio::join!(serve(&good, &acceptor), async {
        let mut made = connector.inner.race(&target, all, &progress).await.unwrap();
        echo(&mut made).await.unwrap();
        made
    });
    assert_eq!(made.peer, good.local_addr().unwrap());
}

#[tokio::test]
async fn the_proxy_is_asked_for_a_tunnel() {
    let listener = TcpListener::bind(LOOPBACK).await.unwrap();
    let url = format!("http://user:word@{}", listener.local_addr().unwrap());
    let connector = plain("istiod.test:15012".to_owned(), Duration::from_secs(5), Some((url, String::new())));
    assert!(!format!("{:?}", connector.config()).contains("word"));
    for (answer, works) in [
        ("HTTP/1.1 200 OK\r\nx: y\r\n\r\nearly", true),
        ("HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", false),
        ("ICY 200 OK\r\n\r\n", false),
        ("", false),
    ] {
        let proxy = async {
            let (mut io, _) = listener.accept().await.unwrap();
            let request = crate::net::http::head(&mut io).await.unwrap();
            io.write_all(answer.as_bytes()).await.unwrap();
            request
        };
        let (request, made) = tokio::join!(proxy, connector.connect());
        assert!(request.starts_with("CONNECT istiod.test:15012 HTTP/1.1\r\nHost: istiod.test:15012\r\n"));
        assert!(request.contains("Proxy-Authorization: Basic dXNlcjp3b3Jk\r\n"));
        match made {
            Ok(mut made) if works => {
                // What the server said first through the tunnel is still there.
                let mut rest = String::new();
                made.io.read_to_string(&mut rest).await.unwrap();
                assert_eq!((rest.as_str(), made.authority.as_str()), ("early", "istiod.test:15012"));
            }
            Err(error) if !works => assert_eq!(error.label(), "proxy", "{error}"),
            made => panic!("{answer}: {made:?}"),
        }
    }
}

#[tokio::test]
async fn bytes_that_are_not_acknowledged_have_a_bound() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let io = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    tune(&io, None);
    assert_eq!(SockRef::from(&io).tcp_user_timeout().unwrap(), None);
    tune(&io, Some(Duration::from_secs(10)));
    assert_eq!(SockRef::from(&io).tcp_user_timeout().unwrap(), Some(Duration::from_secs(10)));
}
