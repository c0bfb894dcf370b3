//! The security token service: any process of the pod changes its token for another one.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::support::google::Google;
use crate::support::http::{Reply, call_with, get};
use crate::support::web::{self, Gate, Rough, Web};
use crate::support::{MockIstiod, TestAgent, eventually, free_port};

const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");

/// A token endpoint: counts, waits until it is told what to answer.
struct Endpoint {
    web: Web,
    asked: Arc<AtomicUsize>,
    answer: watch::Sender<Option<(u16, Value)>>,
    forms: Arc<Mutex<Vec<String>>>,
}

impl Endpoint {
    async fn start() -> Self {
        let (asked, forms) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<String>>>::default());
        let answer = watch::channel(None::<(u16, Value)>).0;
        let (count, kept, told) = (asked.clone(), forms.clone(), answer.clone());
        let web = Web::start(move |_, form| {
            kept.lock().unwrap().push(String::from_utf8_lossy(&form).into_owned());
            let (nth, mut told) = (count.fetch_add(1, SeqCst) + 1, told.subscribe());
            async move {
                let (status, body) = told.wait_for(Option::is_some).await.unwrap().clone().unwrap();
                let body: Value =
                    serde_json::from_str(&body.to_string().replace("$N", &nth.to_string())).unwrap();
                web::json(status, &body)
            }
        })
        .await;
        Self { web, asked, answer, forms }
    }

    fn says(&self, status: u16, body: Value) {
        self.answer.send_replace(Some((status, body)));
    }
}

fn passthrough(mock: &MockIstiod, port: u16, url: &str) -> crate::support::agent::Builder {
    TestAgent::with()
        .istiod(mock)
        .example("tokens-upstream.env")
        .env("STS_PORT", port.to_string())
        .env("STS_UPSTREAM_URL", url)
}

fn form(subject: &str) -> String {
    format!(
        "grant_type=urn:ietf:params:oauth:grant-type:token-exchange&subject_token={subject}\
         &subject_token_type=urn:ietf:params:oauth:token-type:jwt&scope=a+b"
    )
}

async fn ask(port: u16, subject: &str) -> (u16, Value) {
    let reply: Reply = call_with("POST", port, "/token", &form(subject), &[FORM]).await.unwrap();
    (reply.status.as_u16(), serde_json::from_slice(&reply.body).unwrap())
}

#[tokio::test]
async fn half_of_a_request_takes_little_memory() {
    const HALVES: usize = 600;
    let mock = MockIstiod::start().await;
    let endpoint = Endpoint::start().await;
    endpoint.says(200, json!({ "access_token": "a", "token_type": "Bearer", "expires_in": 3600 }));
    let port = free_port();
    let url = format!("http://127.0.0.1:{}/sts", endpoint.web.port);
    let mut agent = passthrough(&mock, port, &url).start();
    agent.wait_ready().await;
    assert_eq!(ask(port, "first").await.0, 200);
    let before = agent.memory("RssAnon");
    let half = format!(
        "POST /token HTTP/1.1\r\nHost: localhost\r\n{}: {}\r\nContent-Length: 60000\r\n\r\ngrant_type=",
        FORM.0, FORM.1
    );
    let mut held = Vec::new();
    for _ in 0..HALVES {
        let mut io = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        io.write_all(half.as_bytes()).await.unwrap();
        held.push(io);
    }
    // Whoever comes after them all is answered after all were read.
    assert_eq!(ask(port, "last").await.0, 200);
    let each = agent.memory("RssAnon").saturating_sub(before) / HALVES;
    println!("{each} kB for half of a request");
    assert!(each < 27, "{each} kB for half of a request");
    // Each of them may still go on: 60,000 bytes in all.
    let mut io = held.remove(HALVES - 1);
    io.write_all(&b"x".repeat(60_000 - "grant_type=".len())).await.unwrap();
    let mut answer = [0; 12];
    io.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 400");
    drop(held);
    agent.stop().await;
}

