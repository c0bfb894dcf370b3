//! Names that nobody reads: a variable or a ProxyConfig field that is one slip away from a known one.
//!
//! The Go agent passes over all of them without a word, and so does this one in what it does: newer istiods write
//! fields that we do not know, and the environment belongs to everybody. What looks like a slip is told.

use serde_json::Value;

use super::env::{Env, VARS, WITHOUT_EFFECT};
use super::yaml;
use crate::base::nearest::nearest;
use crate::proto::schema::{
    ISTIO_MESH_V1ALPHA1_MESHCONFIG as MESH, ISTIO_MESH_V1ALPHA1_PROXYCONFIG as PROXY, Kind, Message, Shape,
};

/// Variables that istiod's injector, the VM packages and istiod itself know beside the table: node metadata, what
/// the start script of a VM and `istio-iptables` read.
const ELSEWHERE: &[&str] = &[
    "ISTIO_META_APP_CONTAINERS",
    "ISTIO_META_AUTO_REGISTER_GROUP",
    "ISTIO_META_DNS_AUTO_ALLOCATE",
    "ISTIO_META_DNS_PROXY_ADDR",
    "ISTIO_META_ENABLE_HBONE",
    "ISTIO_META_GENERATOR",
    "ISTIO_META_GLOBAL_DOWNSTREAM_MAX_CONNECTIONS",
    "ISTIO_META_INTERCEPTION_MODE",
    "ISTIO_META_LOAD_STATS_CONFIG_JSON",
    "ISTIO_META_MESH_ID",
    "ISTIO_META_NAMESPACE",
    "ISTIO_META_NETWORK",
    "ISTIO_META_NODE_NAME",
    "ISTIO_META_OWNER",
    "ISTIO_META_POD_PORTS",
    "ISTIO_META_REQUESTED_NETWORK_VIEW",
    "ISTIO_META_SERVICE_ACCOUNT",
    "ISTIO_META_TLS_CLIENT_CERT_CHAIN",
    "ISTIO_META_TLS_CLIENT_KEY",
    "ISTIO_META_TLS_CLIENT_ROOT_CERT",
    "ISTIO_META_TLS_SERVER_CERT_CHAIN",
    "ISTIO_META_TLS_SERVER_KEY",
    "ISTIO_META_TLS_SERVER_ROOT_CERT",
    "ISTIO_META_UNPRIVILEGED_POD",
    "ISTIO_META_WORKLOAD_NAME",
    "ISTIO_METAJSON_ANNOTATIONS",
    "ISTIO_METAJSON_LABELS",
    "ISTIO_AGENT_FLAGS",
    "ISTIO_CUSTOM_IP_TABLES",
    "ISTIO_INBOUND_PORTS",
    "ISTIO_LOCAL_EXCLUDE_PORTS",
    "ISTIO_NAMESPACE",
    "ISTIO_OUTBOUND_PORTS",
    "ISTIO_PILOT_PORT",
    "ISTIO_SERVICE",
    "ISTIO_SERVICE_CIDR",
    "ISTIO_SERVICE_EXCLUDE_CIDR",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "POD_IP",
    "NODE_NAME",
    "HOSTNAME",
    "KUBERNETES_PORT",
    "KUBERNETES_SERVICE_PORT",
    "KUBERNETES_SERVICE_PORT_HTTPS",
];

/// A name that means nothing, and the one it was probably meant to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unknown {
    /// Variable, or path of the field.
    pub name: String,
    /// The known name nearest to it; none for a field that is like no other.
    pub nearest: Option<&'static str>,
}

/// Variables that look like a slip. Names only: a value may be a secret.
#[must_use]
pub(crate) fn variables(env: &Env) -> Vec<Unknown> {
    let known = || {
        let table = VARS.iter().map(|v| v.name);
        table.chain(WITHOUT_EFFECT.iter().copied()).chain(ELSEWHERE.iter().copied())
    };
    let slip = |(name, _): (&str, &str)| {
        // Ours are written in capitals; what the shell and other programs set in small letters is theirs.
        if name.chars().any(|c| c.is_ascii_lowercase()) || !name.contains('_') {
            return None;
        }
        let nearest = nearest(name, known())?;
        Some(Unknown { name: name.to_owned(), nearest: Some(nearest) })
    };
    env.iter().filter_map(slip).collect()
}

