//! `doctor`: why a proxy does not work here.

use std::path::PathBuf;

use super::{http, request};
use crate::base::error::BoxError;
use crate::base::logging;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::doctor::{self, Inputs};

/// Looks and tells; gives the exit status: 0 healthy, 1 not.
pub(super) fn run(parsed: Parsed, env: &Env) -> Result<u8, BoxError> {
    // What the parts would log stands in the report. Whoever wants both asks for it.
    let mut logs = super::logging_options(&parsed);
    logs.targets = vec!["stderr".to_owned()];
    if logs.output_level.is_empty() {
        logs.output_level = "all:none".to_owned();
    }
    logging::init(&logs)?;
    let port = super::endpoint::given(&parsed)?;
    let json = parsed.is_true(super::DOCTOR, "json");
    let sign = parsed.is_true(super::DOCTOR, "sign");
    let inputs = Inputs { flags: parsed, env: env.clone(), root: PathBuf::from("."), sign, port };
    let report = http::block_on(async { Ok(doctor::examine(inputs).await) })?;
    let out = if json {
        let mut text = serde_json::to_vec_pretty(&report.json()).unwrap_or_default();
        text.push(b'\n');
        text
    } else {
        report.text().into_bytes()
    };
    let lost = request::print(&out);
    Ok(lost.max(report.exit_code()))
}
