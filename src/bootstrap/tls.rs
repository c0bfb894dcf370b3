//! TLS from Envoy to the collectors of the bootstrap, and in front of its metrics; certificates come over SDS.

use serde_json::{Map, Value, json};

use super::{Error, SDS_CLUSTER, typed};

/// `mode` of ClientTLSSettings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TlsMode {
    /// Plaintext.
    #[default]
    Disable,
    /// The server shows a certificate.
    Simple,
    /// Both do, from files.
    Mutual,
    /// Both do, with the workload's own identity.
    IstioMutual,
}

/// ClientTLSSettings, as far as a bootstrap uses them. `TLS_CLIENT_*` metadata has been applied already.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClientTls {
    /// How.
    pub mode: TlsMode,
    /// `caCertificates`: a file.
    pub ca: String,
    /// `clientCertificate`: a file.
    pub cert: String,
    /// `privateKey`: a file.
    pub key: String,
    /// `sni`.
    pub sni: String,
    /// `subjectAltNames`.
    pub sans: Vec<String>,
    /// `insecureSkipVerify`.
    pub skip_verify: bool,
}

impl ClientTls {
    /// Whether they say neither by what to verify the server nor that it need not be: Envoy refuses such a context.
    #[must_use]
    pub(crate) fn is_blind(&self) -> bool {
        matches!(self.mode, TlsMode::Simple | TlsMode::Mutual) && self.ca.is_empty() && !self.skip_verify
    }
}

/// Where the settings stand and what the context is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Use {
    /// The field, for errors.
    pub(crate) field: &'static str,
    /// The server name when ISTIO_MUTUAL names none.
    pub(crate) sni: &'static str,
    /// The protocol is HTTP/2.
    pub(crate) h2: bool,
}

/// An upstream transport socket; none for plaintext.
pub(crate) fn socket(tls: &ClientTls, used: Use) -> Result<Option<Value>, Error> {
    if tls.is_blind() {
        let mode = if tls.mode == TlsMode::Simple { "SIMPLE" } else { "MUTUAL" };
        return Err(Error::NoCa { field: used.field, mode });
    }
    let mut common = Map::new();
    let alpn: &[&str] = match tls.mode {
        TlsMode::Disable => return Ok(None),
        TlsMode::IstioMutual => &["istio", "h2"],
        TlsMode::Simple | TlsMode::Mutual => &["h2"],
    };
    if used.h2 {
        common.insert("alpn_protocols".into(), json!(alpn));
    }
    let cert = match tls.mode {
        TlsMode::IstioMutual => Some(sds("default", true)),
        TlsMode::Mutual if !tls.cert.is_empty() && !tls.key.is_empty() => {
            Some(sds(&format!("file-cert:{}~{}", tls.cert, tls.key), false))
        }
        _ => None,
    };
    if let Some(cert) = cert {
        common.insert("tls_certificate_sds_secret_configs".into(), json!([cert]));
    }
    let root = match tls.mode {
        TlsMode::IstioMutual => Some(sds("ROOTCA", true)),
        _ => (!tls.ca.is_empty()).then(|| sds(&format!("file-root:{}", tls.ca), false)),
    };
    if let Some(root) = root {
        let mut default = Map::new();
        if !tls.sans.is_empty() {
            let sans: Vec<Value> = tls.sans.iter().map(|san| json!({"exact": san})).collect();
            default.insert("match_subject_alt_names".into(), Value::Array(sans));
        }
        common.insert(
            "combined_validation_context".into(),
            json!({"default_validation_context": default, "validation_context_sds_secret_config": root}),
        );
    }
    let mut context = Map::new();
    context.insert("common_tls_context".into(), Value::Object(common));
    let sni = match tls.mode {
        TlsMode::IstioMutual if tls.sni.is_empty() => used.sni,
        _ => &tls.sni,
    };
    if !sni.is_empty() {
        context.insert("sni".into(), json!(sni));
    }
    Ok(Some(typed(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        Value::Object(context),
    )))
}

/// A downstream transport socket with the workload's identity, for callers with one of the same mesh.
pub(crate) fn server(policy: &str) -> Value {
    let mut common = Map::new();
    if let Some(limits) = limits(policy) {
        common.insert("tls_params".into(), limits);
    }
    common.insert("tls_certificate_sds_secret_configs".into(), json!([sds("default", false)]));
    common.insert(
        "combined_validation_context".into(),
        json!({
            "default_validation_context": {},
            "validation_context_sds_secret_config": sds("ROOTCA", false),
        }),
    );
    typed(
        "envoy.transport_sockets.tls",
        "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        json!({"common_tls_context": common, "require_client_certificate": true}),
    )
}

/// What `COMPLIANCE_POLICY` leaves, in Envoy's words.
fn limits(policy: &str) -> Option<Value> {
    Some(match policy {
        "fips-140-2" => json!({
            "tls_minimum_protocol_version": "TLSv1_2",
            "tls_maximum_protocol_version": "TLSv1_2",
            "cipher_suites": [
                "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-RSA-AES128-GCM-SHA256",
                "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-RSA-AES256-GCM-SHA384",
            ],
            "ecdh_curves": ["P-256"],
        }),
        "fips-140-3" => json!({"compliance_policies": ["FIPS_202205"]}),
        "pqc" => json!({"tls_minimum_protocol_version": "TLSv1_3", "ecdh_curves": ["X25519MLKEM768"]}),
        _ => return None,
    })
}

// Names of files come from the operator and may not be there: Envoy waits its default time for them. The
// workload's own identity always comes, so Envoy waits for it without an end.
fn sds(name: &str, own: bool) -> Value {
    let mut config = Map::new();
    config.insert(
        "api_config_source".into(),
        json!({
            "api_type": "GRPC",
            "set_node_on_first_message_only": true,
            "transport_api_version": "V3",
            "grpc_services": [{"envoy_grpc": {"cluster_name": SDS_CLUSTER}}],
        }),
    );
    if own {
        config.insert("initial_fetch_timeout".into(), json!("0s"));
    }
    config.insert("resource_api_version".into(), json!("V3"));
    json!({"name": name, "sds_config": config})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_the_metrics_listeners_follow_the_policy() {
        let of = |policy: &str| server(policy)["typed_config"]["common_tls_context"]["tls_params"].take();
        assert_eq!(of(""), Value::Null);
        assert_eq!(of("fips-140-2")["tls_maximum_protocol_version"], "TLSv1_2");
        assert_eq!(of("fips-140-2")["ecdh_curves"], json!(["P-256"]));
        assert_eq!(of("fips-140-3"), json!({"compliance_policies": ["FIPS_202205"]}));
        assert_eq!(of("pqc")["tls_minimum_protocol_version"], "TLSv1_3");
    }
}
