//! What this binary is: version, source revision, how it was built.

/// Version of this project.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The Istio release whose behaviour this build follows; it is what istiod and Envoy are told.
pub const ISTIO_VERSION: &str = "1.30.3";