/// Fields of a ProxyConfig document (YAML or JSON) that nothing reads. A document that is none has none.
#[must_use]
pub(crate) fn fields(proxy_config: &str) -> Vec<Unknown> {
    let mut out = Vec::new();
    if let Ok(document) = yaml::to_json(proxy_config) {
        walk(&PROXY, &document, "", &mut out);
    }
    out
}

/// The same for the `defaultConfig` of a mesh file, and the file's own top level.
#[must_use]
pub(crate) fn mesh_fields(mesh: &str) -> Vec<Unknown> {
    let mut out = Vec::new();
    if let Ok(document) = yaml::to_json(mesh) {
        walk(&MESH, &document, "", &mut out);
    }
    out
}

fn walk(of: &'static Message, document: &Value, at: &str, out: &mut Vec<Unknown>) {
    let Value::Object(object) = document else { return };
    for (name, value) in object {
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        let Some(field) = of.fields.iter().find(|f| f.json == name || f.name == name) else {
            out.push(Unknown { name: path, nearest: nearest(name, of.fields.iter().map(|f| f.json)) });
            continue;
        };
        let Kind::Message(inner) = field.kind else { continue };
        match (field.shape, value) {
            (Shape::One, value) => walk(inner, value, &path, out),
            (Shape::List, Value::Array(items)) => {
                items
                    .iter()
                    .enumerate()
                    .for_each(|(n, item)| walk(inner, item, &format!("{path}[{n}]"), out));
            }
            (Shape::Map, Value::Object(entries)) => {
                entries.iter().for_each(|(key, item)| walk(inner, item, &format!("{path}.{key}"), out));
            }
            _ => {}
        }
    }
}

/// One line a slip, as the log shows it.
#[must_use]
pub(crate) fn line(source: &str, unknown: &Unknown) -> Option<String> {
    let nearest = unknown.nearest?;
    Some(format!("{source}{} is unknown and has no effect: was {nearest} meant?", unknown.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_in_variables_are_found_and_other_peoples_variables_are_not() {
        let env = Env::of(&[
            ("ISTIO_META_DNS_CAPTRUE", "true"),
            ("POXY_CONFIG", ""),
            ("PROXY_CONFIG", ""),
            ("ISTIO_META_MINE", "x"),
            ("http_proxy", ""),
            ("PATH", ""),
            ("KUBERNETES_SERVICE_PORT", "443"),
            ("TRUST_DOMIAN", "x"),
            ("POD_IP", "10.0.0.1"),
        ]);
        let found: Vec<_> = variables(&env).into_iter().map(|u| (u.name, u.nearest.unwrap())).collect();
        let wanted = [
            ("ISTIO_META_DNS_CAPTRUE", "ISTIO_META_DNS_CAPTURE"),
            ("POXY_CONFIG", "PROXY_CONFIG"),
            ("TRUST_DOMIAN", "TRUST_DOMAIN"),
        ];
        assert_eq!(found, wanted.map(|(a, b)| (a.to_owned(), b)));
    }

    #[test]
    fn no_known_variable_is_a_slip_for_another() {
        let names = VARS.iter().map(|v| v.name).chain(ELSEWHERE.iter().copied());
        let pairs: Vec<(&str, &str)> = names.map(|n| (n, "")).collect();
        assert_eq!(variables(&Env::of(&pairs)), []);
    }

    #[test]
    fn fields_are_found_at_every_depth() {
        let found = fields(
            "concurency: 2\nstatus_port: 1\ntracing: {zipkin: {adress: x}}\nproxyMetadata: {ANY: x}\nfuture: 1\n",
        );
        let found: Vec<_> = found.iter().map(|u| (u.name.as_str(), u.nearest)).collect();
        assert_eq!(
            found,
            [
                ("concurency", Some("concurrency")),
                ("tracing.zipkin.adress", Some("address")),
                ("future", None)
            ]
        );
        assert_eq!(fields("- no\n- document\n"), []);
        assert_eq!(mesh_fields("defaultConfig: {drainDuraton: 1s}\n")[0].nearest, Some("drainDuration"));
    }
}
