//! `status`: what the running agent says of itself, on one screen or as one document.

use std::io::IsTerminal as _;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::{endpoint, http, request};
use crate::base::error::BoxError;
use crate::base::logging;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::{doctor, overview};

/// Between two looks of `--watch`.
const EVERY: Duration = Duration::from_secs(2);
/// The rules are looked at in each so many of them: it takes a run of each save program.
const CAPTURE: u32 = 5;
/// The exit status where no agent answers.
const UNREACHABLE: u8 = 2;
/// Envoy's admin port, when nothing else is said.
const DEFAULT_ADMIN: u16 = 15000;

/// Shows it; gives the exit status: 0 healthy, 1 not, 2 not reachable.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<u8, BoxError> {
    let mut logs = super::logging_options(parsed);
    logs.targets = vec!["stderr".to_owned()];
    if logs.output_level.is_empty() {
        logs.output_level = "all:none".to_owned();
    }
    logging::init(&logs)?;
    let port = endpoint::given(parsed)?;
    let config = endpoint::config(env);
    let port = port.or_else(|| config.as_ref().and_then(endpoint::port_of)).unwrap_or(endpoint::DEFAULT);
    let admin = config.as_ref().map_or(Some(DEFAULT_ADMIN), |config| config.envoy_admin_port());
    let (as_json, watch) = (parsed.is_true(super::STATUS, "json"), parsed.is_true(super::STATUS, "watch"));
    http::block_on(async move {
        let (mut capture, mut turn) = (Vec::new(), 0);
        loop {
            if turn == 0
                && let Some(config) = &config
            {
                capture = doctor::capture(config).await;
            }
            turn = (turn + 1) % CAPTURE;
            let (text, status) = look(port, admin, capture.clone(), as_json && watch, as_json).await;
            if watch && !as_json && std::io::stdout().is_terminal() {
                request::print(b"\x1b[H\x1b[2J");
            }
            let lost = request::print(text.as_bytes());
            if lost != 0 || !watch {
                return Ok(lost.max(status));
            }
            tokio::time::sleep(EVERY).await;
        }
    })
}

async fn look(
    port: u16,
    admin: Option<u16>,
    capture: Vec<String>,
    one_line: bool,
    as_json: bool,
) -> (String, u8) {
    let now = SystemTime::now();
    let (document, status) = match overview::gather(port, admin, capture).await {
        Ok(answers) => {
            let document = overview::document(&answers, now);
            let status = u8::from(document["healthy"] != true);
            (document, status)
        }
        Err(why) => {
            let hint = why.hint();
            if !as_json {
                return (format!("verdict: not reachable: {why}; {hint}\n"), UNREACHABLE);
            }
            (
                json!({"healthy": false, "reachable": false, "error": why.to_string(), "hint": hint}),
                UNREACHABLE,
            )
        }
    };
    let mut text = match (as_json, one_line) {
        (true, true) => document.to_string(),
        (true, false) => serde_json::to_string_pretty(&document).unwrap_or_default(),
        (false, _) => return (overview::screen(&document), status),
    };
    text.push('\n');
    (text, status)
}
