//! What is said of capture rules; the agent itself makes none.

use super::Sources;
use crate::config::env::var;

/// What a look at the rules needs to know.
#[derive(Debug, Clone)]
pub(crate) struct Capture {
    /// Why there are none, where that is meant.
    pub none: Option<String>,
    /// Where programs are.
    pub path: String,
    /// On Kubernetes.
    pub in_pod: bool,
}

/// Says it.
#[must_use]
pub(crate) fn capture(config: &Sources) -> Capture {
    let env = config.settings.env();
    let none = if config.node_type != "sidecar" {
        Some(format!("a {} captures nothing", config.node_type))
    } else if env.get("ISTIO_META_INTERCEPTION_MODE") == Some("NONE") {
        Some("interception mode NONE: nothing is captured".to_owned())
    } else {
        None
    };
    let path = env.get("PATH").unwrap_or("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    let in_pod = !config.settings.text(var::KUBERNETES_SERVICE_HOST).is_empty();
    Capture { none, path: path.to_owned(), in_pod }
}