#[tokio::test]
async fn a_thousand_callers_cause_one_exchange() {
    let mock = MockIstiod::start().await;
    let endpoint = Endpoint::start().await;
    let port = free_port();
    let url = format!("http://127.0.0.1:{}/sts?x=1", endpoint.web.port);
    let mut agent = passthrough(&mock, port, &url)
        .env("STS_UPSTREAM_AUDIENCE", "their audience")
        .arg("--log_output_level=all:debug")
        .start();
    agent.wait_ready().await;

    // A failure first: it is not kept, and nothing of it is repeated.
    endpoint.says(403, json!({"error": "S3CRET-ANSWER"}));
    let (status, body) = ask(port, "S3CRET-SUBJECT").await;
    assert_eq!((status, &body["error"]), (500, &json!("invalid_target")));
    assert!(body["error_description"].as_str().unwrap().contains("403"), "{body}");
    let form = endpoint.forms.lock().unwrap()[0].clone();
    for part in ["subject_token=S3CRET-SUBJECT&", "scope=a%20b", "audience=their%20audience"] {
        assert!(form.contains(part), "{form}");
    }

    endpoint.answer.send_replace(None);
    let before = endpoint.asked.load(SeqCst);
    let mut callers = JoinSet::new();
    for _ in 0..1000 {
        callers.spawn(async move { ask(port, "S3CRET-SUBJECT").await });
    }
    // Let go once it has arrived; the others find the same exchange or its result.
    eventually("the endpoint is asked", async || (endpoint.asked.load(SeqCst) > before).then_some(())).await;
    endpoint.says(200, json!({"access_token": "S3CRET-ACCESS-$N", "expires_in": 3600, "token_type": "N_A"}));
    let mut seen = std::collections::BTreeSet::new();
    while let Some(answer) = callers.join_next().await {
        let (status, body) = answer.unwrap();
        assert_eq!((status, &body["token_type"]), (200, &json!("N_A")), "{body}");
        seen.insert(body["access_token"].as_str().unwrap().to_owned());
    }
    assert_eq!((seen.len(), endpoint.asked.load(SeqCst)), (1, before + 1));

    let dump = get(port, "/stsStatus").await.unwrap().text();
    assert!(dump.contains("\"token_type\":\"access token\"") && dump.contains("\"token\":\"\""), "{dump}");
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(document.contains("Passthrough"), "{document}");
    let metrics = agent.get("/stats/prometheus").await.unwrap().text();
    for (place, text) in
        [("log", agent.log().text()), ("dump", dump), ("document", document), ("metrics", metrics)]
    {
        assert!(!text.contains("S3CRET"), "the {place} shows a token:\n{text}");
    }
    agent.stop().await;
}

