//! Envoy's process: arguments, user, admin port, drain, restart.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::{Error, Sources};
use crate::base::bounded;
use crate::base::error::BoxError;
use crate::base::place::{self, Mode};
use crate::bootstrap::{self, Locality, Node, grpc};
use crate::config::args;
use crate::config::env::{Key, Settings, kinds, var};
use crate::config::envoy_options;
use crate::config::{node, platform, pod, ports};
use crate::envoy::command::{self, IpVersion, LogLevels, Options};
use crate::envoy::drain::{self, ExitOnZero};
use crate::envoy::{self, ConfigFile, admin, launch, restart};
use crate::trouble::Kind;

/// Envoy as this agent is to treat it.
#[derive(Debug, Clone)]
pub(crate) struct Envoy {
    /// Who runs it.
    pub presence: Presence,
    /// Its process.
    pub process: envoy::Config,
    /// What it is told at its start.
    pub bootstrap: Bootstrap,
}

/// Who runs Envoy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Presence {
    /// This agent.
    Own,
    /// Somebody else (`ENVOY_EXTERNAL`).
    External,
    /// There is none (`DISABLE_ENVOY`).
    None,
}

/// Who runs Envoy.
///
/// # Errors
/// When two variables say different things.
pub(crate) fn presence(config: &Sources) -> Result<Presence, Error> {
    let s = &config.settings;
    match (s.flag(var::DISABLE_ENVOY), s.flag(var::ENVOY_EXTERNAL)) {
        (false, false) => Ok(Presence::Own),
        (false, true) => Ok(Presence::External),
        (true, false) => Ok(Presence::None),
        (true, true) => Err(Error::new(
            "DISABLE_ENVOY and ENVOY_EXTERNAL are both true: there is no Envoy, or there is one that somebody else \
             runs; take one of them away",
        )),
    }
}

/// User and group of Envoy when the agent is root and serves DNS on port 53.
const ENVOY_USER: (u32, u32) = (1337, 1337);

/// As Go's `time.Duration` holds it: 292 years at most, cut towards zero.
fn milliseconds(of: &pbjson_types::Duration) -> i64 {
    let nanos = i128::from(of.seconds) * 1_000_000_000 + i128::from(of.nanos);
    let most = if nanos < 0 { i64::MIN } else { i64::MAX };
    i64::try_from(nanos).unwrap_or(most) / 1_000_000
}

/// A port of [`ports::SECURE_PORTS`]; a negative one is only told to istiod, as in the Go agent.
fn secure_port(settings: &Settings, key: Key<kinds::Int>) -> Option<u16> {
    u16::try_from(settings.int(key)).ok().filter(|port| *port > 0)
}

/// The template's path by precedence, if any is named.
#[must_use]
pub(crate) fn template(config: &Sources) -> Option<PathBuf> {
    let named = config
        .settings
        .some_text(var::ISTIO_BOOTSTRAP)
        .or_else(|| config.flags.get("templateFile").filter(|t| !t.is_empty()))
        .or_else(|| Some(config.mesh.proxy.proxy_bootstrap_template_path.as_str()).filter(|t| !t.is_empty()));
    named.map(|path| config.path(path)).or_else(|| config.found_template.clone())
}

/// `customConfigFile`, where one is named.
#[must_use]
pub(crate) fn custom(config: &Sources) -> Option<PathBuf> {
    let named = Some(&config.mesh.proxy.custom_config_file).filter(|named| !named.is_empty());
    named.map(|named| config.path(named))
}

fn file(config: &Sources) -> ConfigFile {
    custom(config).map_or_else(|| ConfigFile::Generated(generated(config)), ConfigFile::Custom)
}

/// Where the bootstrap that is made is written.
#[must_use]
pub(crate) fn generated(config: &Sources) -> PathBuf {
    let yaml = template(config).is_some_and(|t| {
        let name = t.to_string_lossy();
        name.ends_with(".yaml") || name.ends_with(".yaml.tmpl")
    });
    // Joined like a string: the path stands in Envoy's arguments as people know it.
    let name = if yaml { "envoy-rev.yaml" } else { "envoy-rev.json" };
    crate::base::path::cleaned(&config.config_path().join(name))
}

// And what of them means nothing.
fn levels(config: &Sources) -> (LogLevels, Vec<String>) {
    let flag = |name| config.flags.or_default(args::PROXY, name);
    LogLevels::parse(flag("proxyLogLevel"), flag("proxyComponentLogLevel"))
}

