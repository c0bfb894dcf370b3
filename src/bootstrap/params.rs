//! What a custom template can insert: the names and forms that templates for the Go agent use.
//!
//! "JSON text" is ready to be inserted as it is. What does not apply is absent: it counts as false.

use std::collections::BTreeMap;

use serde_json::{Value as Json, json};

use super::template::{Record, Value, capital, go_json};
use super::{Error, HostPort, Keepalive, Options, Tracer, clusters, runtime, stats, tls, tracer};
use crate::proto::schema::ISTIO_MESH_V1ALPHA1_PROXYCONFIG as PROXY;

/// Metadata fields as templates name them.
const METADATA: &[(&str, &str)] = &[
    ("PROXY_CONFIG", "ProxyConfig"),
    ("ISTIO_VERSION", "IstioVersion"),
    ("ISTIO_REVISION", "IstioRevision"),
    ("LABELS", "Labels"),
    ("STATIC_LABELS", "StaticLabels"),
    ("ANNOTATIONS", "Annotations"),
    ("INSTANCE_IPS", "InstanceIPs"),
    ("NAME", "InstanceName"),
    ("NAMESPACE", "Namespace"),
    ("SERVICE_ACCOUNT", "ServiceAccount"),
    ("NODE_NAME", "NodeName"),
    ("WORKLOAD_NAME", "WorkloadName"),
    ("OWNER", "Owner"),
    ("INTERCEPTION_MODE", "InterceptionMode"),
    ("MESH_ID", "MeshID"),
    ("CLUSTER_ID", "ClusterID"),
    ("NETWORK", "Network"),
    ("APP_CONTAINERS", "AppContainers"),
    ("ISTIO_PROXY_SHA", "IstioProxySHA"),
    ("REQUESTED_NETWORK_VIEW", "RequestedNetworkView"),
    ("POD_PORTS", "PodPorts"),
    ("GENERATOR", "Generator"),
    ("HTTP_PROXY_PORT", "HTTPProxyPort"),
    ("IDLE_TIMEOUT", "IdleTimeout"),
    ("HTTP10", "HTTP10"),
    ("BASE", "CertBaseDir"),
    ("AUTO_REGISTER_GROUP", "AutoRegisterGroup"),
    ("WORKLOAD_ENTRY", "WorkloadEntry"),
    ("UNPRIVILEGED_POD", "UnprivilegedPod"),
    ("CLOUDRUN_ADDR", "CloudrunAddr"),
    ("TLS_SERVER_CERT_CHAIN", "TLSServerCertChain"),
    ("TLS_SERVER_KEY", "TLSServerKey"),
    ("TLS_SERVER_ROOT_CERT", "TLSServerRootCert"),
    ("TLS_CLIENT_CERT_CHAIN", "TLSClientCertChain"),
    ("TLS_CLIENT_KEY", "TLSClientKey"),
    ("TLS_CLIENT_ROOT_CERT", "TLSClientRootCert"),
    ("DNS_CAPTURE", "DNSCapture"),
    ("DNS_AUTO_ALLOCATE", "DNSAutoAllocate"),
    ("ENABLE_HBONE", "EnableHBONE"),
    ("DISABLE_HBONE_SEND", "DisableHBONESend"),
    ("INBOUND_LISTENER_EXACT_BALANCE", "InboundListenerExactBalance"),
    ("OUTBOUND_LISTENER_EXACT_BALANCE", "OutboundListenerExactBalance"),
    ("PLATFORM_METADATA", "PlatformMetadata"),
    ("STS_PORT", "StsPort"),
    ("ENVOY_STATUS_PORT", "EnvoyStatusPort"),
    ("ENVOY_PROMETHEUS_PORT", "EnvoyPrometheusPort"),
    ("EXIT_ON_ZERO_ACTIVE_CONNECTIONS", "ExitOnZeroActiveConnections"),
    ("METADATA_DISCOVERY", "MetadataDiscovery"),
    ("ENVOY_SKIP_DEPRECATED_LOGS", "EnvoySkipDeprecatedLogs"),
    ("WORKLOAD_IDENTITY_SOCKET_FILE", "WorkloadIdentitySocketFile"),
    ("PILOT_SAN", "PilotSubjectAltName"),
    ("OUTLIER_LOG_PATH", "OutlierLogPath"),
    ("ENVOY_SECURE_METRICS_PORT", "EnvoySecureMetricsPort"),
    ("ENVOY_SECURE_MERGED_METRICS_PORT", "EnvoySecureMergedMetricsPort"),
    ("ENABLE_SELF_DISCOVERY", "EnableSelfDiscovery"),
    ("DNS_PROXY_ADDR", "DNSProxyAddr"),
];

