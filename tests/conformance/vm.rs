//! `vm`: a virtual machine's files, user and service manager. What needs the kernel's tables is in tests/privileged.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::support::{Envoy, LIMIT, MockIstiod, TestAgent, agent_bin, eventually, free_port, root_for};

mod install;
mod refused;

// What `istioctl x workload entry configure` writes.
fn configured(dir: &Path, mock: &MockIstiod) {
    let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
    write(
        "cluster.env",
        "CANONICAL_SERVICE='shop'\nISTIO_INBOUND_PORTS='*'\nISTIO_LOCAL_EXCLUDE_PORTS='22,15090,15021,15020'\n\
         ISTIO_METAJSON_LABELS='{\"app\":\"shop\"}'\nISTIO_META_DNS_CAPTURE='true'\nISTIO_NAMESPACE='ns'\n\
         ISTIO_SERVICE='shop.ns'\nISTIO_SERVICE_CIDR='*'\nSERVICE_ACCOUNT='sa'\nTRUST_DOMAIN='cluster.local'\n",
    );
    write("mesh.yaml", &format!("defaultConfig:\n  discoveryAddress: {}\n", mock.discovery_address()));
    write("root-cert.pem", &mock.root_pem());
    write("istio-token", &mock.mint("ns", "sa"));
    write("hosts", "192.0.2.9 istiod.istio-system.svc\n");
}

