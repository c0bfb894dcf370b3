//! `proxy --dry-run`: shows everything, writes and binds nothing.

use std::path::Path;
use std::process::{Command, Output};

fn dry_run(dir: &Path, config: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pilot-agent"))
        .args(["proxy", "sidecar", "--dry-run"])
        .current_dir(dir)
        .env_clear()
        .envs([("PROXY_CONFIG", config), ("POD_NAME", "web-1"), ("POD_NAMESPACE", "shop")])
        .envs([("CLOUD_PLATFORM", "none"), ("XDS_HEADER_AUTHORIZATION", "hunter2")])
        .output()
        .unwrap()
}

// Everything below a folder.
fn tree(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(tree(&path));
        }
        all.push(path);
    }
    all.sort();
    all
}

#[test]
fn the_bootstrap_is_on_standard_output_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let roots = dir.path().join("var/run/secrets/istio");
    std::fs::create_dir_all(&roots).unwrap();
    std::fs::write(roots.join("root-cert.pem"), root()).unwrap();
    let before = tree(dir.path());
    let config = r#"{"binaryPath": "/nope/envoy", "proxyMetadata": {"MY_PASSWORD": "hunter2", "NOTE": "it\'s mine"},
        "statusPort": 15999}"#;
    let output = dry_run(dir.path(), config);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let bootstrap: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(bootstrap["node"]["id"].as_str().unwrap().contains("~web-1.shop~shop.svc.cluster.local"));
    for shown in [
        "Effective config: ",
        "statusPort: 15999",
        "MY_PASSWORD: \"<redacted>\"",
        // Not JSON; YAML as the Go agent reads it.
        "NOTE: \"it's mine\"",
        "was not validated",
    ] {
        assert!(stderr.contains(shown), "{shown} in {stderr}");
    }
    assert!(!stderr.contains("hunter2"), "{stderr}");
    // A start would go on without, and say so.
    assert!(stderr.contains("token: ./var/run/secrets/tokens/istio-token is not there"), "{stderr}");
    assert_eq!(tree(dir.path()), before);
}

fn root() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
}

#[test]
fn a_root_that_the_start_would_refuse_is_refused_here() {
    let dir = tempfile::tempdir().unwrap();
    let roots = dir.path().join("var/run/secrets/istio");
    std::fs::create_dir_all(&roots).unwrap();
    std::fs::write(roots.join("root-cert.pem"), "roots").unwrap();
    let output = dry_run(dir.path(), r#"{"binaryPath": "/nope/envoy"}"#);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(255), "{stderr}");
    assert!(stderr.contains("root-cert.pem: it holds no readable certificate"), "{stderr}");
    assert!(output.stdout.is_empty());
}

#[test]
fn what_would_refuse_the_start_refuses_it_here() {
    let dir = tempfile::tempdir().unwrap();
    for (config, reason) in
        [("{\"statusPort\": 0}", "invalid status port"), ("{\"binaryPath\": \"/nope\"}", "root")]
    {
        let output = dry_run(dir.path(), config);
        assert_eq!(output.status.code(), Some(255));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains("Error: ") && stderr.contains(reason), "{stderr}");
        assert!(output.stdout.is_empty());
    }
}
