//! Envoy's bootstrap: a function from [`Options`] to JSON.
//!
//! Promises:
//! - Pure: no file, variable, clock or socket is read; what is needed stands in [`Options`].
//! - The result is always JSON that a stock Envoy's parser takes, whatever the inputs hold: it is built
//!   from values, never by inserting text into text. Where an input cannot become a valid bootstrap
//!   (TLS without anything to verify the server with), [`generate`] refuses with one line that names it.
//! - Members come in the order of the Go agent's file, so that two of them can be compared as text.
//!
//! [`template`] renders an operator's own template (Go's `text/template` syntax) with the same inputs
//! ([`params`]); [`grpc`] makes the bootstrap of proxyless gRPC applications; `write` alone touches the disk. Uses only what every part may use.

mod address;
mod clusters;
pub(crate) mod duration;
pub(crate) mod grpc;
mod listeners;
mod node;
mod options;
pub(crate) mod params;
mod stats;
pub(crate) mod template;
mod tls;
pub(crate) mod tracer;

pub(crate) use address::{Family, HostPort};
pub(crate) use node::{Locality, Node};
pub(crate) use options::{Error, Keepalive, StatsMatcher};
pub use options::{Options, RemoteService, Tracer};
use serde_json::{Map, Value, json};
pub(crate) use tls::{ClientTls, TlsMode};
pub(crate) use tracer::TOKEN_FILE;

/// The name of Envoy's static cluster for the agent's ADS socket.
pub(crate) const XDS_CLUSTER: &str = "xds-grpc";
/// The name of Envoy's static cluster for the workload SDS socket.
pub(crate) const SDS_CLUSTER: &str = "sds-grpc";

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
    if options.outlier_log_path.is_empty() && load_stats.is_none() && !options.self_discovery() {
        return None;
    }
    let mut manager = Map::new();
    manager.insert("enable_deferred_cluster_creation".into(), json!(true));
    if options.self_discovery() {
        manager.insert("local_cluster_name".into(), json!(clusters::OWN));
    }
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
