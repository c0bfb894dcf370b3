//! The fault matrix: what goes wrong at the CA, with the clock or on the disk, at the first certificate and at a
//! renewal.
//!
//! Every row says what Envoy keeps, what is logged, and that the agent heals by itself once the cause is gone: at
//! start there is nothing to keep, so streams end and a later one is served; at renewal the last good certificate
//! stays. A full disk takes nothing from Envoy at all, so its two rows stand at the end.

use std::time::Duration;

use crate::support::agent::{ROOT, TOKEN};
use crate::support::client::{EnvoyClient, Pem, secret_request, secrets};
use crate::support::{Code, Fault, MockIstiod, SmallDisk, TestAgent, Token, eventually_within, root_for};

/// Without [`ATTEMPT`], a call that hangs is given up after 30 s, and the one after it may have begun before the
/// cause was gone.
const LIMIT: Duration = Duration::from_secs(75);

/// `CA_ATTEMPT_TIMEOUT`: less waiting for an agent that knows it.
const ATTEMPT: &str = "5s";

/// Seconds by which the clock is off: istiod's certificate is not valid yet.
const BEHIND: i64 = -3600;

/// Long enough to outlive every deadline in here; renewal comes after a twentieth of it.
const LIFE: Duration = Duration::from_secs(80);

#[derive(Clone, Copy)]
enum Cause {
    /// The certificate service answers like this.
    Answer(fn() -> Fault),
    /// Every new connection meets this.
    Connection(fn() -> Fault),
    /// The port is closed.
    Down,
    /// The token file is missing, or holds this.
    Token(Option<fn() -> String>),
    /// The CA has a new root, which the agent's root file learns later.
    NewRoot,
    /// The wall clock of the agent's machine is an hour behind.
    Clock,
}

struct Row {
    name: &'static str,
    cause: Cause,
    /// One of these stands in the log.
    told: &'static [&'static str],
}

