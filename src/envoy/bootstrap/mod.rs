//! What Envoy is told before it starts: a function from [`Options`] to JSON.
//!
//! Promises:
//! - Pure: no file, variable, clock or socket is read; what is needed stands in [`Options`].
//! - The result is always JSON that a stock Envoy's parser takes, whatever the inputs hold: it is built
//!   from values, never by inserting text into text. Where an input cannot become a valid bootstrap
//!   (TLS without anything to verify the server with), [`generate`] refuses with one line that names it.
//! - Members come in the order of the Go agent's file, so that two of them can be compared as text.
//!
//! [`template`] renders an operator's own template (Go's `text/template` syntax) with the same inputs
//! ([`params`]); [`grpc`] makes the bootstrap of proxyless gRPC applications; [`mod@write`] alone touches the disk. Uses `base` only.

mod address;
mod clusters;
pub mod duration;
pub mod grpc;
mod listeners;
pub mod params;
pub mod path;
mod stats;
pub mod template;
mod tls;
pub(crate) mod tracer;
pub mod write;

use std::collections::BTreeMap;

pub use address::{Family, HostPort};
use serde_json::{Map, Value, json};
pub use tls::{ClientTls, TlsMode};
pub use tracer::TOKEN_FILE;

/// The name of Envoy's static cluster for the agent's ADS socket.
pub(crate) const XDS_CLUSTER: &str = "xds-grpc";
/// The name of Envoy's static cluster for the workload SDS socket.
pub(crate) const SDS_CLUSTER: &str = "sds-grpc";

/// Where Envoy runs, as far as known; empty members are left out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Locality {
    /// Region.
    pub region: String,
    /// Zone.
    pub zone: String,
    /// Sub-zone.
    pub sub_zone: String,
}

impl Locality {
    pub(crate) fn json(&self) -> Value {
        let parts = [("region", &self.region), ("zone", &self.zone), ("sub_zone", &self.sub_zone)];
        parts.into_iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| (k.to_owned(), json!(v))).collect()
    }
}

/// Who Envoy says it is.
#[derive(Debug, Clone, Default)]
pub struct Node {
    /// `<type>~<ip>~<name>.<namespace>~<domain>`.
    pub id: String,
    /// Envoy's service cluster.
    pub cluster: String,
    /// Where it runs.
    pub locality: Locality,
    /// The fields that Istio gives a meaning, without the empty ones.
    pub typed: Map<String, Value>,
    /// Everything that was given as metadata, also what no field stands for; shows where `typed` has no
    /// member of the name.
    pub raw: Map<String, Value>,
    /// Metadata `LABELS`.
    pub labels: BTreeMap<String, String>,
    /// Metadata `ANNOTATIONS`.
    pub annotations: BTreeMap<String, String>,
    /// The addresses of the node without repetitions, its own first.
    pub addresses: Vec<String>,
    /// Platform metadata (`gcp_project` and so on).
    pub platform: BTreeMap<String, String>,
    /// Metadata `ENABLE_HBONE`.
    pub hbone: bool,
}

