//! A running agent: whether one answers, and what it reports.

use std::time::Duration;

use serde_json::Value;

use super::Check;
use crate::fetch::Get;
use crate::trouble::Kind;

const NAME: &str = "agent";
/// It answers from memory; more is a machine that stands still.
const LIMIT: Duration = Duration::from_secs(3);
/// A status document is longer than this only with thousands of rejections.
pub const MOST: usize = 8 << 20;

/// What is known of it.
pub(super) struct Running {
    port: u16,
    outcome: Result<Value, String>,
    pub(super) troubles: Vec<Value>,
}

/// The status document of the agent on this port of this machine.
///
/// # Errors
/// Why there is none.
pub async fn agentz(port: u16) -> Result<Value, String> {
    let url = format!("http://localhost:{port}/debug/agentz");
    let ask = async {
        let said = |e: crate::fetch::Error| crate::base::error::chain(&e);
        let mut reply = Get::new(&url).map_err(said)?.keep(None).send().await.map_err(said)?;
        if reply.status() != http::StatusCode::OK {
            return Err(format!(
                "port {port} answers {} to /debug/agentz: is that this agent?",
                reply.status()
            ));
        }
        let text = reply.bytes(MOST).await.map_err(said)?;
        let document: Value = serde_json::from_slice(&text)
            .map_err(|_| format!("port {port} does not answer as this agent does"))?;
        if document["version"].is_string() {
            Ok(document)
        } else {
            Err(format!("port {port} does not answer as this agent does"))
        }
    };
    tokio::time::timeout(LIMIT, ask)
        .await
        .unwrap_or_else(|_| Err(format!("port {port} gives no answer within {} s", LIMIT.as_secs())))
}

pub(super) async fn look(port: u16) -> Running {
    let outcome = agentz(port).await;
    let troubles = outcome.as_ref().ok().and_then(|d| d["troubles"].as_array().cloned()).unwrap_or_default();
    Running { port, outcome, troubles }
}

impl Running {
    pub(super) fn is_alive(&self) -> bool {
        self.outcome.is_ok()
    }

    pub(super) fn check(&self) -> Check {
        let port = self.port;
        let document = match &self.outcome {
            Ok(document) => document,
            Err(why) => return Check::skip(NAME, format!("none answers: {why}")),
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let Some(first) = self.troubles.first() else {
            return Check::ok(
                NAME,
                format!(
                    "runs (status port {port}, version {}) and reports no trouble",
                    text(&document["version"])
                ),
            );
        };
        let more = match self.troubles.len() {
            1 => String::new(),
            n => format!(" (and {} more)", n - 1),
        };
        let said = format!("reports {}: {}{more}", text(&first["kind"]), text(&first["detail"]));
        let degraded = first["severity"] == "degraded";
        match Kind::from_name(&text(&first["kind"])) {
            Some(kind) if !degraded => Check::fail(NAME, kind, said).hint(text(&first["hint"])),
            Some(kind) => Check::warn(NAME, said, text(&first["hint"])).maybe(kind),
            None => Check::warn(NAME, said, text(&first["hint"])),
        }
    }
}
