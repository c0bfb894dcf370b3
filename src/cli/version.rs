//! `version`: what this build is.

use serde_json::json;

use crate::base::build_info as build;
use crate::config::args::Parsed;

/// Prints it in the form asked for.
pub(super) fn run(parsed: &Parsed) -> Result<(), String> {
    let text = match parsed.or_default(super::VERSION, "output") {
        "" if parsed.is_true(super::VERSION, "short") => {
            format!("client version: {}\n", build::ISTIO_VERSION)
        }
        "" => format!(
            "client version: version.BuildInfo{{Version:{:?}, GitRevision:{:?}, GolangVersion:{:?}, BuildStatus:{:?}, GitTag:{:?}}}\n",
            build::ISTIO_VERSION,
            build::REVISION,
            build::COMPILER,
            build::STATUS,
            build::ISTIO_VERSION,
        ),
        "json" => {
            let document = json!({"clientVersion": {
                "version": build::ISTIO_VERSION,
                "revision": build::REVISION,
                "golang_version": build::COMPILER,
                "status": build::STATUS,
                "tag": build::ISTIO_VERSION,
            }});
            format!("{document:#}\n")
        }
        "yaml" => format!(
            "clientVersion:\n  golang_version: {}\n  revision: {}\n  status: {}\n  tag: {v}\n  version: {v}\n\n",
            build::COMPILER,
            build::REVISION,
            build::STATUS,
            v = build::ISTIO_VERSION,
        ),
        _ => return Err("--output must be 'yaml' or 'json'".to_owned()),
    };
    super::request::print(text.as_bytes());
    Ok(())
}
