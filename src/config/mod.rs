//! The only reader of flags, variables and files.
//!
//! [`load`] takes the words after `proxy`, the environment as an argument and a root that relative paths
//! hang off, and gives one typed [`Config`], or everything that is wrong at once; nothing is bound before.
//! It is two steps: [`Sources`] are read and merged, and [`parts`] makes of them what each part of the agent
//! is told. A variable is read by its key, here and nowhere else. Variables stand in one table
//! ([`env::VARS`]), flags in another ([`args::PROXY`]); docs/CONFIG.md is generated from both.

pub(crate) mod addresses;
pub(crate) mod args;
pub(crate) mod env;
pub(crate) mod envoy_options;
pub(crate) mod go;
pub(crate) mod jsonpb;
pub(crate) mod late;
mod layers;
pub(crate) mod mesh;
pub(crate) mod node;
mod older;
pub(crate) mod parts;
pub(crate) mod platform;
pub(crate) mod pod;
mod ports;
pub(crate) mod release;
pub(crate) mod report;
mod sources;
mod statsd;
mod stock;
pub(crate) mod unknown;
pub(crate) mod validate;
pub(crate) mod yaml;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::CryptoProvider;

use crate::base::notify::Notify;
use crate::tls::provider;
use crate::{health, status, wasm, xds};
use args::Parsed;
use env::{Env, var};
use parts::Error;

#[cfg(test)]
pub(crate) use sources::read;
pub(crate) use sources::{Sources, gather, read_within};

/// What the agent runs with: a value for each part, of the part's own type.
pub(crate) struct Config {
    /// Sidecar, router, waypoint, ztunnel or agentgateway.
    pub node_type: String,
    /// No address of the node is IPv4, and there is one.
    pub all_ipv6: bool,
    /// `NO_CORE_DUMPS`.
    pub no_core_dumps: bool,
    /// `GOMEMLIMIT`, in bytes.
    pub memory: Option<u64>,
    /// What TLS is made of.
    pub crypto: Arc<CryptoProvider>,
    /// Certificates: where they come from, the key, the secret manager, the SDS sockets.
    pub identity: parts::identity::Identity,
    /// Who signs. A fault counts only where this agent has certificates signed, and no other server owns the
    /// workload's socket; where that shows before the start, [`load`] tells of it.
    pub ca: Result<Option<parts::ca::Signer>, Error>,
    /// The way to istiod.
    pub istiod: parts::istiod::Upstream,
    /// The relay.
    pub xds: xds::Config,
    /// Whether istiod's trust bundle is taken over xDS.
    pub trust_bundle: bool,
    /// Envoy, its process and its bootstrap.
    pub envoy: parts::envoy::Envoy,
    /// The status server; none with port 0.
    pub status: Option<status::Config>,
    /// The DNS server, where there is one.
    pub dns: Option<parts::dns::Dns>,
    /// Checks of the application. What is invalid is told when they would start; the agent goes on without.
    pub health: Result<Option<health::Config>, health::Refused>,
    /// Wasm modules; none: extension configs pass as they are.
    pub wasm: Option<wasm::Config>,
    /// The token service, where it has a port.
    pub sts: Option<parts::sts::Service>,
    /// Secrets of gateways, and the socket they are served on.
    pub gateway: Option<(crate::gateway::Config, PathBuf)>,
    /// The socket on which callers bring their tokens.
    pub callers: Option<PathBuf>,
    /// How the agent may be replaced while it runs; none: not at all.
    pub upgrade: Option<parts::upgrade::Upgrade>,
    /// The service manager, where one wants to be told.
    pub notify: Option<Notify>,
}

// Values hold credentials of proxies and headers.
impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Config").field("node_type", &self.node_type).finish_non_exhaustive()
    }
}

/// Reads everything, lets `show` see what could be read, and makes it into what the parts are told; or gives
/// everything that is wrong, bad values and missing files, in the order of a start.
pub(crate) fn load(
    flags: Parsed,
    env: &Env,
    root: &Path,
    annotation: impl Fn(&str) -> Option<String>,
    show: impl FnOnce(&Sources),
) -> (Arc<Sources>, Result<Arc<Config>, Vec<Error>>) {
    let (sources, errors) = gather(flags, env, root, annotation, Duration::MAX);
    if errors.is_empty() {
        show(&sources);
    }
    let config = Config::new(&sources, errors);
    (sources, config)
}

