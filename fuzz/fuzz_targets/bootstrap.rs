//! Any metadata, annotations and addresses: a bootstrap that is JSON, or a line that says why not; and any
//! template over it: text, or a line.
#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::config::release::Release;
use pilot_agent::testing::config::{node, pod};
use pilot_agent::testing::bootstrap::{self, Options, RemoteService, Tracer, params, template};
use serde_json::json;

type Input =
    (BTreeMap<String, String>, Vec<(String, String)>, String, Vec<String>, [String; 4], String);

fuzz_target!(|input: Input| {
    let (env, metajson, pod_file, addresses, [zipkin, metrics, statsd, discovery], text) = input;
    let file = pod::parse(&pod_file).ok();
    let json: Vec<(&str, &str)> =
        metajson.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let built = node::build(&node::Inputs {
        env: &env,
        json: &json,
        kind: "sidecar",
        addresses: &addresses,
        domain: "",
        id: None,
        proxy_config: &json!({"configPath": "./x"}),
        proxy_metadata: &env,
        cluster_name: &node::ClusterName::CanonicalNameAndNamespace,
        pilot_san: Some("istiod"),
        labels: file.as_ref(),
        annotations: file.as_ref(),
        platform: &node::Platform::default(),
        credential_socket: true,
        external_sds: true,
        sts_port: 1,
        outlier_log_path: "x",
        envoy_status_port: 15021,
        envoy_prometheus_port: 15090,
        secure_ports: [15091, 0],
        dns_address: "",
        release: Release::V1_31,
        exit_on_zero_connections: true,
        metadata_discovery: None,
        skip_deprecated_logs: true,
        workload_socket_file: "socket",
    });
    let Ok(node) = built else { return };
    let options = Options {
        node,
        runtime_values: env.clone(),
        tracer: Some(Tracer::Zipkin { address: zipkin }),
        metrics_service: Some(RemoteService { address: metrics, ..RemoteService::default() }),
        statsd_address: statsd,
        discovery_address: discovery,
        extra_stat_tags: addresses,
        ..Options::default()
    };
    if let Ok(value) = bootstrap::generate(&options) {
        let again: serde_json::Value = serde_json::from_str(&value.to_string()).unwrap();
        assert_eq!(again["node"]["id"], options.node.id.as_str());
    }
    if let Ok(data) = params::all(&options) {
        let _ = template::render(&text, &data, &env);
    }
});
