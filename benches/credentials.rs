//! What is off by default: the token service, and secrets of gateways. What a kept token costs, what a thousand
//! callers cause, what three of two thousand secrets take. No other agent of today has either.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use envoy_types::pb::envoy::service::discovery::v3::DiscoveryResponse;
use mock_istiod::MockIstiod;
use mock_istiod::apiserver::ApiServer;
use prost::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::agent::{Agent, LIMIT, Setup, secret_request};
use crate::table::{Row, Value};

/// Requests of one measurement on a kept connection, and on connections of their own.
const KEPT: u32 = 3000;
const FRESH: u32 = 2000;
const CALLERS: usize = 1000;
/// Secrets of the namespace, and those that Envoy asks for.
const SECRETS: usize = 2000;
const ASKED: [usize; 3] = [7, 700, 1700];

/// All rows, for the first binary: agents of today have no such parts.
pub(crate) async fn all(binaries: &[PathBuf], runs: usize) -> Result<Vec<Row>, String> {
    let Some(binary) = binaries.first() else { return Ok(Vec::new()) };
    let istiod = MockIstiod::start().await;
    let mut rows = Vec::new();
    let mut add = |what: &str, values: Vec<f64>, target: &'static str| {
        let ours = Value::of(values);
        rows.push(Row { what: what.to_owned(), ours, peer: None, wire: None, direct: None, target });
    };
    let service = Service::start(binary, &istiod).await?;
    for (what, count, kept, p50, cpu) in [
        ("kept token, kept connection", KEPT, true, "≤ 150", "≤ 50"),
        ("kept token, new connection", FRESH, false, "–", "–"),
    ] {
        let mut measured = Vec::new();
        for _ in 0..runs {
            measured.push(service.many(count, kept).await?);
        }
        let (times, cpus) = measured.into_iter().unzip();
        add(&format!("{what}: p50 (µs)"), times, p50);
        add(&format!("{what}: agent CPU (µs)"), cpus, cpu);
    }
    let (took, exchanges) = service.herd().await?;
    add("1,000 callers without a kept token: to the last answer (ms)", vec![took], "–");
    add("1,000 callers without a kept token: exchanges", vec![exchanges], "1");
    drop(service);
    let mut grown = Vec::new();
    for _ in 0..runs.min(3) {
        grown.push(secrets(binary, &istiod).await?);
    }
    add("3 of 2,000 secrets of gateways: resident over none (MB)", grown, "≤ 3");
    Ok(rows)
}

/// An agent with the token service, and the endpoint that it asks.
struct Service {
    agent: Agent,
    port: u16,
    exchanges: Arc<AtomicUsize>,
    _endpoint: JoinSet<()>,
}

impl Service {
    async fn start(binary: &Path, istiod: &MockIstiod) -> Result<Self, String> {
        let said = |e: io::Error| e.to_string();
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(said)?;
        let url = format!("http://{}/token", listener.local_addr().map_err(said)?);
        let exchanges = Arc::<AtomicUsize>::default();
        let (count, mut tasks) = (exchanges.clone(), JoinSet::new());
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let count = count.clone();
                open.spawn(async move {
                    let _ = endpoint(stream, &count).await;
                });
            }
        });
        let free = TcpListener::bind("127.0.0.1:0").await.and_then(|l| l.local_addr()).map_err(said)?;
        let env = vec![
            ("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()),
            ("STS_PORT", free.port().to_string()),
            ("TOKEN_MANAGER_PLUGIN", "Passthrough".to_owned()),
            ("STS_UPSTREAM_URL", url),
        ];
        let agent = Agent::start(&Setup { binary, envoy: None, env }, istiod).map_err(said)?;
        agent.certificate().await.map_err(said)?;
        let service = Self { agent, port: free.port(), exchanges, _endpoint: tasks };
        // What the start leaves to do is over, and the token is there.
        tokio::time::sleep(Duration::from_secs(2)).await;
        service.ask(&mut service.connect().await?, "kept").await?;
        Ok(service)
    }

    async fn connect(&self) -> Result<TcpStream, String> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        Ok(stream)
    }

    async fn ask(&self, stream: &mut TcpStream, subject: &str) -> Result<(), String> {
        ask(stream, subject).await.map_err(|e| format!("token service: {e}"))
    }

    /// The median time of requests for a kept token and their CPU each, in µs.
    async fn many(&self, count: u32, kept: bool) -> Result<(f64, f64), String> {
        let mut stream = self.connect().await?;
        let mut times = Vec::new();
        let before = self.agent.proc().cpu();
        for _ in 0..count {
            let begin = Instant::now();
            if !kept {
                stream = self.connect().await?;
            }
            self.ask(&mut stream, "kept").await?;
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        let cpu = (self.agent.proc().cpu() - before).as_secs_f64() * 1e6 / f64::from(count);
        times.sort_by(f64::total_cmp);
        Ok((times[times.len() / 2], cpu))
    }

    /// Many callers at the same time for a token that is not there: ms to the last answer, and exchanges.
    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^53")]
    async fn herd(&self) -> Result<(f64, f64), String> {
        let before = self.exchanges.load(Relaxed);
        let mut streams = Vec::new();
        for _ in 0..CALLERS {
            streams.push(self.connect().await?);
        }
        let begin = Instant::now();
        let mut callers = JoinSet::new();
        for mut stream in streams {
            callers.spawn(async move { ask(&mut stream, "herd").await });
        }
        while let Some(answer) = callers.join_next().await {
            answer.map_err(|e| e.to_string())?.map_err(|e| format!("token service: {e}"))?;
        }
        let took = begin.elapsed().as_secs_f64() * 1e3;
        Ok((took, (self.exchanges.load(Relaxed) - before) as f64))
    }
}

