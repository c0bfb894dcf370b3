//! What a command line of 0.8 to 1.8 means beside the ProxyConfig: the registry's rules of the node's name,
//! and an Envoy that is replaced when mounted certificates change.

use std::path::{Path, PathBuf};

use super::args::Parsed;
use super::env::{Settings, var};
use super::mesh::Effective;
use super::parts::at;

/// Where mounted certificates lay, and which were watched.
const WATCHED: &str = "./etc/certs/cert-chain.pem,./etc/certs/key.pem,./etc/certs/root-cert.pem";
const CHAIN: &str = "etc/certs/cert-chain.pem";

/// Domain and middle part of the node id, as far as `--serviceregistry`, `--id` and `--domain` say them.
pub(super) struct Named {
    pub(super) domain: Option<String>,
    pub(super) id: Option<String>,
}

/// Kubernetes names a node by its pod; Consul and others by its address.
pub(super) fn named(flags: &Parsed, address: &str) -> Named {
    let flag = |name: &str| flags.get(name).filter(|v| !v.is_empty()).map(str::to_owned);
    let (domain, id) = match flag("serviceregistry").as_deref() {
        None | Some("Kubernetes") => (None, None),
        Some("Consul") => (Some("service.consul".to_owned()), Some(format!("{address}.service.consul"))),
        Some(_) => (Some(String::new()), Some(address.to_owned())),
    };
    Named { domain: flag("domain").or(domain), id: flag("id").or(id) }
}

/// The token that Kubernetes mounts, or a VM is given.
const TOKEN: &str = "./var/run/secrets/tokens/istio-token";
/// The pod's own, which every pod has; for the API server, and in old clusters without an end.
const POD_TOKEN: &str = "./var/run/secrets/kubernetes.io/serviceaccount/token";

/// Which token proves to istiod who this is. With `JWT_POLICY=first-party-jwt` the pods of releases up to 1.20 had
/// the pod's own only; where the other one is there too, it is used, as the newer agents do.
pub(super) fn token(settings: &Settings, root: &Path, warnings: &mut Vec<String>) -> PathBuf {
    let first = settings.text(var::JWT_POLICY) == "first-party-jwt";
    let (usual, pods) = (at(root, TOKEN), at(root, POD_TOKEN));
    if !first || usual.exists() || !pods.exists() {
        return usual;
    }
    warnings.push(format!(
        "JWT_POLICY=first-party-jwt and no {TOKEN}: the pod's own token ({POD_TOKEN}) is sent to istiod, as releases up \
         to 1.20 did; mount the projected token istio-token (audience istio-ca) and take the variable away"
    ));
    pods
}

