//! Bootstraps against files that were looked at (`testdata/golden/bootstrap`), and against a real Envoy.
//!
//! `UPDATE_GOLDEN=1 cargo test --test it bootstrap` writes the files anew from `cases.json`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use pilot_agent::testing::bootstrap::{self, Options};
use pilot_agent::testing::config::mesh::Effective;
use pilot_agent::testing::config::{envoy_options, node};
use serde_json::{Value, json};

use crate::support::envoy_bin;

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/golden/bootstrap"))
}

fn cases() -> serde_json::Map<String, Value> {
    let text = std::fs::read_to_string(folder().join("cases.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

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
    let grpc = bootstrap::grpc::generate(&node, &proxy.config_path, "./out");
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
    json!({"envoy": bootstrap::generate(&options).unwrap(), "grpc": grpc})
}

#[test]
#[expect(clippy::disallowed_methods, reason = "UPDATE_GOLDEN says to write instead of to compare")]
fn bootstraps_equal_the_files() {
    for (name, case) in cases() {
        let file = folder().join(format!("{name}.json"));
        let text = format!("{:#}\n", made(&case));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&file, &text).unwrap();
        }
        let wanted = std::fs::read_to_string(file).unwrap_or_default();
        assert!(
            text == wanted,
            "{name} differs; if that is meant, run with UPDATE_GOLDEN=1 and look at the change"
        );
    }
}

#[test]
fn a_real_envoy_takes_every_bootstrap() {
    let envoy = envoy_bin();
    for (name, case) in cases() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("envoy-rev.json");
        std::fs::write(&file, made(&case)["envoy"].to_string()).unwrap();
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