async fn ask(stream: &mut TcpStream, subject: &str) -> io::Result<()> {
    let body = format!(
        "grant_type=urn:ietf:params:oauth:grant-type:token-exchange&subject_token={subject}\
         &subject_token_type=urn:ietf:params:oauth:token-type:jwt"
    );
    let request = format!(
        "POST /token HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let exchange = async {
        stream.write_all(request.as_bytes()).await?;
        let answer = whole(stream).await?;
        let good = answer.starts_with("HTTP/1.1 200 ") && answer.contains("\"access_token\"");
        good.then_some(()).ok_or_else(|| io::Error::other(answer))
    };
    tokio::time::timeout(LIMIT, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// A head and its body of known length.
async fn whole(stream: &mut TcpStream) -> io::Result<String> {
    let mut bytes = Vec::with_capacity(1024);
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some(head) = bytes.windows(4).position(|w| w == b"\r\n\r\n") else { continue };
        let text = String::from_utf8_lossy(&bytes[..head]).to_ascii_lowercase();
        let length = text.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.and_then(|n| n.trim().parse().ok()).unwrap_or(0);
        if bytes.len() >= head + 4 + length {
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}

/// Gives a token after as long as a near endpoint takes.
async fn endpoint(mut stream: TcpStream, count: &AtomicUsize) -> io::Result<()> {
    loop {
        whole(&mut stream).await?;
        count.fetch_add(1, Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
        let token = format!("ya29.{}", "a".repeat(1000));
        let body =
            format!("{{\"access_token\": \"{token}\", \"token_type\": \"Bearer\", \"expires_in\": 3600}}");
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        stream.write_all(answer.as_bytes()).await?;
    }
}

/// What three secrets take of an agent's memory, in MB.
#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
async fn secrets(binary: &Path, istiod: &MockIstiod) -> Result<f64, String> {
    let said = |e: io::Error| e.to_string();
    let api = ApiServer::start(&istiod.authority(), "token").await;
    let pair = istiod.issue("spiffe://x/gateway", Duration::from_secs(3600));
    for n in 0..SECRETS {
        let fields = [("tls.crt", pair.chain.as_bytes()), ("tls.key", pair.key.as_bytes())];
        api.put(&format!("secret-{n}"), &fields);
    }
    let env = vec![
        ("ECC_SIGNATURE_ALGORITHM", "ECDSA".to_owned()),
        ("ENABLE_INGRESS_GATEWAY_SDS", "true".to_owned()),
        ("KUBERNETES_SERVICE_HOST", "localhost".to_owned()),
        ("KUBERNETES_SERVICE_PORT", api.port().to_string()),
    ];
    let agent = Agent::start(&Setup { binary, envoy: None, env }, istiod).map_err(said)?;
    let account = agent.path("var/run/secrets/kubernetes.io/serviceaccount");
    std::fs::create_dir_all(&account).map_err(said)?;
    std::fs::write(account.join("token"), "token").map_err(said)?;
    std::fs::write(account.join("ca.crt"), istiod.root_pem()).map_err(said)?;
    agent.certificate().await.map_err(said)?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = agent.proc().memory().rss;
    let mut streams = Vec::new();
    for n in ASKED {
        let mut stream = agent.gateway_secrets().await.map_err(said)?;
        stream.send(&secret_request(&format!("secret-{n}"))).map_err(said)?;
        let message = tokio::time::timeout(LIMIT, stream.message()).await;
        let message = message.map_err(|_| "a secret never came".to_owned())?.map_err(said)?;
        let response = DiscoveryResponse::decode(message).map_err(|e| e.to_string())?;
        if response.resources.len() != 1 {
            return Err("an answer without a secret".to_owned());
        }
        streams.push(stream);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(agent.proc().memory().rss.saturating_sub(before) as f64 / 1e6)
}
