//! Static clusters: the agent's own sockets, and collectors that are known before istiod is.

use serde_json::{Map, Value, json};

use super::tls::Use;
use super::{Error, HostPort, Options, RemoteService, Tracer, XDS_CLUSTER, tls, typed};

/// The folder of the workload SDS socket.
const WORKLOAD_UDS: &str = "./var/run/secrets/workload-spiffe-uds";
/// The agent's SDS socket for certificates in files, when the workload socket is somebody else's.
pub(crate) const FILES_UDS: &str = "./var/run/secrets/credential-uds/files-socket";

struct Cluster(Map<String, Value>);

impl Cluster {
    fn new(name: &str, kind: &str, connect_timeout: &str, address: Value) -> Self {
        let cluster = json!({
            "name": name,
            // Ends so because the tag regex of cluster names needs it.
            "alt_stat_name": format!("{name};"),
            "type": kind,
            "connect_timeout": connect_timeout,
            "lb_policy": "ROUND_ROBIN",
            "load_assignment": {"cluster_name": name, "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address}}]},
            ]},
        });
        let Value::Object(members) = cluster else { unreachable!("json! of an object") };
        Self(members)
    }

    fn local(name: &str, host: &str, port: i64) -> Self {
        let address = json!({"socket_address": {"protocol": "TCP", "address": host, "port_value": port}});
        Self::new(name, "STATIC", "0.250s", address)
    }

    fn pipe(name: &str, path: &str) -> Self {
        Self::new(name, "STATIC", "1s", json!({"pipe": {"path": path}})).http2()
    }

    fn dns(name: &str, address: &HostPort) -> Self {
        Self::new(name, "STRICT_DNS", "1s", json!({"socket_address": address.json()}))
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.0.insert(key.to_owned(), value);
        self
    }

    fn http2(self) -> Self {
        let name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        let options = json!({
            "@type": format!("type.googleapis.com/{name}"),
            "explicit_http_config": {"http2_protocol_options": {}},
        });
        self.with("typed_extension_protocol_options", json!({name: options}))
    }

    fn maybe(self, key: &str, value: Option<Value>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }
}

/// All static clusters, in the order of the Go agent's file.
pub(crate) fn all(options: &Options) -> Result<Vec<Value>, Error> {
    let localhost = options.family().localhost();
    let mut list = vec![
        Cluster::local("prometheus_stats", localhost, options.admin_port),
        Cluster::local("agent", localhost, options.status_port),
        Cluster::pipe(super::SDS_CLUSTER, &format!("{WORKLOAD_UDS}/{}", options.workload_socket_file)),
    ];
    if options.node.raw.contains_key("file-credential") {
        list.push(Cluster::pipe("sds-files-grpc", FILES_UDS));
    }
    list.push(xds(&options.config_path));
    list.extend(tracer(options)?);
    let service = |service: &Option<RemoteService>, name, used| match service {
        Some(service) if !service.address.is_empty() => remote(options, service, name, used).map(Some),
        _ => Ok(None),
    };
    list.extend(service(&options.metrics_service, "envoy_metrics_service_address", METRICS)?);
    list.extend(service(&options.access_log_service, "envoy_accesslog_service_address", ACCESS_LOG)?);
    if options.self_discovery() {
        list.push(own());
    }
    Ok(list.into_iter().map(|c| Value::Object(c.0)).collect())
}

pub(crate) const METRICS: Use =
    Use { field: "envoyMetricsService.tlsSettings", sni: "envoy_metrics_service", h2: true };
pub(crate) const ACCESS_LOG: Use =
    Use { field: "envoyAccessLogService.tlsSettings", sni: "envoy_accesslog_service", h2: true };
pub(crate) const TRACER: Use = Use { field: "tracing.tlsSettings", sni: "tracer", h2: true };

/// The cluster of the proxy's own workload: istiod tells its endpoints, and Envoy from them in which zone
/// it is and how many others there are.
pub(crate) const OWN: &str = "local_cluster";

fn own() -> Cluster {
    let policy = typed(
        "envoy.load_balancing_policies.least_request",
        "envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest",
        json!({"locality_lb_config": {"zone_aware_lb_config": {"min_cluster_size": "1"}}}),
    );
    let cluster = json!({
        "name": OWN,
        "alt_stat_name": format!("{OWN};"),
        "type": "EDS",
        "connect_timeout": "1s",
        "eds_cluster_config": {
            "eds_config": {"ads": {}, "resource_api_version": "V3"},
            "service_name": OWN,
        },
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    });
    let Value::Object(members) = cluster else { unreachable!("json! of an object") };
    Cluster(members)
}

fn xds(config_path: &str) -> Cluster {
    let thresholds = |priority: &str| {
        json!({
            "priority": priority,
            "max_connections": 100_000,
            "max_pending_requests": 100_000,
            "max_requests": 100_000,
        })
    };
    Cluster::pipe(XDS_CLUSTER, &format!("{config_path}/XDS"))
        .with("circuit_breakers", json!({"thresholds": [thresholds("DEFAULT"), thresholds("HIGH")]}))
        .with("upstream_connection_options", json!({"tcp_keepalive": {"keepalive_time": 300}}))
        .with("max_requests_per_connection", json!(1))
}

fn tracer(options: &Options) -> Result<Option<Cluster>, Error> {
    let Some(tracer) = &options.tracer else { return Ok(None) };
    let (name, address, parse_name, h2) = match tracer {
        Tracer::Zipkin { address } => ("zipkin", address, "zipkin", false),
        Tracer::Lightstep { address } => ("lightstep", address, "lightstep", true),
        Tracer::Datadog { address } => ("datadog_agent", address, "datadog", false),
        Tracer::Stackdriver { .. } => return Ok(None),
    };
    if address.is_empty() {
        return Ok(None);
    }
    let address = HostPort::parse(parse_name, address, &options.host_ip)?;
    let socket = match &options.tracing_tls {
        Some(settings) => tls::socket(settings, Use { h2, ..TRACER })?,
        None => None,
    };
    let mut cluster = Cluster::dns(name, &address).maybe("transport_socket", socket);
    if h2 {
        cluster = cluster.http2();
    }
    cluster = cluster
        .with("respect_dns_ttl", json!(true))
        .with("dns_lookup_family", json!(options.family().lookup()));
    if name == "zipkin" {
        cluster = cluster.with("dns_refresh_rate", json!("30s"));
    }
    Ok(Some(cluster))
}

fn remote(
    options: &Options,
    service: &RemoteService,
    address_name: &'static str,
    used: Use,
) -> Result<Cluster, Error> {
    let address = HostPort::parse(address_name, &service.address, &options.host_ip)?;
    let socket = match &service.tls {
        Some(settings) => tls::socket(settings, used)?,
        None => None,
    };
    Ok(Cluster::dns(used.sni, &address)
        .maybe("transport_socket", socket)
        .maybe("upstream_connection_options", service.keepalive.as_ref().map(super::Keepalive::json))
        .http2()
        .with("respect_dns_ttl", json!(true))
        .with("dns_lookup_family", json!(options.family().lookup())))
}