/// Metadata fields that are booleans, shown as text.
const FLAGS: &[&str] = &[
    "DNS_CAPTURE",
    "DNS_AUTO_ALLOCATE",
    "ENABLE_HBONE",
    "DISABLE_HBONE_SEND",
    "INBOUND_LISTENER_EXACT_BALANCE",
    "OUTBOUND_LISTENER_EXACT_BALANCE",
    "EXIT_ON_ZERO_ACTIVE_CONNECTIONS",
    "METADATA_DISCOVERY",
    "ENVOY_SKIP_DEPRECATED_LOGS",
    "ENABLE_SELF_DISCOVERY",
];

/// All parameters.
///
/// # Errors
/// When an address is not `host:port`, as for the built-in bootstrap.
pub fn all(options: &Options) -> Result<Value, Error> {
    options.check()?;
    let mut p = Params::default();
    let node = &options.node;
    p.text("nodeID", &node.id);
    p.text("nodeType", node.kind());
    p.text("cluster", &node.cluster);
    p.json("meta_json_str", &Json::Object(node.metadata()));
    p.put("metadata", metadata(options));
    p.put("config", config(&options.proxy_config));
    let locality = &node.locality;
    for (name, value) in
        [("region", &locality.region), ("zone", &locality.zone), ("sub_zone", &locality.sub_zone)]
    {
        p.some_text(name, value);
    }
    p.json("runtime_flags", &Json::Object(runtime(options)));
    p.text("xds_type", options.xds_type());
    p.flag("metadata_discovery", options.discovery());
    addresses(&mut p, options)?;
    collectors(&mut p, options)?;
    tracing(&mut p, options);
    stats_params(&mut p, options);
    p.flag("log_json", options.log_as_json);
    p.on("envoy_status_port_enable_proxy_protocol", options.status_proxy_protocol);
    p.number("envoy_status_port", options.envoy_status_port);
    p.number("envoy_prometheus_port", options.envoy_prometheus_port);
    for (name, port) in [
        ("envoy_secure_metrics_port", options.secure_metrics_port),
        ("envoy_secure_merged_metrics_port", options.secure_merged_metrics_port),
    ] {
        port.into_iter().for_each(|port| p.number(name, port.into()));
    }
    p.number("global_downstream_max_connections", options.max_connections());
    let platform = |key: &str| node.platform.get(key).map_or("", String::as_str);
    p.some_text("gcp_project_number", platform("gcp_project_number"));
    let sts = node.typed.get("STS_PORT").and_then(Json::as_str).and_then(|t| t.parse::<i64>().ok());
    if let Some(port) = sts.filter(|p| *p > 0) {
        p.flag("sts", true);
        p.number("sts_port", port);
        p.some_text("gcp_project_id", platform("gcp_project"));
    }
    if node.raw.contains_key("file-credential") {
        p.text("custom_file_path", clusters::FILES_UDS);
    }
    p.some_text("outlier_log_path", &options.outlier_log_path);
    p.text("workload_identity_socket_file", &options.workload_socket_file);
    if let Some(load_stats) = options.load_stats() {
        p.json("load_stats_config_json_str", &load_stats);
    }
    Ok(Value::Map(p.0))
}

#[derive(Default)]
struct Params(BTreeMap<String, Value>);

impl Params {
    fn put(&mut self, name: &str, value: Value) {
        self.0.insert(name.to_owned(), value);
    }

    fn text(&mut self, name: &str, value: &str) {
        self.put(name, Value::text(value));
    }

