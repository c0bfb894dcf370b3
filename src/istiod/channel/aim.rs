//! Where a dial goes: istiod, or the proxy on the way, and their addresses.

use std::net::{IpAddr, SocketAddr};

use rand::seq::SliceRandom;

use crate::base::lane;
use crate::istiod::{Config, Error, Phase, name};
use crate::net::proxy::Proxy;
use crate::trouble::Kind;

/// What to do where the proxy itself cannot be reached.
pub(super) const PROXY_DOWN: &str = "; does the HTTP proxy that HTTPS_PROXY names run there? Set NO_PROXY for istiod if it is reached directly";

/// Where a dial goes, by the settings.
pub(super) struct Aim<'a> {
    pub(super) address: &'a str,
    host: &'a str,
    port: &'a str,
    pub(super) proxy: Option<Proxy>,
    shuffle: bool,
}

impl<'a> Aim<'a> {
    /// # Errors
    /// When the settings name no such place.
    pub(super) fn new(config: &'a Config) -> Result<Self, Error> {
        let address = config.address.as_str();
        let (host, port) = name::split(address).ok_or_else(|| {
            invalid(address, "it has no port".to_owned(), "; write host:port, and brackets around IPv6")
        })?;
        let proxy = Proxy::for_target(config.proxy.as_ref(), host, port).map_err(|e| {
            invalid(address, e.to_string(), "; set NO_PROXY for istiod if it is reached directly")
        })?;
        Ok(Self { address, host, port, proxy, shuffle: config.shuffle })
    }

    /// What went wrong there, at `peer`.
    pub(super) fn error(
        &self,
        peer: Option<SocketAddr>,
        phase: Phase,
        reason: String,
        hint: impl Into<String>,
    ) -> Error {
        let address = match (peer, &self.proxy) {
            (Some(peer), Some(_)) => format!("{} (proxy {peer})", self.address),
            (Some(peer), None) if self.host.parse::<IpAddr>().is_err() => {
                format!("{} ({peer})", self.address)
            }
            _ => self.address.to_owned(),
        };
        let kind = match phase {
            Phase::Address => Kind::AddressInvalid,
            Phase::Resolve => Kind::NameNotResolved,
            Phase::Connect => Kind::ConnectionFailed,
            Phase::Proxy => Kind::ProxyRefused,
            Phase::Tls => Kind::TlsFailed,
            Phase::ClientCertificate => Kind::CertificateFiles,
        };
        Error::Dial { address, phase, kind, reason, hint: hint.into() }
    }

    /// What comes first: a connection to istiod, or to the proxy on the way.
    pub(super) fn first(&self) -> Phase {
        if self.proxy.is_some() { Phase::Proxy } else { Phase::Connect }
    }

    /// Why there is no address; `kind` where that is not the resolver's fault.
    fn unresolved(&self, reason: String, kind: Option<Kind>) -> Error {
        let (address, phase) = (self.address.to_owned(), Phase::Resolve);
        match kind {
            Some(kind) => Error::Dial { address, phase, kind, reason, hint: String::new() },
            None if self.proxy.is_some() => self.error(None, Phase::Proxy, reason, PROXY_DOWN),
            None => self.error(
                None,
                phase,
                reason,
                "; does DNS answer on this machine, and is this the name of a running istiod? \
                 (a VM outside the cluster's DNS needs it in /etc/hosts)",
            ),
        }
    }

    /// The addresses to dial, the proxy's where one is used.
    ///
    /// # Errors
    /// The resolver's.
    pub(super) async fn resolve(&self) -> Result<Vec<SocketAddr>, Error> {
        let (host, port) = match &self.proxy {
            Some(proxy) => (proxy.host.as_str(), proxy.port.as_str()),
            None => (self.host, self.port),
        };
        let port: u16 = port.parse().map_err(|_| {
            self.error(None, Phase::Address, format!("{port:?} is no port number"), "; write host:port")
        })?;
        // As in Go, no host means this machine.
        let host = if host.is_empty() { "localhost" } else { host };
        if let Ok(ip) = host.parse() {
            // A literal needs no resolver thread.
            return Ok(vec![SocketAddr::new(ip, port)]);
        }
        let found = lane::NAMES
            .look_up(host, port)
            .await
            .map_err(|e| self.unresolved(format!("{host}: {e}"), Kind::of_io(&e)))?;
        let addresses = interleave(order(found, self.shuffle).into_iter());
        if addresses.is_empty() {
            return Err(self.unresolved(format!("{host} has no address"), None));
        }
        Ok(addresses)
    }
}

/// An address that no dial can go to.
pub(super) fn invalid(address: &str, reason: String, hint: &str) -> Error {
    let (address, hint) = (address.to_owned(), hint.to_owned());
    Error::Dial { address, phase: Phase::Address, kind: Kind::AddressInvalid, reason, hint }
}

/// In the resolver's order, or in one of our own, so that not every agent of a mesh goes to the first.
fn order(mut found: Vec<SocketAddr>, shuffle: bool) -> Vec<SocketAddr> {
    if shuffle {
        found.shuffle(&mut rand::rng());
    }
    found
}

/// Families in turn, beginning with the resolver's first choice, duplicates dropped.
fn interleave(found: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut all = Vec::new();
    for address in found {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    let Some(first_v4) = all.first().map(SocketAddr::is_ipv4) else { return all };
    let (first, second): (Vec<_>, Vec<_>) = all.into_iter().partition(|a| a.is_ipv4() == first_v4);
    let (mut first, mut second) = (first.into_iter(), second.into_iter());
    let mut out = Vec::new();
    loop {
        match (first.next(), second.next()) {
            (None, None) => return out,
            (a, b) => out.extend(a.into_iter().chain(b)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns() {
        let parse = |all: &[&str]| all.iter().map(|a| a.parse().unwrap()).collect::<Vec<SocketAddr>>();
        let found = parse(&["[::1]:1", "[::2]:1", "1.1.1.1:1", "[::1]:1", "1.1.1.2:1", "1.1.1.3:1"]);
        let turns = parse(&["[::1]:1", "1.1.1.1:1", "[::2]:1", "1.1.1.2:1", "1.1.1.3:1"]);
        assert_eq!(interleave(found.into_iter()), turns);
    }

    #[test]
    fn a_random_order_has_the_same_addresses() {
        let all: Vec<SocketAddr> = (1..=40).map(|n| SocketAddr::from(([10, 0, 0, n], 15012))).collect();
        assert_eq!(order(all.clone(), false), all);
        let mut mixed = order(all.clone(), true);
        assert_ne!(mixed, all, "once in 10^47 it is");
        mixed.sort_unstable();
        assert_eq!(mixed, all);
    }
}
