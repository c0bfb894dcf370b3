//! `deploy/`: every value file and manifest is rendered by the real helm and kustomize.
//!
//! Where there is no helm the test says so in a line that nobody can overlook and looks at the files as YAML only;
//! `HELM=required` makes that a failure and builds one (`scripts/get-helm`). The samples of `apparmor` and `selinux/` are
//! given to their own compilers (Debian: apparmor, checkpolicy, semodule-utils) where these are installed, and said so
//! where not.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_yaml_ng::Value;

const IMAGE: &str = "registry.example.com/mesh/pilot-agent:0.1.0";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(dir: &str) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(root().join(dir)).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

fn documents(text: &str) -> Vec<Value> {
    use serde::Deserialize;
    serde_yaml_ng::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap_or_else(|e| panic!("{e}:\n{text}")))
        .filter(|document| !document.is_null())
        .collect()
}

#[expect(clippy::disallowed_methods, reason = "a switch of the test run, not of the product")]
fn helm() -> Option<PathBuf> {
    let required = std::env::var_os("HELM").is_some_and(|v| v == "required");
    let mut command = Command::new(root().join("scripts/get-helm"));
    let output = command.args(required.then_some("--build")).output().unwrap();
    if output.status.success() {
        return Some(String::from_utf8(output.stdout).unwrap().trim().into());
    }
    let reason = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!required, "{reason}");
    eprintln!("\n*** THE VALUES OF deploy/ WERE NOT RENDERED: {} ***\n", reason.trim());
    None
}

// The image of a container, by its name.
fn image(pods: &[Value], container: &str) -> Option<String> {
    let all =
        pods.iter().flat_map(|pod| ["initContainers", "containers"].map(|kind| pod["spec"][kind].clone()));
    let mut all = all.flat_map(|list| list.as_sequence().cloned().unwrap_or_default());
    all.find(|c| c["name"] == container).and_then(|c| c["image"].as_str().map(str::to_owned))
}

#[test]
fn values_render_to_the_images_they_promise() {
    let table: &[(&str, &[(&str, &str)])] = &[
        (
            "istiod",
            &[("istio-proxy", IMAGE), ("istio-init", IMAGE), ("discovery", "docker.io/istio/pilot:1.31.0")],
        ),
        ("keep-init", &[("istio-proxy", IMAGE), ("istio-init", "docker.io/istio/proxyv2:1.31.0")]),
        (
            "hub",
            &[
                ("istio-proxy", "registry.example.com/mesh/proxyv2:0.1.0-distroless"),
                ("discovery", "docker.io/istio/pilot:1.31.0"),
            ],
        ),
        ("gateway", &[]),
        ("gateway-rollback", &[]),
        ("cni", &[("istio-validation", "docker.io/istio/proxyv2:1.31.0")]),
        ("native-sidecars", &[("istio-proxy", "docker.io/istio/proxyv2:1.31.0")]),
        (
            "rollback",
            &[
                ("istio-proxy", "docker.io/istio/proxyv2:1.31.0"),
                ("istio-init", "docker.io/istio/proxyv2:1.31.0"),
            ],
        ),
    ];
    let mut names: Vec<String> = files("deploy/values")
        .iter()
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    let known: std::collections::BTreeSet<&str> = table.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, known.into_iter().collect::<Vec<_>>(), "each value file stands in the table");
    let helm = helm();
    for (name, images) in table {
        let path = root().join(format!("deploy/values/{name}.yaml"));
        assert_eq!(documents(&std::fs::read_to_string(&path).unwrap()).len(), 1, "{name}");
        let Some(helm) = &helm else { continue };
        let output = Command::new(helm)
            .args(["template", "mesh", "deploy/chart", "-f"])
            .arg(&path)
            .current_dir(root())
            .output();
        let output = output.unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        let pods = documents(&String::from_utf8(output.stdout).unwrap());
        for (container, wanted) in *images {
            assert_eq!(image(&pods, container).as_deref(), Some(*wanted), "{name}: {container}");
        }
        match *name {
            "gateway" => assert_eq!(pods[0]["metadata"]["annotations"]["sidecar.istio.io/proxyImage"], IMAGE),
            "native-sidecars" => assert_eq!(pods[0]["spec"]["initContainers"][1]["restartPolicy"], "Always"),
            "cni" => assert_eq!(pods[0]["spec"]["initContainers"][0]["args"][1], "--run-validation"),
            _ => {}
        }
    }
}

