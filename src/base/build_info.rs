//! What this binary is: version, source revision, how it was built.

/// Version of this project.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The Istio release whose behaviour this build follows; it is what istiod and Envoy are told.
pub const ISTIO_VERSION: &str = "1.30.3";

/// Source revision, if the build was told one (`PILOT_AGENT_REVISION`).
pub const REVISION: &str = match option_env!("PILOT_AGENT_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

/// Whether the sources were as committed, if the build was told so (`PILOT_AGENT_BUILD_STATUS`).
pub const STATUS: &str = match option_env!("PILOT_AGENT_BUILD_STATUS") {
    Some(status) => status,
    None => "unknown",
};

/// Where the Go agent names its Go: the language, and the oldest compiler that builds this.
pub const COMPILER: &str = concat!("rust", env!("CARGO_PKG_RUST_VERSION"));
