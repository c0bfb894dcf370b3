//! Nameservers that are this server itself: to ask them is to be asked, once more for each socket there is.
//!
//! On a machine whose programs ask the agent at port 53, `resolv.conf` names the agent, and its own nameservers stand in
//! another file. Where that one is missing, each query would go round until nothing is left to ask with.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::resolv;

/// Where this server listens, and whether a nameserver was that.
#[derive(Debug, Default)]
pub(super) struct Itself {
    places: Vec<SocketAddr>,
    found: AtomicBool,
}

impl Itself {
    /// Listening there; nameservers are asked at `port`.
    pub(super) fn at(places: impl IntoIterator<Item = SocketAddr>, port: u16) -> Self {
        let places = places.into_iter().filter(|place| place.port() == port).collect();
        Self { places, found: AtomicBool::default() }
    }

    /// Those of these nameservers that are somebody else.
    pub(super) fn without(&self, servers: Vec<String>) -> Vec<String> {
        let (own, others): (Vec<_>, Vec<_>) = servers.into_iter().partition(|server| self.is(server));
        self.found.store(!own.is_empty(), Relaxed);
        if !own.is_empty() {
            tracing::warn!(target: "dns",
                "resolv.conf names this DNS server itself ({}), which is not asked: the machine's own nameservers belong \
                into /var/lib/istio/resolv.conf", own.join(", "));
        }
        others
    }

    /// Whether one of the last nameservers was this server.
    pub(super) fn found(&self) -> bool {
        self.found.load(Relaxed)
    }

    fn is(&self, server: &str) -> bool {
        if self.places.is_empty() {
            return false;
        }
        // Whoever asks nobody in particular asks this machine.
        let asked = match resolv::ip(server) {
            Some(IpAddr::V4(ip)) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            Some(IpAddr::V6(ip)) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            Some(ip) => ip.to_canonical(),
            None => return false,
        };
        self.places.iter().any(|place| match place.ip() {
            // Of both families, as its socket is.
            IpAddr::V6(ip) if ip.is_unspecified() => is_here(asked),
            IpAddr::V4(ip) if ip.is_unspecified() => asked.is_ipv4() && is_here(asked),
            ip => ip.to_canonical() == asked,
        })
    }
}

// Only an address of this machine can be bound.
fn is_here(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leads_back_is_left_out() {
        let servers = ["127.0.0.1", "127.0.0.53", "0.0.0.0", "::ffff:127.0.0.1", "::1", "192.0.2.1", "dns"];
        for (places, left) in [
            (&["127.0.0.1:53"][..], &["127.0.0.53", "::1", "192.0.2.1", "dns"][..]),
            (&["127.0.0.1:53", "[::1]:53"], &["127.0.0.53", "192.0.2.1", "dns"]),
            (&["0.0.0.0:53"], &["::1", "192.0.2.1", "dns"]),
            (&["[::]:53"], &["192.0.2.1", "dns"]),
            (&["127.0.0.1:15053"], &servers),
        ] {
            let itself = Itself::at(places.iter().map(|place| place.parse().unwrap()), 53);
            assert_eq!(itself.without(servers.map(str::to_owned).to_vec()), left, "{places:?}");
            assert_eq!(itself.found(), left.len() < servers.len());
        }
    }
}
