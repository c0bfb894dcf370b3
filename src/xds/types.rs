//! The type URLs the relay knows by name, and which of them Envoy may be sent.

/// Every Envoy type begins so.
const ENVOY: &str = "type.googleapis.com/envoy.";
/// `Listener`: its first request makes the agent send its own.
pub const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
/// `TypedExtensionConfig`: rewritten when Wasm modules are fetched by the agent.
pub(crate) const ECDS: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
/// Peer metadata of the ambient mesh, the one type of Istio's that Envoy takes.
const WORKLOAD: &str = "type.googleapis.com/istio.workload.Workload";
/// Health reports of VMs.
pub const HEALTH: &str = "type.googleapis.com/istio.v1.HealthInformation";
/// Name table of the DNS proxy.
pub const NAME_TABLE: &str = "type.googleapis.com/istio.networking.nds.v1.NameTable";
/// Proxy configuration pushed by istiod.
pub const PROXY_CONFIG: &str = "type.googleapis.com/istio.mesh.v1alpha1.ProxyConfig";

/// Whether a response of this type may go to Envoy.
#[must_use]
pub fn for_envoy(type_url: &str) -> bool {
    type_url.starts_with(ENVOY) || type_url == WORKLOAD
}

/// A short name from a closed set, for metrics and for people.
#[must_use]
pub fn short(type_url: &str) -> &'static str {
    match type_url.strip_prefix("type.googleapis.com/").unwrap_or(type_url) {
        "envoy.config.cluster.v3.Cluster" => "CDS",
        "envoy.config.endpoint.v3.ClusterLoadAssignment" => "EDS",
        "envoy.config.listener.v3.Listener" => "LDS",
        "envoy.config.route.v3.RouteConfiguration" => "RDS",
        "envoy.extensions.transport_sockets.tls.v3.Secret" => "SDS",
        "envoy.config.core.v3.TypedExtensionConfig" => "ECDS",
        "istio.workload.Workload" => "WDS",
        "istio.networking.nds.v1.NameTable" => "NDS",
        "istio.mesh.v1alpha1.ProxyConfig" => "PCDS",
        "istio.v1.HealthInformation" => "health",
        "envoy.config.bootstrap.v3.Bootstrap" => "bootstrap",
        _ => "other",
    }
}