/// What Envoy will refuse to start with, told before anything is bound. It is for Envoy, or for what stands in its place,
/// to refuse it: the status of its end is what scripts know.
#[must_use]
pub(crate) fn refused(config: &Sources) -> Vec<String> {
    if !matches!(presence(config), Ok(Presence::Own)) {
        return Vec::new();
    }
    let level = Some(levels(config).0.base).filter(|level| {
        !["", "warn"].contains(&level.as_str()) && !command::LEVELS.contains(&level.as_str())
    });
    let level = level.map(|level| {
        format!(
            "--proxyLogLevel={level}: Envoy knows no such level and will not start; write one of {}",
            command::LEVELS.join(", ")
        )
    });
    let custom = &config.mesh.proxy.custom_config_file;
    let custom = if custom.is_empty() { None } else { std::fs::metadata(config.path(custom)).err() }.map(|why| {
        format!(
            "customConfigFile of the proxy config: {custom}: {why}: Envoy will not start without it; write the file, or take the field \
             away to have a configuration made"
        )
    });
    level.into_iter().chain(custom).collect()
}

/// This program, to be started again. Where no /proc is mounted (a bare chroot), by the path that it was started by.
fn own_program() -> PathBuf {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() { own } else { OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()).into() }
}

fn override_file(config: &Sources) -> Option<PathBuf> {
    config.settings.some_text(var::ISTIO_BOOTSTRAP_OVERRIDE).map(|path| config.path(path))
}

/// The files that a bootstrap is made from, or that stand in its place.
fn inputs(config: &Sources) -> Vec<PathBuf> {
    let base = custom(config).or_else(|| template(config));
    base.into_iter().chain(override_file(config)).collect()
}

/// What the file of `ISTIO_BOOTSTRAP_OVERRIDE` puts over the bootstrap, if anything.
///
/// # Errors
/// Why it has no effect, with its name.
pub(crate) fn override_json(config: &Sources) -> Result<Option<String>, Error> {
    let Some(path) = config.settings.some_text(var::ISTIO_BOOTSTRAP_OVERRIDE) else { return Ok(None) };
    let read = || -> Result<_, BoxError> {
        let text = bounded::given_text(&config.path(path))?;
        let text = command::override_text(&text, config.settings.text(var::HOST_IP));
        Ok(command::override_value(&crate::config::yaml::to_json(&text)?))
    };
    read().map_err(|e| Error::new(format!("{path}: {e}")))
}

/// Why variables with node metadata have no effect.
#[must_use]
pub(crate) fn metadata_faults(config: &Sources) -> Vec<String> {
    config.settings.env().json().into_iter().filter_map(|(name, text)| node::fault(name, text)).collect()
}