// `helm upgrade --reuse-values` lays a file over those before it; so does naming both, in order.
#[test]
fn the_way_back_undoes_every_value_file_of_ours() {
    let Some(helm) = helm() else { return };
    let rendered = |files: &[&str]| {
        let mut command = Command::new(&helm);
        command.args(["template", "mesh", "deploy/chart"]).current_dir(root());
        for name in files {
            command.args(["-f", &format!("deploy/values/{name}.yaml")]);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{files:?}: {}", String::from_utf8_lossy(&output.stderr));
        documents(&String::from_utf8(output.stdout).unwrap())
    };
    let before = rendered(&[]);
    for name in ["istiod", "keep-init", "hub"] {
        let there = rendered(&[name]);
        assert!(image(&there, "istio-proxy").unwrap().starts_with("registry.example.com/"), "{name}");
        assert_eq!(rendered(&[name, "rollback"]), before, "{name}");
    }
    // How Istio injects is not this agent's: it stays, as the file says.
    for name in ["cni", "native-sidecars"] {
        let there = rendered(&[name]);
        assert_ne!(there, before, "{name}");
        assert_eq!(rendered(&[name, "rollback"]), there, "{name}");
    }
    assert_ne!(rendered(&["gateway"]), before);
    // An upgrade drops what is null; here it stays as null.
    let annotations = &rendered(&["gateway", "gateway-rollback"])[0]["metadata"]["annotations"];
    assert!(annotations["sidecar.istio.io/proxyImage"].is_null(), "{annotations:?}");
    // And the pages do not promise that leaving a file out does it.
    for page in ["docs/INSTALL.md", "docs/UPGRADE.md"] {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        assert!(text.contains("deploy/values/rollback.yaml"), "{page}");
        assert!(text.contains("deploy/values/gateway-rollback.yaml"), "{page}");
    }
}

#[test]
fn image_and_values_are_of_the_agents_own_release() {
    let read = |name: &str| std::fs::read_to_string(root().join(name)).unwrap();
    let source = read("src/base/build_info.rs");
    let istio = source.split("ISTIO_VERSION: &str = \"").nth(1).unwrap().split('"').next().unwrap();
    let dockerfile = read("Dockerfile");
    assert!(
        dockerfile.contains(&format!("\nARG ENVOY_IMAGE=docker.io/istio/proxyv2:{istio}")),
        "Envoy's release"
    );
    assert!(dockerfile.contains(&format!("\nARG VERSION={}\n", env!("CARGO_PKG_VERSION"))), "our version");
    for name in ["chart/values.yaml", "values/rollback.yaml"] {
        assert!(read(&format!("deploy/{name}")).contains(&format!("tag: {istio}\n")), "{name}");
    }
    // Without a version helm takes the newest chart, and istiod itself is another.
    let mut upgrades = 0;
    for page in ["README.md", "docs/INSTALL.md", "docs/UPGRADE.md", "deploy/README.md", "examples/README.md"]
    {
        for command in read(page).split("helm upgrade ").skip(1) {
            let command = command.split(['`', '\n']).next().unwrap();
            assert!(command.contains(&format!(" --version {istio} ")), "{page}: helm upgrade {command}");
            upgrades += 1;
        }
    }
    assert!(upgrades > 8, "only {upgrades} upgrades are found: is the reader of pages broken?");
    for page in ["docs/INSTALL.md", "deploy/README.md"] {
        assert!(read(page).contains("helm list -n istio-system"), "{page} says how the version is found");
    }
    assert!(read("deploy/values/hub.yaml").contains(&format!("istio/pilot:{istio}\n")));
    // What `make image` says of an image and puts beside the binaries the Dockerfile does as well, in both its ends.
    let image = read("scripts/image");
    let labels: Vec<&str> =
        image.split('"').filter(|word| word.starts_with("org.opencontainers.image.")).collect();
    assert!(labels.len() >= 6, "{labels:?}");
    for label in labels {
        assert_eq!(dockerfile.matches(&format!("{label}=")).count(), 2, "{label}");
    }
    assert_eq!(dockerfile.matches("COPY --from=build /doc/ /usr/share/doc/").count(), 2);
    for text in ["LICENSE", "NOTICE", "third-party-licences.txt", "envoy-copyright"] {
        assert!(image.contains(text) && dockerfile.contains(text), "{text}");
    }
}

#[test]
fn the_canary_gives_every_deployment_the_image() {
    let annotation = "sidecar.istio.io/proxyImage";
    let kubectl = Command::new("kubectl").args(["kustomize", "deploy/canary"]).current_dir(root()).output();
    let rendered = match kubectl {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            documents(&String::from_utf8(output.stdout).unwrap())
        }
        Err(e) => {
            eprintln!("\n*** deploy/canary WAS NOT RENDERED: kubectl: {e} ***\n");
            let text = std::fs::read_to_string(root().join("deploy/canary/kustomization.yaml")).unwrap();
            let patch = documents(&text)[0]["patches"][0]["patch"].as_str().unwrap().to_owned();
            documents(&patch)
        }
    };
    assert!(!rendered.is_empty());
    for deployment in &rendered {
        assert_eq!(deployment["spec"]["template"]["metadata"]["annotations"][annotation], IMAGE);
    }
    let grpc = std::fs::read_to_string(root().join("deploy/proxyless-grpc/deployment.yaml")).unwrap();
    let grpc = &documents(&grpc)[0]["spec"]["template"]["metadata"]["annotations"];
    assert_eq!(
        (&grpc["inject.istio.io/templates"], &grpc[annotation]),
        (&"grpc-agent".into(), &IMAGE.into())
    );
    assert_eq!(
        documents(grpc["proxy.istio.io/config"].as_str().unwrap())[0]["holdApplicationUntilProxyStarts"],
        true
    );
}

