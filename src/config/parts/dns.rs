//! The local DNS server.

use std::path::Path;
use std::time::Duration;

use super::{Error, Sources};
use crate::config::env::{Settings, var};
use crate::dns::{self, Scope};

const RESOLV_CONF: &str = "/etc/resolv.conf";
/// Where the original resolvers stand when `/etc/resolv.conf` names the agent itself.
const OTHER_RESOLV_CONF: &str = "/var/lib/istio/resolv.conf";
/// Of `DNS_SERVE_STALE`: an address that is older leads to somebody else too often.
const LONGEST_STALE: Duration = Duration::from_secs(30);
const DEFAULT_ADDRESS: &str = "localhost:15053";
/// Where `DNS_FORWARD_TIMEOUT` is 0: what the Go agent's library takes then.
const WITHOUT_LIMIT: Duration = Duration::from_secs(2);

/// Whether there is a server at all.
#[must_use]
pub(crate) fn enabled(config: &Sources) -> bool {
    let s = &config.settings;
    s.flag(var::ISTIO_META_ENABLE_DNS_SERVER)
        || (s.flag(var::ISTIO_META_DNS_CAPTURE) && config.node_type == "sidecar")
}

/// The server, if there is one.
///
/// # Errors
/// When its address is none, or none of this machine's.
pub(crate) fn checked(config: &Sources, root: bool) -> Result<Option<Dns>, Error> {
    let server = server(config, root);
    match server.as_ref().map(|dns| dns::check(&dns.server.address)) {
        Some(Err(why)) => Err(Error::new(crate::base::error::chain(&why))),
        _ => Ok(server),
    }
}

/// The DNS server.
#[derive(Debug, Clone)]
pub(crate) struct Dns {
    /// What it serves, and whom it asks.
    pub server: dns::Config,
    /// From where names are seen.
    pub scope: Scope,
}

/// Where the server is to listen, if there is one.
#[must_use]
pub(crate) fn address(config: &Sources, root: bool) -> Option<&str> {
    let asked = config.settings.some_text(var::DNS_PROXY_ADDR).unwrap_or(DEFAULT_ADDRESS);
    let refused = asked.ends_with(":53") && !root;
    enabled(config).then_some(if refused { DEFAULT_ADDRESS } else { asked })
}

/// The server, if there is one. On port 53 it is everybody's resolver, which takes root.
#[must_use]
fn server(config: &Sources, root: bool) -> Option<Dns> {
    let address = address(config, root)?.to_owned();
    let s = &config.settings;
    let asked = s.some_text(var::DNS_PROXY_ADDR).unwrap_or(DEFAULT_ADDRESS);
    let privileged = asked.ends_with(":53");
    if privileged && !root {
        tracing::error!(
            target: "dns",
            "DNS_PROXY_ADDR is {asked:?}, but port 53 needs root: using {DEFAULT_ADDRESS}"
        );
    }
    let before_sync = privileged && root;
    let other = before_sync && Path::new(OTHER_RESOLV_CONF).exists();
    let server = dns::Config {
        address,
        resolv_conf: if other { OTHER_RESOLV_CONF } else { RESOLV_CONF }.into(),
        before_sync,
        parallel: s.flag(var::DNS_FORWARD_PARALLEL),
        timeout: limit(s),
        adaptive: s.flag(var::DNS_FORWARD_ADAPTIVE),
        cache: dns::Cache {
            fresh: s.duration(var::DNS_CACHE_MAX_TTL),
            stale: s.duration(var::DNS_SERVE_STALE).min(LONGEST_STALE),
        },
    };
    Some(Dns { server, scope: Scope::new(s.text(var::POD_NAMESPACE), &config.domain) })
}

// A negative one leaves no time, as in the Go agent.
fn limit(s: &Settings) -> Duration {
    let given = s.signed(var::DNS_FORWARD_TIMEOUT);
    let none = !given.negative && given.span.is_zero();
    if none { WITHOUT_LIMIT } else { s.duration(var::DNS_FORWARD_TIMEOUT) }
}
