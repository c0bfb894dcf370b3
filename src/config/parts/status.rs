//! The status server.

use std::net::SocketAddr;

use super::{Error, Sources};
use crate::config::env::var;
use crate::config::release::Release;
use crate::status::{self, probes, ready, stats};

/// The status server; `None` when the port is none, which only an annotation can say.
///
/// # Errors
/// When the probers or the metrics annotations cannot be read.
pub(crate) fn server(config: &Sources, all_ipv6: bool) -> Result<Option<status::Config>, Error> {
    let s = &config.settings;
    let proxy = &config.mesh.proxy;
    let port = match u16::try_from(proxy.status_port) {
        Ok(0) => return Ok(None),
        Ok(port) => port,
        Err(_) => {
            tracing::warn!(
                "there is no status server, so no readiness, no application probes and no merged metrics: the port number {} of \
                 the annotation status.sidecar.istio.io/port is not in the range 1..65535",
                proxy.status_port
            );
            return Ok(None);
        }
    };
    let instance_ip = s.text(var::INSTANCE_IP);
    let ipv6 = status::ipv6_mode(all_ipv6, instance_ip);
    let envoy = !s.flag(var::DISABLE_ENVOY);
    let admin = u16::try_from(proxy.proxy_admin_port).unwrap_or(15000);
    let mut out = status::Config::new(port);
    out.ready = ready::Config {
        envoy_admin: envoy.then(|| SocketAddr::new(status::loopback(ipv6), admin)),
        external: s.flag(var::ENVOY_EXTERNAL),
        grpc_bootstrap: s.some_text(var::GRPC_XDS_BOOTSTRAP).map(|p| config.path(p)),
        strict: s.flag(var::READINESS_STRICT),
    };
    out.probes = probes::Config {
        table: probes::parse(s.text(var::ISTIO_KUBE_APP_PROBERS)).map_err(|e| Error::new(e.to_string()))?,
        destination: if s.flag(var::REWRITE_PROBE_LEGACY_LOCALHOST_DESTINATION) {
            "localhost".to_owned()
        } else {
            instance_ip.to_owned()
        },
        source: status::probe_source(ipv6),
        http2: s.flag(var::ISTIO_ENABLE_HTTP2_PROBING),
        keepalive: s.flag(var::ENABLE_PROBE_KEEPALIVE_CONNECTIONS),
    };
    let annotations = s.env().get("ISTIO_PROMETHEUS_ANNOTATIONS").filter(|_| config.node_type == "sidecar");
    let merge = envoy && s.flag(var::PILOT_AGENT_MERGE_ENVOY_STATS);
    out.stats = stats::Config {
        envoy_port: merge.then(|| u16::try_from(s.int(var::ENVOY_PROMETHEUS_PORT)).unwrap_or(15090)),
        targets: match annotations {
            Some(text) => targets(config, text, port).map_err(|e| Error::new(e.to_string()))?,
            None => Vec::new(),
        },
        local_only: s.flag(var::METRICS_LOCALHOST_ACCESS_ONLY),
        limit: u64::try_from(s.int(var::METRICS_PART_LIMIT_BYTES)).ok().filter(|n| *n > 0),
        details: s.flag(var::METRICS_DETAILS),
    };
    out.profiling = config.flags.or_default(crate::config::args::PROXY, "profiling") == "true"
        || crate::config::go::boolean(config.flags.or_default(crate::config::args::PROXY, "profiling"))
            == Some(true);
    Ok(Some(out))
}

/// The release that was named decides; without a name each form is judged by the release that writes it.
fn targets(config: &Sources, text: &str, port: u16) -> Result<Vec<stats::Target>, stats::AnnotationError> {
    let named = config.settings.env().get("ISTIO_COMPAT_VERSION").is_some_and(|v| !v.is_empty());
    match config.release {
        Release::V1_30 => stats::parse_1_30(text, port),
        Release::V1_31 if named => stats::parse_annotations(text, port),
        Release::V1_31 => {
            let (targets, refused) = stats::parse_either(text, port)?;
            if let Some(why) = refused {
                tracing::warn!(
                    "{why} (release 1.31 refuses to start with it; here each scrape counts a failure)"
                );
            }
            Ok(targets)
        }
    }
}
