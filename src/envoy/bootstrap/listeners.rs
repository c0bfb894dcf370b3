//! Envoy's own listeners: stats for Prometheus and readiness.

use serde_json::{Map, Value, json};

use super::{Family, Options, typed};

struct Listener<'a> {
    address: &'a str,
    other: Option<&'a str>,
    port: i64,
    proxy_protocol: bool,
    stat_prefix: &'a str,
    path: &'a str,
    cluster: &'a str,
    compress: bool,
}

/// Both listeners.
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
        path: "/stats/prometheus",
        cluster: "prometheus_stats",
        compress: options.stats_compression,
    };
    let status = Listener {
        address: family.wildcard(),
        other: family.additional().map(|(_, wild)| wild),
        port: options.envoy_status_port,
        proxy_protocol: options.status_proxy_protocol,
        stat_prefix: "agent",
        path: "/healthz/ready",
        cluster: "agent",
        compress: false,
    };
    vec![stats.json(), status.json()]
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
        put("filter_chains", json!([{"filters": [self.connection_manager()]}]));
        Value::Object(members)
    }

    fn connection_manager(&self) -> Value {
        let mut filters = Vec::new();
        if self.compress {
            filters.extend(
                [("brotli", "Brotli"), ("zstd", "Zstd"), ("gzip", "Gzip")].map(|(n, t)| compressor(n, t)),
            );
        }
        let router = "envoy.extensions.filters.http.router.v3.Router";
        filters.push(typed("envoy.filters.http.router", router, json!({})));
        typed(
            "envoy.filters.network.http_connection_manager",
            "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            json!({
                "codec_type": "AUTO",
                "stat_prefix": self.stat_prefix,
                "route_config": {"virtual_hosts": [{"name": "backend", "domains": ["*"], "routes": [
                    {"match": {"prefix": self.path}, "route": {"cluster": self.cluster}},
                ]}]},
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
