//! Wasm modules.

use std::path::PathBuf;
use std::time::Duration;

use super::Sources;
use crate::config::env::var;
use crate::fetch::Proxies;
use crate::wasm;

/// Where modules go; whoever deploys the agent mounts it.
const FOLDER: &str = "/var/lib/istio/data";
const HOUR: Duration = Duration::from_secs(3600);
const LONGEST: u64 = 256 << 20;

/// The converter; `None` when extension configs pass as they are.
#[must_use]
pub(crate) fn converter(config: &Sources) -> Option<wasm::Config> {
    let s = &config.settings;
    if !s.flag(var::ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION) {
        return None;
    }
    let or = |value: Duration, default| if value.is_zero() { default } else { value };
    Some(wasm::Config {
        dir: FOLDER.into(),
        expiry: or(s.duration(var::WASM_MODULE_EXPIRY), 24 * HOUR),
        purge_interval: or(s.duration(var::WASM_PURGE_INTERVAL), HOUR),
        http_timeout: s.duration(var::WASM_HTTP_REQUEST_TIMEOUT),
        http_attempts: u32::try_from(s.int(var::WASM_HTTP_REQUEST_MAX_RETRIES)).unwrap_or(0),
        insecure: match s.text(var::WASM_INSECURE_REGISTRIES) {
            "" => Vec::new(),
            list => list.split(',').map(ToOwned::to_owned).collect(),
        },
        max_size: u64::try_from(s.int(var::ISTIO_WASM_MAX_BINARY_SIZE_BYTES)).unwrap_or(LONGEST),
        credentials: credentials(config),
        proxies: Proxies {
            http: super::istiod::proxy(config, "HTTP_PROXY"),
            https: super::istiod::proxy(config, "HTTPS_PROXY"),
        },
    })
}

// In the order in which container tools look for them.
fn credentials(config: &Sources) -> Vec<PathBuf> {
    let s = &config.settings;
    let home = s.env().get("HOME").filter(|home| !home.is_empty()).map(|home| format!("{home}/.docker"));
    let docker = s.some_text(var::DOCKER_CONFIG).map(ToOwned::to_owned).or(home);
    let docker = docker.map(|folder| format!("{folder}/config.json"));
    let named = s.some_text(var::REGISTRY_AUTH_FILE).map(ToOwned::to_owned);
    let runtime = s.some_text(var::XDG_RUNTIME_DIR).map(|folder| format!("{folder}/containers/auth.json"));
    [docker, named, runtime].into_iter().flatten().map(|path| config.path(path)).collect()
}
