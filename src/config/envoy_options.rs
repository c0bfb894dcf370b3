//! From the effective proxy config to what a bootstrap is made from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::node::{ClusterName, pilot_san};
use crate::base::bounded;
use crate::bootstrap::{
    self, ClientTls, Keepalive, Node, Options, RemoteService, StatsMatcher, TlsMode, Tracer, params, template,
};
use crate::proto::istio::networking::v1alpha3::ClientTlsSettings;
use crate::proto::istio::networking::v1alpha3::client_tls_settings::TlSmode;
use crate::proto::istio::networking::v1alpha3::connection_pool_settings::tcp_settings::TcpKeepalive;
use crate::proto::mesh;

/// Spans of Stackdriver hold this many of each thing unless told otherwise (the Go agent's number).
const STACKDRIVER_MAX: i64 = 200;

/// Why there is no bootstrap.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The inputs do not make one.
    #[error("failed to generate bootstrap config: {0}")]
    Inputs(#[from] bootstrap::Error),
    /// The template could not be read.
    #[error("failed to generate bootstrap config: cannot read the template {path}: {source}")]
    Read {
        /// The template.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The template could not be rendered.
    #[error("failed to generate bootstrap config: template {path}: {source}")]
    Template {
        /// The template.
        path: PathBuf,
        /// Where and why.
        source: template::Error,
    },
}

/// The text of Envoy's bootstrap: the built-in one, or what the operator's template makes of the same
/// inputs. What a template makes is handed over as it is, even if it is no JSON (Envoy's parser takes more
/// than ours); a line warns of that.
///
/// # Errors
/// With the template's path where there is one.
pub(crate) fn render(
    options: &Options,
    template: Option<&Path>,
    env: &BTreeMap<String, String>,
) -> Result<Vec<u8>, Error> {
    let Some(path) = template else {
        let document = bootstrap::generate(options)?;
        return Ok(serde_json::to_vec_pretty(&document).unwrap_or_default());
    };
    let read = bounded::given(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    let text = String::from_utf8_lossy(&read);
    let data = params::all(options)?;
    let fail = |source| Error::Template { path: path.to_owned(), source };
    let out = template::render(&text, &data, env).map_err(fail)?;
    let is_yaml = path.to_string_lossy().contains(".yaml");
    if !is_yaml && let Err(error) = serde_json::from_str::<serde::de::IgnoredAny>(&out) {
        tracing::warn!(
            "what the template {} gives is not JSON ({error}); Envoy may refuse it",
            path.display()
        );
    }
    Ok(out.into_bytes())
}

/// The effective proxy config in the JSON form that metadata, logs and templates show.
#[must_use]
pub fn proxy_config_json(config: &mesh::ProxyConfig) -> Value {
    serde_json::to_value(config).unwrap_or_else(|error| {
        tracing::error!("the proxy config has no JSON form and is not shown to istiod: {error}");
        Value::Object(serde_json::Map::new())
    })
}

/// Which name Envoy's service cluster is made from.
#[must_use]
pub fn cluster_name(config: &mesh::ProxyConfig) -> ClusterName {
    use mesh::proxy_config::{ClusterName as Given, TracingServiceName as Kind};
    match &config.cluster_name {
        Some(Given::ServiceCluster(name)) => ClusterName::Service(name.clone()),
        Some(Given::TracingServiceName(kind)) => match Kind::try_from(*kind) {
            Ok(Kind::CanonicalNameOnly) => ClusterName::CanonicalName,
            Ok(Kind::CanonicalNameAndNamespace) => ClusterName::CanonicalNameAndNamespace,
            Ok(Kind::AppLabelAndNamespace) | Err(_) => ClusterName::AppLabelAndNamespace,
        },
        None => ClusterName::AppLabelAndNamespace,
    }
}

/// The SAN of istiod that metadata names: only with mutual TLS.
#[must_use]
pub fn istiod_san(config: &mesh::ProxyConfig) -> Option<String> {
    let mutual = config.control_plane_auth_policy() == mesh::AuthenticationPolicy::MutualTls;
    mutual.then(|| pilot_san(&config.discovery_address))
}

/// The part of a bootstrap's options that the proxy config and the node decide; what variables and flags
/// decide keeps its default and is for the caller to set.
#[must_use]
pub fn options(config: &mesh::ProxyConfig, node: Node) -> Options {
    let tracing = config.tracing.as_ref();
    let metrics = match (&config.envoy_metrics_service, config.envoy_metrics_service_address.as_str()) {
        (Some(service), _) if !service.address.is_empty() => Some(remote(service, &node)),
        (_, "") => None,
        (_, address) => Some(RemoteService { address: address.to_owned(), ..RemoteService::default() }),
    };
    let matcher = config.proxy_stats_matcher.clone().unwrap_or_default();
    let metadata = &config.proxy_metadata;
    Options {
        config_path: config.config_path.clone(),
        admin_port: config.proxy_admin_port.into(),
        status_port: config.status_port.into(),
        discovery_address: config.discovery_address.clone(),
        stats_on_localhost: metadata.get("METRICS_LOCALHOST_ACCESS_ONLY").is_some_and(|v| v == "true"),
        runtime_values: config.runtime_values.clone().into_iter().collect::<BTreeMap<_, _>>(),
        max_connections: metadata.get("ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS").cloned(),
        extra_stat_tags: config.extra_stat_tags.clone(),
        stats_matcher: StatsMatcher {
            prefixes: matcher.inclusion_prefixes,
            suffixes: matcher.inclusion_suffixes,
            regexps: matcher.inclusion_regexps,
        },
        stats_compression: config.stats_compression.as_ref().is_none_or(|on| on.value),
        tracer: tracing.and_then(|t| t.tracer.as_ref()).and_then(tracer),
        tracing_tls: tracing.and_then(|t| t.tls_settings.as_ref()).map(|t| tls(t, |key| named(&node, key))),
        metrics_service: metrics,
        access_log_service: config.envoy_access_log_service.as_ref().map(|s| remote(s, &node)),
        statsd_address: config.statsd_udp_address.clone(),
        proxy_config: proxy_config_json(config),
        node,
        ..Options::default()
    }
}

/// The token that Lightstep wants in a file, if that tracer is chosen.
#[must_use]
pub(crate) fn lightstep_token(config: &mesh::ProxyConfig) -> Option<&str> {
    match config.tracing.as_ref()?.tracer.as_ref()? {
        mesh::tracing::Tracer::Lightstep(lightstep) => Some(&lightstep.access_token),
        _ => None,
    }
}

fn tracer(given: &mesh::tracing::Tracer) -> Option<Tracer> {
    use mesh::tracing::Tracer as Given;
    let max = |given: &Option<pbjson_types::Int64Value>| given.as_ref().map_or(STACKDRIVER_MAX, |n| n.value);
    Some(match given {
        Given::Zipkin(t) => Tracer::Zipkin { address: t.address.clone() },
        Given::Lightstep(t) => Tracer::Lightstep { address: t.address.clone() },
        Given::Datadog(t) => Tracer::Datadog { address: t.address.clone() },
        Given::Stackdriver(t) => Tracer::Stackdriver {
            debug: t.debug,
            max_attributes: max(&t.max_number_of_attributes),
            max_annotations: max(&t.max_number_of_annotations),
            max_events: max(&t.max_number_of_message_events),
        },
        Given::OpenCensusAgent(_) => return None,
    })
}

fn named<'a>(node: &'a Node, key: &str) -> Option<&'a str> {
    node.typed.get(key).and_then(Value::as_str)
}

