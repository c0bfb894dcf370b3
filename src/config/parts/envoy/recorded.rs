//! Our bootstraps beside those that the Go agent wrote: the recordings of `conformance/bootstrap`, without a process, root
//! or a network namespace.

use std::net::IpAddr;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::Bootstrap;
use crate::base::error::BoxError;
use crate::base::netlink::Interface;
use crate::base::recordings::{self, Recording};
use crate::config::env::{Env, var};
use crate::config::{Sources, addresses, args, gather, pod};

/// What `conformance/bootstrap/lib/sandbox.py` gives the namespace of a case.
fn interfaces(net: &str) -> Vec<Interface> {
    let all: &[(&str, &[&str])] = match net {
        "lo" => &[],
        "v4" => &[("eth0", &["10.9.0.2"])],
        "v6" => &[("eth0", &["fd00:9::2"])],
        "dual" => &[("eth0", &["10.9.0.2", "fd00:9::2"])],
        "multi" => &[("eth0", &["10.9.0.2"]), ("net1", &["10.8.0.2", "10.8.0.3"]), ("net2", &["fd00:8::2"])],
        other => panic!("an unknown net: {other}"),
    };
    let interface = |(index, (name, addresses)): (u32, &(&str, &[&str]))| Interface {
        index,
        name: (*name).to_owned(),
        up: true,
        loopback: false,
        addresses: addresses.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect(),
    };
    (2..).zip(all).map(interface).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn environment(case: &Recording, root: &str) -> Env {
    let mut all = Map::from_iter([
        ("POD_NAME".to_owned(), json!("web-1")),
        ("POD_NAMESPACE".to_owned(), json!("shop")),
        ("SERVICE_ACCOUNT".to_owned(), json!("web")),
        ("INSTANCE_IP".to_owned(), json!("10.9.0.2")),
        ("HOME".to_owned(), json!("/root")),
        ("PATH".to_owned(), json!("/usr/local/bin:/usr/bin:/bin")),
        ("CLOUD_PLATFORM".to_owned(), json!("none")),
    ]);
    let mut proxy = json!({"discoveryAddress": "localhost:15012", "binaryPath": "./bin/envoy"});
    let proxy = proxy.as_object_mut().unwrap();
    for (key, value) in case.input("pc").as_object().unwrap() {
        proxy.insert(key.clone(), value.clone());
    }
    proxy.retain(|_, value| value != "@absent");
    let proxy = case.case.get("pc_raw").map_or_else(|| Value::Object(proxy.clone()).to_string(), text);
    all.insert("PROXY_CONFIG".to_owned(), proxy.into());
    for (key, value) in case.input("env").as_object().unwrap() {
        all.insert(key.clone(), value.clone());
    }
    all.retain(|_, value| !value.is_null());
    Env::from_os(all.iter().map(|(k, v)| (k.into(), text(v).replace("@cwd", root).into())))
}

/// The files of a case; the names of its sockets that somebody serves.
fn write(case: &Recording, root: &Path) -> Vec<String> {
    let mut files = case.input("files").as_object().unwrap().clone();
    for (key, path) in [("labels", pod::LABELS), ("annotations", pod::ANNOTATIONS)] {
        let Some(given) = case.case.get(key) else { continue };
        let line = |(name, value): (&String, &Value)| format!("{name}={value}");
        let lines = given.as_object().map(|all| all.iter().map(line).collect::<Vec<_>>().join("\n"));
        let content = lines.map_or_else(|| given.clone(), Value::String);
        files.entry(path.trim_start_matches("./")).or_insert(content);
    }
    if let Some(mesh) = case.case.get("mesh") {
        files.insert("etc/istio/config/mesh".to_owned(), mesh.clone());
    }
    let mut served = Vec::new();
    for (path, content) in files {
        let full = root.join(&path);
        std::fs::create_dir_all(full.parent().unwrap()).unwrap();
        match content.as_str() {
            Some("@live-socket") => served.push(path),
            Some("@dir") => std::fs::create_dir_all(full).unwrap(),
            Some(content) if !content.starts_with('@') => std::fs::write(full, content).unwrap(),
            _ => {}
        }
    }
    served
}

/// What is no contract, as the runner leaves it out.
fn normal(value: Value, key: &str, case: &Recording, root: &str) -> Value {
    let own_version = case.input("env").get("ISTIO_META_ISTIO_VERSION").is_some();
    match value {
        Value::Object(map) => {
            let known = map.into_iter().filter(|(key, _)| key != "UserAgentVersionType");
            known.map(|(key, item)| (key.clone(), normal(item, &key, case, root))).collect()
        }
        Value::Array(list) => list.into_iter().map(|item| normal(item, "", case, root)).collect(),
        Value::String(_) if key == "ISTIO_VERSION" && !own_version => json!("$VERSION"),
        Value::String(span) if ["stats_flush_interval", "stats_eviction_interval"].contains(&key) => {
            match span.strip_suffix('s').filter(|n| n.contains('.')) {
                Some(number) => json!(format!("{}s", number.trim_end_matches('0').trim_end_matches('.'))),
                None => json!(span),
            }
        }
        Value::String(text) => json!(text.replace(root, "$CWD")),
        Value::Number(number) => match number.as_f64() {
            Some(n) if n.fract() == 0.0 && n.abs() < 1e15 => json!(n as i64),
            Some(n) if n.abs() > 9e15 => json!(n),
            _ => Value::Number(number),
        },
        plain => plain,
    }
}

/// The bootstraps of Envoy and of proxyless applications, or why this case has none to compare.
async fn made(case: &Recording) -> Result<(Value, Value), BoxError> {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_str().unwrap();
    let served = write(case, dir.path());
    let env = environment(case, root);
    let words = match case.case.get("args") {
        Some(words) => words.as_array().unwrap().iter().map(text).collect(),
        None => vec!["sidecar".to_owned()],
    };
    let words: Vec<String> = words.iter().map(|w| w.replace("@cwd", root)).collect();
    let table: Vec<_> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    let flags = args::parse(&words, &table, true)?;
    let annotations = pod::read(&dir.path().join(pod::ANNOTATIONS)).unwrap_or_default();
    let annotation = |key: &str| annotations.get(key).cloned();
    let (sources, errors) = gather(flags, &env, dir.path(), annotation, std::time::Duration::MAX);
    if !errors.is_empty() {
        return Err(errors.join("; ").into());
    }
    let excluded = annotation("traffic.sidecar.istio.io/excludeInterfaces").unwrap_or_default();
    let net = interfaces(case.case.get("net").and_then(Value::as_str).unwrap_or("v4"));
    let addresses = addresses::choose(sources.settings.text(var::INSTANCE_IP), &excluded, &net).0;
    let sources = std::sync::Arc::new(Sources { addresses, ..Sources::clone(&sources) });
    let serves = |folder: &str| served.iter().any(|path| path.contains(folder));
    let bootstrap = Bootstrap::new(&sources);
    let node = bootstrap.node(serves("workload-spiffe-uds"), serves("workload-spiffe-credentials")).await?;
    bootstrap.write_grpc(&node)?;
    let grpc = sources.settings.some_text(var::GRPC_XDS_BOOTSTRAP).map_or(Value::Null, |path| {
        serde_json::from_slice(&std::fs::read(sources.path(path)).unwrap()).unwrap()
    });
    let envoy = bootstrap.render(node)?;
    let envoy = serde_json::from_slice(&envoy).unwrap_or_else(|_| json!(String::from_utf8(envoy).unwrap()));
    Ok((normal(envoy, "", case, root), normal(grpc, "", case, root)))
}

/// The first place where two documents differ.
fn difference(ours: &Value, theirs: &Value, path: &str) -> Option<String> {
    match (ours, theirs) {
        (Value::Object(a), Value::Object(b)) => a.keys().chain(b.keys()).find_map(|key| {
            let (a, b) = (a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null));
            difference(a, b, &format!("{path}/{key}"))
        }),
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => a
            .iter()
            .zip(b)
            .enumerate()
            .find_map(|(at, (ours, theirs))| difference(ours, theirs, &format!("{path}/{at}"))),
        (Value::Number(a), Value::Number(b)) if a.as_f64() == b.as_f64() => None,
        _ => (ours != theirs).then(|| format!("{path}: {ours:.300} where the Go agent has {theirs:.300}")),
    }
}

