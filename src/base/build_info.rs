//! What this binary is: version, source revision, how it was built.

/// What this is called.
pub(crate) const PRODUCT: &str = "pilot-agent in Rust";

/// Version of this project.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The Istio release whose behaviour this build follows; it is what istiod and Envoy are told.
pub(crate) const ISTIO_VERSION: &str = "1.31.0";

/// Source revision, if the build was told one (`PILOT_AGENT_REVISION`).
pub(crate) const REVISION: &str = match option_env!("PILOT_AGENT_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

/// Whether the sources were as committed, if the build was told so (`PILOT_AGENT_BUILD_STATUS`).
pub(crate) const STATUS: &str = match option_env!("PILOT_AGENT_BUILD_STATUS") {
    Some(status) => status,
    None => "unknown",
};

/// Where the Go agent names its Go: the language, and the oldest compiler that builds this.
pub(crate) const COMPILER: &str = concat!("rust", env!("CARGO_PKG_RUST_VERSION"));

/// The TLS and key library with the versions that Cargo.lock pins (`AWS-LC` is built from `aws-lc-sys`, its FIPS
/// module from `aws-lc-fips-sys`).
pub(crate) const CRYPTO: &str = if cfg!(feature = "fips") {
    concat!(
        "aws-lc-rs ",
        env!("PILOT_AGENT_AWS_LC_RS"),
        " (aws-lc-fips-sys ",
        env!("PILOT_AGENT_AWS_LC_FIPS_SYS"),
        ", FIPS module)"
    )
} else {
    concat!("aws-lc-rs ", env!("PILOT_AGENT_AWS_LC_RS"), " (aws-lc-sys ", env!("PILOT_AGENT_AWS_LC_SYS"), ")")
};

/// The triple this was built for.
pub(crate) const TARGET: &str = env!("PILOT_AGENT_TARGET");

/// The C library: what the build was told (`PILOT_AGENT_LIBC`, for instance `glibc 2.28`, the oldest that will do),
/// else the target's.
pub(crate) const LIBC: &str = match option_env!("PILOT_AGENT_LIBC") {
    Some(libc) => libc,
    None if cfg!(all(target_env = "musl", target_feature = "crt-static")) => "musl, static",
    None if cfg!(target_env = "musl") => "musl",
    None => "glibc",
};
