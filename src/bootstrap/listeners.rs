//! Envoy's own listeners: stats for Prometheus (plain, and behind mutual TLS) and readiness.

use serde_json::{Map, Value, json};

use super::{Family, Options, tls, typed};

struct Listener<'a> {
    address: &'a str,
    other: Option<&'a str>,
    port: i64,
    proxy_protocol: bool,
    stat_prefix: &'a str,
    paths: &'a [&'a str],
    cluster: &'a str,
    compress: bool,
    // Behind mutual TLS, with the limits of this policy.
    mutual_tls: Option<&'a str>,
}

/// All of them, in the order of the Go agent's file.
pub(crate) fn all(options: &Options, family: &Family) -> Vec<Value> {
    let stats_address = if options.stats_on_localhost { family.localhost() } else { family.wildcard() };
    let other =
        family.additional().map(|(local, wild)| if options.stats_on_localhost { local } else { wild });
    let stats = Listener {
        address: stats_address,
        other,
        port: options.envoy_prometheus_port,
        proxy_protocol: false,
        stat_prefix: "stats",
        paths: &["/stats/prometheus"],
        cluster: "prometheus_stats",
        compress: options.stats_compression,
        mutual_tls: None,
    };
    let status = Listener {
        address: family.wildcard(),
        other: family.additional().map(|(_, wild)| wild),
        port: options.envoy_status_port,
        proxy_protocol: options.status_proxy_protocol,
        stat_prefix: "agent",
        paths: &["/healthz/ready"],
        cluster: "agent",
        compress: false,
        mutual_tls: None,
    };
    let secure = |port: Option<u16>, stat_prefix, paths, cluster| {
        let listener = |port: u16| Listener {
            address: family.wildcard(),
            other: None,
            port: port.into(),
            proxy_protocol: false,
            stat_prefix,
            paths,
            cluster,
            compress: false,
            mutual_tls: Some(&options.policy),
        };
        port.map(|port| listener(port).json())
    };
    let envoy =
        secure(options.secure_metrics_port, "secure_stats", &["/stats/prometheus"], "prometheus_stats");
    let both = &["/stats/prometheus", "/metrics"];
    let merged = secure(options.secure_merged_metrics_port, "secure_merged_stats", both, "agent");
    [Some(stats.json()), envoy, merged, Some(status.json())].into_iter().flatten().collect()
}

impl Listener<'_> {
    fn json(&self) -> Value {
        let socket = |address: &str| json!({"protocol": "TCP", "address": address, "port_value": self.port});
        let mut members = Map::new();
        let mut put = |key: &str, value: Value| members.insert(key.to_owned(), value);
        put("name", json!(format!("{}_{}", self.address, self.port)));
        put("address", json!({"socket_address": socket(self.address)}));
        if let Some(other) = self.other {
            // The camelCase name is the Go agent's; Envoy takes either.
            put("additionalAddresses", json!([{"address": {"socket_address": socket(other)}}]));
        }
        put("ignore_global_conn_limit", json!(true));
        put("bypass_overload_manager", json!(true));
        if self.proxy_protocol {
            put(
                "listener_filters",
                json!([typed(
                    "envoy.listener.proxy_protocol",
                    "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol",
                    json!({"allow_requests_without_proxy_protocol": true}),
                )]),
            );
        }
        let filters = json!([self.connection_manager()]);
        if let Some(policy) = self.mutual_tls {
            let inspector = "envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector";
            put(
                "listener_filters",
                json!([typed("envoy.filters.listener.tls_inspector", inspector, json!({}))]),
            );
            let chain = json!({
                "filter_chain_match": {"transport_protocol": "tls"},
                "filters": filters,
                "transport_socket": tls::server(policy),
            });
            put("filter_chains", json!([chain]));
        } else {
            put("filter_chains", json!([{"filters": filters}]));
        }
        Value::Object(members)
    }

    fn connection_manager(&self) -> Value {
        let mut filters = Vec::new();
        if self.compress {
            filters.extend(
                [("brotli", "Brotli"), ("zstd", "Zstd"), ("gzip", "Gzip")].map(|(n, t)| compressor(n, t)),
            );
        }
        let routes = self
            .paths
            .iter()
            .map(|path| json!({"match": {"prefix": path}, "route": {"cluster": self.cluster}}));
        let router = "envoy.extensions.filters.http.router.v3.Router";
        filters.push(typed("envoy.filters.http.router", router, json!({})));
        typed(
            "envoy.filters.network.http_connection_manager",
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            json!({
                "codec_type": "AUTO",
                "stat_prefix": self.stat_prefix,
                "route_config": {"virtual_hosts": [
                    {"name": "backend", "domains": ["*"], "routes": routes.collect::<Vec<_>>()},
                ]},
                "http_filters": filters,
            }),
        )
    }
}

fn compressor(name: &str, kind: &str) -> Value {
    let library = typed(
        &format!("stats_{name}"),
        &format!("envoy.extensions.compression.{name}.compressor.v3.{kind}"),
        json!({}),
    );
    let config = json!({
        "compressor_library": library,
        "response_direction_config": {"common_config": {"content_type": [
            "text/plain",
            "application/vnd.google.protobuf",
            "application/openmetrics-text",
            "application/openmetrics-protobuf",
        ]}},
    });
    let compressor = "envoy.extensions.filters.http.compressor.v3.Compressor";
    typed(&format!("envoy.filters.http.compressor.{name}"), compressor, config)
}