impl Node {
    /// The metadata that Envoy sends: typed fields, then raw members of other names; sorted.
    #[must_use]
    pub fn metadata(&self) -> Map<String, Value> {
        let mut all: BTreeMap<&String, &Value> = self.raw.iter().collect();
        all.extend(self.typed.iter());
        all.into_iter().map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    /// `sidecar`, `router`, `waypoint`: the first part of the id.
    #[must_use]
    pub fn kind(&self) -> &str {
        self.id.split('~').next().unwrap_or_default()
    }

    /// A metadata value that is text.
    #[must_use]
    pub fn raw_text(&self, key: &str) -> Option<&str> {
        self.raw.get(key).and_then(Value::as_str)
    }

    fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.get(key).map(String::as_str).filter(|v| !v.is_empty())
    }
}

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
    /// `discoveryAddress`; only custom templates use it, but it must be `host:port`.
    pub discovery_address: String,
    /// `ENVOY_STATUS_PORT`.
    pub envoy_status_port: i64,
    /// `ENVOY_PROMETHEUS_PORT`.
    pub envoy_prometheus_port: i64,
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
    /// `HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED`.
    pub strip_fragment: bool,
    /// `EXIT_ON_ZERO_ACTIVE_CONNECTIONS`: Envoy must count active connections.
    pub exit_on_zero_connections: bool,
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
            status_proxy_protocol: false,
            stats_on_localhost: false,
            dual_stack: false,
            delta_xds: true,
            metadata_discovery: None,
            log_as_json: false,
            fips: false,
            strip_fragment: true,
            exit_on_zero_connections: false,
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

    fn waypoint(&self) -> bool {
        self.node.kind() == "waypoint"
    }

    fn wants_discovery(&self) -> bool {
        self.metadata_discovery.unwrap_or(self.node.hbone)
    }

    fn xds_type(&self) -> &'static str {
        if self.delta_xds || self.waypoint() { "DELTA_GRPC" } else { "GRPC" }
    }

    fn family(&self) -> Family {
        Family::of(&self.node.addresses, self.dual_stack)
    }

    // The overload manager's limit: proxyMetadata, else the old runtime key, else none to speak of.
    fn max_connections(&self) -> i64 {
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
    fn load_stats(&self) -> Option<Value> {
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

    fn check(&self) -> Result<(), Error> {
        HostPort::parse("pilot_grpc_address", &self.discovery_address, &self.host_ip)?;
        if !self.delta_xds && !self.waypoint() && self.wants_discovery() {
            tracing::warn!("metadata discovery needs delta xDS and is off, because ISTIO_DELTA_XDS is false");
        }
        if let Some(Tracer::Stackdriver { .. }) = self.tracer
            && self.node.platform.get("gcp_project").is_none_or(String::is_empty)
        {
            return Err(Error::NoGcpProject);
        }
        Ok(())
    }
}

/// The bootstrap of Envoy.
///
/// # Errors
/// When an address is not `host:port` or TLS towards a collector has nothing to verify it with.
pub fn generate(options: &Options) -> Result<Value, Error> {
    options.check()?;
    let family = options.family();
    let mut all = Map::new();
    let mut put = |key: &str, value: Value| all.insert(key.to_owned(), value);
    put("application_log_config", json!({"log_format": log_format(options.log_as_json)}));
    put(
        "node",
        json!({
            "id": options.node.id,
            "cluster": options.node.cluster,
            "locality": options.node.locality.json(),
            "metadata": options.node.metadata(),
        }),
    );
    put(
        "layered_runtime",
        json!({"layers": [
            {"name": "global config", "static_layer": runtime(options)},
            {"name": "admin", "admin_layer": {}},
        ]}),
    );
    put("bootstrap_extensions", extensions(options.discovery()));
    let intervals = stats::Intervals::of(&options.node);
    if let Some(flush) = intervals.flush {
        put("stats_flush_interval", json!(flush));
    }
    if let Some(eviction) = intervals.eviction {
        put("stats_eviction_interval", json!(eviction));
    }
    put("stats_config", stats::config(options));
    put("admin", admin(family.localhost(), options.admin_port));
    put("dynamic_resources", dynamic_resources(options.xds_type()));
    put(
        "static_resources",
        json!({"clusters": clusters::all(options)?, "listeners": listeners::all(options, &family)}),
    );
    put("overload_manager", overload_manager(options.max_connections()));
    if let Some(section) = tracer::section(options) {
        put("tracing", section);
    }
    let sinks = stats::sinks(options)?;
    if !sinks.is_empty() {
        put("stats_sinks", Value::Array(sinks));
    }
    if let Some(manager) = cluster_manager(options) {
        put("cluster_manager", manager);
    }
    put("deferred_stat_options", json!({"enable_deferred_creation_stats": true}));
    Ok(Value::Object(all))
}

fn log_format(as_json: bool) -> Value {
    if as_json {
        json!({"json_format": {
            "time": "%Y-%m-%dT%T.%fZ", "level": "%l", "scope": "envoy %n", "msg": "%j", "caller": "%g:%#", "thread": "%t",
        }})
    } else {
        json!({"text_format": "%Y-%m-%dT%T.%fZ\t%l\tenvoy %n %g:%#\t%v\tthread=%t"})
    }
}

/// The static runtime layer; the JSON types are the Go agent's.
pub(crate) fn runtime(options: &Options) -> Map<String, Value> {
    let mut layer = Map::new();
    let mut put = |key: &str, value: Value| layer.insert(key.to_owned(), value);
    put("re2.max_program_size.error_level", json!("32768"));
    put(
        "envoy.deprecated_features:envoy.config.listener.v3.Listener.hidden_envoy_deprecated_use_original_dst",
        json!(true),
    );
    put("envoy.reloadable_features.http_reject_path_with_fragment", json!(false));
    put("envoy.reloadable_features.fixed_heap_use_allocated", json!(true));
    put("envoy.reloadable_features.coalesce_lb_rebuilds_on_batch_update", json!(false));
    if options.fips {
        put("envoy.reloadable_features.google_grpc_disable_tls_13", json!(true));
    }
    if !options.strip_fragment {
        let key = "envoy.reloadable_features.http_strip_fragment_from_path_unsafe_if_disabled";
        put(key, json!("false"));
    }
    for (key, text) in &options.runtime_values {
        match text.as_str() {
            "" => drop(layer.shift_remove(key)),
            "true" => drop(layer.insert(key.clone(), json!(true))),
            "false" => drop(layer.insert(key.clone(), json!(false))),
            _ => drop(layer.insert(key.clone(), json!(text))),
        }
    }
    layer
}

fn extensions(discovery: bool) -> Value {
    let typed = |name: &str, type_url: &str, value: Value| {
        json!({"name": name, "typed_config": {
            "@type": "type.googleapis.com/udpa.type.v1.TypedStruct",
            "type_url": format!("type.googleapis.com/{type_url}"),
            "value": value,
        }})
    };
    let mut list = Vec::new();
    if discovery {
        let value = json!({"config_source": {"ads": {}}});
        list.push(typed("metadata_discovery", "istio.workload.BootstrapExtension", value));
    }
    list.push(typed(
        "envoy.bootstrap.internal_listener",
        "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
        json!({"buffer_size_kb": 64}),
    ));
    Value::Array(list)
}

fn admin(localhost: &str, port: i64) -> Value {
    json!({
        "access_log": [typed(
            "envoy.access_loggers.file",
            "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            json!({"path": "/dev/null"}),
        )],
        "profile_path": "/var/lib/istio/data/envoy.prof",
        "address": {"socket_address": {"address": localhost, "port_value": port}},
    })
}

fn dynamic_resources(api_type: &str) -> Value {
    let ads = json!({"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"});
    json!({
        "lds_config": ads,
        "cds_config": ads,
        "ads_config": {
            "api_type": api_type,
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
            "grpc_services": [{"envoy_grpc": {"cluster_name": XDS_CLUSTER}}],
        },
    })
}

fn overload_manager(limit: i64) -> Value {
    json!({"resource_monitors": [typed(
        "envoy.resource_monitors.global_downstream_max_connections",
        "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
        json!({"max_active_downstream_connections": limit}),
    )]})
}

fn cluster_manager(options: &Options) -> Option<Value> {
    let load_stats = options.load_stats();
    if options.outlier_log_path.is_empty() && load_stats.is_none() {
        return None;
    }
    let mut manager = Map::new();
    manager.insert("enable_deferred_cluster_creation".into(), json!(true));
    if !options.outlier_log_path.is_empty() {
        manager.insert("outlier_detection".into(), json!({"event_log_path": options.outlier_log_path}));
    }
    if let Some(config) = load_stats {
        manager.insert("load_stats_config".into(), config);
    }
    Some(Value::Object(manager))
}

/// `{"name": .., "typed_config": {"@type": ..}}` with the members of `config` behind the type.
pub(crate) fn typed(name: &str, type_name: &str, config: Value) -> Value {
    let mut inner = Map::new();
    inner.insert("@type".into(), json!(format!("type.googleapis.com/{type_name}")));
    if let Value::Object(members) = config {
        inner.extend(members);
    }
    json!({"name": name, "typed_config": inner})
}