#[test]
fn the_patch_of_the_install_page_gives_a_pod_the_image() {
    let page = std::fs::read_to_string(root().join("docs/INSTALL.md")).unwrap();
    let command = page.lines().find(|line| line.starts_with("    kubectl patch ")).expect("the page has it");
    let patch = command.split('\'').nth(1).expect("the patch stands in quotes");
    let read: Value = serde_yaml_ng::from_str(patch).unwrap();
    let kubectl = Command::new("kubectl")
        .args(["patch", "--local", "-f", "deploy/canary/sample.yaml", "-o", "yaml", "-p", patch])
        .current_dir(root())
        .output();
    let patched = match kubectl {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            documents(&String::from_utf8(output.stdout).unwrap()).remove(0)
        }
        Err(e) => {
            eprintln!("\n*** THE PATCH OF docs/INSTALL.md WAS NOT APPLIED: kubectl: {e} ***\n");
            read
        }
    };
    assert_eq!(patched["spec"]["template"]["metadata"]["annotations"]["sidecar.istio.io/proxyImage"], IMAGE);
}

/// Runs one compiler of policies; says so and gives nothing where it is not installed.
fn compiled(program: &str, arguments: &[&str]) -> Option<()> {
    let places = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    let Some(path) = places.iter().map(|dir| Path::new(dir).join(program)).find(|path| path.exists()) else {
        eprintln!("\n*** NOT COMPILED, FOR {program} IS NOT INSTALLED: {arguments:?} ***\n");
        return None;
    };
    let output = Command::new(path).args(arguments).current_dir(root()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    Some(())
}

#[test]
fn the_samples_of_policies_are_understood_by_their_own_compilers() {
    // Nothing is loaded (-Q), and no cache is looked at (-K).
    compiled("apparmor_parser", &["-Q", "-K", "deploy/apparmor"]);
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    let (module, package) = (at("pilot_agent.mod"), at("pilot_agent.pp"));
    if compiled("checkmodule", &["-M", "-m", "-o", &module, "deploy/selinux/pilot_agent.te"]).is_some() {
        let files = "deploy/selinux/pilot_agent.fc";
        compiled("semodule_package", &["-o", &package, "-m", &module, "-f", files]);
    }
}
