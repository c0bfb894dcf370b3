//! Rust made from `proto/` by the build script. A leaf: uses nothing of ours.

#![allow(missing_docs, unreachable_pub, dead_code, clippy::all)]

/// `istio.v1.auth`: the certificate service.
pub mod ca {
    tonic::include_proto!("istio.v1.auth");
}

/// The packages of the mesh configuration, nested as on the wire, with their JSON mapping.
pub mod istio {
    pub mod mesh {
        pub mod v1alpha1 {
            tonic::include_proto!("istio.mesh.v1alpha1");
            include!(concat!(env!("OUT_DIR"), "/istio.mesh.v1alpha1.serde.rs"));
        }
    }
    pub mod networking {
        pub mod v1alpha3 {
            tonic::include_proto!("istio.networking.v1alpha3");
            include!(concat!(env!("OUT_DIR"), "/istio.networking.v1alpha3.serde.rs"));
        }
        pub mod v1beta1 {
            tonic::include_proto!("istio.networking.v1beta1");
            include!(concat!(env!("OUT_DIR"), "/istio.networking.v1beta1.serde.rs"));
        }
    }
}

/// `ProxyConfig` and what it holds.
pub use istio::mesh::v1alpha1 as mesh;

pub mod schema;
