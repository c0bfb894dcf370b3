//! What the Go agent checks in a ProxyConfig and in a mesh file, all problems together.
//!
//! The texts are those its users search for, with the field in front and the remedy behind.

mod mesh_file;

use std::fmt::Display;
use std::net::{IpAddr, Ipv6Addr};

pub use mesh_file::mesh;
use serde_json::Value;

use super::jsonpb::{Fault, Object};
use super::mesh::Effective;
use crate::proto::istio::networking::v1alpha3::ClientTlsSettings;
use crate::proto::istio::networking::v1alpha3::client_tls_settings::TlSmode;
use crate::proto::mesh::private_key_provider::Provider;
use crate::proto::mesh::proxy_config::ClusterName;
use crate::proto::mesh::tracing::Tracer;
use crate::proto::mesh::{ConnectionSettings, ProxyConfig, Tracing};

/// The window that HTTP/2 starts with; Envoy takes none below it.
const LEAST_H2_WINDOW: i32 = 65_535;

#[derive(Default)]
struct Problems(Vec<Fault>);

impl Problems {
    fn add(&mut self, at: &str, reason: impl Into<String>) {
        self.0.push(Fault { at: at.to_owned(), reason: reason.into() });
    }

    fn check(&mut self, at: &str, prefix: &str, result: Result<(), impl Display>) {
        if let Err(reason) = result {
            self.add(at, format!("{prefix}: {reason}"));
        }
    }
}

/// Everything wrong with an effective ProxyConfig.
#[must_use]
pub fn proxy(effective: &Effective) -> Vec<Fault> {
    let mut p = Problems::default();
    let c = &effective.proxy;
    if c.config_path.is_empty() {
        p.add("configPath", "config path must be set: a folder the agent may write to");
    }
    if c.binary_path.is_empty() {
        p.add("binaryPath", "binary path must be set: the path of Envoy");
    }
    match &c.cluster_name {
        // A number without a name is not in the typed form; it means what no name of its own means.
        None if effective.document().contains_key("tracingServiceName") => {}
        None => p.add("serviceCluster", "oneof service cluster or tracing service name must be specified"),
        Some(ClusterName::ServiceCluster(name)) if name.is_empty() => {
            p.add("serviceCluster", "service cluster must be specified");
        }
        Some(_) => {}
    }
    drain(&mut p, c);
    if c.discovery_address.is_empty() {
        p.add("discoveryAddress", "discovery address must be set to the proxy discovery service, for instance istiod.istio-system.svc:15012");
    } else {
        p.check("discoveryAddress", "invalid discovery address", address(&c.discovery_address));
    }
    if let Some(tracing) = &c.tracing {
        tracer(&mut p, tracing);
    }
    services(&mut p, c);
    for (at, what, port) in
        [("proxyAdminPort", "proxy admin", c.proxy_admin_port), ("statusPort", "status", c.status_port)]
    {
        p.check(at, &format!("invalid {what} port"), in_range(i64::from(port)));
    }
    // Judged in the document: a number without a name is not in the typed form.
    let policy = effective.document().get("controlPlaneAuthPolicy");
    if policy.is_some_and(|v| v != "NONE" && v != "MUTUAL_TLS") {
        let shown = policy.map(text_of).unwrap_or_default();
        p.add("controlPlaneAuthPolicy", format!("invalid authentication policy: unrecognized control plane auth policy {shown:?}; it must be NONE or MUTUAL_TLS"));
    }
    if let Some(provider) = &c.private_key_provider {
        p.check(
            "privateKeyProvider",
            "invalid private key provider configuration",
            key_provider(provider.provider.as_ref()),
        );
    }
    if let Some(settings) = &c.connection_settings {
        connections(&mut p, settings);
    }
    p.0
}

// The agent uses none of them; istiod does, and 1.31 refuses what istiod could not use.
fn connections(p: &mut Problems, c: &ConnectionSettings) {
    let mut number = |name: &str, value: &Option<pbjson_types::Int32Value>, least: i32| {
        if let Some(value) = value.as_ref().map(|v| v.value).filter(|v| *v < least) {
            p.add(
                &format!("connectionSettings.{name}"),
                format!("{value} is too low; it must be at least {least}"),
            );
        }
    };
    number("listenerPerConnectionBufferLimitBytes", &c.listener_per_connection_buffer_limit_bytes, 0);
    number("clusterPerConnectionBufferLimitBytes", &c.cluster_per_connection_buffer_limit_bytes, 0);
    number("httpMaxConcurrentStreams", &c.http_max_concurrent_streams, 1);
    number("http2InitialStreamWindowSize", &c.http2_initial_stream_window_size, LEAST_H2_WINDOW);
    number("http2InitialConnectionWindowSize", &c.http2_initial_connection_window_size, LEAST_H2_WINDOW);
    number("listenerConnectionLimit", &c.listener_connection_limit, 1);
    number("globalDownstreamConnectionLimit", &c.global_downstream_connection_limit, 1);
    for (name, span) in [
        ("httpIdleTimeout", &c.http_idle_timeout),
        ("httpMaxConnectionDuration", &c.http_max_connection_duration),
        ("httpDrainTimeout", &c.http_drain_timeout),
        ("httpRequestTimeout", &c.http_request_timeout),
        ("httpRequestHeadersTimeout", &c.http_request_headers_timeout),
        ("httpStreamIdleTimeout", &c.http_stream_idle_timeout),
        ("httpMaxStreamDuration", &c.http_max_stream_duration),
    ] {
        if span.as_ref().is_some_and(|d| d.seconds < 0 || d.nanos < 0) {
            p.add(&format!("connectionSettings.{name}"), "a duration must not be negative; 0s means none");
        }
    }
}

fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn drain(p: &mut Problems, c: &ProxyConfig) {
    let at = "drainDuration";
    let (seconds, nanos) = c.drain_duration.as_ref().map_or((0, 0), |d| (d.seconds, d.nanos));
    if seconds < 0 || (seconds == 0 && nanos < 1_000_000) {
        p.add(at, "invalid drain duration: duration must be greater than 1ms");
    }
    if nanos % 1_000_000 != 0 {
        p.add(at, "invalid drain duration: only durations to ms precision are supported");
    }
    if nanos != 0 {
        p.add(at, "drain time only supports durations to seconds precision, for instance 45s");
    }
}

fn tracer(p: &mut Problems, tracing: &Tracing) {
    let local = |a: &str| address(&a.replacen("$(HOST_IP)", "127.0.0.1", 1));
    match &tracing.tracer {
        Some(Tracer::Zipkin(z)) => {
            p.check("tracing.zipkin.address", "invalid zipkin config", local(&z.address));
        }
        Some(Tracer::Datadog(d)) => {
            p.check("tracing.datadog.address", "invalid datadog config", local(&d.address));
        }
        Some(Tracer::Lightstep(l)) => {
            if l.address.is_empty() {
                p.add("tracing.lightstep.address", "invalid lightstep config: address is required");
            } else {
                p.check(
                    "tracing.lightstep.address",
                    "invalid lightstep config: invalid lightstep address",
                    address(&l.address),
                );
            }
            if l.access_token.is_empty() {
                p.add("tracing.lightstep.accessToken", "invalid lightstep config: access token is required");
            }
        }
        _ => {}
    }
    if let Some(tls) = &tracing.tls_settings {
        for reason in client_tls(tls) {
            p.add("tracing.tlsSettings", format!("invalid tracing TLS config: {reason}"));
        }
    }
}

fn services(p: &mut Problems, c: &ProxyConfig) {
    let mut check = |at: &str, what: &str, value: &str| {
        p.check(at, &format!("invalid {what} address {value:?}"), address(value));
    };
    if !c.statsd_udp_address.is_empty() {
        check("statsdUdpAddress", "statsd udp", &c.statsd_udp_address);
    }
    if !c.envoy_metrics_service_address.is_empty() {
        check("envoyMetricsServiceAddress", "envoy metrics service", &c.envoy_metrics_service_address);
    }
    if let Some(service) = c.envoy_metrics_service.as_ref().filter(|s| !s.address.is_empty()) {
        check("envoyMetricsService.address", "envoy metrics service", &service.address);
    }
    if let Some(service) = c.envoy_access_log_service.as_ref().filter(|s| !s.address.is_empty()) {
        check("envoyAccessLogService.address", "envoy access log service", &service.address);
    }
}

fn key_provider(provider: Option<&Provider>) -> Result<(), &'static str> {
    let delay = match provider {
        None => return Err("private key provider configuration is required: cryptomb or qat"),
        Some(Provider::Cryptomb(c)) => c.poll_delay.as_ref(),
        Some(Provider::Qat(q)) => q.poll_delay.as_ref(),
    };
    match delay {
        None => Err("pollDelay is required"),
        Some(d) if d.seconds == 0 && d.nanos == 0 => Err("pollDelay must be non zero"),
        Some(_) => Ok(()),
    }
}

/// What is no address, in the Go agent's words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoAddress {
    /// There are no two parts.
    #[error("unable to split {text:?}: address {text}: {why}; it must be host:port")]
    Unsplit {
        /// All of it.
        text: String,
        /// In the words of Go's `net`.
        why: &'static str,
    },
    /// The part behind the colon.
    #[error("port ({0}) is not a number; it must be host:port")]
    Port(String),
    /// A number that no port has.
    #[error("port number {0} must be in the range 1..65535")]
    Range(i64),
    /// The part before the colon.
    #[error("{0:?} is not a valid hostname or an IP address")]
    Host(String),
}