/// Everything about the process; `root`: whether the agent runs as root.
///
/// # Errors
/// Durations that Envoy cannot be told.
pub(crate) fn process(config: &Sources, root: bool) -> Result<envoy::Config, Error> {
    let addresses = &config.addresses;
    let s = &config.settings;
    let proxy = &config.mesh.proxy;
    let drain = Sources::span(proxy.drain_duration.as_ref()).unwrap_or(Duration::from_secs(45));
    if drain.subsec_nanos() != 0 {
        return Err(Error::new(format!(
            "drain time only supports durations to seconds precision: drainDuration is {drain:?}"
        )));
    }
    let (log, warnings) = levels(config);
    warnings.iter().for_each(|w| tracing::warn!("{w}"));
    let port = |key, default: u16| u16::try_from(s.int(key)).unwrap_or(default);
    let arguments = Options {
        drain_seconds: i64::try_from(drain.as_secs()).unwrap_or(i64::MAX),
        ip_version: IpVersion::of(addresses),
        file_flush_milliseconds: proxy.file_flush_interval.as_ref().map(milliseconds),
        file_flush_min_size_kb: proxy.file_flush_min_size_kb,
        log,
        skip_deprecated_logs: s.flag(var::ENVOY_SKIP_DEPRECATED_LOGS),
        core_dump: s.flag(var::ISTIO_ENVOY_ENABLE_CORE_DUMP),
        override_json: override_json(config).unwrap_or_else(|why| {
            tracing::warn!("Failed to read bootstrap override: {why}; Envoy starts without it");
            None
        }),
        concurrency: proxy.concurrency.as_ref().and_then(|c| u32::try_from(c.value).ok()).unwrap_or(0),
    };
    let fips = super::istiod::compliance(config).is_fips();
    let suites = "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384";
    let ipv4 = addresses.iter().any(|a| a.parse::<std::net::Ipv4Addr>().is_ok());
    let on_zero = s.flag(var::EXIT_ON_ZERO_ACTIVE_CONNECTIONS).then(|| ExitOnZero {
        minimum: s.duration(var::MINIMUM_DRAIN_DURATION),
        cap: Some(s.duration(var::MAXIMUM_DRAIN_DURATION)).filter(|d| !d.is_zero()),
    });
    let watched = s.text(var::ENVOY_RESTART_ON_FILES).split(',').filter(|p| !p.is_empty());
    Ok(envoy::Config {
        binary: proxy.binary_path.clone(),
        launcher: own_program(),
        arguments,
        extra_env: if fips { vec![("GRPC_SSL_CIPHER_SUITES".to_owned(), suites.to_owned())] } else { vec![] },
        user: (root && s.text(var::DNS_PROXY_ADDR).ends_with(":53")).then_some(ENVOY_USER),
        own_group: s.flag(var::ENVOY_OWN_PROCESS_GROUP),
        file: file(config),
        admin: admin::Config {
            port: u16::try_from(proxy.proxy_admin_port).unwrap_or(15000),
            ipv6_only: !ipv4 && !addresses.is_empty(),
            inbound_only: config.node_type == "sidecar",
            own_ports: vec![port(var::ENVOY_STATUS_PORT, 15021), port(var::ENVOY_PROMETHEUS_PORT, 15090)],
            secure_ports: ports::SECURE_PORTS.into_iter().filter_map(|key| secure_port(s, key)).collect(),
        },
        drain: drain::Config {
            termination_drain: Sources::span(proxy.termination_drain_duration.as_ref()).unwrap_or_default(),
            exit_on_zero: on_zero,
            jitter: s.duration(var::TERMINATION_DRAIN_JITTER),
            drained_limit: Some(s.duration(var::DRAINED_ENVOY_LIMIT)).filter(|d| !d.is_zero()),
            requests: s.flag(var::DRAIN_COUNT_REQUESTS),
        },
        restart: restart::Config {
            hot_restart: s.flag(var::ENVOY_HOT_RESTART),
            recovery: s.flag(var::ENVOY_RECOVERY),
            parent_shutdown: s.duration(var::ENVOY_PARENT_SHUTDOWN_DURATION),
            watched: watched.map(|p| config.path(p)).collect(),
            inputs: inputs(config),
        },
        always_zero: s.flag(var::ENVOY_EXIT_ALWAYS_ZERO),
    })
}

impl Sources {
    fn bootstrap_options(&self, node: Node) -> bootstrap::Options {
        let s = &self.settings;
        let proxy = &self.mesh.proxy;
        let mut out = envoy_options::options(proxy, node);
        out.envoy_status_port = s.int(var::ENVOY_STATUS_PORT);
        out.envoy_prometheus_port = s.int(var::ENVOY_PROMETHEUS_PORT);
        [out.secure_metrics_port, out.secure_merged_metrics_port] =
            ports::SECURE_PORTS.map(|key| secure_port(s, key));
        out.status_proxy_protocol = s.flag(var::ENVOY_STATUS_PORT_ENABLE_PROXY_PROTOCOL);
        out.dual_stack = s.flag(var::ISTIO_DUAL_STACK);
        out.delta_xds = s.flag(var::ISTIO_DELTA_XDS);
        out.metadata_discovery =
            s.env().get("PEER_METADATA_DISCOVERY").map(|v| crate::config::go::boolean(v).unwrap_or(false));
        out.log_as_json =
            crate::config::go::boolean(self.flags.get("log_as_json").unwrap_or("false")) == Some(true);
        out.fips = s.text(var::COMPLIANCE_POLICY) == "fips-140-2";
        s.text(var::COMPLIANCE_POLICY).clone_into(&mut out.policy);
        out.strip_fragment = s.flag(var::HTTP_STRIP_FRAGMENT_FROM_PATH_UNSAFE_IF_DISABLED);
        out.exit_on_zero_connections = s.flag(var::EXIT_ON_ZERO_ACTIVE_CONNECTIONS);
        out.drain_counts_requests = s.flag(var::DRAIN_COUNT_REQUESTS);
        s.text(var::WORKLOAD_IDENTITY_SOCKET_FILE).clone_into(&mut out.workload_socket_file);
        self.flags.or_default(args::PROXY, "outlierLogPath").clone_into(&mut out.outlier_log_path);
        s.text(var::HOST_IP).clone_into(&mut out.host_ip);
        s.text(var::XDS_ROOT_CA).clone_into(&mut out.xds_root_cert);
        out.sts_port = self.sts_port();
        out
    }
}