    fn some_text(&mut self, name: &str, value: &str) {
        if !value.is_empty() {
            self.text(name, value);
        }
    }

    fn json(&mut self, name: &str, value: &Json) {
        self.put(name, Value::Text(go_json(value)));
    }

    fn flag(&mut self, name: &str, value: bool) {
        self.put(name, Value::Bool(value));
    }

    // Absent where it is off.
    fn on(&mut self, name: &str, value: bool) {
        if value {
            self.flag(name, value);
        }
    }

    // In the form that the Go agent gives it, which shows where the template makes no JSON.
    fn address(&mut self, name: &'static str, address: &str, host_ip: &str) -> Result<(), Error> {
        if !address.is_empty() {
            let (host, port) = HostPort::parts(name, address, host_ip)?;
            self.text(name, &format!("{{\"address\": \"{host}\", \"port_value\": {port}}}"));
        }
        Ok(())
    }

    fn number(&mut self, name: &str, value: i64) {
        self.put(name, Value::Int(value));
    }
}

fn addresses(p: &mut Params, options: &Options) -> Result<(), Error> {
    let discovery = &options.discovery_address;
    p.text("discovery_address", discovery);
    p.text("discovery_host", discovery.split(':').next().unwrap_or_default());
    p.address("pilot_grpc_address", discovery, &options.host_ip)?;
    let sans = options.node.typed.get("PILOT_SAN").and_then(Json::as_array);
    p.json("pilot_SAN", &sans.into_iter().flatten().map(|san| json!({"exact": san})).collect());
    p.text("xds_root_cert", &options.xds_root_cert);
    let family = options.family();
    p.text("localhost", family.localhost());
    p.text("wildcard", family.wildcard());
    p.text("dns_lookup_family", family.lookup());
    p.on("dual_stack", family.additional().is_some());
    if let Some((localhost, wildcard)) = family.additional() {
        p.text("additional_localhost", localhost);
        p.text("additional_wildcard", wildcard);
    }
    Ok(())
}

fn collectors(p: &mut Params, options: &Options) -> Result<(), Error> {
    let host_ip = &options.host_ip;
    p.address("statsd", &options.statsd_address, host_ip)?;
    match &options.tracer {
        Some(Tracer::Zipkin { address }) => p.address("zipkin", address, host_ip)?,
        Some(Tracer::Lightstep { address }) => p.address("lightstep", address, host_ip)?,
        Some(Tracer::Datadog { address }) => p.address("datadog", address, host_ip)?,
        Some(Tracer::Stackdriver { .. }) | None => {}
    }
    for (name, service, used) in [
        ("envoy_metrics_service", &options.metrics_service, clusters::METRICS),
        ("envoy_accesslog_service", &options.access_log_service, clusters::ACCESS_LOG),
    ] {
        let Some(service) = service.as_ref().filter(|s| !s.address.is_empty()) else { continue };
        let key = if used.sni == "envoy_metrics_service" {
            "envoy_metrics_service_address"
        } else {
            "envoy_accesslog_service_address"
        };
        p.address(key, &service.address, host_ip)?;
        socket(p, &format!("{name}_tls"), service.tls.as_ref(), used);
        if let Some(keepalive) = service.keepalive.as_ref().map(Keepalive::json) {
            p.json(&format!("{name}_tcp_keepalive"), &keepalive);
        }
    }
    Ok(())
}

// A template may do without; so what the built-in bootstrap refuses is only warned about.
fn socket(p: &mut Params, name: &str, settings: Option<&super::ClientTls>, used: tls::Use) {
    match settings.map_or(Ok(None), |settings| tls::socket(settings, used)) {
        Ok(Some(socket)) => p.json(name, &socket),
        Ok(None) => {}
        Err(error) => ::tracing::warn!("the template parameter {name} is absent: {error}"),
    }
}

