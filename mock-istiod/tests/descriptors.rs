//! `proto/descriptors.bin` is what the definitions say, checked against the crate that ships them.
//!
//! mock-istiod turns resources written in JSON or YAML into protobuf by Envoy's own definitions. Those lie beside
//! the Rust code of the crate `envoy-types`, which offers no way to them but its folder; a build that asked cargo
//! for that folder failed wherever cargo had not fetched everything. So the compiled descriptors are committed,
//! and this test compiles them again: `make descriptors` writes them anew.

#![allow(clippy::disallowed_methods, reason = "cargo tells a test its place by variables")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What resources may be made of. A file with a typed extension that is not reachable from these roots is
/// added here; whatever it imports comes along.
const ROOTS: &[&str] = &[
    "envoy/config/bootstrap/v3",
    "envoy/config/cluster/v3",
    "envoy/config/endpoint/v3",
    "envoy/config/listener/v3",
    "envoy/config/route/v3",
    "envoy/service/discovery/v3",
    "envoy/extensions/access_loggers/file/v3",
    "envoy/extensions/access_loggers/stream/v3",
    "envoy/extensions/clusters/aggregate/v3",
    "envoy/extensions/filters/http/cors/v3",
    "envoy/extensions/filters/http/fault/v3",
    "envoy/extensions/filters/http/health_check/v3",
    "envoy/extensions/filters/http/jwt_authn/v3",
    "envoy/extensions/filters/http/lua/v3",
    "envoy/extensions/filters/http/rbac/v3",
    "envoy/extensions/filters/http/router/v3",
    "envoy/extensions/filters/http/wasm/v3",
    "envoy/extensions/filters/listener/http_inspector/v3",
    "envoy/extensions/filters/listener/original_dst/v3",
    "envoy/extensions/filters/listener/original_src/v3",
    "envoy/extensions/filters/listener/tls_inspector/v3",
    "envoy/extensions/filters/network/http_connection_manager/v3",
    "envoy/extensions/filters/network/rbac/v3",
    "envoy/extensions/filters/network/tcp_proxy/v3",
    "envoy/extensions/filters/network/wasm/v3",
    "envoy/extensions/internal_redirect/previous_routes/v3",
    "envoy/extensions/retry/host/previous_hosts/v3",
    "envoy/extensions/transport_sockets/proxy_protocol/v3",
    "envoy/extensions/transport_sockets/raw_buffer/v3",
    "envoy/extensions/transport_sockets/tls/v3",
    "envoy/extensions/upstreams/http/v3",
    "envoy/extensions/upstreams/tcp/v3",
    "envoy/extensions/wasm/v3",
];

#[test]
fn committed_descriptors_are_those_of_the_crate() -> Result<(), Box<dyn Error>> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto");
    let committed = own.join("descriptors.bin");
    let fresh = compiled(&envoy_protos()?, &own)?;
    if std::env::var_os("UPDATE_DESCRIPTORS").is_some() {
        let beside = own.join("descriptors.bin.new");
        std::fs::write(&beside, &fresh)?;
        std::fs::rename(&beside, &committed)?;
    }
    let same = std::fs::read(&committed)? == fresh;
    assert!(same, "{} is not what the definitions say: run `make descriptors`", committed.display());
    Ok(())
}

fn compiled(envoy: &Path, own: &Path) -> Result<Vec<u8>, Box<dyn Error>> {
    let includes: Vec<PathBuf> = [
        "data-plane-api",
        "xds",
        "googleapis",
        "protoc-gen-validate",
        "opentelemetry-proto",
        "client_model",
        "cel-spec/proto",
    ]
    .iter()
    .map(|dir| envoy.join(dir))
    .chain([own.to_owned()])
    .collect();

    let mut files = vec!["nds.proto".to_owned(), "pcds.proto".to_owned()];
    for root in ROOTS {
        let dir = envoy.join("data-plane-api").join(root);
        for entry in std::fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))? {
            let name = entry?.file_name().into_string().map_err(|n| format!("not UTF-8: {n:?}"))?;
            if name.ends_with(".proto") {
                files.push(format!("{root}/{name}"));
            }
        }
    }
    files.sort();

    let mut compiler = protox::Compiler::new(includes)?;
    compiler.include_imports(true).include_source_info(false).open_files(files)?;
    Ok(compiler.encode_file_descriptor_set())
}

/// The folder of the crate that this test was built with; cargo has it, since it has just built it. Offline and
/// for this platform alone: nothing else need ever have been fetched.
fn envoy_protos() -> Result<PathBuf, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").ok_or("cargo sets CARGO")?;
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let version = String::from_utf8(Command::new(rustc).arg("-vV").output()?.stdout)?;
    let host = version.lines().find_map(|l| l.strip_prefix("host: ")).ok_or("rustc -vV names no host")?;
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()?;
    if !output.status.success() {
        return Err(format!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "envoy-types")
        .and_then(|package| package["manifest_path"].as_str())
        .and_then(|manifest| Some(Path::new(manifest).parent()?.join("proto")))
        .filter(|dir| dir.join("data-plane-api").is_dir())
        .ok_or_else(|| "envoy-types no longer ships its .proto files".into())
}
