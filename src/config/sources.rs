//! What flags, variables, the mesh file, annotations and the host say, read once and merged. Private to
//! [`crate::config`]: everybody else gets the values that [`super::parts`] make of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::args::{self, Parsed};
use super::env::{Env, Settings, var};
use super::mesh::Effective;
use super::ports;
use super::release::Release;
use super::{addresses, layers, older, parts, report, stock, unknown};
use crate::tls::provider::{Compliance, fips_module};

/// Everything that was read. `Debug` leaves secrets out.
#[derive(Clone)]
pub(crate) struct Sources {
    /// Node type: sidecar, router, waypoint, ztunnel or agentgateway.
    pub node_type: String,
    /// DNS suffix of the node.
    pub domain: String,
    /// The middle part of the node id, where it is not the pod's name.
    pub(super) id: Option<String>,
    /// The flags as given.
    pub(super) flags: Parsed,
    /// Every variable.
    pub(super) settings: Settings,
    /// The release to follow where two exclude each other.
    pub(super) release: Release,
    /// The effective ProxyConfig.
    pub(super) mesh: Effective,
    /// The node's addresses, `INSTANCE_IP` first.
    pub addresses: Vec<String>,
    /// A changed bootstrap template at its old place, where none is named.
    pub(super) found_template: Option<PathBuf>,
    /// The file with the token that proves to istiod who this is.
    pub token: PathBuf,
    /// What relative paths hang off.
    pub(super) root: PathBuf,
    /// What is odd but tolerated, for the log.
    pub warnings: Vec<String>,
}

impl std::fmt::Debug for Sources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sources")
            .field("node_type", &self.node_type)
            .field("domain", &self.domain)
            .field("addresses", &self.addresses)
            .field("root", &self.root)
            .field("variables", &report::variables(self))
            .field("proxy_config", &report::proxy_config(self))
            .finish_non_exhaustive()
    }
}

impl Sources {
    /// The status port; 0: no status server.
    #[must_use]
    pub(crate) fn status_port(&self) -> Option<u16> {
        u16::try_from(self.mesh.proxy.status_port).ok()
    }

    /// Envoy's admin port; none without an Envoy.
    #[must_use]
    pub(crate) fn envoy_admin_port(&self) -> Option<u16> {
        let envoy = !self.settings.flag(var::DISABLE_ENVOY);
        envoy.then(|| u16::try_from(self.mesh.proxy.proxy_admin_port).unwrap_or(15000))
    }

    /// Where istiod is, as it was named.
    #[must_use]
    pub(crate) fn discovery_address(&self) -> &str {
        &self.mesh.proxy.discovery_address
    }

    /// Envoy's binary: a path, or a name.
    #[must_use]
    pub(crate) fn envoy_binary(&self) -> &str {
        &self.mesh.proxy.binary_path
    }

    /// Namespace and service account, as the workload calls itself.
    #[must_use]
    pub(crate) fn account(&self) -> (&str, &str) {
        (self.settings.text(var::POD_NAMESPACE), self.settings.text(var::SERVICE_ACCOUNT))
    }
}

const TYPES: &[&str] = &["sidecar", "router", "waypoint", "ztunnel", "agentgateway"];

/// Reads everything. What is wrong is told beside it, one line each, and has its default. Names and addresses that are
/// not there yet are waited for no longer than `patience`, and no longer than a start waits for them.
pub(crate) fn gather(
    flags: Parsed,
    env: &Env,
    root: &Path,
    annotation: impl Fn(&str) -> Option<String>,
    patience: Duration,
) -> (Arc<Sources>, Vec<String>) {
    let (mut settings, mut warnings) = Settings::read(env);
    let mut errors = Vec::new();
    let node_type = node_type(&flags, &mut errors, &mut warnings);
    warnings.extend(flags.unknown.iter().map(|flag| tolerated(flag)));
    let passed_over = flags.passed_over.iter();
    warnings.extend(
        passed_over.map(|why| format!("a flag of old releases is passed over, its default holds: {why}")),
    );
    warnings.extend(unknown::variables(env).iter().filter_map(|u| unknown::line("the variable ", u)));
    settings.default_text(var::TRUST_DOMAIN, flags.get("trust-domain").unwrap_or_default());
    settings.default_text(var::INSTANCE_IP, flags.get("ip").unwrap_or_default());
    let release = Release::of(settings.text(var::ISTIO_COMPAT_VERSION)).unwrap_or_else(|e| {
        errors.push(e.to_string());
        Release::default()
    });
    let mesh = layers::merge(&flags, &settings, release, root, &annotation, &mut warnings, patience);
    let mut mesh = mesh.unwrap_or_else(|problems| {
        errors.extend(problems.into_iter().map(|p| format!("failed to get proxy config: {p}")));
        Effective::new()
    });
    let dns = settings.flag(var::ISTIO_META_ENABLE_DNS_SERVER) || settings.flag(var::ISTIO_META_DNS_CAPTURE);
    errors.extend(ports::check(&settings, &mesh, dns, &mut warnings));
    compliance(&settings, &mut errors, &mut warnings);
    errors.extend(words(&settings));
    warnings.extend(parts::spread(&settings).1);
    warnings.extend(parts::memory::limit(&settings).1);
    warnings.extend(parts::identity::without_validity(&settings));
    errors.extend(named_template(&flags, &mut mesh));
    let unnamed = settings.some_text(var::ISTIO_BOOTSTRAP).is_none()
        && mesh.proxy.proxy_bootstrap_template_path.is_empty()
        && mesh.proxy.custom_config_file.is_empty();
    let found_template = unnamed.then(|| stock::own(root, env.map(), &mut warnings)).flatten();
    let excluded = annotation("traffic.sidecar.istio.io/excludeInterfaces").unwrap_or_default();
    let (addresses, odd) = addresses::of_host(settings.text(var::INSTANCE_IP), &excluded, patience);
    warnings.extend(odd);
    let token = older::token(&settings, root, &mut warnings);
    older::hot_restart(&flags, &mesh, root, &mut settings, &mut warnings);
    let older::Named { domain, id } = older::named(&flags, addresses.first().map_or("", String::as_str));
    let domain = domain.unwrap_or_else(|| format!("{}.svc.cluster.local", settings.text(var::POD_NAMESPACE)));
    let mut sources = Sources {
        node_type,
        domain,
        id,
        flags,
        settings,
        release,
        mesh,
        addresses,
        found_template,
        token,
        root: root.to_owned(),
        warnings,
    };
    sources.warnings.extend(parts::envoy::refused(&sources));
    // A value that is refused has its default here, which may be another's port.
    if errors.is_empty() {
        sources.warnings.extend(parts::ports::shared(&sources));
    }
    (Arc::new(sources), errors)
}