/// The matrix of faults, at the endpoint that exchanges: none takes away a token that still lives.
#[tokio::test]
async fn whatever_is_in_the_endpoints_place_is_told_and_the_old_token_stays() {
    let mock = MockIstiod::start().await;
    // Each token is asked for anew, since it ends within the five minutes, and lives for longer than this test.
    let issued = Arc::<AtomicUsize>::default();
    let count = issued.clone();
    let web = Web::start(move |_, _| {
        let nth = count.fetch_add(1, SeqCst);
        let mut answer = web::json(200, &json!({"access_token": format!("S3CRET-{nth}"), "expires_in": 250}));
        // Each try is a connection of its own, so that the next fault meets it.
        answer.headers_mut().insert("connection", http::HeaderValue::from_static("close"));
        async { answer }
    })
    .await;
    let gate = Gate::before(web.port).await;
    let elsewhere = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free_port();
    let url = format!("http://127.0.0.1:{}/token", gate.port);
    let mut agent = passthrough(&mock, port, &url)
        .env("READINESS_STRICT", "true")
        .arg("--log_output_level=all:debug")
        .start();
    agent.wait_ready().await;
    let (status, first) = ask(port, "S3CRET-SUBJECT").await;
    assert_eq!(status, 200, "{first}");
    let to = elsewhere.local_addr().unwrap().port();
    for (rough, tries, said) in [
        (Rough::Reset, 5, " tries)"),
        (Rough::Garbage, 5, " tries)"),
        (Rough::Status(503), 5, "HTTP status 503"),
        (Rough::Status(403), 1, "HTTP status 403"),
        (Rough::Redirect(to), 1, "redirects are not followed"),
        (Rough::Cut, 1, "was cut off"),
        (Rough::Endless, 1, "is longer than"),
        (Rough::Drip, 1, "no answer within"),
        (Rough::Body("S3CRET-NO-JSON"), 1, "is no JSON object"),
        (Rough::Body("[]"), 1, "is no JSON object"),
        (Rough::Body("{}"), 1, "access_token"),
        (Rough::Body(r#"{"access_token": 7, "expires_in": "S3CRET"}"#), 1, "access_token"),
    ] {
        gate.next([rough].repeat(tries));
        let (status, body) = ask(port, "S3CRET-SUBJECT").await;
        assert_eq!((status, &body["access_token"]), (200, &first["access_token"]), "{rough:?}: {body}");
        // Fewer tries on a machine that is slow: they share a deadline.
        assert!(gate.forget() < tries, "{rough:?} was met");
        let document = agent.get("/debug/agentz").await.unwrap().text();
        assert!(
            document.contains("\"TokensNotExchanged\"") && document.contains(said) && document.contains(&url),
            "{rough:?}: {document}"
        );
        assert!(!document.contains("S3CRET"), "{document}");
    }
    // Who has no token is told why, and no more: whom the endpoint refuses says nothing of those whom it serves, and
    // must not take readiness away from them.
    assert_eq!(ask(port, "S3CRET-SUBJECT").await.0, 200);
    agent.wait_ready().await;
    gate.next([Rough::Status(403)]);
    let (status, body) = ask(port, "S3CRET-OTHER").await;
    let why = body["error_description"].as_str().unwrap_or_default();
    assert!(status == 500 && why.contains("403") && !why.contains("S3CRET"), "{body}");
    assert_eq!(agent.get("/healthz/ready").await.unwrap().status.as_u16(), 200);
    // One that it has served is the service's own trouble.
    gate.next([Rough::Status(403)]);
    assert_eq!(ask(port, "S3CRET-SUBJECT").await.0, 200, "the token that lives");
    let reply = agent.get("/healthz/ready").await.unwrap();
    let told = reply.headers.get("x-not-ready").and_then(|text| text.to_str().ok()).unwrap_or_default();
    assert!(reply.status.as_u16() == 503 && told.contains("403"), "strict readiness tells: {told:?}");
    // One that is silent costs a try.
    gate.next([Rough::Silent]);
    let (status, body) = ask(port, "S3CRET-SUBJECT").await;
    assert!(status == 200 && body["access_token"] != first["access_token"], "{body}");
    let document = agent.get("/debug/agentz").await.unwrap().text();
    assert!(!document.contains("\"kind\": \"TokensNotExchanged\""), "it is over: {document}");
    agent.wait_ready().await;
    let visited = tokio::time::timeout(Duration::from_millis(1), elsewhere.accept()).await;
    assert!(visited.is_err(), "a redirect was followed");
    assert!(!agent.log().contains("S3CRET"), "{}", agent.log().text());
    agent.stop().await;
}

/// The system's roots are read for each connection, from wherever somebody has mounted them.
#[tokio::test]
async fn roots_that_cannot_be_read_hold_up_nobody_but_the_callers() {
    let mock = MockIstiod::start().await;
    let endpoint = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = free_port();
    let url = format!("https://localhost:{}/token", endpoint.local_addr().unwrap().port());
    let mut agent = passthrough(&mock, port, &url).env("SSL_CERT_FILE", "roots").start();
    agent.wait_ready().await;
    // Whoever opens it waits for a writer.
    assert!(std::process::Command::new("mkfifo").arg(agent.path("roots")).status().unwrap().success());
    let beside = async {
        endpoint.accept().await.unwrap();
        assert_eq!(agent.get("/healthz/ready").await.unwrap().status.as_u16(), 200);
    };
    let ((status, body), ()) = tokio::join!(ask(port, "S3CRET-SUBJECT"), beside);
    let why = body["error_description"].as_str().unwrap_or_default();
    assert!(status == 500 && why.contains("the system's roots"), "{body}");
    agent.stop().await;
}

#[tokio::test]
async fn what_cannot_work_is_refused_at_the_start() {
    let mock = MockIstiod::start().await;
    let port = free_port();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken_port = taken.local_addr().unwrap().port().to_string();
    for (name, value, said) in [
        ("STS_UPSTREAM_URL", "http://sts.example.com/", "https"),
        ("STS_UPSTREAM_URL", "", "needs STS_UPSTREAM_URL"),
        ("STS_PORT", "99999", "1..65535"),
        ("STS_PORT", "many", "STS_PORT=many"),
        ("STS_PORT", &taken_port, "--stsPort"),
    ] {
        let mut agent = passthrough(&mock, port, "https://sts.example.com/").env(name, value).start();
        assert_eq!(agent.wait_exit().await.code(), Some(255), "{name}={value}");
        said_by(&agent, said).await;
    }
    drop(taken);
    let builder = TestAgent::with().istiod(&mock);
    let status = builder.ports().status.to_string();
    let mut agent = builder.env("GCP_METADATA", "p|1|c|z").arg("--stsPort").arg(status).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    said_by(&agent, "status server").await;
}

/// Whatever else is wrong at that moment: the last line names what ended the agent.
#[tokio::test]
async fn the_last_line_names_the_service_that_could_not_be_started() {
    let mock = MockIstiod::start().await;
    let port = free_port().to_string();
    let nobody = format!("127.0.0.1:{}", free_port());
    let builder = TestAgent::with().istiod(&mock).example("tokens-google.env").env("CLOUD_PLATFORM", "none");
    mock.down().await;
    let mut agent =
        builder.env("GCP_METADATA", "").env("GCE_METADATA_HOST", &nobody).arg("--stsPort").arg(port).start();
    assert_eq!(agent.wait_exit().await.code(), Some(255));
    said_by(&agent, "verdict: ").await;
    let log = agent.log().text();
    let last = log.lines().rfind(|line| line.contains("verdict: ")).unwrap();
    assert!(
        last.contains("no Google project number") && last.contains("verdict: TokensNotExchanged"),
        "{last}"
    );
}

/// Envoy calls a gRPC service (rate limits) with `sts_service` credentials, and the service sees our token.
#[tokio::test]
async fn envoy_gets_its_tokens_through_us() {
    if !crate::support::root_for("port 443 and a mount namespace") {
        return;
    }
    let mock = MockIstiod::start().await;
    let google = Google::start().await;
    let (port, seen) = (free_port(), free_port());
    let bootstrap = include_str!("../support/sts_envoy.yaml")
        .replace("{{sts}}", &port.to_string())
        .replace("{{service}}", &std::fs::read_to_string(google.path("service")).unwrap())
        .replace("{{ca}}", &google.path("ca.pem").to_string_lossy())
        .replace("{{listener}}", &seen.to_string());
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .before(&google.names())
        .example("tokens-google.env")
        .env("CLOUD_PLATFORM", "none")
        .env("SSL_CERT_FILE", google.path("ca.pem").to_string_lossy())
        .env("ISTIO_BOOTSTRAP_OVERRIDE", "override.yaml")
        .file("override.yaml", bootstrap)
        .arg("--stsPort")
        .arg(port.to_string())
        .envoy(crate::support::Envoy::Real)
        .start();
    agent.wait_ready().await;
    let token = crate::support::eventually("Envoy's call with a token", async || {
        let _ = get(seen, "/").await;
        let calls = google.asked();
        calls.iter().find(|call| call["host"] == "service").map(|call| call["authorization"].clone())
    })
    .await;
    assert_eq!(token, "Bearer ACCESS-1", "{:?}", google.asked());
    let asked = google.asked();
    let own = std::fs::read_to_string(agent.path(crate::support::agent::TOKEN)).unwrap();
    assert_eq!(asked[0]["json"]["subjectToken"], own.trim(), "{asked:?}");
    assert_eq!(asked[1]["authorization"], "Bearer FEDERATED-1");
    assert!(!agent.log().contains("ACCESS-") && !agent.log().contains("FEDERATED-"));
    agent.stop().await;
}

/// What an agent that has ended left in its log; the last lines may still be on their way.
async fn said_by(agent: &TestAgent, part: &str) {
    crate::support::eventually(part, async || agent.log().contains(part).then_some(())).await;
}