const fn row(name: &'static str, cause: Cause, told: &'static [&'static str]) -> Row {
    Row { name, cause, told }
}

fn garbage_chain() -> Fault {
    Fault::Chain(vec!["junk".to_owned(), "more junk".to_owned()])
}

const ROWS: &[Row] = &[
    row("unauthenticated", Cause::Answer(|| Fault::refuse(Code::Unauthenticated)), &["UNAUTHENTICATED"]),
    row("permission denied", Cause::Answer(|| Fault::refuse(Code::PermissionDenied)), &["PERMISSION_DENIED"]),
    row("invalid argument", Cause::Answer(|| Fault::refuse(Code::InvalidArgument)), &["INVALID_ARGUMENT"]),
    row("internal", Cause::Answer(|| Fault::refuse(Code::Internal)), &["INTERNAL"]),
    row("unavailable", Cause::Answer(|| Fault::refuse(Code::Unavailable)), &["UNAVAILABLE"]),
    row("unknown", Cause::Answer(|| Fault::refuse(Code::Unknown)), &["UNKNOWN"]),
    row("cancelled", Cause::Answer(|| Fault::refuse(Code::Cancelled)), &["CANCELLED"]),
    row("deadline exceeded", Cause::Answer(|| Fault::refuse(Code::DeadlineExceeded)), &["DEADLINE_EXCEEDED"]),
    row("not found", Cause::Answer(|| Fault::refuse(Code::NotFound)), &["NOT_FOUND"]),
    row("already exists", Cause::Answer(|| Fault::refuse(Code::AlreadyExists)), &["ALREADY_EXISTS"]),
    row("precondition", Cause::Answer(|| Fault::refuse(Code::FailedPrecondition)), &["FAILED_PRECONDITION"]),
    row("aborted", Cause::Answer(|| Fault::refuse(Code::Aborted)), &["ABORTED"]),
    row("out of range", Cause::Answer(|| Fault::refuse(Code::OutOfRange)), &["OUT_OF_RANGE"]),
    row("unimplemented", Cause::Answer(|| Fault::refuse(Code::Unimplemented)), &["UNIMPLEMENTED"]),
    row("data loss", Cause::Answer(|| Fault::refuse(Code::DataLoss)), &["DATA_LOSS"]),
    row("too busy", Cause::Answer(Fault::exhausted), &["RESOURCE_EXHAUSTED"]),
    row("garbage", Cause::Answer(garbage_chain), &["refused"]),
    row("not a chain", Cause::Answer(|| Fault::Garbage), &["refused", "unusable", "create certificate"]),
    row("one certificate", Cause::Answer(|| Fault::OneCertificate), &["invalid empty CertChain"]),
    row("empty chain", Cause::Answer(|| Fault::EmptyChain), &["invalid empty CertChain", "no certificate"]),
    row("wrong key", Cause::Answer(|| Fault::WrongKey), &["not for the key"]),
    row("wrong order", Cause::Answer(|| Fault::WrongOrder), &["out of order"]),
    row("expired", Cause::Answer(|| Fault::Expired(Duration::from_secs(60))), &["expired already"]),
    row("dropped", Cause::Answer(|| Fault::Drop), &["create certificate"]),
    row("slow", Cause::Answer(|| Fault::Delay(2 * LIMIT)), &["no answer within", "DEADLINE_EXCEEDED"]),
    row("cut", Cause::Answer(|| Fault::Cut(100)), &["create certificate"]),
    row("cut off", Cause::Answer(|| Fault::Sever(200)), &["create certificate"]),
    row("half-open", Cause::Answer(|| Fault::HalfOpen), &["no answer within", "DEADLINE_EXCEEDED"]),
    row("silent server", Cause::Connection(|| Fault::HalfOpen), &["cannot connect", "create certificate"]),
    row("port closed", Cause::Down, &["refused"]),
    row("token missing", Cause::Token(None), &["istio-token"]),
    row("token empty", Cause::Token(Some(String::new)), &["istio-token", "UNAUTHENTICATED"]),
    row("token expired", Cause::Token(Some(expired_token)), &["expired"]),
    row("token rotated to junk", Cause::Token(Some(|| "junk".to_owned())), &["UNAUTHENTICATED"]),
    row("new root", Cause::NewRoot, &["create certificate", "cannot connect"]),
    row("clock an hour behind", Cause::Clock, &["not valid yet", "not yet valid"]),
];

fn expired_token() -> String {
    Token { expires: mock_istiod::jwt::Expiry::Ago(Duration::from_secs(60)), ..Token::of("ns", "sa") }.sign()
}

async fn cause(row: &Row, mock: &MockIstiod, put: impl Fn(&str, Option<String>)) {
    match row.cause {
        Cause::Answer(fault) => mock.ca().always(vec![fault()]),
        Cause::Connection(fault) => {
            mock.connections().always(vec![fault()]);
            // An open connection would not notice.
            mock.ca().next(Fault::Drop);
        }
        Cause::Down => mock.down().await,
        Cause::Token(text) => put(TOKEN, text.map(|t| t())),
        Cause::NewRoot => {
            mock.rotate_root(false);
            mock.ca().next(Fault::Drop);
        }
        Cause::Clock => {
            // An open connection would not notice.
            mock.ca().next(Fault::Drop);
        }
    }
}

async fn heal(row: &Row, mock: &MockIstiod, agent: &TestAgent) {
    match row.cause {
        Cause::Answer(_) => mock.ca().clear(),
        Cause::Connection(_) => mock.connections().clear(),
        Cause::Down => mock.up().await.expect("the port is ours"),
        Cause::Token(_) => agent.put(TOKEN, mock.mint("ns", "sa")),
        Cause::NewRoot => agent.put(ROOT, mock.root_pem()),
        Cause::Clock => agent.step_clock(0),
    }
}

/// What a new stream is given.
async fn ask(client: &EnvoyClient, name: &str) -> Result<Pem, Code> {
    let mut stream = client.stream_secrets();
    stream.send(&secret_request(name));
    match stream.next().await {
        Ok(response) => Ok(secrets(&response).remove(0).1),
        Err(status) if status.code() == tonic::Code::Unknown => Err(Code::Unknown),
        Err(status) => panic!("{name}: the stream ends with {status:?}"),
    }
}

fn builder(mock: &MockIstiod) -> crate::support::agent::Builder {
    TestAgent::with()
        .istiod(mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("CA_ATTEMPT_TIMEOUT", ATTEMPT)
        .env("SECRET_GRACE_PERIOD_RATIO", "0.95")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
}

async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, check: impl FnMut() -> F) -> T {
    eventually_within(LIMIT, what, check).await
}

async fn told(row: &Row, agent: &mut TestAgent) {
    eventually(&format!("{}: one of {:?} in the log", row.name, row.told), || async {
        row.told.iter().any(|words| agent.log().contains(words)).then_some(())
    })
    .await;
    agent.assert_running();
}

async fn at_start(row: &Row) {
    let mock = MockIstiod::start().await;
    let mut builder = builder(&mock);
    let slot = std::cell::RefCell::new(None);
    cause(row, &mock, |path, text| *slot.borrow_mut() = Some((path.to_owned(), text))).await;
    builder = match slot.into_inner() {
        Some((path, Some(text))) => builder.file(&path, text),
        Some((path, None)) => builder.without_file(&path),
        None => builder,
    };
    if matches!(row.cause, Cause::Clock) {
        builder = builder.clock_off_by(BEHIND);
    }
    // The agent was installed with the root of before.
    let mut agent = builder.start();
    let client = agent.sds().await;
    // Both names end with the reason; or wait where the CA keeps the agent waiting.
    let open = matches!(row.name, "half-open" | "silent server" | "slow");
    if !open {
        for name in ["default", "ROOTCA"] {
            assert!(ask(&client, name).await.is_err(), "{}: {name} out of nothing", row.name);
        }
    }
    told(row, &mut agent).await;
    heal(row, &mock, &agent).await;
    eventually(&format!("{} heals", row.name), || async { ask(&client, "default").await.ok() }).await;
    ask(&client, "ROOTCA").await.unwrap();
}

async fn at_renewal(row: &Row) {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(LIFE));
    let mut builder = builder(&mock);
    if matches!(row.cause, Cause::Clock) {
        builder = builder.clock_off_by(0);
    }
    let mut agent = builder.start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    stream.next().await.unwrap();
    let root = ask(&client, "ROOTCA").await.unwrap();
    cause(row, &mock, |path, text| match text {
        Some(text) => agent.put(path, text),
        None => std::fs::remove_file(agent.path(path)).unwrap(),
    })
    .await;
    if matches!(row.cause, Cause::Clock) {
        agent.step_clock(BEHIND);
    }
    // Now: a machine that stood still may have had a renewal before.
    let first = ask(&client, "default").await.unwrap();
    told(row, &mut agent).await;
    let kept = ask(&client, "default").await;
    assert_eq!(kept.as_ref(), Ok(&first), "{}: the last good certificate", row.name);
    assert_eq!(ask(&client, "ROOTCA").await, Ok(root), "{}: the root does not hang on the CA", row.name);
    mock.set_ttl(None);
    heal(row, &mock, &agent).await;
    eventually(&format!("{}: renewed", row.name), || async {
        ask(&client, "default").await.ok().filter(|now| *now != first)
    })
    .await;
}

