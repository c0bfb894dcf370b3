//! `vm install`: what it refuses, writes and leaves alone.

use super::*;

#[tokio::test]
async fn install_refuses_what_would_keep_the_agent_from_starting() {
    let machine = Machine::new().await;
    machine.with_user();
    let [root_flag, dir_flag] = machine.flags();
    // A root that is none is not made.
    let broken = tempfile::tempdir().unwrap();
    configured(broken.path(), &machine.mock);
    for (name, text) in
        [("cluster.env", "A=$(id)\n"), ("mesh.yaml", "defaultConfig: [\n"), ("root-cert.pem", "half\n")]
    {
        std::fs::write(broken.path().join(name), text).unwrap();
    }
    let dir = format!("--dir={}", broken.path().display());
    let refused = vm(machine.root.path(), &["install", &root_flag, &dir, "--yes"], &[]);
    assert_eq!(refused.status.code(), Some(255));
    for part in ["cluster.env:1: only a shell can compute", "mesh.yaml: ", "root-cert.pem: "] {
        assert!(said(&refused).contains(part), "{part}: {}", said(&refused));
    }
    for action in [
        &["install", "--root=missing", &dir_flag][..],
        &["run", "--root=missing"],
        &["check", "--root=missing"],
    ] {
        let refused = vm(broken.path(), action, &[]);
        assert_eq!(refused.status.code(), Some(255), "{action:?}");
        assert!(said(&refused).contains("--root=missing: No such file"), "{}", said(&refused));
    }
    assert!(
        !machine.at("etc/certs").exists() && !broken.path().join("missing").exists(),
        "something was installed"
    );
}

#[tokio::test]
async fn install_puts_files_in_place_and_asks_before_it_overwrites() {
    let machine = Machine::new().await;
    let at = |path: &str| machine.at(path);
    if rustix::process::geteuid().is_root() {
        let [_, dir] = &machine.flags();
        let text = said(&vm(machine.root.path(), &["install", dir], &[]));
        assert!(text.contains("the user istio-proxy does not exist: useradd"), "{text}");
        machine.with_user();
    }

    // Another line for istiod's name is other content; comments alone, as the package's file has, are none.
    std::fs::create_dir_all(at("var/lib/istio/envoy")).unwrap();
    std::fs::write(at("var/lib/istio/envoy/cluster.env"), "# Put it here.\n").unwrap();
    std::fs::write(at("etc/hosts"), "127.0.0.1 localhost\n192.0.2.1 istiod.istio-system.svc\n").unwrap();
    let refused = machine.install();
    assert_eq!(refused.status.code(), Some(255));
    assert!(said(&refused).contains("etc/hosts is there with other content"), "{}", said(&refused));
    assert!(!said(&refused).contains("cluster.env"), "{}", said(&refused));
    assert!(!at("etc/certs").exists(), "something was installed");

    // Nor may an older line that has other names, too, hold istiod's before the new one.
    std::fs::write(at("etc/hosts"), "192.0.2.1 istiod.istio-system.svc istiod # old\n").unwrap();
    let refused = machine.install();
    assert!(said(&refused).contains("etc/hosts is there with other content"), "{}", said(&refused));

    // Lines that are only added to the machine's own are not asked about.
    std::fs::write(at("etc/hosts"), "127.0.0.1 localhost\n").unwrap();
    let done = machine.install();
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    assert!(at("var/log/istio").is_dir(), "the unit may not make it");
    assert_eq!(
        std::fs::read_to_string(at("etc/hosts")).unwrap(),
        "127.0.0.1 localhost\n192.0.2.9 istiod.istio-system.svc\n"
    );
    let token = at("var/run/secrets/tokens/istio-token");
    let about = std::fs::metadata(&token).unwrap();
    assert_eq!(about.permissions().mode() & 0o777, 0o600);
    if rustix::process::geteuid().is_root() {
        use std::os::unix::fs::MetadataExt;
        assert_eq!((about.uid(), about.gid()), (1337, 1338));
        assert_eq!(std::fs::metadata(at("var/log/istio")).unwrap().uid(), 1337);
    }
    assert_eq!(std::fs::read(at("etc/certs/root-cert.pem")).unwrap(), machine.mock.root_pem().as_bytes());
    // What only `vm` reads is no secret to who asks for the cause of something.
    let doctor = Command::new(agent_bin())
        .arg("doctor")
        .current_dir(machine.root.path())
        .env_clear()
        .output()
        .unwrap();
    assert!(
        said(&doctor).contains("pilot-agent vm check --root / looks with those settings"),
        "{}",
        said(&doctor)
    );
    let unit = std::fs::read_to_string(at("etc/systemd/system/istio.service")).unwrap();
    assert!(
        unit.contains(&format!("ExecStart={} vm run", agent_bin().display())) && unit.contains("Type=notify")
    );

    // Again: nothing to do. Something else in a place: asked for.
    let again = machine.install();
    assert_eq!(again.status.code(), Some(0), "{}", said(&again));
    assert!(!said(&again).contains("written"), "{}", said(&again));
    std::fs::write(at("etc/istio/config/mesh"), "defaultConfig: {}\n").unwrap();
    assert!(said(&machine.install()).contains("config/mesh is there with other content"));
    assert_eq!(std::fs::read_to_string(at("etc/istio/config/mesh")).unwrap(), "defaultConfig: {}\n");
}