fn tracing(p: &mut Params, options: &Options) {
    let h2 = matches!(options.tracer, Some(Tracer::Lightstep { .. }));
    match &options.tracer {
        Some(Tracer::Lightstep { .. }) => {
            p.text("lightstepToken", &tracer::token_file(&options.config_path));
        }
        Some(Tracer::Stackdriver { debug, max_attributes, max_annotations, max_events }) => {
            p.flag("stackdriver", true);
            let project = options.node.platform.get("gcp_project").map_or("", String::as_str);
            p.text("stackdriverProjectID", project);
            p.flag("stackdriverDebug", *debug);
            p.number("stackdriverMaxAnnotations", *max_annotations);
            p.number("stackdriverMaxAttributes", *max_attributes);
            p.number("stackdriverMaxEvents", *max_events);
        }
        Some(Tracer::Zipkin { .. } | Tracer::Datadog { .. }) | None => {}
    }
    socket(p, "tracing_tls", options.tracing_tls.as_ref(), tls::Use { h2, ..clusters::TRACER });
}

fn stats_params(p: &mut Params, options: &Options) {
    p.flag("envoy_metrics_stats_compression", options.stats_compression);
    p.flag("metrics_localhost_access_only", options.stats_on_localhost);
    let tags = stats::extra_tags(options);
    if !tags.is_empty() {
        p.put("extraStatTags", Value::texts(&tags));
    }
    let matcher = &options.stats_matcher;
    let list = |annotation, config: &[String], needed: &[&str]| {
        let mut all = stats::inclusion(options, annotation, config);
        all.extend(needed.iter().map(ToString::to_string));
        Value::texts(&all)
    };
    p.put("inclusionPrefix", list(stats::PREFIXES, &matcher.prefixes, &stats::NEEDED_PREFIXES));
    let mut suffixes = stats::NEEDED_SUFFIXES.to_vec();
    suffixes.extend(stats::counted(options));
    p.put("inclusionSuffix", list(stats::SUFFIXES, &matcher.suffixes, &suffixes));
    p.put("inclusionRegexps", list(stats::REGEXPS, &matcher.regexps, &[stats::ROUTE_REGEX]));
    let buckets = stats::histogram_buckets(&options.node);
    let buckets = buckets.as_ref().and_then(Json::as_array).into_iter().flatten();
    p.put("histogram_buckets", Value::List(buckets.map(open_record).collect()));
    let intervals = stats::Intervals::of(&options.node);
    p.some_text("stats_flush_interval", intervals.flush.as_deref().unwrap_or_default());
    p.some_text("stats_eviction_interval", intervals.eviction.as_deref().unwrap_or_default());
}

/// Metadata fields of the bootstrap's own, beside those that istiod knows as well.
const OWN: &[&str] =
    &["InstanceName", "Owner", "PilotSubjectAltName", "OutlierLogPath", "AppContainers", "IstioProxySHA"];

fn metadata(options: &Options) -> Value {
    let typed = &options.node.typed;
    let member = |(key, name): &(&str, &str)| {
        let given = typed.get(*key);
        let text = given.and_then(Json::as_str);
        let value = match *key {
            "PROXY_CONFIG" => given.map_or(Value::Nil, config),
            "LABELS" | "STATIC_LABELS" | "ANNOTATIONS" | "PLATFORM_METADATA" => {
                given.map_or_else(|| Value::Map(BTreeMap::new()), Value::from_json)
            }
            "INSTANCE_IPS" | "REQUESTED_NETWORK_VIEW" => {
                Value::List(text.into_iter().flat_map(|t| t.split(',')).map(Value::text).collect())
            }
            "POD_PORTS" => {
                let ports: Vec<Json> = text.and_then(|t| serde_json::from_str(t).ok()).unwrap_or_default();
                Value::List(ports.iter().map(open_record).collect())
            }
            "PILOT_SAN" => given.map_or_else(|| Value::List(Vec::new()), Value::from_json),
            "ENVOY_STATUS_PORT"
            | "ENVOY_PROMETHEUS_PORT"
            | "ENVOY_SECURE_METRICS_PORT"
            | "ENVOY_SECURE_MERGED_METRICS_PORT" => Value::Int(given.and_then(Json::as_i64).unwrap_or(0)),
            key if FLAGS.contains(&key) => Value::Bool(text == Some("true")),
            _ => Value::text(text.unwrap_or_default()),
        };
        ((*name).to_owned(), value)
    };
    let json = Json::Object(typed.clone());
    let mut members: BTreeMap<String, Value> = METADATA.iter().map(member).collect();
    members.insert("Raw".to_owned(), Value::from_json(&Json::Object(options.node.raw.clone())));
    let known = members.iter().filter(|(name, _)| !OWN.contains(&name.as_str()));
    let known = known.map(|(name, value)| (name.clone(), value.clone())).collect();
    members.insert("NodeMetadata".to_owned(), record("model.NodeMetadata", known, json.clone()));
    members.insert("XDSRootCert".to_owned(), Value::text(&options.xds_root_cert));
    record("*model.BootstrapNodeMetadata", members, json)
}