/// The defaults of hot restart. The rule: `--parentShutdownDuration`, which every start line of 0.8 to 1.5 has
/// and none since 1.6, and a certificate in `/etc/certs`. The span itself is also taken from the field of
/// that name, which left ProxyConfig later.
pub(super) fn hot_restart(
    flags: &Parsed,
    mesh: &Effective,
    root: &Path,
    settings: &mut Settings,
    warnings: &mut Vec<String>,
) {
    let flag = flags.get("parentShutdownDuration").filter(|v| !v.is_empty());
    if let Some(span) = mesh.parent_shutdown().or(flag)
        && !settings.default_of(var::ENVOY_PARENT_SHUTDOWN_DURATION, span)
    {
        warnings.push(format!(
            "parentShutdownDuration={span} is passed over: no duration of zero or more; write for instance 60s, or ENVOY_PARENT_SHUTDOWN_DURATION"
        ));
    }
    if flag.is_some() && root.join(CHAIN).exists() {
        warnings.push(
            "a start line of Istio 0.8 to 1.5 (--parentShutdownDuration) and certificates in /etc/certs: Envoy is replaced \
             when they change, as it was then; ENVOY_HOT_RESTART=false switches that off"
                .to_owned(),
        );
        settings.default_of(var::ENVOY_HOT_RESTART, "true");
        settings.default_of(var::ENVOY_RESTART_ON_FILES, WATCHED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Sources, args, env::Env, read};
    use std::sync::Arc;

    fn start(words: &[&str], env: &[(&str, &str)], root: &Path) -> Arc<Sources> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let flags = args::parse(&words, args::PROXY, true).unwrap();
        read(flags, &Env::of(env), root, |_| None).unwrap()
    }

    #[test]
    fn names_by_registry() {
        let of = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            let named = named(&args::parse(&words, args::PROXY, true).unwrap(), "10.0.0.1");
            (named.domain, named.id)
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of(&[]), (None, None));
        assert_eq!(of(&["--serviceregistry", "Kubernetes", "--id=a.b"]), (None, some("a.b")));
        assert_eq!(
            of(&["--serviceregistry=Consul"]),
            (some("service.consul"), some("10.0.0.1.service.consul"))
        );
        assert_eq!(of(&["--serviceregistry=Other"]), (some(""), some("10.0.0.1")));
        assert_eq!(of(&["--serviceregistry=Other", "--domain=x", "--id=y"]), (some("x"), some("y")));
    }

    #[test]
    fn flags_that_the_go_agent_passes_over_never_end_a_start() {
        let root = tempfile::tempdir().unwrap();
        for (word, told) in [
            ("--drainDuration=500ms", "drainDuration"),
            ("--drainDuration=45", "drainDuration"),
            ("--connectTimeout=abc", "connectTimeout"),
            ("--parentShutdownDuration=5", "parentShutdownDuration"),
            ("--controlPlaneAuthPolicy=none", "controlPlaneAuthPolicy"),
            ("--statusPort=x", "statusPort"),
            ("--proxyAdminPort=0", "proxyAdminPort"),
            ("--discoveryAddress=istiod", "discoveryAddress"),
            ("--zipkinAddress=z", "zipkin"),
            // What Envoy would refuse to start with.
            ("--lightstepAddress=l:1", "not part of Envoy any more"),
            (r#"--envoyMetricsService={"address":"m:1","tlsSettings":{"mode":"SIMPLE"}}"#, "caCertificates"),
            (
                r#"--envoyAccessLogService={"address":"a:1","tlsSettings":{"mode":"MUTUAL"}}"#,
                "caCertificates",
            ),
        ] {
            let more = ["--lightstepAccessToken=t", "--lightstepSecure"];
            let config = start(&[word, more[0], more[1]], &[], root.path());
            assert!(config.warnings.iter().any(|w| w.contains(told)), "{word}: {:?}", config.warnings);
            let plain = start(&[], &[], root.path());
            assert_eq!(config.mesh.to_json(), plain.mesh.to_json(), "{word}");
        }
        let named = r#"--envoyMetricsService={"address":"m:1","tlsSettings":{"mode":"SIMPLE","caCertificates":"/ca"}}"#;
        let both = start(&[named, "--lightstepAddress=l:1", "--datadogAgentAddress=d:1"], &[], root.path());
        assert!(both.mesh.proxy.envoy_metrics_service.is_some() && both.mesh.proxy.tracing.is_some());
    }

    #[test]
    fn a_status_port_of_zero_is_none_and_newer_sources_win() {
        let root = tempfile::tempdir().unwrap();
        let words = ["--statusPort", "0", "--discoveryAddress=old:15010"];
        let config = start(&words, &[], root.path());
        assert_eq!(config.mesh.proxy.status_port, 0);
        assert_eq!(config.mesh.proxy.discovery_address, "old:15010");
        assert!(config.warnings.iter().any(|w| w.contains("PROXY_CONFIG")), "{:?}", config.warnings);
        let newer = "{statusPort: 15888, discoveryAddress: 'new:15012', terminationDrainDuration: 7s}";
        let env = [("PROXY_CONFIG", newer), ("TERMINATION_DRAIN_DURATION_SECONDS", "9")];
        let config = start(&words, &env, root.path());
        assert_eq!(config.mesh.proxy.status_port, 15888);
        assert!(config.warnings.iter().any(|w| w.contains("names new:15012")), "{:?}", config.warnings);
        assert_eq!(config.mesh.proxy.termination_drain_duration.as_ref().map(|d| d.seconds), Some(7));
        let config = start(&[], &env[1..], root.path());
        assert_eq!(config.mesh.proxy.termination_drain_duration.as_ref().map(|d| d.seconds), Some(9));
    }

    #[test]
    fn a_first_party_token_is_the_pods_own_where_no_other_is() {
        let root = tempfile::tempdir().unwrap();
        let ends = |env: &[(&str, &str)], end: &str| {
            let config = start(&[], env, root.path());
            assert!(config.token.ends_with(end), "{env:?}: {:?}", config.token);
            config.warnings.iter().any(|w| w.contains("first-party-jwt"))
        };
        let first = [("JWT_POLICY", "first-party-jwt")];
        assert!(!ends(&first, "tokens/istio-token"), "nothing is there: the usual one may come yet");
        for path in [POD_TOKEN, TOKEN] {
            let file = root.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "x").unwrap();
            let only = path == POD_TOKEN;
            assert_eq!(ends(&first, if only { "serviceaccount/token" } else { "tokens/istio-token" }), only);
            assert!(!ends(&[], "tokens/istio-token"));
        }
    }

    #[test]
    fn mounted_certificates_restart_envoy_for_an_old_start_line_only() {
        let root = tempfile::tempdir().unwrap();
        let span = ["--parentShutdownDuration", "70s"];
        let on = |words: &[&str], env: &[(&str, &str)]| {
            let config = start(words, env, root.path());
            let s = &config.settings;
            (s.flag(var::ENVOY_HOT_RESTART), s.duration(var::ENVOY_PARENT_SHUTDOWN_DURATION).as_secs())
        };
        assert_eq!(on(&span, &[]), (false, 70));
        std::fs::create_dir_all(root.path().join("etc/certs")).unwrap();
        std::fs::write(root.path().join(CHAIN), "x").unwrap();
        assert_eq!(on(&[], &[]), (false, 60));
        assert_eq!(on(&span, &[]), (true, 70));
        assert_eq!(on(&span, &[("ENVOY_HOT_RESTART", "false")]), (false, 70));
        assert_eq!(on(&span, &[("PROXY_CONFIG", "parentShutdownDuration: 80s")]), (true, 80));
    }
}