/// As root copies it by hand; `vm check` says that the agent may not read it and to do as vm install does.
#[tokio::test]
async fn install_gives_the_agents_user_what_root_had_copied_there() {
    use std::os::unix::fs::MetadataExt;
    if !root_for("files of another user") {
        return;
    }
    let machine = Machine::new().await;
    machine.with_user();
    let (from, token) =
        (machine.from.path().join("istio-token"), machine.at("var/run/secrets/tokens/istio-token"));
    std::fs::create_dir_all(token.parent().unwrap()).unwrap();
    std::fs::copy(from, &token).unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    let done = machine.install();
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    let about = std::fs::metadata(&token).unwrap();
    assert_eq!((about.uid(), about.mode() & 0o777), (1337, 0o600), "{}", said(&done));
    assert!(said(&machine.install()).contains(&format!("unchanged   {}", token.display())));
}

// Links are read as the prepared root will read them, and stay links.
#[tokio::test]
async fn install_follows_links_inside_the_root() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let machine = Machine::new().await;
    machine.with_user();
    let at = |path: &str| machine.at(path);
    for dir in ["run", "var/lib/istio/envoy", "etc/istio/envoy", "etc/systemd/system"] {
        std::fs::create_dir_all(at(dir)).unwrap();
    }
    symlink("/run", at("var/run")).unwrap();
    symlink("/etc/istio/envoy/cluster.env", at("var/lib/istio/envoy/cluster.env")).unwrap();
    std::fs::write(at("etc/istio/envoy/cluster.env"), "# here\n").unwrap();
    std::fs::rename(at("etc/hosts"), at("etc/hosts.real")).unwrap();
    symlink("hosts.real", at("etc/hosts")).unwrap();
    symlink("/dev/null", at("etc/systemd/system/istio.service")).unwrap();
    // Not where the program lies that runs.
    std::fs::create_dir_all(at("usr/local/bin")).unwrap();
    std::fs::write(at("usr/local/bin/pilot-agent"), "").unwrap();

    let refused = machine.install();
    assert_eq!(refused.status.code(), Some(255));
    assert!(
        said(&refused).contains("istio.service is masked (a link to /dev/null): --yes"),
        "{}",
        said(&refused)
    );
    assert!(!at("etc/certs").exists(), "something was installed");
    let [root, dir] = &machine.flags();
    let done = vm(machine.root.path(), &["install", root, dir, "--yes"], &[]);
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    for link in ["var/lib/istio/envoy/cluster.env", "etc/hosts", "var/run"] {
        assert!(at(link).symlink_metadata().unwrap().is_symlink(), "{link} is no link any more");
    }
    let read = |path: &str| std::fs::read_to_string(at(path)).unwrap();
    assert!(read("etc/istio/envoy/cluster.env").contains("CANONICAL_SERVICE"));
    assert!(read("etc/hosts.real").contains("192.0.2.9 istiod"));
    assert!(read("etc/systemd/system/istio.service").contains("ExecStart=/usr/local/bin/pilot-agent vm run"));
    assert!(at("run/secrets/tokens/istio-token").is_file(), "the token went elsewhere");
    if rustix::process::geteuid().is_root() {
        for (path, uid) in
            [("run/secrets", 1337), ("run/secrets/tokens", 1337), ("var/log", 0), ("etc/istio/config", 1337)]
        {
            assert_eq!(std::fs::metadata(at(path)).unwrap().uid(), uid, "{path}");
        }
    }
}