fn node_type(flags: &Parsed, errors: &mut Vec<String>, warnings: &mut Vec<String>) -> String {
    let mut named = flags.positional.first().cloned().unwrap_or_else(|| "sidecar".to_owned());
    if named == "ingress" {
        warnings.push("the role ingress of old releases is a router today: write proxy router".to_owned());
        "router".clone_into(&mut named);
    }
    if !TYPES.contains(&named.as_str()) {
        errors.push(format!("invalid proxy Type: {named}; it is one of {}", TYPES.join(", ")));
    }
    named
}

// istiod is told of the template in the proxy config, wherever it was named.
fn named_template(flags: &Parsed, mesh: &mut Effective) -> Vec<String> {
    let named = flags.get("templateFile").filter(|path| !path.is_empty());
    let Some(path) = named.filter(|_| mesh.proxy.custom_config_file.is_empty()) else { return Vec::new() };
    let faults = mesh.set("proxyBootstrapTemplatePath", path.into()).err().unwrap_or_default();
    faults.iter().map(|fault| format!("--templateFile={path}: {fault}")).collect()
}

// Words that are none of those a variable knows.
fn words(settings: &Settings) -> impl Iterator<Item = String> {
    let action = settings.text(var::IDENTITY_NEAR_EXPIRY).parse::<crate::secrets::NearExpiryAction>();
    let replay = parts::replay(settings.text(var::XDS_REPLAY));
    let uids = parts::identity::uids(settings.text(var::SDS_ALLOWED_UIDS));
    let errors = [
        action.err().map(|e| e.to_string()),
        replay.err().map(|e| e.to_string()),
        uids.err().map(|e| e.to_string()),
    ];
    errors.into_iter().flatten()
}

// The limits of TLS, and the module that is approved for them.
fn compliance(settings: &Settings, errors: &mut Vec<String>, warnings: &mut Vec<String>) {
    let policy = settings.text(var::COMPLIANCE_POLICY);
    if Compliance::of(policy).is_none() {
        errors.push(format!(
            "COMPLIANCE_POLICY={policy}: unknown, and TLS without its limits would not be what was asked for; it is {}, or not set",
            Compliance::NAMES
        ));
    }
    if settings.flag(var::FIPS_MODULE_REQUIRED) {
        let policy = Compliance::of(policy).unwrap_or_default();
        match fips_module(policy) {
            Err(why) => errors.push(format!(
                "FIPS_MODULE_REQUIRED=true: {why}; run a build of make release-fips, or leave the variable out"
            )),
            Ok(()) if !policy.is_fips() => warnings.push(
                "FIPS_MODULE_REQUIRED=true without a policy: the module is there, but TLS may use what it does not approve; \
                 set COMPLIANCE_POLICY=fips-140-3"
                    .to_owned(),
            ),
            Ok(()) => {}
        }
    }
}

/// Reads everything, or says what is wrong: for commands that look at a configuration and do not run on it, and cannot wait
/// for names and addresses as long as a start does; a patience of zero looks up no name.
///
/// # Errors
/// Every problem, one line each.
pub(crate) fn read_within(
    flags: Parsed,
    env: &Env,
    root: &Path,
    annotation: impl Fn(&str) -> Option<String>,
    patience: Duration,
) -> Result<Arc<Sources>, Vec<String>> {
    let (sources, errors) = gather(flags, env, root, annotation, patience);
    if errors.is_empty() { Ok(sources) } else { Err(errors) }
}

/// As [`read_within`], with the patience of a start.
#[cfg(test)]
pub(crate) fn read(
    flags: Parsed,
    env: &Env,
    root: &Path,
    annotation: impl Fn(&str) -> Option<String>,
) -> Result<Arc<Sources>, Vec<String>> {
    read_within(flags, env, root, annotation, Duration::MAX)
}

fn tolerated(flag: &str) -> String {
    let known = args::PROXY.iter().chain(args::LOGGING).map(|f| f.name);
    let meant = crate::base::nearest::nearest(flag.trim_start_matches('-'), known);
    let meant = meant.map(|name| format!(": was --{name} meant?")).unwrap_or_default();
    format!("unknown flag {flag} is tolerated and has no effect{meant}")
}