fn remote(given: &mesh::RemoteService, node: &Node) -> RemoteService {
    RemoteService {
        address: given.address.clone(),
        tls: given.tls_settings.as_ref().map(|t| tls(t, |key| named(node, key))),
        keepalive: given.tcp_keepalive.as_ref().map(keepalive),
    }
}

fn keepalive(given: &TcpKeepalive) -> Keepalive {
    // Envoy refuses what 32 bits do not hold.
    let seconds =
        |d: &Option<pbjson_types::Duration>| d.as_ref().map_or(0, |d| d.seconds.min(i64::from(u32::MAX)));
    Keepalive { probes: given.probes, time: seconds(&given.time), interval: seconds(&given.interval) }
}

/// TLS to a collector. Files that metadata names are where the certificates are mounted, and beat those of the settings.
pub(super) fn tls<'a>(given: &ClientTlsSettings, metadata: impl Fn(&str) -> Option<&'a str>) -> ClientTls {
    let path = |key: &str, settings: &String| {
        metadata(key).filter(|v| !v.is_empty()).map_or_else(|| settings.clone(), str::to_owned)
    };
    ClientTls {
        mode: match given.mode() {
            TlSmode::Disable => TlsMode::Disable,
            TlSmode::Simple => TlsMode::Simple,
            TlSmode::Mutual => TlsMode::Mutual,
            TlSmode::IstioMutual => TlsMode::IstioMutual,
        },
        ca: path("TLS_CLIENT_ROOT_CERT", &given.ca_certificates),
        cert: path("TLS_CLIENT_CERT_CHAIN", &given.client_certificate),
        key: path("TLS_CLIENT_KEY", &given.private_key),
        sni: given.sni.clone(),
        sans: given.subject_alt_names.clone(),
        skip_verify: given.insecure_skip_verify.as_ref().is_some_and(|on| on.value),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::mesh::Effective;

    fn made(proxy: &Value) -> Result<Value, bootstrap::Error> {
        let mut mesh = Effective::new();
        mesh.overlay(&proxy.to_string()).unwrap();
        bootstrap::generate(&options(&mesh.proxy, Node::default()))
    }

    #[test]
    fn the_deprecated_address_of_the_metrics_service_is_its_address() {
        let old = made(&json!({"envoyMetricsServiceAddress": "ms.test:1"})).unwrap();
        let new = made(&json!({"envoyMetricsService": {"address": "ms.test:1"}})).unwrap();
        assert_eq!(old["static_resources"]["clusters"], new["static_resources"]["clusters"]);
        assert!(old["static_resources"].to_string().contains("ms.test"));
    }

    #[test]
    fn tls_that_could_verify_nobody_is_refused_by_its_field() {
        for mode in ["SIMPLE", "MUTUAL"] {
            let tls = json!({"mode": mode, "clientCertificate": "c", "privateKey": "k"});
            let service = json!({"address": "als.test:1", "tlsSettings": tls});
            let error = made(&json!({"envoyAccessLogService": service})).unwrap_err().to_string();
            assert!(error.contains("envoyAccessLogService") && error.contains(mode), "{error}");
        }
        let open =
            json!({"address": "als.test:1", "tlsSettings": {"mode": "SIMPLE", "insecureSkipVerify": true}});
        assert!(made(&json!({"envoyAccessLogService": open})).is_ok());
    }
}