#[tokio::test]
async fn install_looks_at_every_place_before_it_writes() {
    let machine = Machine::new().await;
    machine.with_user();
    std::fs::create_dir_all(machine.at("etc/istio/config/mesh")).unwrap();
    std::fs::write(machine.at("var"), "a file").unwrap();
    std::fs::write(machine.from.path().join("hosts"), "not an ip line\n").unwrap();
    let [root, dir] = &machine.flags();
    let refused = vm(machine.root.path(), &["install", root, dir, "--yes"], &[]);
    assert_eq!(refused.status.code(), Some(255));
    for part in [
        "etc/istio/config/mesh: what is there is no file",
        "var/lib/istio/envoy/cluster.env: Not a directory",
        "hosts:1: \"not\" is no IP address",
    ] {
        assert!(said(&refused).contains(part), "{part}: {}", said(&refused));
    }
    assert!(!machine.at("etc/certs").exists(), "something was installed");
}

/// Roots and tokens lie in these folders: whoever may write there chooses whom the machine trusts.
#[tokio::test]
async fn install_makes_no_folder_that_everybody_may_write_to() {
    let machine = Machine::new().await;
    machine.with_user();
    let mut command = Command::new("sh");
    command.args(["-c", "umask 000; exec \"$0\" vm install \"$@\""]).arg(agent_bin()).args(machine.flags());
    let done = command
        .current_dir(machine.root.path())
        .env_clear()
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    for folder in
        ["etc/certs", "etc/istio/config", "var/lib/istio/envoy", "var/run/secrets/tokens", "var/log/istio"]
    {
        let mode = std::fs::metadata(machine.at(folder)).expect(folder).permissions().mode();
        assert_eq!(mode & 0o022, 0, "{folder} has the mode {mode:o}");
    }
}

#[tokio::test]
async fn install_gives_the_files_to_the_user_of_the_settings() {
    use std::os::unix::fs::MetadataExt;
    if !root_for("files of another user") {
        return;
    }
    let machine = Machine::new().await;
    std::fs::create_dir_all(machine.at("var/lib/istio/envoy")).unwrap();
    // As the package has it: a link that leads elsewhere on the machine that installs.
    std::fs::create_dir_all(machine.at("etc/istio/envoy")).unwrap();
    std::fs::write(machine.at("etc/istio/envoy/sidecar.env"), "EXEC_USER=meshproxy\n").unwrap();
    let link = machine.at("var/lib/istio/envoy/sidecar.env");
    std::os::unix::fs::symlink("/etc/istio/envoy/sidecar.env", link).unwrap();
    machine.with_user();
    let refused = machine.install();
    assert_eq!(refused.status.code(), Some(255));
    assert!(said(&refused).contains("the user meshproxy (EXEC_USER) does not exist"), "{}", said(&refused));
    std::fs::write(machine.at("etc/passwd"), "meshproxy:x:1555:1556::/:/bin/false\n").unwrap();
    let done = machine.install();
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    let token = std::fs::metadata(machine.at("var/run/secrets/tokens/istio-token")).unwrap();
    assert_eq!((token.uid(), token.gid()), (1555, 1556));
    assert_eq!(std::fs::metadata(machine.at("var/log/istio")).unwrap().uid(), 1555);
    // Nor does the unit need the user that is not there.
    let unit = std::fs::read_to_string(machine.at("etc/systemd/system/istio.service")).unwrap();
    let named = unit.lines().find(|line| !line.starts_with('#') && line.contains("istio-proxy"));
    assert_eq!(named, None);
}

