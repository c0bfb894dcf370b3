//! Compiles `proto/` to Rust without a `protoc` on the machine (protox parses the files itself).

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let services = protox::compile(["proto/ca.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(services)?;
    mesh()
}

// Types with their JSON mapping; maps are sorted, as the Go agent prints them.
fn mesh() -> Result<(), Box<dyn Error>> {
    let set = protox::compile(["proto/mesh/proxy.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    pbjson_build::Builder::new()
        .register_descriptors(&set.encode_to_vec())?
        .ignore_unknown_fields()
        .btree_map(["."])
        .out_dir(&out)
        .build(&[".istio.mesh", ".istio.networking"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .compile_well_known_types(true)
        .extern_path(".google.protobuf", "::pbjson_types")
        .btree_map(".")
        .out_dir(&out)
        .compile_fds(set)?;
    Ok(())
}
