//! The only reader of flags, variables and files.
//!
//! [`load`] takes the words after `proxy`, the environment as an argument and a root that relative paths
//! hang off, and gives one typed [`Config`], or every bad value at once; nothing is bound before. What a
//! part needs of it is cut out by [`parts`]. Variables stand in one table ([`env::VARS`]), flags in
//! another ([`args::PROXY`]); docs/CONFIG.md is generated from both.

pub mod addresses;
pub mod args;
pub mod bootstrap;
pub mod env;
pub mod go;
pub mod mesh;
pub mod node;
pub mod parts;
pub mod platform;
pub mod pod;

use std::path::{Path, PathBuf};

use serde_json::Value;

use args::Parsed;
use env::{Env, Settings};
use mesh::Effective;

/// What the agent runs with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Node type: sidecar, router, waypoint, ztunnel or agentgateway.
    pub node_type: String,
    /// DNS suffix of the node.
    pub domain: String,
    /// The flags as given.
    pub flags: Parsed,
    /// Every variable.
    pub settings: Settings,
    /// The effective ProxyConfig.
    pub mesh: Effective,
    /// The node's addresses, `INSTANCE_IP` first.
    pub addresses: Vec<String>,
    /// What relative paths hang off.
    pub root: PathBuf,
    /// What is odd but tolerated, for the log.
    pub warnings: Vec<String>,
}

const TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// Reads everything.
///
/// # Errors
/// Every problem, one line each.
pub fn load(
    flags: Parsed,
    env: &Env,
    root: &Path,
    annotation: impl Fn(&str) -> Option<String>,
) -> Result<Config, Vec<String>> {
    let (mut settings, mut warnings) = Settings::read(env);
    let mut errors = Vec::new();
    let node_type = flags.positional.first().cloned().unwrap_or_else(|| "sidecar".to_owned());
    if !TYPES.contains(&node_type.as_str()) {
        errors.push(format!("invalid proxy Type: {node_type}"));
    }
    warnings.extend(flags.unknown.iter().map(|f| format!("unknown flag {f} is tolerated and has no effect")));
    settings.default_text("TRUST_DOMAIN", flags.get("trust-domain").unwrap_or_default());
    settings.default_text("INSTANCE_IP", flags.get("ip").unwrap_or_default());
    let mesh = layers(&flags, &settings, root, &annotation, &mut warnings).unwrap_or_else(|e| {
        errors.push(format!("failed to get proxy config: {e}"));
        Effective::new()
    });
    if !errors.is_empty() {
        return Err(errors);
    }
    let domain = match flags.get("domain").filter(|d| !d.is_empty()) {
        Some(domain) => domain.to_owned(),
        None => format!("{}.svc.cluster.local", settings.text("POD_NAMESPACE")),
    };
    let excluded = annotation("traffic.sidecar.istio.io/excludeInterfaces").unwrap_or_default();
    let (addresses, odd) = addresses::of_host(settings.text("INSTANCE_IP"), &excluded);
    warnings.extend(odd);
    Ok(Config { node_type, domain, flags, settings, mesh, addresses, root: root.to_owned(), warnings })
}

fn layers(
    flags: &Parsed,
    settings: &Settings,
    root: &Path,
    annotation: &impl Fn(&str) -> Option<String>,
    warnings: &mut Vec<String>,
) -> Result<Effective, String> {
    let mut mesh = Effective::new();
    old_flags(flags, &mut mesh)?;
    let path = flags.get("meshConfig").unwrap_or("./etc/istio/config/mesh");
    match std::fs::read_to_string(root.join(path)) {
        Ok(text) => mesh
            .overlay_mesh(&text)
            .map_err(|e| format!("failed to unmarshal mesh config from file [{text}]: {e}"))?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(format!("failed to read mesh config file {path}: {e}")),
    }
    let text = settings.text("PROXY_CONFIG");
    mesh.overlay(text)
        .map_err(|e| format!("failed to unmarshal mesh config from environment [{text}]: {e}"))?;
    if let Some(text) = annotation("proxy.istio.io/config") {
        mesh.overlay(&text)
            .map_err(|e| format!("failed to unmarshal mesh config from annotation [{text}]: {e}"))?;
    }
    concurrency(flags, settings, &mut mesh, warnings)?;
    if let Some(address) = annotation("sidecar.istio.io/discoveryAddress") {
        mesh.set("discoveryAddress", Value::String(address))?;
    }
    if let Some(port) = annotation("status.sidecar.istio.io/port") {
        let number = port.parse::<i32>().unwrap_or_else(|_| {
            warnings.push(format!("Invalid annotation status.sidecar.istio.io/port={port}: not a number; there will be no status server"));
            0
        });
        mesh.set("statusPort", Value::from(number))?;
    }
    Ok(mesh)
}

fn concurrency(
    flags: &Parsed,
    settings: &Settings,
    mesh: &mut Effective,
    warnings: &mut Vec<String>,
) -> Result<(), String> {
    let limit = settings.int("ISTIO_CPU_LIMIT");
    if mesh.proxy.concurrency.is_none() && limit != 0 {
        mesh.set("concurrency", Value::from(limit))?;
    }
    let flag = go::integer(flags.or_default(args::PROXY, "concurrency"), 64).unwrap_or(0);
    if flag != 0 {
        warnings.push(format!("legacy --concurrency={flag} flag detected; prefer to use ProxyConfig"));
        mesh.set("concurrency", Value::from(flag))?;
    }
    Ok(())
}

// What 0.8 to 1.8 took from flags, below every newer source.
fn old_flags(flags: &Parsed, mesh: &mut Effective) -> Result<(), String> {
    for field in [
        "configPath",
        "binaryPath",
        "drainDuration",
        "discoveryAddress",
        "statsdUdpAddress",
        "proxyAdminPort",
        "controlPlaneAuthPolicy",
        "customConfigFile",
        "statusPort",
    ] {
        if let Some(value) = flags.get(field) {
            mesh.set(field, Value::String(value.to_owned()))
                .map_err(|e| format!("--{field}={value}: {e}"))?;
        }
    }
    let tracing = |kind: &str, address: &str| serde_json::json!({ kind: { "address": address } });
    if let Some(address) = flags.get("lightstepAddress") {
        let token = flags.get("lightstepAccessToken").unwrap_or_default();
        let value = serde_json::json!({"lightstep": {"address": address, "accessToken": token}});
        mesh.set("tracing", value)?;
    } else if let Some(address) = flags.get("zipkinAddress") {
        mesh.set("tracing", tracing("zipkin", address))?;
    } else if let Some(address) = flags.get("datadogAgentAddress") {
        mesh.set("tracing", tracing("datadog", address))?;
    }
    Ok(())
}
