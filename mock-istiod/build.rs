//! Compiles the CA service's definition, the same file the agent is built from.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=../proto/ca.proto");
    let services = protox::compile(["../proto/ca.proto"], ["../proto"])?;
    tonic_prost_build::configure().compile_fds(services)?;
    Ok(())
}