fn in_range(port: i64) -> Result<(), NoAddress> {
    if (1..=65535).contains(&port) { Ok(()) } else { Err(NoAddress::Range(port)) }
}

/// Whether `text` is `host:port` with a host that is a DNS name or an IP address.
///
/// # Errors
/// What it is not.
pub(crate) fn address(text: &str) -> Result<(), NoAddress> {
    let unsplit = |why| NoAddress::Unsplit { text: text.to_owned(), why };
    let (host, port) = split_host_port(text).map_err(unsplit)?;
    let number: i64 = port.parse().map_err(|_| NoAddress::Port(port.to_owned()))?;
    in_range(number)?;
    if is_name(host) || is_ip(host) { Ok(()) } else { Err(NoAddress::Host(host.to_owned())) }
}

/// Go's `net.SplitHostPort`.
///
/// # Errors
/// The reason alone.
pub(crate) fn split_host_port(text: &str) -> Result<(&str, &str), &'static str> {
    let colon = text.rfind(':').ok_or("missing port in address")?;
    let (host, port) = (&text[..colon], &text[colon + 1..]);
    let host = match text.strip_prefix('[') {
        Some(_) => {
            let end = text.find(']').ok_or("missing ']' in address")?;
            if end + 1 == text.len() {
                return Err("missing port in address");
            } else if end + 1 != colon {
                return Err(if text[end + 1..].starts_with(':') {
                    "too many colons in address"
                } else {
                    "missing port in address"
                });
            }
            &text[1..end]
        }
        None if host.contains(':') => return Err("too many colons in address"),
        None => host,
    };
    if host.contains('[') {
        return Err("unexpected '[' in address");
    }
    if host.contains(']') {
        return Err("unexpected ']' in address");
    }
    Ok((host, port))
}

fn is_name(host: &str) -> bool {
    !host.is_empty() && host.len() <= 255 && are_labels(host)
}

// An IPv6 address may name a zone.
fn is_ip(host: &str) -> bool {
    match host.split_once('%') {
        None => host.parse::<IpAddr>().is_ok(),
        Some((address, zone)) => !zone.is_empty() && address.parse::<Ipv6Addr>().is_ok(),
    }
}

// An empty last label is allowed, one that is a number is not.
fn are_labels(name: &str) -> bool {
    let (rest, last) = name.rsplit_once('.').map_or((None, name), |(rest, last)| (Some(rest), last));
    let ends = last.is_empty() || last.parse::<i64>().is_err() && is_label(last);
    ends && rest.is_none_or(|rest| rest.split('.').all(is_label))
}

fn is_label(label: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
    let edge = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    label.len() <= 63 && label.bytes().all(inner) && edge(label.bytes().next()) && edge(label.bytes().last())
}

fn client_tls(tls: &ClientTlsSettings) -> Vec<String> {
    let mode = TlSmode::try_from(tls.mode).unwrap_or(TlSmode::Disable);
    let mut out = Vec::new();
    let skip = tls.insecure_skip_verify.as_ref().is_some_and(|v| v.value);
    let excluded =
        |set: bool, what: &str, by: &str| set.then(|| format!("cannot specify {what} if {by} is set"));
    if skip && matches!(mode, TlSmode::Simple | TlSmode::Mutual) {
        let by = "insecureSkipVerify";
        out.extend(excluded(!tls.ca_certificates.is_empty(), "caCertificates", by));
        out.extend(excluded(
            mode == TlSmode::Simple && !tls.credential_name.is_empty(),
            "credentialName",
            by,
        ));
        out.extend(excluded(!tls.subject_alt_names.is_empty(), "subjectAltNames", by));
    }
    if !tls.credential_name.is_empty() {
        if tls.credential_name.starts_with("configmap://") {
            out.push(format!("credentialName {:?} is not supported here", tls.credential_name));
        }
        if matches!(mode, TlSmode::Simple | TlSmode::Mutual) {
            let by = "credentialName";
            out.extend(excluded(!tls.client_certificate.is_empty(), "clientCertificate", by));
            out.extend(excluded(!tls.ca_certificates.is_empty(), "caCertificates", by));
            out.extend(excluded(!tls.private_key.is_empty(), "privateKey", by));
            out.extend(excluded(!tls.ca_crl.is_empty(), "caCrl", by));
        }
    } else if mode == TlSmode::Mutual {
        if tls.client_certificate.is_empty() {
            out.push("client certificate required for mutual tls: set clientCertificate".to_owned());
        }
        if tls.private_key.is_empty() {
            out.push("private key required for mutual tls: set privateKey".to_owned());
        }
    }
    out
}

#[cfg(test)]
mod tests;