/// What node and bootstrap are made from.
#[derive(Debug, Clone)]
pub(crate) struct Bootstrap(Arc<Sources>);

impl Bootstrap {
    /// From everything that was read: metadata and templates may name any variable.
    #[must_use]
    pub(crate) fn new(sources: &Arc<Sources>) -> Self {
        Self(sources.clone())
    }

    /// Who this Envoy is. `external_sds`: somebody else owns the workload's socket; `credential_socket`: a third
    /// party serves credentials. The platform is asked.
    ///
    /// # Errors
    /// When a metadata field has a wrong type.
    pub(crate) async fn node(&self, external_sds: bool, credential_socket: bool) -> Result<Node, Error> {
        let known = platform::Known::of(&self.0.settings);
        let platform = platform::detect(&known, &self.0.addresses).await;
        self.node_on(&platform, external_sds, credential_socket)
    }

    /// Whether there would be a node: what [`Self::node`] refuses, without asking the platform.
    ///
    /// # Errors
    /// When a metadata field has a wrong type.
    pub(crate) fn has_node(&self) -> Result<(), Error> {
        self.node_on(&node::Platform::default(), false, false).map(drop)
    }

    fn node_on(
        &self,
        platform: &node::Platform,
        external_sds: bool,
        credential_socket: bool,
    ) -> Result<Node, Error> {
        let config = &*self.0;
        let s = &config.settings;
        let proxy = &config.mesh.proxy;
        let labels = pod::read(&config.path(pod::LABELS));
        let annotations = pod::read(&config.path(pod::ANNOTATIONS));
        let cluster_name = envoy_options::cluster_name(proxy);
        let proxy_config = config.mesh.to_json();
        let pilot_san = envoy_options::istiod_san(proxy);
        let discovery = s.env().get("PEER_METADATA_DISCOVERY");
        let inputs = node::Inputs {
            env: s.env().map(),
            json: &s.env().json(),
            kind: &config.node_type,
            addresses: &config.addresses,
            domain: &config.domain,
            id: config.id.as_deref(),
            proxy_config: &proxy_config,
            proxy_metadata: &proxy.proxy_metadata,
            cluster_name: &cluster_name,
            pilot_san: pilot_san.as_deref(),
            labels: labels.as_ref(),
            annotations: annotations.as_ref(),
            platform,
            credential_socket,
            external_sds,
            sts_port: config.sts_port(),
            outlier_log_path: config.flags.or_default(args::PROXY, "outlierLogPath"),
            envoy_status_port: s.int(var::ENVOY_STATUS_PORT),
            envoy_prometheus_port: s.int(var::ENVOY_PROMETHEUS_PORT),
            secure_ports: ports::SECURE_PORTS.map(|key| s.int(key)),
            dns_address: s.env().get("DNS_PROXY_ADDR").unwrap_or_default(),
            release: config.release,
            exit_on_zero_connections: s.flag(var::EXIT_ON_ZERO_ACTIVE_CONNECTIONS),
            metadata_discovery: discovery.map(|v| crate::config::go::boolean(v).unwrap_or(false)),
            skip_deprecated_logs: s.flag(var::ENVOY_SKIP_DEPRECATED_LOGS),
            workload_socket_file: s.text(var::WORKLOAD_IDENTITY_SOCKET_FILE),
        };
        let mut node = node::build(&inputs)
            .map_err(|e| Error::new(format!("failed to generate bootstrap metadata: {e}")))?;
        // Of releases up to 1.4, below what labels and the platform say.
        if let Some(zone) = config.flags.get("availabilityZone")
            && node.locality == Locality::default()
        {
            zone.clone_into(&mut node.locality.zone);
        }
        Ok(node)
    }