// A few at a time: each row has an agent and a CA of its own.
async fn all(check: impl AsyncFn(&'static Row)) {
    use futures_util::StreamExt;
    let rows = futures_util::stream::iter(ROWS).map(|row| {
        let check = &check;
        async move {
            // The limits inside are for conditions; this one is for the row.
            let done = tokio::time::timeout(4 * LIMIT, check(row)).await;
            assert!(done.is_ok(), "{}: never done", row.name);
        }
    });
    rows.buffer_unordered(6).collect::<Vec<_>>().await;
}

#[tokio::test]
async fn faults_at_the_first_certificate() {
    all(at_start).await;
}

#[tokio::test]
async fn faults_at_a_renewal() {
    all(at_renewal).await;
}

/// The first one is served all the same: there is nothing to keep, and the clock that is wrong may be ours.
#[tokio::test]
async fn a_certificate_that_begins_later_takes_the_place_of_none_that_is_good() {
    at_renewal(&row("not valid yet", Cause::Answer(|| Fault::Future(LIFE / 2)), &["valid only from"])).await;
}

#[tokio::test]
async fn a_certificate_without_an_identity_is_told_as_such() {
    let mock = MockIstiod::start().await;
    mock.ca().always(vec![Fault::WrongSan(String::new())]);
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    agent.wait_log("the CA issued a certificate without one").await;
}

#[tokio::test]
async fn another_identity_is_the_cas_to_decide() {
    let mock = MockIstiod::start().await;
    mock.ca().always(vec![Fault::WrongSan("spiffe://elsewhere/ns/x/sa/y".to_owned())]);
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    agent.wait_log("spiffe://elsewhere/ns/x/sa/y").await;
}

#[tokio::test]
async fn another_identity_at_a_renewal_is_told_and_gone_with_the_next() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(LIFE));
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    let first = ask(&client, "default").await.unwrap();
    mock.ca().next(Fault::WrongSan("spiffe://elsewhere/ns/x/sa/y".to_owned()));
    agent.wait_log("spiffe://elsewhere/ns/x/sa/y").await;
    let other = eventually("the CA's choice", || async {
        ask(&client, "default").await.ok().filter(|now| *now != first)
    })
    .await;
    eventually("the next certificate", || async {
        ask(&client, "default").await.ok().filter(|now| *now != other)
    })
    .await;
    let identities: Vec<_> = mock.record().signed().into_iter().filter_map(|call| call.identity).collect();
    assert!(identities.iter().all(|id| *id == mock.identity("ns", "sa")), "{identities:?}");
}

