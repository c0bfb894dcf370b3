//! Compiles the descriptors that turn resources written in JSON or YAML into protobuf.
//!
//! The definitions of Envoy's messages are those that the crate `envoy-types` ships beside its Rust code; the
//! crate offers no other way to find them than to ask cargo where it unpacked it.

#![allow(clippy::disallowed_methods, reason = "a build script is configured by its environment")]

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

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=proto");
    let envoy = envoy_protos()?;
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
    .chain([PathBuf::from("proto")])
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
    let out = Path::new(&std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join("descriptors.bin");
    std::fs::write(out, compiler.encode_file_descriptor_set())?;
    Ok(())
}

fn envoy_protos() -> Result<PathBuf, Box<dyn Error>> {
    let cargo = std::env::var_os("CARGO").ok_or("cargo sets CARGO")?;
    let output = Command::new(cargo).args(["metadata", "--format-version=1", "--offline"]).output()?;
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