    /// For whom configuration is: this node with this account in this mesh, and this very Envoy.
    pub(crate) fn owner(&self, node: &Node) -> impl Future<Output = String> + Send + use<> {
        let config = &*self.0;
        let s = &config.settings;
        let binary = config.mesh.proxy.binary_path.clone();
        let owner = [
            &node.id,
            &node.cluster,
            s.text(var::POD_NAMESPACE),
            s.text(var::SERVICE_ACCOUNT),
            s.text(var::TRUST_DOMAIN),
            &config.mesh.proxy.discovery_address,
            &binary,
        ]
        .join("\n");
        // Asking Envoy for its version takes a process; its file is another one after an upgrade.
        async move {
            let envoy = launch::beside(move || std::fs::metadata(binary)).await.map_or_else(
                |_| "unknown".to_owned(),
                |meta| format!("{} {}.{}", meta.len(), meta.mtime(), meta.mtime_nsec()),
            );
            format!("{owner}\n{envoy}")
        }
    }

    /// Writes the bootstrap of proxyless applications, if one is wanted.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write_grpc(&self, node: &Node) -> Result<(), Error> {
        let config = &*self.0;
        let Some(path) = config.settings.some_text(var::GRPC_XDS_BOOTSTRAP) else { return Ok(()) };
        let document =
            grpc::generate(node, &config.mesh.proxy.config_path, config.settings.text(var::OUTPUT_CERTS));
        let text = serde_json::to_vec_pretty(&document).unwrap_or_default();
        place::put(&config.path(path), &text, Mode::Exact(0o644)).map_err(|e| {
            let kind = Kind::of_chain(&e).unwrap_or(Kind::GrpcBootstrapMissing);
            Error::new(crate::base::error::chain(&e)).after("failed to write the gRPC bootstrap").of(kind)
        })
    }

    /// The token that Lightstep wants in a file, if that tracer is chosen, and the file.
    #[must_use]
    pub(crate) fn lightstep_token(&self) -> Option<(PathBuf, &str)> {
        let token = envoy_options::lightstep_token(&self.0.mesh.proxy)?;
        Some((self.0.config_path().join(bootstrap::TOKEN_FILE), token))
    }

    /// What `ISTIO_BOOTSTRAP_OVERRIDE` puts over the bootstrap now. `None`: what was read before stays, since there is no
    /// such file, or what is no file has given it away.
    pub(crate) fn over(&self) -> Option<Result<Option<String>, Error>> {
        let path = override_file(&self.0)?;
        let is_spent = std::fs::metadata(path).is_ok_and(|meta| !meta.is_file());
        (!is_spent).then(|| override_json(&self.0))
    }

    /// The text of Envoy's bootstrap.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn render(&self, node: Node) -> Result<Vec<u8>, envoy_options::Error> {
        let config = &*self.0;
        let options = config.bootstrap_options(node);
        envoy_options::render(&options, template(config).as_deref(), config.settings.env().map())
    }
}

#[cfg(test)]
mod recorded;

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{milliseconds, process};
    use crate::config::{args, env::Env, read};

    #[test]
    fn what_the_bootstrap_is_made_from_is_watched() {
        let root = tempfile::tempdir().unwrap();
        let inputs = |env: &[(&str, &str)]| {
            let flags = args::parse(&[], args::PROXY, true).unwrap();
            let config = read(flags, &Env::of(env), root.path(), |_| None).unwrap();
            let inputs = process(&config, false).unwrap().restart.inputs;
            inputs.iter().map(|path| path.strip_prefix(root.path()).unwrap().to_owned()).collect::<Vec<_>>()
        };
        let template = ("ISTIO_BOOTSTRAP", "t.json");
        let over = ("ISTIO_BOOTSTRAP_OVERRIDE", "o.yaml");
        let own = ("PROXY_CONFIG", "customConfigFile: c.json");
        assert!(inputs(&[]).is_empty());
        assert_eq!(inputs(&[template, over]), ["t.json", "o.yaml"].map(Path::new));
        assert_eq!(inputs(&[template, over, own]), ["c.json", "o.yaml"].map(Path::new));
    }

    #[test]
    fn an_odd_flush_interval_is_the_go_agents() {
        let of = |seconds, nanos| milliseconds(&pbjson_types::Duration { seconds, nanos });
        for (seconds, nanos, said) in [
            (0, 250_000_000, 250),
            (1, 999_999, 1000),
            (-5, 0, -5000),
            (0, -500_000_000, -500),
            (-1, -1_999_999, -1001),
            (315_576_000_000, 0, 9_223_372_036_854),
            (-315_576_000_000, 0, -9_223_372_036_854),
        ] {
            assert_eq!(of(seconds, nanos), said, "{seconds} s {nanos} ns");
        }
    }
}
