//! What a bootstrap is made from.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{ClientTls, Family, HostPort, Node};

/// The tracer of the proxy config; an empty address means no tracer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tracer {
    /// Zipkin, by its collector's `host:port`.
    Zipkin {
        /// `host:port`.
        address: String,
    },
    /// Lightstep, which released Envoys no longer have.
    Lightstep {
        /// `host:port`.
        address: String,
    },
    /// Datadog's agent.
    Datadog {
        /// `host:port`.
        address: String,
    },
    /// Google's; configured by istiod, here only for templates.
    Stackdriver {
        /// Print spans on standard output.
        debug: bool,
        /// 200 unless set.
        max_attributes: i64,
        /// 200 unless set.
        max_annotations: i64,
        /// 200 unless set.
        max_events: i64,
    },
}

/// A gRPC service that Envoy reports to.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RemoteService {
    /// `host:port`.
    pub address: String,
    /// TLS towards it.
    pub tls: Option<ClientTls>,
    /// TCP keepalive towards it.
    pub keepalive: Option<Keepalive>,
}

/// TCP keepalive; members of 0 are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keepalive {
    /// Probes without an answer before the connection counts as dead.
    pub probes: u32,
    /// Idle seconds before the first probe.
    pub time: i64,
    /// Seconds between probes.
    pub interval: i64,
}

impl Keepalive {
    pub(crate) fn json(&self) -> Value {
        let mut inner = Map::new();
        if self.probes > 0 {
            inner.insert("keepalive_probes".into(), json!(self.probes));
        }
        if self.time > 0 {
            inner.insert("keepalive_time".into(), json!(self.time));
        }
        if self.interval > 0 {
            inner.insert("keepalive_interval".into(), json!(self.interval));
        }
        json!({"tcp_keepalive": inner})
    }
}

/// Which stats Envoy keeps beside those that Istio needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatsMatcher {
    /// `inclusionPrefixes`.
    pub prefixes: Vec<String>,
    /// `inclusionSuffixes`.
    pub suffixes: Vec<String>,
    /// `inclusionRegexps`.
    pub regexps: Vec<String>,
}

/// Everything a bootstrap is made from. Defaults are the Go agent's.
#[derive(Debug, Clone)]
pub struct Options {
    /// Who Envoy is.
    pub node: Node,
    /// `configPath`: where the agent's ADS socket is.
    pub config_path: String,
    /// `proxyAdminPort`.
    pub admin_port: i64,
    /// `statusPort`.
    pub status_port: i64,
    /// `discoveryAddress`; only custom templates use it, but there must be a host and a port, or nothing.
    pub discovery_address: String,
    /// `ENVOY_STATUS_PORT`.
    pub envoy_status_port: i64,
    /// `ENVOY_PROMETHEUS_PORT`.
    pub envoy_prometheus_port: i64,
    /// `ENVOY_SECURE_METRICS_PORT`: Envoy's metrics behind mutual TLS.
    pub secure_metrics_port: Option<u16>,
    /// `ENVOY_SECURE_MERGED_METRICS_PORT`: the merged metrics behind mutual TLS.
    pub secure_merged_metrics_port: Option<u16>,
    /// `ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL`.
    pub status_proxy_protocol: bool,
    /// `METRICS_LOCALHOST_ACCESS_ONLY` of `proxyMetadata`.
    pub stats_on_localhost: bool,
    /// `ISTIO_DUAL_STACK`.
    pub dual_stack: bool,
    /// `ISTIO_DELTA_XDS`.
    pub delta_xds: bool,
    /// `PEER_METADATA_DISCOVERY`; unset: as `ENABLE_HBONE` says.
    pub metadata_discovery: Option<bool>,
    /// `--log_as_json`.
    pub log_as_json: bool,
    /// `COMPLIANCE_POLICY` is `fips-140-2`.
    pub fips: bool,
    /// `COMPLIANCE_POLICY`, for the listeners behind mutual TLS.
    pub policy: String,
    /// `HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED`.
    pub strip_fragment: bool,
    /// `EXIT_ON_ZERO_ACTIVE_CONNECTIONS`: Envoy must count active connections.
    pub exit_on_zero_connections: bool,
    /// `DRAIN_COUNT_REQUESTS`: and requests.
    pub drain_counts_requests: bool,
    /// `runtimeValues`.
    pub runtime_values: BTreeMap<String, String>,
    /// `ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS` of `proxyMetadata`.
    pub max_connections: Option<String>,
    /// `extraStatTags`.
    pub extra_stat_tags: Vec<String>,
    /// `proxyStatsMatcher`.
    pub stats_matcher: StatsMatcher,
    /// `statsCompression`.
    pub stats_compression: bool,
    /// `WORKLOAD_IDENTITY_SOCKET_FILE`.
    pub workload_socket_file: String,
    /// The tracer.
    pub tracer: Option<Tracer>,
    /// `tracing.tlsSettings`.
    pub tracing_tls: Option<ClientTls>,
    /// `envoyMetricsService`, or the address of the deprecated `envoyMetricsServiceAddress`.
    pub metrics_service: Option<RemoteService>,
    /// `envoyAccessLogService`.
    pub access_log_service: Option<RemoteService>,
    /// `statsdUdpAddress`, resolved.
    pub statsd_address: String,
    /// `--outlierLogPath`.
    pub outlier_log_path: String,
    /// `HOST_IP`, for `$(HOST_IP)` in collector addresses.
    pub host_ip: String,
    /// `--stsPort`; only metadata and custom templates.
    pub sts_port: i64,
    /// `XDS_ROOT_CA`; only custom templates.
    pub xds_root_cert: String,
    /// The effective proxy config in its JSON form; only custom templates.
    pub proxy_config: Value,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            node: Node::default(),
            config_path: "./etc/istio/proxy".to_owned(),
            admin_port: 15000,
            status_port: 15020,
            discovery_address: "istiod.istio-system.svc:15012".to_owned(),
            envoy_status_port: 15021,
            envoy_prometheus_port: 15090,
            secure_metrics_port: None,
            secure_merged_metrics_port: None,
            status_proxy_protocol: false,
            stats_on_localhost: false,
            dual_stack: false,
            delta_xds: true,
            metadata_discovery: None,
            log_as_json: false,
            fips: false,
            policy: String::new(),
            strip_fragment: true,
            exit_on_zero_connections: false,
            drain_counts_requests: false,
            runtime_values: BTreeMap::new(),
            max_connections: None,
            extra_stat_tags: Vec::new(),
            stats_matcher: StatsMatcher::default(),
            stats_compression: true,
            workload_socket_file: "socket".to_owned(),
            tracer: None,
            tracing_tls: None,
            metrics_service: None,
            access_log_service: None,
            statsd_address: String::new(),
            outlier_log_path: String::new(),
            host_ip: String::new(),
            sts_port: 0,
            xds_root_cert: String::new(),
            proxy_config: Value::Null,
        }
    }
}