/// Cases in which we differ on purpose.
fn deliberate() -> Vec<String> {
    let listed = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/conformance/differences.json"));
    let listed: Value = serde_json::from_str(listed).unwrap();
    listed["bootstrap"].as_object().unwrap().keys().cloned().collect()
}

/// Whether a case is left to the runner: what it needs is not there without a namespace.
fn needs_a_namespace(case: &Recording) -> bool {
    let other_net = case.case.get("net").is_some_and(|net| !net.is_string());
    let has = |key: &str| case.case.get(key).is_some();
    // Names that only the namespace's own hosts file knows.
    let names = case.case.to_string().contains(".test:");
    other_net || names || ["metadata", "hosts", "latent", "command"].into_iter().any(has)
}

#[tokio::test]
async fn bootstraps_equal_those_of_the_go_agent() {
    let (deliberate, mut compared, mut wrong) = (deliberate(), [0, 0], Vec::new());
    for case in recordings::of("bootstrap") {
        let Some(files) = case.did["files"].as_object() else { continue };
        if needs_a_namespace(&case) || deliberate.contains(&case.name) {
            continue;
        }
        let of = |ends: &[&str]| files.iter().find(|(path, _)| ends.iter().any(|end| path.ends_with(end)));
        let (envoy, grpc) =
            (of(&["/envoy-rev.json", "/envoy-rev.yaml"]), of(&["/grpc-bootstrap.json", "/grpc.json"]));
        let ours = match made(&case).await {
            Ok(ours) => ours,
            Err(why) => {
                wrong.push(format!("{}: refused: {why}", case.name));
                continue;
            }
        };
        for (nth, (ours, theirs)) in [(&ours.0, envoy), (&ours.1, grpc)].into_iter().enumerate() {
            let Some((path, theirs)) = theirs else { continue };
            let theirs = ["json", "not_json", "text"].iter().find_map(|form| theirs.get(*form));
            let Some(theirs) = theirs else { continue };
            compared[nth] += 1;
            wrong.extend(difference(ours, theirs, "").map(|found| format!("{} {path}: {found}", case.name)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(compared.iter().all(|count| *count > 100), "only {compared:?} recordings were compared");
}
