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

// Root reaches every socket, and would make rules; the agent removes one that it finds nobody at, or ends.
#[tokio::test(flavor = "multi_thread")]
async fn run_refuses_a_socket_that_the_agents_user_may_neither_reach_nor_remove() {
    use std::os::unix::fs::chown;
    if !root_for("sockets of another user") {
        return;
    }
    let machine = Machine::new().await;
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(machine.root.path(), 0o755);
    let folder = machine.at("var/run/secrets/workload-spiffe-uds");
    for dir in ["victim", "etc/certs", "var/run/secrets/workload-spiffe-uds", "etc/istio/proxy"] {
        std::fs::create_dir_all(machine.at(dir)).unwrap();
    }
    for (name, to) in [("mesh.yaml", "mesh.yaml"), ("root-cert.pem", "etc/certs/root-cert.pem")] {
        std::fs::copy(machine.from.path().join(name), machine.at(to)).unwrap();
    }
    chown(machine.at("etc/istio/proxy"), Some(65534), Some(65534)).unwrap();
    let place = folder.join("socket");
    let served = tokio::net::UnixListener::bind(&place).unwrap();
    mode(&place, 0o660);
    let mut server = tokio::task::JoinSet::new();
    server.spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut client, _)) = served.accept().await {
            // An HTTP/2 server's first frame.
            let _ =
                tokio::io::AsyncWriteExt::write_all(&mut client, b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64")
                    .await;
            held.push(client);
        }
    });
    let (logs, runs) = (("ISTIO_LOG_DIR", ""), "Effective config");
    let refused = async |part: &str| {
        let text = run_by_root(&machine, &[], &[logs], runs).await;
        assert!(text.contains(part), "{part}: {text}");
        assert!(!text.contains(runs), "it started all the same: {text}");
    };
    refused("secrets/workload-spiffe-uds/socket: another SDS server is there, and ").await;
    let root = &machine.flags()[0];
    let env = [("EXEC_USER", "65534"), ("ISTIO_CUSTOM_IP_TABLES", "true"), ("DISABLE_ENVOY", "true")];
    let check = tokio::task::block_in_place(|| {
        said(&vm(machine.root.path(), &["check", "--mesh=mesh.yaml", root], &env))
    });
    let told =
        |line: &str| line.starts_with("FAIL  settings") && line.contains("another SDS server is there");
    assert_eq!(check.lines().filter(|line| told(line)).count(), 1, "{check}");

    // It may be reached; what is left of a server is not.
    mode(&place, 0o666);
    let text = run_by_root(&machine, &[], &[logs], runs).await;
    assert!(text.contains(runs), "{text}");
    server.shutdown().await;
    refused("socket: nobody answers there, nor may it be removed: ").await;
    chown(&folder, Some(65534), Some(65534)).unwrap();
    let text = run_by_root(&machine, &[], &[logs], runs).await;
    assert!(text.contains(runs), "{text}");
}
