//! Bootstraps against a real Envoy. That they are the Go agent's is tested beside the code, by its recordings
//! (`src/config/parts/envoy/recorded.rs`).

use std::collections::BTreeMap;

use pilot_agent::testing::bootstrap::{self, Options};
use pilot_agent::testing::config::mesh::Effective;
use pilot_agent::testing::config::{envoy_options, node};
use serde_json::{Value, json};

use crate::support::envoy_bin;

fn cases() -> serde_json::Map<String, Value> {
    serde_json::from_str(include_str!("bootstrap.json")).unwrap()
}

/// The bootstrap of a case of `bootstrap.json`.
fn made(case: &Value) -> Value {
    let map = |key: &str| -> BTreeMap<String, String> {
        case.get(key).map(|v| serde_json::from_value(v.clone()).unwrap()).unwrap_or_default()
    };
    let flag = |key: &str, default| case.get(key).map_or(default, |v| v.as_bool().unwrap());
    let (env, labels, annotations) = (map("env"), map("labels"), map("annotations"));
    let mut mesh = Effective::new();
    mesh.overlay(&case.get("proxy").unwrap_or(&json!({})).to_string()).unwrap();
    let proxy = &mesh.proxy;
    let addresses: Vec<String> = match case.get("addresses") {
        Some(list) => serde_json::from_value(list.clone()).unwrap(),
        None => vec!["10.7.0.2".to_owned()],
    };
    let outlier = case.get("outlier").and_then(Value::as_str).unwrap_or_default();
    let san = envoy_options::istiod_san(proxy);
    let node = node::build(&node::Inputs {
        env: &env,
        json: &[],
        kind: case.get("kind").and_then(Value::as_str).unwrap_or("sidecar"),
        addresses: &addresses,
        domain: "",
        id: None,
        proxy_config: &envoy_options::proxy_config_json(proxy),
        proxy_metadata: &proxy.proxy_metadata,
        cluster_name: &envoy_options::cluster_name(proxy),
        pilot_san: san.as_deref(),
        labels: Some(&labels).filter(|l| !l.is_empty()),
        annotations: Some(&annotations),
        platform: &node::Platform::default(),
        credential_socket: false,
        external_sds: flag("external", false),
        sts_port: 0,
        outlier_log_path: outlier,
        envoy_status_port: 15021,
        envoy_prometheus_port: 15090,
        secure_ports: [0, 0],
        dns_address: "",
        release: Default::default(),
        exit_on_zero_connections: flag("exit_on_zero", false),
        metadata_discovery: None,
        skip_deprecated_logs: true,
        workload_socket_file: "socket",
    })
    .unwrap();
    let options = Options {
        delta_xds: flag("delta", true),
        dual_stack: flag("dual", false),
        fips: flag("fips", false),
        log_as_json: flag("log_as_json", false),
        status_proxy_protocol: flag("proxy_protocol", false),
        exit_on_zero_connections: flag("exit_on_zero", false),
        outlier_log_path: outlier.to_owned(),
        host_ip: env.get("HOST_IP").cloned().unwrap_or_default(),
        ..envoy_options::options(proxy, node)
    };
    bootstrap::generate(&options).unwrap()
}

#[test]
fn a_real_envoy_takes_every_bootstrap() {
    let envoy = envoy_bin();
    for (name, case) in cases() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("envoy-rev.json");
        std::fs::write(&file, made(&case).to_string()).unwrap();
        let mut command = std::process::Command::new(&envoy);
        command.current_dir(dir.path()).args([
            "--mode",
            "validate",
            "--disable-hot-restart",
            "-l",
            "error",
            "-c",
        ]);
        let output = command.arg(&file).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // Where a stock Envoy lacks an extension it must be for that reason only.
        match case.get("envoy").and_then(Value::as_str) {
            None => assert!(output.status.success(), "{name}: {said}"),
            Some(reason) => {
                let word = if reason.contains("lightstep") { "lightstep" } else { "istio.workload" };
                assert!(!output.status.success() && said.to_lowercase().contains(word), "{name}: {said}");
            }
        }
    }
}