fn config(json: &Json) -> Value {
    let mut config = Value::message(&PROXY, json);
    if let Value::Record(record) = &mut config {
        let chosen =
            ["serviceCluster", "tracingServiceName"].into_iter().find(|name| json.get(name).is_some());
        let members =
            chosen.map(capital).and_then(|name| Some((name.clone(), record.members.get(&name)?.clone())));
        let kind = "istio.mesh.v1alpha1.ProxyConfig.ClusterName";
        let chosen = self::record(kind, members.into_iter().collect(), Json::Null);
        record.members.insert("ClusterName".to_owned(), chosen);
    }
    config
}

fn record(kind: &'static str, members: BTreeMap<String, Value>, json: Json) -> Value {
    Value::Record(Box::new(Record { kind, members, json, open: false, text: None }))
}

// A message whose absent members count as empty.
fn open_record(json: &Json) -> Value {
    let members = json.as_object().into_iter().flatten().map(|(key, value)| {
        let value = if value.is_object() { open_record(value) } else { Value::from_json(value) };
        (capital(key), value)
    });
    Value::Record(Box::new(Record {
        kind: "message",
        members: members.collect(),
        json: json.clone(),
        open: true,
        text: None,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Map;

    use crate::bootstrap::{Node, template};

    fn check(options: &Options, table: &[(&str, &str)]) {
        let data = all(options).unwrap();
        for (text, wanted) in table {
            assert_eq!(template::render(text, &data, &BTreeMap::new()).unwrap(), *wanted, "{text}");
        }
    }

    #[test]
    fn parameters_are_absent_where_the_go_agents_are() {
        let none = "<no value>";
        let table = [
            ("{{ .pilot_SAN }}", "[]"),
            (
                "{{ .pilot_grpc_address }}",
                "{\"address\": \"istiod.istio-system.svc\", \"port_value\": 15012}",
            ),
            ("<{{ .xds_root_cert }}>", "<>"),
            ("{{ .histogram_buckets }}{{ if .histogram_buckets }}x{{ end }}", "[]"),
            ("{{ .dual_stack }}", none),
            ("{{ .envoy_status_port_enable_proxy_protocol }}", none),
            ("{{ .extraStatTags }}", none),
            ("{{ toJSON .extraStatTags }}", "{}"),
            ("{{ .custom_file_path }}", none),
            ("{{ .gcp_project_number }}", none),
        ];
        check(&Options::default(), &table);
        // What the annotation of the discovery address may be.
        let address = |text: &str| Options { discovery_address: text.to_owned(), ..Options::default() };
        check(&address(""), &[("{{ .pilot_grpc_address }}", none), ("<{{ .discovery_host }}>", "<>")]);
        let wanted = "{\"address\": \"istiod\", \"port_value\": https}";
        check(&address("istiod:https"), &[("{{ .pilot_grpc_address }}", wanted)]);
        assert!(all(&address("istiod")).is_err());
    }

    #[test]
    fn parameters_of_a_node_have_the_go_agents_names() {
        let node = Node {
            raw: Map::from_iter([("file-credential".to_owned(), json!("true"))]),
            typed: Map::from_iter([("BASE".to_owned(), json!("/certs"))]),
            platform: BTreeMap::from([("gcp_project_number".to_owned(), "7".to_owned())]),
            ..Node::default()
        };
        let tls = super::super::ClientTls {
            ca: "/ca".to_owned(),
            mode: super::super::TlsMode::Simple,
            ..Default::default()
        };
        let options = Options {
            node,
            proxy_config: json!({"serviceCluster": "web"}),
            tracing_tls: Some(tls),
            ..Options::default()
        };
        let table = [
            ("{{ .gcp_project_number }}{{ .sts }}", "7<no value>"),
            ("{{ .custom_file_path }}", "./var/run/secrets/credential-uds/files-socket"),
            ("{{ .metadata.CertBaseDir }}", "/certs"),
            ("{{ .config.ClusterName.ServiceCluster }}", "web"),
            (
                "{{ .metadata.NodeMetadata.CertBaseDir }} {{ index .metadata.Raw \"file-credential\" }}",
                "/certs true",
            ),
            ("{{ if .tracing_tls }}{{ contains \"h2\" .tracing_tls }}{{ end }}", "false"),
        ];
        check(&options, &table);
    }

    // As templates of releases up to 1.5 asked it, and others since.
    #[test]
    fn a_proxy_config_has_gos_types() {
        let proxy_config = json!({
            "controlPlaneAuthPolicy": "MUTUAL_TLS", "drainDuration": "45s", "terminationDrainDuration": "1.500s",
            "concurrency": 2, "statsCompression": false, "tracing": {"zipkin": {"address": "z:9411"}},
        });
        let options = Options { proxy_config, ..Options::default() };
        let table = [
            ("{{ if eq .config.ControlPlaneAuthPolicy 1 }}tls{{ end }}", "tls"),
            (
                "{{ .config.ControlPlaneAuthPolicy }} {{ printf \"%d %s\" .config.ControlPlaneAuthPolicy .config.InterceptionMode }}",
                "MUTUAL_TLS 1 REDIRECT",
            ),
            ("{{ if .config.InterceptionMode }}x{{ end }}", ""),
            ("{{ .config.DrainDuration.Seconds }}s {{ .config.DrainDuration }}", "45s seconds:45"),
            (
                "{{ .config.TerminationDrainDuration.Nanos }} {{ .config.TerminationDrainDuration }}",
                "500000000 seconds:1 nanos:500000000",
            ),
            (
                "{{ .config.Concurrency.Value }} {{ .config.Concurrency.GetValue }} {{ .config.Concurrency }}",
                "2 2 value:2",
            ),
            ("{{ .config.StatsCompression.Value }}<{{ .config.StatsCompression }}>", "false<>"),
            (
                "{{ .config.Tracing.GetZipkin.Address }} <{{ .config.Tracing.GetDatadog.GetAddress }}>",
                "z:9411 <>",
            ),
            // Go has no methods on the outermost one, and oneofs as a field of their own.
            ("{{ .config.GetStatusPort }} {{ .config.Tracing.Zipkin.Address }}", "0 z:9411"),
            ("{{ .config.ProxyHeaders.GetServer.GetDisabled.GetValue }}", "false"),
            ("{{ .config.EnvoyMetricsService }}{{ with .config.EnvoyMetricsService }}x{{ end }}", "<nil>"),
            (
                "<{{ .config.EnvoyMetricsService.GetTlsSettings.GetMode }}> {{ toJSON .config.Image }}",
                "<DISABLE> null",
            ),
            (
                "{{ .config.StatusPort }} {{ .config.ExtraStatTags }} {{ .config.ProxyMetadata }}",
                "0 [] map[]",
            ),
        ];
        check(&options, &table);
        let data = all(&options).unwrap();
        for method in [
            "DrainDuration.AsDuration",
            "DrainDuration.String",
            "ControlPlaneAuthPolicy.Number",
            "ClusterName",
        ] {
            let fault = template::render(&format!("{{{{ .config.{method} }}}}"), &data, &BTreeMap::new());
            let fault = fault.expect_err(method).to_string();
            assert!(fault.contains(method.rsplit('.').next().unwrap()), "{fault}");
        }
        let fault = template::render("{{ .config.EnvoyMetricsService.Address }}", &data, &BTreeMap::new());
        assert!(
            fault
                .unwrap_err()
                .to_string()
                .contains("nil pointer evaluating istio.mesh.v1alpha1.RemoteService.Address")
        );
    }
}
