//! What Envoy and proxyless applications are told: gathers the node's facts and renders.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use crate::base::place::{self, Mode as FileMode};
use crate::config::env::var;
use crate::config::parts::{self, Error};
use crate::config::{Config, args, bootstrap as from_config, node, pod, release};
use crate::envoy;
use crate::envoy::bootstrap::{self, Locality, Node, grpc};
use crate::secrets::probe::Mode;

/// The node's addresses, `INSTANCE_IP` first.
pub fn addresses(config: &Config) -> Vec<String> {
    config.addresses.clone()
}

/// No address is IPv4, and there is one.
pub fn all_ipv6(addresses: &[String]) -> bool {
    let mut known = addresses.iter().filter_map(|a| a.parse::<std::net::IpAddr>().ok()).peekable();
    known.peek().is_some() && known.all(|a| a.is_ipv6())
}

/// Who this Envoy is. `credential_socket`: whether a third party serves credentials.
pub async fn node(
    config: &Config,
    addresses: &[String],
    mode: Mode,
    credential_socket: bool,
) -> Result<Node, Error> {
    let s = &config.settings;
    let proxy = &config.mesh.proxy;
    let labels = pod::read(&config.path(pod::LABELS));
    let annotations = pod::read(&config.path(pod::ANNOTATIONS));
    let platform = config.platform().await;
    let cluster_name = from_config::cluster_name(proxy);
    let proxy_config = config.mesh.to_json();
    let pilot_san = from_config::istiod_san(proxy);
    let discovery = s.env().get("PEER_METADATA_DISCOVERY");
    let inputs = node::Inputs {
        env: s.env().map(),
        kind: &config.node_type,
        addresses,
        domain: &config.domain,
        id: config.id.as_deref(),
        proxy_config: &proxy_config,
        proxy_metadata: &proxy.proxy_metadata,
        cluster_name: &cluster_name,
        pilot_san: pilot_san.as_deref(),
        labels: labels.as_ref(),
        annotations: annotations.as_ref(),
        platform: &platform,
        credential_socket,
        external_sds: mode == Mode::External,
        sts_port: config.sts_port(),
        outlier_log_path: config.flags.or_default(args::PROXY, "outlierLogPath"),
        envoy_status_port: s.int(var::ENVOY_STATUS_PORT),
        envoy_prometheus_port: s.int(var::ENVOY_PROMETHEUS_PORT),
        secure_ports: release::SECURE_PORTS.map(|key| s.int(key)),
        dns_address: s.env().get("DNS_PROXY_ADDR").unwrap_or_default(),
        release: config.release,
        exit_on_zero_connections: s.flag(var::EXIT_ON_ZERO_ACTIVE_CONNECTIONS),
        metadata_discovery: discovery.map(|v| crate::config::go::boolean(v).unwrap_or(false)),
        skip_deprecated_logs: s.flag(var::ENVOY_SKIP_DEPRECATED_LOGS),
        workload_socket_file: s.text(var::WORKLOAD_IDENTITY_SOCKET_FILE),
    };
    let mut node = node::build(&inputs)
        .map_err(|e| Error::new(format!("failed to generate bootstrap metadata: {e}")))?;
    // Of releases up to 1.4, below what labels and the platform say.
    if let Some(zone) = config.flags.get("availabilityZone")
        && node.locality == Locality::default()
    {
        zone.clone_into(&mut node.locality.zone);
    }
    Ok(node)
}

/// For whom configuration is: this node with this account in this mesh, and this very Envoy.
pub fn owner(config: &Config, node: &Node) -> String {
    let s = &config.settings;
    let binary = &config.mesh.proxy.binary_path;
    // Asking Envoy for its version takes a process; its file is another one after an upgrade.
    let envoy = std::fs::metadata(binary).map_or_else(
        |_| "unknown".to_owned(),
        |meta| format!("{} {}.{}", meta.len(), meta.mtime(), meta.mtime_nsec()),
    );
    [
        &node.id,
        &node.cluster,
        s.text(var::POD_NAMESPACE),
        s.text(var::SERVICE_ACCOUNT),
        s.text(var::TRUST_DOMAIN),
        &config.mesh.proxy.discovery_address,
        binary,
        &envoy,
    ]
    .join("\n")
}

/// Writes the bootstrap of proxyless applications, if one is wanted.
pub fn write_grpc(config: &Config, node: &Node) -> Result<(), Error> {
    let Some(path) = config.settings.some_text(var::GRPC_XDS_BOOTSTRAP) else { return Ok(()) };
    let document =
        grpc::generate(node, &config.mesh.proxy.config_path, config.settings.text(var::OUTPUT_CERTS));
    let text = serde_json::to_vec_pretty(&document).unwrap_or_default();
    place::put(&config.path(path), &text, FileMode::Exact(0o644)).map_err(|e| {
        Error::new(format!("failed to write the gRPC bootstrap: {}", crate::base::error::chain(&e)))
    })
}

/// Renders Envoy's bootstrap, anew for each epoch.
pub struct Bootstrap {
    config: Arc<Config>,
    node: Node,
}

impl Bootstrap {
    /// Holds the node.
    pub fn new(config: Arc<Config>, node: Node) -> Self {
        Self { config, node }
    }
}

impl envoy::Bootstrap for Bootstrap {
    fn render(&mut self) -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
        let options = self.config.bootstrap_options(self.node.clone());
        if let Some(token) = from_config::lightstep_token(&self.config.mesh.proxy) {
            let path = self.config.config_path().join(bootstrap::TOKEN_FILE);
            // Envoy may run as another user and reads it by itself, so the mode is the Go agent's.
            place::put(&path, token.as_bytes(), FileMode::Masked(0o666))?;
        }
        let template = parts::envoy::template(&self.config);
        Ok(from_config::render(&options, template.as_deref(), self.config.settings.env().map())?)
    }
}