/// Why there is no bootstrap.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// An address is not `host:port`.
    #[error("unable to parse {name} address {address:?}: {reason}")]
    Address {
        /// What it is the address of.
        name: &'static str,
        /// As given.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// TLS that could not verify the server.
    #[error(
        "{field}: mode {mode} has no caCertificates, so Envoy would refuse its configuration; name the file of the \
         server's CA, or set insecureSkipVerify to trust any server"
    )]
    NoCa {
        /// Where it stands in the proxy config.
        field: &'static str,
        /// `SIMPLE` or `MUTUAL`.
        mode: &'static str,
    },
    /// Stackdriver without a project.
    #[error("unable to process Stackdriver tracer: missing GCP Project")]
    NoGcpProject,
}

impl Options {
    /// Whether Envoy finds out about its peers from istiod: HBONE, waypoints.
    #[must_use]
    pub fn discovery(&self) -> bool {
        self.waypoint() || (self.delta_xds && self.wants_discovery())
    }

    // A cluster of the proxy's own workload, for zone-aware routing.
    pub(super) fn self_discovery(&self) -> bool {
        self.node.typed.get("ENABLE_SELF_DISCOVERY").is_some_and(|v| v == "true")
    }

    pub(super) fn waypoint(&self) -> bool {
        self.node.kind() == "waypoint"
    }

    pub(super) fn wants_discovery(&self) -> bool {
        self.metadata_discovery.unwrap_or(self.node.hbone)
    }

    pub(super) fn xds_type(&self) -> &'static str {
        if self.delta_xds || self.waypoint() { "DELTA_GRPC" } else { "GRPC" }
    }

    pub(super) fn family(&self) -> Family {
        Family::of(&self.node.addresses, self.dual_stack)
    }

    // The overload manager's limit: proxyMetadata, else the old runtime key, else practically none.
    pub(super) fn max_connections(&self) -> i64 {
        let runtime = || self.runtime_values.get("overload.global_downstream_max_connections");
        // Envoy refuses a limit below 1.
        let number = |text: &String| text.parse::<i64>().ok().filter(|n| *n > 0);
        self.max_connections
            .as_ref()
            .and_then(number)
            .or_else(|| runtime().and_then(number))
            .unwrap_or(i64::from(i32::MAX))
    }

    // Nothing unless it is an object: anything else keeps Envoy from starting.
    pub(super) fn load_stats(&self) -> Option<Value> {
        let text = self.node.raw_text("LOAD_STATS_CONFIG_JSON").filter(|t| !t.is_empty())?;
        match serde_json::from_str::<Value>(text) {
            Ok(value) if value.is_object() => Some(value),
            Ok(_) => {
                tracing::warn!(
                    "ISTIO_META_LOAD_STATS_CONFIG_JSON is not a JSON object and is left out: {text}"
                );
                None
            }
            Err(error) => {
                tracing::warn!("ISTIO_META_LOAD_STATS_CONFIG_JSON is not JSON and is left out: {error}");
                None
            }
        }
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        // Only templates show it, and none without an address.
        if !self.discovery_address.is_empty() {
            HostPort::parts("pilot_grpc_address", &self.discovery_address, &self.host_ip)?;
        }
        if !self.delta_xds && !self.waypoint() && self.wants_discovery() {
            tracing::warn!("metadata discovery needs delta xDS and is off, because ISTIO_DELTA_XDS is false");
        }
        if let Some(Tracer::Stackdriver { .. }) = self.tracer
            && !self.node.platform.contains_key("gcp_project")
        {
            return Err(Error::NoGcpProject);
        }
        Ok(())
    }
}
