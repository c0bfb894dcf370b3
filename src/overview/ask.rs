//! The questions: the agent's document, whether it is ready, and Envoy's own word.

use std::time::Duration;

use serde_json::Value;

use crate::envoy::port;
use crate::fetch::{Error, Get};

/// The agent answers from memory, and asks an Envoy that may hang for up to 3 s.
const LIMIT: Duration = Duration::from_secs(5);
/// A status document is longer than this only with thousands of rejections.
const MOST: usize = 8 << 20;

/// What came back.
#[derive(Debug)]
pub(crate) struct Answers {
    /// `/debug/agentz`.
    pub agentz: Value,
    /// Readiness, or what is missing.
    pub ready: Result<(), String>,
    /// `/server_info` of Envoy's admin port, or why there is none.
    pub envoy: Result<Value, String>,
    /// Capture rules, one line a set; empty where they cannot be read.
    pub capture: Vec<String>,
}

/// Asks the agent on `port` and the Envoy whose admin port is `admin`.
///
/// # Errors
/// When no agent answers; why.
pub(crate) async fn gather(port: u16, admin: Option<u16>, capture: Vec<String>) -> Result<Answers, String> {
    let agentz = agentz(port).await?;
    let (ready, envoy) = tokio::join!(ready(port), async {
        match admin {
            Some(admin) => {
                within(server_info(admin), || format!("Envoy's admin port {admin} is silent")).await
            }
            None => Err("no Envoy is started".to_owned()),
        }
    });
    Ok(Answers { agentz, ready, envoy, capture })
}

/// The status document of the agent on this port of this machine.
///
/// # Errors
/// Why there is none.
pub(crate) async fn agentz(port: u16) -> Result<Value, String> {
    let silent = || format!("port {port}{} gives no answer within {} s", held(port), LIMIT.as_secs());
    within(status_document(port), silent).await
}

async fn status_document(port: u16) -> Result<Value, String> {
    let (status, text) = get(&format!("http://localhost:{port}/debug/agentz")).await?;
    let strange = || format!("port {port}{} does not answer as this agent does", held(port));
    if status != 200 {
        return Err(format!("{}: status {status}", strange()));
    }
    let document: Value = serde_json::from_slice(&text).map_err(|_| strange())?;
    if document["version"].is_string() { Ok(document) } else { Err(strange()) }
}

async fn ready(port: u16) -> Result<(), String> {
    let silent = || format!("port {port} gives no answer");
    let ask = async {
        let (status, text) = get(&format!("http://localhost:{port}/healthz/ready?verbose")).await?;
        let text = String::from_utf8_lossy(&text).trim().to_owned();
        if status == 200 { Ok(()) } else { Err(text) }
    };
    within(ask, silent).await
}

async fn server_info(admin: u16) -> Result<Value, String> {
    let (status, text) = get(&format!("http://localhost:{admin}/server_info")).await?;
    if status != 200 {
        return Err(format!("Envoy's admin port {admin} answers {status}"));
    }
    serde_json::from_slice(&text).map_err(|_| format!("port {admin}{} is no Envoy's admin port", held(admin)))
}

async fn within<T>(
    ask: impl Future<Output = Result<T, String>>,
    late: impl FnOnce() -> String,
) -> Result<T, String> {
    tokio::time::timeout(LIMIT, ask).await.unwrap_or_else(|_| Err(late()))
}

async fn get(url: &str) -> Result<(u16, Vec<u8>), String> {
    let said = |e: Error| crate::base::error::chain(&e);
    let mut reply = Get::new(url).map_err(said)?.keep(None).send().await.map_err(said)?;
    let status = reply.status().as_u16();
    Ok((status, reply.bytes(MOST).await.map_err(said)?))
}

/// Who is behind a port that answers strangely.
fn held(port: u16) -> String {
    port::holder(port).map(|holder| format!(", held by {holder},")).unwrap_or_default()
}
