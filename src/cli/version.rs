//! `version` and `--version`: what this build is.
//!
//! Where the Go agent's form is scripted against (no `-o`, `-s`, `-o json`, `-o yaml`) its fields stay, in its order and
//! with nothing beside them: `version` and `tag` are the Istio release whose behaviour this has, and where Go's version
//! stood ([`golang`]) is everything else in one value, as User-Agent headers are written. `full` and `full-json` are ours.

use serde_json::json;

use crate::base::build_info as build;
use crate::base::error::BoxError;
use crate::config::args::Parsed;

/// Prints it in the form asked for.
pub(super) fn run(parsed: &Parsed) -> Result<u8, BoxError> {
    let text = match parsed.or_default(super::VERSION, "output") {
        "" if parsed.is_true(super::VERSION, "short") => {
            format!("client version: {}\n", build::ISTIO_VERSION)
        }
        "" => format!(
            "client version: version.BuildInfo{{Version:{:?}, GitRevision:{:?}, GolangVersion:{:?}, BuildStatus:{:?}, GitTag:{:?}}}\n",
            build::ISTIO_VERSION,
            build::REVISION,
            golang(),
            build::STATUS,
            build::ISTIO_VERSION,
        ),
        "json" => {
            let document = json!({"clientVersion": {
                "version": build::ISTIO_VERSION,
                "revision": build::REVISION,
                "golang_version": golang(),
                "status": build::STATUS,
                "tag": build::ISTIO_VERSION,
            }});
            format!("{document:#}\n")
        }
        "yaml" => format!(
            "clientVersion:\n  golang_version: {}\n  revision: {}\n  status: {}\n  tag: {v}\n  version: {v}\n\n",
            golang(),
            build::REVISION,
            build::STATUS,
            v = build::ISTIO_VERSION,
        ),
        "full" => full(),
        "full-json" => {
            let fields = fields().map(|(name, value)| (name.replace(' ', "_"), value.into()));
            format!("{:#}\n", serde_json::Value::Object(fields.into_iter().collect()))
        }
        _ => return Err("--output must be 'yaml' or 'json', or 'full' or 'full-json'".into()),
    };
    Ok(super::request::print(text.as_bytes()))
}

/// `--version`.
pub(super) fn full() -> String {
    fields().iter().map(|(name, value)| format!("{name}: {value}\n")).collect()
}

fn fields() -> [(&'static str, &'static str); 9] {
    [
        ("product", build::PRODUCT),
        ("version", build::VERSION),
        ("revision", build::REVISION),
        ("status", build::STATUS),
        ("istio", build::ISTIO_VERSION),
        ("crypto", build::CRYPTO),
        ("target", build::TARGET),
        ("libc", build::LIBC),
        ("compiler", build::COMPILER),
    ]
}

/// What stands where the Go agent names its Go.
fn golang() -> String {
    format!(
        "{}; {} {}; {}; {}; {}",
        build::COMPILER,
        build::PRODUCT,
        build::VERSION,
        build::CRYPTO,
        build::TARGET,
        build::LIBC
    )
}
