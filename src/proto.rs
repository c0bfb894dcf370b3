//! Rust made from `proto/` by the build script. A leaf: uses nothing of ours.

#![allow(missing_docs, clippy::all)]

/// `istio.v1.auth`: the certificate service.
pub mod ca {
    tonic::include_proto!("istio.v1.auth");
}
