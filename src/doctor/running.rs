//! A running agent: whether one answers, and what it reports.

use serde_json::Value;

use super::Check;
use crate::overview;
use crate::trouble::Kind;

pub(super) const NAME: &str = "agent";

/// What is known of it.
pub(super) struct Running {
    port: u16,
    outcome: Result<Value, overview::Error>,
    pub(super) troubles: Vec<Value>,
}

pub(super) async fn look(port: u16) -> Running {
    let outcome = overview::agentz(port).await;
    let troubles = outcome.as_ref().ok().and_then(|d| d["troubles"].as_array().cloned()).unwrap_or_default();
    Running { port, outcome, troubles }
}

impl Running {
    pub(super) fn is_alive(&self) -> bool {
        matches!(self.outcome, Ok(_) | Err(overview::Error::NoFiles(_)))
    }

    pub(super) fn check(&self) -> Check {
        let port = self.port;
        let document = match &self.outcome {
            Ok(document) => document,
            Err(why @ overview::Error::NoFiles(_)) => {
                return Check::fail(NAME, Kind::OpenFiles, format!("it can be asked nothing: {why}"));
            }
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
        match Kind::from_name(&text(&first["kind"])) {
            Some(kind) => Check::fail(NAME, kind, said).hint(text(&first["hint"])),
            None => Check::warn(NAME, said, text(&first["hint"])),
        }
    }
}
