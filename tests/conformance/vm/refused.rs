//! `vm run` and `vm check`: what would end the agent's start later, and what would hold up a look.

use super::*;

// Rules would be made by then, and nobody would serve them.
#[tokio::test]
async fn run_refuses_what_the_agent_would_refuse_when_it_is_under_way() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    configured(dir.path(), &mock);
    for place in ["etc/certs", "var/run/secrets/tokens"] {
        std::fs::create_dir_all(dir.path().join(place)).unwrap();
    }
    std::fs::copy(dir.path().join("root-cert.pem"), dir.path().join("etc/certs/root-cert.pem")).unwrap();
    let user = me();
    for (name, value, word) in [
        ("ISTIO_AGENT_FLAGS", "--log_output_level=default:inf", "ISTIO_AGENT_FLAGS: invalid output level"),
        ("ISTIO_AGENT_FLAGS", "--log_target=no/such/folder", "ISTIO_AGENT_FLAGS: cannot open log target"),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", "a/b", "must be a filename"),
        ("WORKLOAD_IDENTITY_SOCKET_FILE", "spire", "no socket found"),
        ("GRPC_XDS_BOOTSTRAP", "etc", "etc (GRPC_XDS_BOOTSTRAP): is a directory"),
        ("GRPC_XDS_BOOTSTRAP", "./mesh.yaml/x", "(GRPC_XDS_BOOTSTRAP): not a directory"),
        // No label is so long, so that no server is asked.
        (
            "DNS_PROXY_ADDR",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa:15053",
            "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        ),
        ("PLUGINS", "GoogleTokenExchange", "GKE_CLUSTER_URL"),
    ] {
        let env = [
            ("EXEC_USER", user.as_str()),
            ("ISTIO_CUSTOM_IP_TABLES", "true"),
            ("DISABLE_ENVOY", "true"),
            ("CLOUD_PLATFORM", "none"),
            ("GCE_METADATA_HOST", "127.0.0.1:1"),
            (name, value),
        ];
        let files = ["--cluster-env=cluster.env", "--mesh=mesh.yaml"];
        let check = said(&vm(dir.path(), &["check", files[0], files[1]], &env));
        let told = check.lines().filter(|line| line.starts_with("FAIL  settings") && line.contains(word));
        assert_eq!(told.count(), 1, "{name}={value}: {check}");
        let run = vm(dir.path(), &["run", files[0], files[1]], &env);
        assert_eq!(run.status.code(), Some(255), "{name}={value}: {}", said(&run));
        assert!(said(&run).contains(word), "{name}={value}: {}", said(&run));
        assert!(!said(&run).contains("Effective config"), "the agent was started: {}", said(&run));
    }
}

#[tokio::test]
async fn check_waits_for_no_pipe_without_an_end() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    configured(dir.path(), &mock);
    std::fs::create_dir_all(dir.path().join("etc/certs")).unwrap();
    let made = Command::new("mkfifo").arg(dir.path().join("etc/certs/root-cert.pem")).status().unwrap();
    assert!(made.success());
    let user = me();
    let output = Command::new("timeout")
        .args(["-s", "KILL", "60"])
        .arg(agent_bin())
        .args(["vm", "check", "--cluster-env=cluster.env", "--mesh=mesh.yaml"])
        .current_dir(dir.path())
        .envs([("EXEC_USER", user.as_str()), ("ISTIO_CUSTOM_IP_TABLES", "true")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("FAIL  root        ./etc/certs/root-cert.pem: "), "{}", said(&output));
}

#[tokio::test]
async fn check_looks_for_programs_on_the_path_of_the_settings() {
    if !root_for("a look at the rules") {
        return;
    }
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    configured(dir.path(), &mock);
    let nft = dir.path().join("nft");
    std::fs::write(&nft, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&nft, std::fs::Permissions::from_mode(0o755)).unwrap();
    let sidecar = format!("PATH='{}'\nEXEC_USER=0\n", dir.path().display());
    std::fs::write(dir.path().join("sidecar.env"), sidecar).unwrap();
    let args = ["check", "--cluster-env=cluster.env", "--sidecar-env=sidecar.env", "--mesh=mesh.yaml"];
    let text = said(&vm(dir.path(), &args, &[]));
    assert!(
        text.contains("no iptables on the PATH: install the package iptables, or set NATIVE_NF"),
        "{text}"
    );
}