/// The Go agent asks hundreds of times a second.
#[tokio::test]
async fn an_expired_answer_is_not_asked_for_without_pause() {
    let mock = MockIstiod::start().await;
    mock.ca().always(vec![Fault::Expired(Duration::from_secs(60))]);
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    // As an impatient Envoy does.
    while mock.record().ca_calls().len() < 6 {
        ask(&client, "default").await.unwrap_err();
    }
    let calls = mock.record().ca_calls();
    let span = calls[5].received.duration_since(calls[0].received).unwrap();
    assert!(span > Duration::from_millis(500), "six requests in {span:?}");
    agent.wait_log("expired already").await;
}

#[tokio::test]
async fn files_do_not_wait_for_a_ca_that_hangs() {
    let mock = MockIstiod::start().await;
    mock.ca().always(vec![Fault::HalfOpen]);
    let mut agent = builder(&mock).env("CA_ATTEMPT_TIMEOUT", "600s").env("CA_TIMEOUT", "600s").start();
    let client = agent.sds().await;
    let hangs = client.stream_secrets();
    hangs.send(&secret_request("default"));
    eventually("the CA is asked", || async { mock.record().ca_calls().pop() }).await;
    // The limits of the call are far beyond those of this test.
    let root = ask(&client, "file-root:var/run/secrets/istio/root-cert.pem").await.unwrap();
    assert!(matches!(root, Pem::Roots(_)), "{root:?}");
}

#[tokio::test]
async fn files_that_cannot_be_written_are_written_later() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(LIFE));
    let mut agent = builder(&mock).env("OUTPUT_CERTS", "out").start();
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    agent.wait_log("out/key.pem").await;
    std::fs::create_dir(agent.path("out")).unwrap();
    let written = || async { std::fs::read(agent.path("out/cert-chain.pem")).ok() };
    let first = eventually("the files", written).await;
    eventually("the next certificate's files", || async { written().await.filter(|now| *now != first) })
        .await;
    let left: Vec<_> =
        std::fs::read_dir(agent.path("out")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[tokio::test]
async fn a_full_disk_at_start_takes_nothing_from_envoy() {
    if !root_for("a full disk") {
        return;
    }
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&dir.path().join("out"));
    disk.fill();
    let mut agent = builder(&mock).env("OUTPUT_CERTS", "out").start_in(dir);
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    agent.wait_log("No space left").await;
    disk.empty();
    eventually("the files", || async { std::fs::read(agent.path("out/cert-chain.pem")).ok() }).await;
    agent.wait_log("written to").await;
    whole(&agent).await;
}

#[tokio::test]
async fn a_full_disk_at_a_renewal_leaves_the_old_files_whole() {
    if !root_for("a full disk") {
        return;
    }
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(LIFE));
    let dir = tempfile::tempdir().unwrap();
    let disk = SmallDisk::mount(&dir.path().join("out"));
    let mut agent = builder(&mock).env("OUTPUT_CERTS", "out").start_in(dir);
    let client = agent.sds().await;
    let first = ask(&client, "default").await.unwrap();
    whole(&agent).await;
    disk.fill();
    agent.wait_log("No space left").await;
    // Envoy has the new certificate, the readers of files the old one: a pair that belongs together.
    eventually("the renewed certificate", || async {
        ask(&client, "default").await.ok().filter(|now| *now != first)
    })
    .await;
    whole(&agent).await;
    disk.empty();
    eventually("files that are Envoy's again", || async {
        let Ok(Pem::Identity { chain, .. }) = ask(&client, "default").await else { return None };
        (std::fs::read_to_string(agent.path("out/cert-chain.pem")).ok()? == chain).then_some(())
    })
    .await;
    whole(&agent).await;
}