fn vm(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(agent_bin());
    command.arg("vm").args(args).current_dir(dir).env_clear().envs(env.iter().copied());
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(std::process::Stdio::null());
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

// Who runs the test, as a user that the machine knows.
fn me() -> String {
    rustix::process::geteuid().as_raw().to_string()
}

#[test]
fn every_fault_is_told_before_anything_is_changed() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.env"), "A=$(id)\nISTIO_SVC_IP='10.0.0.1'\nB='open\n").unwrap();
    let output = vm(dir.path(), &["run", "--cluster-env=c.env"], &[]);
    assert_eq!(output.status.code(), Some(255));
    let text = said(&output);
    assert!(text.contains("c.env:1: only a shell can compute"), "{text}");
    assert!(text.contains("c.env:3: a quote is not closed"), "{text}");
    let output = vm(dir.path(), &["run", "--cluster-env=missing.env"], &[]);
    assert!(said(&output).contains("missing.env: No such file"), "{}", said(&output));
    let env = [("EXEC_USER", "nobody-of-that-name"), ("ISTIO_SVC_IP", "vm.example")];
    let text = said(&vm(dir.path(), &["run"], &env));
    assert!(text.contains("nobody-of-that-name (EXEC_USER) does not exist"), "{text}");
    assert!(text.contains("ISTIO_SVC_IP=vm.example: this is no IP address"), "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "something was written");
    for args in [&["start"][..], &["run", "now"], &["install"]] {
        assert_eq!(vm(dir.path(), args, &[]).status.code(), Some(255), "{args:?}");
    }
}

/// The folder that `istioctl` wrote, and a machine's root without anything of Istio.
struct Machine {
    mock: MockIstiod,
    from: tempfile::TempDir,
    root: tempfile::TempDir,
}

impl Machine {
    async fn new() -> Self {
        let mock = MockIstiod::start().await;
        let (from, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        configured(from.path(), &mock);
        std::fs::create_dir_all(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/hosts"), "127.0.0.1 localhost\n").unwrap();
        Self { mock, from, root }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    // Root needs the user that the agent will run as.
    fn with_user(&self) {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        std::fs::write(self.at("etc/passwd"), "istio-proxy:x:1337:1338::/var/lib/istio:/bin/false\n")
            .unwrap();
    }

    fn flags(&self) -> [String; 2] {
        [format!("--root={}", self.root.path().display()), format!("--dir={}", self.from.path().display())]
    }

    fn install(&self) -> Output {
        let [root, dir] = &self.flags();
        vm(self.root.path(), &["install", root, dir], &[])
    }
}

#[tokio::test]
async fn check_gives_a_line_for_each_thing() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    configured(dir.path(), &mock);
    for place in ["etc/certs", "var/run/secrets/tokens"] {
        std::fs::create_dir_all(at(place)).unwrap();
    }
    let mesh = format!(
        "defaultConfig:\n  discoveryAddress: {}\n  binaryPath: /bin/true\n",
        mock.discovery_address()
    );
    std::fs::write(at("mesh.yaml"), mesh).unwrap();
    let user = me();
    let env = [
        ("EXEC_USER", user.as_str()),
        ("ISTIO_CUSTOM_IP_TABLES", "true"),
        ("CA_ADDR", "name-that-does-not-exist.invalid:15012"),
    ];
    let check = |env: &[(&str, &str)]| {
        vm(dir.path(), &["check", "--cluster-env=cluster.env", "--mesh=mesh.yaml"], env)
    };
    // Without a root the agent would not start. The places are not the machine's own, which is said.
    let output = check(&env);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let here = std::fs::canonicalize(dir.path()).unwrap();
    for line in [
        "FAIL  root        ./etc/certs/root-cert.pem is not there: copy root-cert.pem to it".to_owned(),
        "FAIL  token       ./var/run/secrets/tokens/istio-token is not there: copy istio-token to it"
            .to_owned(),
        format!("warn  places      places hang off {}, the working directory: --root /", here.display()),
    ] {
        assert!(said(&output).contains(&line), "{line}: {}", said(&output));
    }
    std::fs::create_dir_all(at("var/lib/istio/envoy")).unwrap();
    std::fs::write(at("var/lib/istio/envoy/cluster.env"), "# as the package brings it\n").unwrap();
    let output = vm(dir.path(), &["check", &format!("--root={}", here.display())], &env);
    assert!(!said(&output).contains("places hang off"), "{}", said(&output));
    assert!(said(&output).contains("cluster.env sets nothing: "), "{}", said(&output));
    let place = here.join("etc/certs/root-cert.pem");
    assert!(
        said(&output).contains(&format!("FAIL  root        {} is", place.display())),
        "{}",
        said(&output)
    );
    std::fs::copy(at("root-cert.pem"), at("etc/certs/root-cert.pem")).unwrap();
    let output = check(&env);
    let text = said(&output);
    for line in [
        "ok    root, time",
        "FAIL  token",
        "ok    envoy",
        "ok    istiod",
        "FAIL  ca",
        "ok    rules",
        "warn  unit",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    std::fs::copy(at("istio-token"), at("var/run/secrets/tokens/istio-token")).unwrap();
    let output = check(&env[..2]);
    let text = said(&output);
    assert!(text.contains("ok    token"), "{text}");
    // Without CA_ADDR the default is asked, which no resolver here knows.
    assert!(text.contains("ca          istiod.istio-system.svc:15012"), "{text}");

    // There, and yet none that systemd would start.
    std::fs::create_dir_all(at("etc/systemd/system")).unwrap();
    std::os::unix::fs::symlink("/dev/null", at("etc/systemd/system/istio.service")).unwrap();
    let text = said(&check(&env[..2]));
    assert!(text.contains("warn  unit        ./etc/systemd/system/istio.service is masked"), "{text}");

    // A setting that cannot be used hides nothing else.
    std::fs::remove_file(at("var/run/secrets/tokens/istio-token")).unwrap();
    let output = check(&[("EXEC_USER", "nobody-of-this-name"), ("ISTIO_SVC_IP", "vm.example")]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let text = said(&output);
    for line in [
        "FAIL  settings    the user nobody-of-this-name (EXEC_USER) does not exist",
        "FAIL  settings    ISTIO_SVC_IP=vm.example",
        "warn  envoy       not looked at",
        "warn  user        not looked at",
        "warn  istiod      not looked at",
        "ok    mesh",
        "ok    root, time",
        "FAIL  token",
        "warn  unit",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }

    // Nor does a certificate that istiod would not be shown stand for the token.
    for name in ["key.pem", "cert-chain.pem"] {
        std::fs::write(at("etc/certs").join(name), "half a file").unwrap();
    }
    let text = said(&check(&env[..2]));
    assert!(text.contains("FAIL  token"), "{text}");
    assert!(text.contains("an earlier start is of no use: ./etc/certs/cert-chain.pem: "), "{text}");
}

/// As the package's `sidecar.env` promises.
#[tokio::test]
async fn check_says_which_settings_are_in_force() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    configured(dir.path(), &mock);
    let user = me();
    let folder = dir.path().join("var/lib/istio/envoy");
    std::fs::create_dir_all(&folder).unwrap();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    let packaged = include_str!("../../packaging/etc/sidecar.env");
    assert!(packaged.contains("`pilot-agent vm check` says what is in force"));
    let env = [("EXEC_USER", user.as_str()), ("ISTIO_CUSTOM_IP_TABLES", "true")];
    let check = || said(&vm(dir.path(), &["check", "--mesh=mesh.yaml"], &env));

    write("sidecar.env", packaged);
    write("cluster.env", "");
    assert!(!check().contains("ok    settings"), "nothing is set: {}", check());
    write(
        "sidecar.env",
        "ISTIO_NAMESPACE=a\nISTIO_NAMESPACE='shop'\nISTIO_INBOUND_PORTS=80\nVAULT_TOKEN=hunter2\n",
    );
    write("cluster.env", "ISTIO_INBOUND_PORTS='*'\nPOD_NAMESPACE='shop'\nISTIO_SERVICE='web'\n");
    let text = check();
    for line in [
        "ok    settings    ./var/lib/istio/envoy/sidecar.env: ISTIO_NAMESPACE='shop', VAULT_TOKEN, not ISTIO_INBOUND_PORTS, which \
         the other file sets as well\n",
        "ok    settings    ./var/lib/istio/envoy/cluster.env: ISTIO_INBOUND_PORTS='*', ISTIO_SERVICE='web', POD_NAMESPACE\n",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(!text.contains("hunter2"), "{text}");
}

#[tokio::test]
async fn check_judges_what_run_would_use() {
    let mock = MockIstiod::start().await;
    let dir = tempfile::tempdir().unwrap();
    let at = |path: &str| dir.path().join(path);
    configured(dir.path(), &mock);
    let user = me();
    let check = |more: &[(&str, &str)]| {
        let mut env = vec![("EXEC_USER", user.as_str()), ("ISTIO_CUSTOM_IP_TABLES", "true")];
        env.extend(more);
        said(&vm(dir.path(), &["check", "--cluster-env=cluster.env", "--mesh=mesh.yaml"], &env))
    };
    let has = |text: &str, line: &str| assert!(text.contains(line), "{line}: {text}");
    let system = [("XDS_ROOT_CA", "SYSTEM"), ("CA_ROOT_CA", "SYSTEM")];
    let plain = [("PILOT_ADDRESS", "127.0.0.1:15010"), ("ISTIO_CP_AUTH", "NONE")];
    has(&check(&[("DISABLE_ENVOY", "true")]), "ok    envoy       there is none (DISABLE_ENVOY)");
    has(&check(&[("ENVOY_EXTERNAL", "true")]), "ok    envoy       somebody else's business");
    has(&check(&system), "ok    root        the system's");
    has(&check(&plain), "ok    root        none is needed: plain text");
    has(&check(&system[..1]), "FAIL  ca root     invalid config - PROV_CERT=./etc/certs missing a root");
    for place in ["etc/certs", "mine"] {
        std::fs::create_dir_all(at(place)).unwrap();
    }
    std::fs::copy(at("root-cert.pem"), at("etc/certs/root-cert.pem")).unwrap();
    std::fs::write(at("mine/root-cert.pem"), "half\n").unwrap();
    let text = check(&[]);
    has(&text, "ok    root, time  ./etc/certs/root-cert.pem");
    assert!(!text.contains("ca root"), "{text}");
    has(
        &check(&[("XDS_ROOT_CA", "mine/root-cert.pem")]),
        "FAIL  root        mine/root-cert.pem: no certificate in it",
    );
    let text = check(&[("PROV_CERT", "./mine")]);
    has(&text, "ok    root, time  ./etc/certs/root-cert.pem");
    has(&text, "FAIL  ca root     ./mine/root-cert.pem");

    // Nobody looks a name up that only the proxy calls.
    let proxy = format!("http://{}", mock.discovery_address());
    let there = ("PILOT_ADDRESS", "istiod.invalid:15012");
    let line = "istiod      istiod.invalid:15012 by the proxy ";
    has(&check(&[there, ("HTTPS_PROXY", proxy.as_str())]), &format!("ok    {line}"));
    has(&check(&[there, ("HTTPS_PROXY", "http://127.0.0.1:1")]), &format!("FAIL  {line}127.0.0.1:1: "));
    let direct = [there, ("HTTPS_PROXY", proxy.as_str()), ("NO_PROXY", ".invalid")];
    has(&check(&direct), "FAIL  istiod      istiod.invalid:15012: ");

    let vault = [("CA_PROVIDER", "VaultCA"), ("VAULT_ADDR", "https://127.0.0.1:1"), ("VAULT_ROLE", "web")];
    let paths = [("VAULT_AUTH_PATH", "auth/kubernetes/login"), ("VAULT_SIGN_CSR_PATH", "pki/sign/web")];
    let text = check(&[vault, [paths[0], paths[1], ("CA_ADDR", "ca.invalid:1")]].concat());
    has(&text, "FAIL  ca          127.0.0.1:1: ");
    assert!(!text.contains("ca.invalid"), "{text}");

    let text = check(&[("FILE_MOUNTED_CERTS", "true"), ("PROV_CERT", ""), ("CA_ADDR", "ca.invalid:1")]);
    has(&text, "ok    token       none is needed: certificates are mounted");
    assert!(!text.contains("ca.invalid"), "{text}");
    has(
        &check(&[("CREDENTIAL_FETCHER_TYPE", "GoogleComputeEngine")]),
        "ok    token       none is needed: the metadata server gives it",
    );

    // Which is where the line of its own would not be read.
    for given in
        ["{concurrency: 1}", "{\"discoveryAddress\": \"x.invalid:1\"}\n", "concurrency: 1\n---\nb: 1\n"]
    {
        let text = check(&[("PILOT_ADDRESS", "127.0.0.1:1"), ("PROXY_CONFIG", given)]);
        has(&text, "FAIL  istiod      127.0.0.1:1: ");
    }
}

#[test]
fn lines_that_only_a_shell_reads_so_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let user = me();
    let env = [("EXEC_USER", user.as_str()), ("ISTIO_CUSTOM_IP_TABLES", "true")];
    for (text, told) in [
        (
            "A=1\nISTIO_NAMESPACE=shop; ISTIO_SVC_IP=10.1.1.1\n",
            "FAIL  settings    ./cluster.env:2: ; means something",
        ),
        ("ISTIO_NAMESPACE=shop\\", "FAIL  settings    ./cluster.env:1: nothing follows the backslash"),
    ] {
        std::fs::write(dir.path().join("cluster.env"), text).unwrap();
        let output = vm(dir.path(), &["check", "--cluster-env=cluster.env"], &env);
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        assert!(said(&output).contains(told), "{told}: {}", said(&output));
    }
}

/// A service manager that takes notes.
struct Manager {
    socket: UnixDatagram,
    heard: Vec<String>,
}

impl Manager {
    fn at(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, heard: Vec::new() }
    }

    fn hears(&mut self, part: &str) -> bool {
        let mut bytes = [0; 8192];
        while let Ok(n) = self.socket.recv(&mut bytes) {
            self.heard.push(String::from_utf8_lossy(&bytes[..n]).into_owned());
        }
        self.heard.iter().any(|message| message.lines().any(|line| line.starts_with(part)))
    }

    async fn wait(&mut self, part: &str) {
        let deadline = tokio::time::Instant::now() + LIMIT + Duration::from_secs(30);
        while !self.hears(part) {
            assert!(tokio::time::Instant::now() < deadline, "{part:?} was never told: {:#?}", self.heard);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn the_service_manager_is_told_and_the_watchdog_is_fed() {
    let mock = MockIstiod::start().await;
    let scratch = tempfile::tempdir().unwrap();
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = scratch.path().join("notify");
    let mut manager = Manager::at(&path);
    let mut agent = TestAgent::with()
        .istiod(&mock)
        .env("NOTIFY_SOCKET", path.to_string_lossy())
        .env("WATCHDOG_USEC", "300000")
        .fake("ready", false)
        .start();
    manager.wait("STATUS=not ready: ").await;
    manager.wait("WATCHDOG=1").await;
    assert!(
        !manager.hears("READY=1") || manager.heard.len() > 20,
        "ready before it was: {:#?}",
        manager.heard
    );
    agent.assert_running();
    agent.stop().await;
    manager.wait("STOPPING=1").await;
    manager.wait("STATUS=stopping: ").await;
}

#[tokio::test]
async fn ready_and_a_new_envoy_are_told() {
    let mock = MockIstiod::start().await;
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("notify");
    let mut manager = Manager::at(&path);
    let agent = TestAgent::with()
        .istiod(&mock)
        .env("NOTIFY_SOCKET", path.to_string_lossy())
        .env("ENVOY_RECOVERY", "true")
        .start();
    manager.wait("READY=1").await;
    manager.wait("STATUS=ready").await;
    manager.heard.clear();
    rustix::process::kill_process(agent.envoy_pid().await, rustix::process::Signal::KILL).unwrap();
    manager.wait("RELOADING=1").await;
    manager.wait("MONOTONIC_USEC=").await;
    manager.wait("READY=1").await;
    agent.stop().await;
}

// The whole way without root: the script's files, the agent in this process's place, identity and readiness.
#[tokio::test]
async fn run_reads_the_files_and_becomes_the_agent() {
    let mock = MockIstiod::start().await;
    let from = tempfile::tempdir().unwrap();
    configured(from.path(), &mock);
    let file = |name: &str| std::fs::read(from.path().join(name)).unwrap();
    let builder = TestAgent::with();
    let ports = builder.ports();
    let address = mock.discovery_address();
    let mesh = format!(
        "defaultConfig:\n  discoveryAddress: {address}\n  statusPort: {}\n  proxyAdminPort: {}\n  binaryPath: {}\n  terminationDrainDuration: 1s\n",
        ports.status,
        ports.admin,
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/fake_envoy.py"),
    );
    let mut agent = builder
        .args(&["vm", "run", "--mesh=./mesh.yaml"])
        .env("PROXY_CONFIG", "")
        .env("EXEC_USER", me())
        .env("ISTIO_CUSTOM_IP_TABLES", "true")
        .env("CA_ADDR", address)
        .env("DNS_PROXY_ADDR", format!("127.0.0.1:{}", free_port()))
        .without_env("POD_NAMESPACE")
        .without_env("SERVICE_ACCOUNT")
        .without_env("INSTANCE_IP")
        .file("mesh.yaml", mesh)
        .file("var/lib/istio/envoy/cluster.env", file("cluster.env"))
        .file("var/lib/istio/envoy/sidecar.env", "# operator's\nISTIO_META_DNS_CAPTURE=false\n")
        .file("etc/certs/root-cert.pem", file("root-cert.pem"))
        .file_mode("var/run/secrets/tokens/istio-token", file("istio-token"), 0o600)
        .env("ISTIO_META_DNS_CAPTURE", "false")
        .envoy(Envoy::Fake)
        .start();
    // cluster.env comes last and switches DNS capture on, which makes readiness wait for a name table.
    agent.wait_log("serviceCluster: shop.ns").await;
    let chain = agent.path("etc/certs/cert-chain.pem");
    eventually("the certificate is written to OUTPUT_CERTS", || async { chain.exists().then_some(()) }).await;
    let seen: BTreeMap<String, String> =
        std::fs::read(format!("/proc/{}/environ", agent.pid().as_raw_nonzero()))
            .unwrap()
            .split(|b| *b == 0)
            .filter_map(|pair| {
                String::from_utf8_lossy(pair).split_once('=').map(|(k, v)| (k.into(), v.into()))
            })
            .collect();
    assert_eq!(seen["ISTIO_META_DNS_CAPTURE"], "true");
    assert_eq!(seen["POD_NAMESPACE"], "ns");
    assert_eq!(seen["SERVICE_ACCOUNT"], "sa");
    assert_eq!(seen["PROV_CERT"], "./etc/certs");
    let name = std::fs::read_to_string(format!("/proc/{}/comm", agent.pid().as_raw_nonzero())).unwrap();
    assert_eq!(name, "pilot-agent\n", "who looks for the agent looks for its name");
    agent.stop().await;
}

/// What `vm run` by root says until it ends, says `part`, or writes where it must not.
async fn run_by_root(machine: &Machine, args: &[&str], env: &[(&str, &str)], part: &str) -> String {
    let out = machine.at("out");
    let file = std::fs::File::create(&out).unwrap();
    let mut child = tokio::process::Command::new(agent_bin())
        .args(["vm", "run", "--mesh=mesh.yaml"])
        .arg(&machine.flags()[0])
        .args(args)
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .envs([("EXEC_USER", "65534"), ("ISTIO_CUSTOM_IP_TABLES", "true"), ("DISABLE_ENVOY", "true")])
        .envs(env.iter().copied())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut waits = std::pin::pin!(eventually("vm run tells", || async {
        let told = std::fs::read_to_string(&out).is_ok_and(|text| text.contains(part));
        (told || std::fs::read_dir(machine.at("victim")).unwrap().count() > 0).then_some(())
    }));
    tokio::select! {
        _ = child.wait() => {}
        () = &mut waits => {}
    }
    let _ = child.kill().await;
    std::fs::read_to_string(&out).unwrap()
}

// The folders below these are the proxy's, which may put there what it likes before root comes again.
#[tokio::test]
async fn root_writes_through_no_link_of_the_proxys_user() {
    use std::os::unix::fs::{chown, lchown, symlink};
    if !root_for("a link of another user") {
        return;
    }
    let machine = Machine::new().await;
    let at = |path: &str| machine.at(path);
    std::fs::set_permissions(machine.root.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for dir in ["victim", "etc/certs", "var/run/secrets", "var/lib/istio"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    for (name, to) in [("mesh.yaml", "mesh.yaml"), ("root-cert.pem", "etc/certs/root-cert.pem")] {
        std::fs::copy(machine.from.path().join(name), at(to)).unwrap();
    }
    let planted = |link: &str| {
        let (link, dir) = (at(link), at(link).parent().unwrap().to_owned());
        chown(dir, Some(65534), Some(65534)).unwrap();
        symlink(at("victim"), &link).unwrap();
        lchown(&link, Some(65534), Some(65534)).unwrap();
    };
    let spared = |text: &str| {
        let found: Vec<_> = std::fs::read_dir(at("victim")).unwrap().map(|e| e.unwrap().path()).collect();
        assert!(found.is_empty(), "{found:?}: {text}");
    };
    let runs = "Effective config";

    planted("var/lib/istio/logs");
    for place in ["./var/lib/istio/logs", "./var/lib/istio/logs/deep/down"] {
        let text = run_by_root(&machine, &[], &[("ISTIO_LOG_DIR", place)], runs).await;
        spared(&text);
        assert!(text.contains("istio/logs is a link of user 65534"), "{text}");
        assert!(text.contains("the agent's log stays here"), "{text}");
    }

    planted("var/run/secrets/tokens");
    let token = format!("--token={}", machine.from.path().join("istio-token").display());
    let text = run_by_root(&machine, &[&token], &[("ISTIO_LOG_DIR", "")], runs).await;
    spared(&text);
    assert!(text.contains("secrets/tokens is a link of user 65534"), "{text}");
    assert!(!text.contains(runs), "it started all the same: {text}");

    // What root reads for the agent is the agent's.
    std::fs::remove_file(at("var/run/secrets/tokens")).unwrap();
    std::fs::write(at("shadow"), "root's").unwrap();
    symlink(at("shadow"), at("var/run/secrets/mine")).unwrap();
    lchown(at("var/run/secrets/mine"), Some(65534), Some(65534)).unwrap();
    let env = [("ISTIO_LOG_DIR", "")];
    let text = run_by_root(&machine, &["--token=./var/run/secrets/mine"], &env, runs).await;
    assert!(text.contains("secrets/mine is a link of user 65534"), "{text}");
    assert!(!at("var/run/secrets/tokens/istio-token").exists(), "{text}");
}

/// Whoever was there first may have made it: root that copied a token, or another user's agent before `EXEC_USER` was set.
#[tokio::test]
async fn the_folder_of_sockets_becomes_the_agents_users() {
    use std::os::unix::fs::{MetadataExt, chown, symlink};
    if !root_for("a folder of another user") {
        return;
    }
    let machine = Machine::new().await;
    let at = |path: &str| machine.at(path);
    std::fs::set_permissions(machine.root.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    for dir in ["victim", "etc/certs", "run/secrets", "var/lib/istio"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    symlink("../run", at("var/run")).unwrap();
    for (name, to) in [("mesh.yaml", "mesh.yaml"), ("root-cert.pem", "etc/certs/root-cert.pem")] {
        std::fs::copy(machine.from.path().join(name), at(to)).unwrap();
    }
    for owner in [0, 1337] {
        chown(at("run/secrets"), Some(owner), Some(owner)).unwrap();
        let check = ["check", &machine.flags()[0], "--mesh=mesh.yaml"];
        let checked = vm(
            machine.root.path(),
            &check,
            &[("EXEC_USER", "65534"), ("ISTIO_CUSTOM_IP_TABLES", "true"), ("DISABLE_ENVOY", "true")],
        );
        assert!(!said(&checked).contains("FAIL  folders"), "{}", said(&checked));
        assert_eq!(at("run/secrets").metadata().unwrap().uid(), owner, "a look changes nothing");
        let env = [("ISTIO_LOG_DIR", "")];
        let text = run_by_root(&machine, &[], &env, "Effective config").await;
        let about = at("run/secrets").metadata().unwrap();
        assert_eq!((about.uid(), about.gid()), (65534, 65534), "{text}");
    }
}