/// `vm check` and the agent look for it there.
#[tokio::test]
async fn install_puts_the_root_into_the_folder_of_the_settings() {
    let machine = Machine::new().await;
    machine.with_user();
    std::fs::create_dir_all(machine.at("var/lib/istio/envoy")).unwrap();
    let set = |text: &str| std::fs::write(machine.at("var/lib/istio/envoy/sidecar.env"), text).unwrap();
    let inside = format!("PROV_CERT={}\n", machine.at("etc/inside").display());
    for (text, place) in [
        ("PROV_CERT=./etc/relative\n", "etc/relative"),
        // As the machine will know it once it runs.
        ("PROV_CERT=/etc/mesh-certs\n", "etc/mesh-certs"),
        (&inside, "etc/inside"),
    ] {
        set(text);
        let done = machine.install();
        assert_eq!(done.status.code(), Some(0), "{text}: {}", said(&done));
        assert!(machine.at(place).join("root-cert.pem").is_file(), "{text}: {}", said(&done));
    }
    let [root, dir] = &machine.flags();
    let done = vm(machine.root.path(), &["install", root, dir, "--certs=./etc/flag"], &[]);
    assert!(machine.at("etc/flag/root-cert.pem").is_file(), "{}", said(&done));
    assert!(!machine.at("etc/certs").exists(), "{}", said(&done));
}

// The package's own links, which in an image must not lead to the machine that prepares it.
#[tokio::test]
async fn settings_of_an_image_are_its_own() {
    let machine = Machine::new().await;
    machine.with_user();
    for dir in ["var/lib/istio/envoy", "etc/istio/envoy"] {
        std::fs::create_dir_all(machine.at(dir)).unwrap();
    }
    // Some place with settings of another machine.
    let other = tempfile::tempdir().unwrap();
    let link = |name: &str| {
        let place = other.path().join(name);
        std::fs::write(&place, format!("ISTIO_SERVICE='of the builder: {name}'\n")).unwrap();
        let inside = machine.at(place.strip_prefix("/").unwrap().to_str().unwrap());
        std::fs::create_dir_all(inside.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(&place, machine.at("var/lib/istio/envoy").join(name)).unwrap();
        inside
    };
    let (sidecar, cluster) = (link("sidecar.env"), link("cluster.env"));
    let [root, _] = &machine.flags();
    let check = || said(&vm(machine.root.path(), &["check", root], &[]));
    let text = check();
    assert!(text.contains("cluster.env is not there: \"istioctl"), "{text}");
    assert!(!text.contains("of the builder"), "{text}");

    let done = machine.install();
    assert_eq!(done.status.code(), Some(0), "{}", said(&done));
    assert!(std::fs::read_to_string(cluster).unwrap().contains("CANONICAL_SERVICE"));
    std::fs::write(&sidecar, "ISTIO_LOG_DIR='/of/the/image'\n").unwrap();
    let text = check();
    for part in
        ["var/lib/istio/envoy/cluster.env: ", "ISTIO_SERVICE='shop.ns'", "ISTIO_LOG_DIR='/of/the/image'"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("of the builder"), "{text}");

    // Whose files they are to be is not known where it cannot be read.
    std::fs::remove_file(&sidecar).unwrap();
    std::os::unix::fs::symlink(sidecar.file_name().unwrap(), &sidecar).unwrap();
    for text in [check(), said(&machine.install())] {
        assert!(text.contains("var/lib/istio/envoy/sidecar.env: links lead in a circle"), "{text}");
    }
}