/// Key and chain in `out` belong together, and nothing else lies there.
async fn whole(agent: &TestAgent) {
    eventually("three files that belong together", || async {
        let read = |name: &str| std::fs::read(agent.path("out").join(name)).ok();
        let (key, chain, _) = (read("key.pem")?, read("cert-chain.pem")?, read("root-cert.pem")?);
        belong_together(&chain, &key).then_some(())
    })
    .await;
    let names = std::fs::read_dir(agent.path("out")).unwrap().map(|e| e.unwrap().file_name());
    let left: Vec<_> = names.filter(|n| n != "filler").collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

fn belong_together(chain: &[u8], key: &[u8]) -> bool {
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, PrivateKeyDer};
    let Ok(key) = PrivateKeyDer::from_pem_slice(key) else { return false };
    let chain: Vec<_> = CertificateDer::pem_slice_iter(chain).filter_map(Result::ok).collect();
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    rustls::sign::CertifiedKey::from_der(chain, key, &provider).is_ok_and(|pair| pair.keys_match().is_ok())
}

#[tokio::test]
async fn a_clock_set_forward_is_noticed_long_before_its_timer() {
    let mock = MockIstiod::start().await;
    // A day, renewed at noon.
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("ECC_SIGNATURE_ALGORITHM", "ECDSA")
        .env("SECRET_GRACE_PERIOD_RATIO_JITTER", "0")
        .clock_off_by(0)
        .start();
    let client = agent.sds().await;
    let mut stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    let first = secrets(&stream.next().await.unwrap()).remove(0).1;
    agent.step_clock(13 * 3600);
    eventually("the renewal", || async { ask(&client, "default").await.ok().filter(|now| *now != first) })
        .await;
}

#[tokio::test]
async fn a_root_file_that_is_missing_for_a_while_stops_nothing() {
    let mock = MockIstiod::start().await;
    mock.set_ttl(Some(LIFE));
    let mut agent = builder(&mock).start();
    let client = agent.sds().await;
    let first = ask(&client, "default").await.unwrap();
    // The Go agent closes its channel after a failure, cannot build another, and stays without one.
    std::fs::remove_file(agent.path(ROOT)).unwrap();
    mock.ca().next(Fault::Drop);
    // Every view names it: with the file as it is no agent could start.
    let missing =
        async || agent.get("/debug/agentz").await.ok().filter(|page| page.text().contains("\"RootMissing\""));
    eventually("the trouble", missing).await;
    ask(&client, "default").await.unwrap();
    agent.put(ROOT, mock.root_pem());
    let over = async || missing().await.is_none().then_some(());
    eventually("the end of the trouble, long before a dial needs the file", over).await;
    eventually("the renewal", || async { ask(&client, "default").await.ok().filter(|now| *now != first) })
        .await;
    // Istiod and its CA are trusted by the same file.
    let log = agent.log().text();
    for words in ["cannot read root certificates", "over: RootMissing"] {
        assert_eq!(log.matches(words).count(), 1, "{words}: {log}");
    }
}

#[tokio::test]
async fn a_root_of_the_ca_alone_is_missed_and_found_as_istiods_is() {
    const OWN: &str = "var/run/secrets/ca/root.pem";
    let mock = MockIstiod::start().await;
    let mut agent = builder(&mock).env("CA_ROOT_CA", OWN).file(OWN, mock.root_pem()).start();
    let client = agent.sds().await;
    ask(&client, "default").await.unwrap();
    let told = async || {
        agent.get("/debug/agentz").await.ok().is_some_and(|page| page.text().contains("\"RootMissing\""))
    };
    // No dial is near.
    std::fs::remove_file(agent.path(OWN)).unwrap();
    eventually("the trouble", async || told().await.then_some(())).await;
    agent.put(OWN, mock.root_pem());
    eventually("its end", async || (!told().await).then_some(())).await;
}

/// A stream on which istiod is silent does not end, so no other attempt tells that the token is good.
#[tokio::test]
async fn a_token_that_was_repaired_is_no_trouble_beside_an_istiod_that_is_silent() {
    let mock = MockIstiod::start().await;
    mock.ads().always(vec![Fault::HalfOpen]);
    let mut agent = builder(&mock).file(TOKEN, expired_token()).start();
    let _secrets = agent.sds().await;
    let ads = agent.xds().await.ads();
    ads.send(&super::ads::ask(super::ads::CDS));
    let kinds = async || {
        let page = agent.get("/debug/agentz").await.ok()?.text();
        Some(["IstiodSilent", "TokenExpired"].map(|kind| page.contains(&format!("\"kind\": \"{kind}\""))))
    };
    eventually("both", async || (kinds().await? == [true, true]).then_some(())).await;
    agent.put(TOKEN, mock.mint("ns", "sa"));
    eventually("one is over", async || (kinds().await? == [true, false]).then_some(())).await;
}
