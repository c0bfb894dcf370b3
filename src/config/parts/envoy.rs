//! Envoy's process: arguments, user, admin port, drain, restart.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Config, Error};
use crate::config::args;
use crate::config::bootstrap as from_config;
use crate::config::env::{Key, Settings, kinds, var};
use crate::config::node::Platform;
use crate::config::release;
use crate::envoy::bootstrap::{self, Node};
use crate::envoy::command::{self, IpVersion, LogLevels, Options};
use crate::envoy::drain::{self, ExitOnZero};
use crate::envoy::{self, ConfigFile, admin, restart};

/// User and group of Envoy when the agent is root and serves DNS on port 53.
const ENVOY_USER: (u32, u32) = (1337, 1337);

/// A port of [`release::SECURE_PORTS`]; a negative one is only told to istiod, as in the Go agent.
fn secure_port(settings: &Settings, key: Key<kinds::Int>) -> Option<u16> {
    u16::try_from(settings.int(key)).ok().filter(|port| *port > 0)
}

/// The template's path by precedence, if any is named.
#[must_use]
pub fn template(config: &Config) -> Option<PathBuf> {
    let named = config
        .settings
        .some_text(var::ISTIO_BOOTSTRAP)
        .or_else(|| config.flags.get("templateFile").filter(|t| !t.is_empty()))
        .or_else(|| Some(config.mesh.proxy.proxy_bootstrap_template_path.as_str()).filter(|t| !t.is_empty()));
    named.map(|path| config.path(path)).or_else(|| config.found_template.clone())
}

fn file(config: &Config) -> ConfigFile {
    let custom = &config.mesh.proxy.custom_config_file;
    if !custom.is_empty() {
        return ConfigFile::Custom(config.path(custom));
    }
    let yaml = template(config).is_some_and(|t| {
        let name = t.to_string_lossy();
        name.ends_with(".yaml") || name.ends_with(".yaml.tmpl")
    });
    // Joined like a string: the path stands in Envoy's arguments as people know it.
    let name = if yaml { "envoy-rev.yaml" } else { "envoy-rev.json" };
    ConfigFile::Generated(config.config_path().join(name))
}

fn override_json(config: &Config) -> Option<String> {
    let path = config.settings.some_text(var::ISTIO_BOOTSTRAP_OVERRIDE)?;
    let text = match std::fs::read_to_string(config.path(path)) {
        Ok(text) => text,
        Err(e) => {
            tracing::warn!("Failed to read bootstrap override: {path}: {e}; Envoy starts without it");
            return None;
        }
    };
    let text = command::override_text(&text, config.settings.text(var::HOST_IP));
    match crate::config::yaml::to_json(&text) {
        Ok(value) => command::override_value(&value),
        Err(e) => {
            tracing::warn!("Failed to read bootstrap override: {path}: {e}; Envoy starts without it");
            None
        }
    }
}

/// Everything about the process; `launcher` is this binary, `root` whether the agent runs as root.
///
/// # Errors
/// Durations that Envoy cannot be told.
pub fn process(
    config: &Config,
    addresses: &[String],
    launcher: &Path,
    root: bool,
) -> Result<envoy::Config, Error> {
    let s = &config.settings;
    let proxy = &config.mesh.proxy;
    let drain = Config::span(proxy.drain_duration.as_ref()).unwrap_or(Duration::from_secs(45));
    if drain.subsec_nanos() != 0 {
        return Err(Error::new(format!(
            "drain time only supports durations to seconds precision: drainDuration is {drain:?}"
        )));
    }
    let (log, warnings) = LogLevels::parse(
        config.flags.or_default(args::PROXY, "proxyLogLevel"),
        config.flags.or_default(args::PROXY, "proxyComponentLogLevel"),
    );
    warnings.iter().for_each(|w| tracing::warn!("{w}"));
    let port = |key, default: u16| u16::try_from(s.int(key)).unwrap_or(default);
    let arguments = Options {
        drain_seconds: i64::try_from(drain.as_secs()).unwrap_or(i64::MAX),
        ip_version: IpVersion::of(addresses),
        file_flush_interval: Config::span(proxy.file_flush_interval.as_ref()),
        file_flush_min_size_kb: proxy.file_flush_min_size_kb,
        log,
        skip_deprecated_logs: s.flag(var::ENVOY_SKIP_DEPRECATED_LOGS),
        core_dump: s.flag(var::ISTIO_ENVOY_ENABLE_CORE_DUMP),
        override_json: override_json(config),
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
        launcher: launcher.to_owned(),
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
            secure_ports: release::SECURE_PORTS.into_iter().filter_map(|key| secure_port(s, key)).collect(),
        },
        drain: drain::Config {
            termination_drain: Config::span(proxy.termination_drain_duration.as_ref()).unwrap_or_default(),
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
        },
        always_zero: s.flag(var::ENVOY_EXIT_ALWAYS_ZERO),
    })
}

impl Config {
    /// What the bootstrap is made from.
    #[must_use]
    pub fn bootstrap_options(&self, node: Node) -> bootstrap::Options {
        let s = &self.settings;
        let proxy = &self.mesh.proxy;
        let mut out = from_config::options(proxy, node);
        out.envoy_status_port = s.int(var::ENVOY_STATUS_PORT);
        out.envoy_prometheus_port = s.int(var::ENVOY_PROMETHEUS_PORT);
        [out.secure_metrics_port, out.secure_merged_metrics_port] =
            release::SECURE_PORTS.map(|key| secure_port(s, key));
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
        s.text(var::WORKLOAD_IDENTITY_SOCKET_FILE).clone_into(&mut out.workload_socket_file);
        self.flags.or_default(args::PROXY, "outlierLogPath").clone_into(&mut out.outlier_log_path);
        s.text(var::HOST_IP).clone_into(&mut out.host_ip);
        s.text(var::XDS_ROOT_CA).clone_into(&mut out.xds_root_cert);
        out.sts_port = self.sts_port();
        out
    }

    /// What the platform says.
    pub async fn platform(&self) -> Platform {
        crate::config::platform::detect(&self.settings, &self.addresses).await
    }
}