impl Config {
    /// What the parts are told; `errors` are those of the sources. On the heap from the start: it is kilobytes, and
    /// each frame that it passed through would keep a copy's place on the stack.
    ///
    /// # Errors
    /// They, and everything that a part refuses.
    pub(crate) fn new(sources: &Arc<Sources>, errors: Vec<String>) -> Result<Arc<Self>, Vec<Error>> {
        let s = &sources.settings;
        let mut wrong = Wrong(errors.into_iter().map(Error::new).collect());
        let all_ipv6 = addresses::all_ipv6(&sources.addresses);
        let root = rustix::process::getuid().is_root();
        let plan = wrong.of(parts::identity::plan(sources));
        let mounted = plan.as_ref().is_some_and(|plan| plan.file_mounted);
        let presence = wrong.of(parts::envoy::presence(sources));
        let status = wrong.of(parts::status::server(sources, all_ipv6));
        let tokens = wrong.of(parts::identity::tokens(sources));
        let ca = parts::ca::signer(sources, mounted);
        let ca = match ca {
            Err(error) if !parts::identity::may_be_external(sources) => wrong.of(Err(error)),
            other => Some(other),
        };
        let istiod = wrong.of(parts::istiod::upstream(sources, mounted));
        let sts = wrong.of(parts::sts::service(sources, all_ipv6));
        let gateway = wrong.of(parts::gateway::secrets(sources));
        let callers = wrong.of(parts::gateway::callers(sources));
        let process = wrong.of(parts::envoy::process(sources, root));
        let dns = wrong.of(parts::dns::checked(sources, root));
        let (Some(plan), Some(presence), Some(status), Some(tokens), Some(ca), Some(istiod), Some(sts)) =
            (plan, presence, status, tokens, ca, istiod, sts)
        else {
            return Err(wrong.0);
        };
        let (Some(gateway), Some(callers), Some(process), Some(dns), []) =
            (gateway, callers, process, dns, wrong.0.as_slice())
        else {
            return Err(wrong.0);
        };
        let xds = parts::xds(sources, &istiod, mounted);
        Ok(Arc::new(Self {
            node_type: sources.node_type.clone(),
            all_ipv6,
            no_core_dumps: s.flag(var::NO_CORE_DUMPS),
            memory: parts::memory::limit(s).0,
            crypto: provider::provider(parts::istiod::compliance(sources)).0,
            identity: parts::identity::identity(sources, &plan, tokens),
            ca,
            istiod,
            xds,
            trust_bundle: s.flag(var::PROXY_CONFIG_XDS_AGENT),
            envoy: parts::envoy::Envoy {
                presence,
                process,
                bootstrap: parts::envoy::Bootstrap::new(sources),
            },
            status,
            dns,
            health: parts::health::checks(sources, all_ipv6),
            wasm: parts::wasm::converter(sources),
            sts,
            gateway,
            callers,
            upgrade: parts::upgrade::upgrade(sources),
            notify: Notify::new(|name| s.env().get(name)),
        }))
    }
}

/// Everything that would end a start on what was read, for commands that only look: what [`Config::new`] refuses, the
/// faults of a CA whose certificates another server's may turn out to replace, and what the node cannot be made of.
pub(crate) fn refusals(sources: &Arc<Sources>) -> Vec<Error> {
    let mut wrong = Wrong(Config::new(sources, Vec::new()).err().unwrap_or_default());
    let mounted = parts::identity::plan(sources).is_ok_and(|plan| plan.file_mounted);
    wrong.of(parts::ca::signer(sources, mounted));
    wrong.of(parts::envoy::Bootstrap::new(sources).has_node());
    wrong.0
}

/// What was refused so far.
struct Wrong(Vec<Error>);

impl Wrong {
    fn of<T>(&mut self, result: Result<T, Error>) -> Option<T> {
        let told = |error: &Error| {
            let same = |e: &Error| e.text == error.text || e.missing.is_some() && e.missing == error.missing;
            self.0.iter().any(same)
        };
        match result {
            Ok(value) => return Some(value),
            Err(error) if told(&error) => {}
            Err(error) => self.0.push(error),
        }
        None
    }
}

#[cfg(test)]
mod tests;
