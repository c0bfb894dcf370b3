//! Compiles `proto/` to Rust without a `protoc` on the machine (protox parses the files itself).

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let services = protox::compile(["proto/ca.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(services)?;
    Ok(())
}
