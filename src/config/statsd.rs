//! The statsd address as Envoy needs it: an IP address and a port.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::validate::split_host_port;
use crate::base::lane::{NoAnswer, look_up_here};

/// How long a look-up may take before the start goes on without statsd; the Go agent's number.
const LIMIT: Duration = Duration::from_secs(15);

/// Why there is no such address.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("address {address}: {why}")]
    Address { address: String, why: &'static str },
    #[error("{0:?} is no port")]
    Port(String),
    #[error("{host} was not resolved: no thread: {source}")]
    Thread { host: String, source: std::io::Error },
    #[error("{host} was not resolved within {} s", limit.as_secs())]
    Late { host: String, limit: Duration },
    #[error("{host} was not looked up")]
    Unasked { host: String },
    #[error("lookup {host}: {source}")]
    LookUp { host: String, source: std::io::Error },
    #[error("{0} has no address")]
    Empty(String),
}

/// `address` with its host resolved; a literal only gets its usual form. IPv4 goes first, as in the Go agent: Envoy's
/// statsd sink takes one address. A look-up takes no longer than `patience`; without any there is none.
///
/// # Errors
/// The agent then runs without statsd.
pub(super) fn resolve(address: &str, patience: Duration) -> Result<String, Error> {
    let unsplit = |why| Error::Address { address: address.to_owned(), why };
    let (host, port) = split_host_port(address).map_err(unsplit)?;
    let digits = port.bytes().all(|b| b.is_ascii_digit());
    let port: u16 = port.parse().ok().filter(|_| digits).ok_or_else(|| Error::Port(port.to_owned()))?;
    // A zone is left out, as in the Go agent.
    let bare = host.split_once('%').filter(|(address, zone)| address.contains(':') && !zone.is_empty());
    if let Ok(ip) = bare.map_or(host, |(address, _)| address).parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip.to_canonical(), port).to_string());
    }
    let limit = patience.min(LIMIT);
    if limit.is_zero() {
        return Err(Error::Unasked { host: host.to_owned() });
    }
    let all = look_up_here(host, port, limit).map_err(|why| {
        let host = host.to_owned();
        match why {
            NoAnswer::Thread(source) => Error::Thread { host, source },
            NoAnswer::Late => Error::Late { host, limit },
            NoAnswer::LookUp(source) => Error::LookUp { host, source },
        }
    })?;
    choose(&all).map(|a| a.to_string()).ok_or_else(|| Error::Empty(host.to_owned()))
}

fn choose(all: &[SocketAddr]) -> Option<SocketAddr> {
    let mut all = all.iter().map(|a| SocketAddr::new(a.ip().to_canonical(), a.port()));
    all.clone().find(SocketAddr::is_ipv4).or_else(|| all.next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ipv4_wins_else_the_last_ipv6() {
        let of = |all: &[&str]| {
            let all: Vec<SocketAddr> = all.iter().map(|a| a.parse().unwrap()).collect();
            choose(&all).map(|a| a.to_string())
        };
        assert_eq!(of(&["[::1]:1", "1.1.1.1:1", "2.2.2.2:1"]).unwrap(), "1.1.1.1:1");
        assert_eq!(of(&["[::1]:1", "[::2]:1"]).unwrap(), "[::2]:1");
        assert_eq!(of(&["[::ffff:1.1.1.1]:1", "[::2]:1"]).unwrap(), "1.1.1.1:1");
        assert_eq!(of(&[]), None);
    }

    #[test]
    fn literals_get_their_usual_form_and_what_is_no_address_is_named() {
        let resolve = |address| resolve(address, Duration::ZERO);
        assert_eq!(resolve("10.0.0.1:9125").unwrap(), "10.0.0.1:9125");
        assert_eq!(resolve("[fd00::1]:9125").unwrap(), "[fd00::1]:9125");
        assert_eq!(resolve("[FD00:0::1]:09125").unwrap(), "[fd00::1]:9125");
        assert_eq!(resolve("[::ffff:10.0.0.1]:9125").unwrap(), "10.0.0.1:9125");
        assert_eq!(resolve("[fe80::1%eth0]:9125").unwrap(), "[fe80::1]:9125");
        for bad in ["10.0.0.1:+9125", "stats.test", "stats.test:http", "stats.test:70000", "::1:9"] {
            assert!(resolve(bad).is_err(), "{bad}");
        }
        assert!(matches!(resolve("localhost:9125"), Err(Error::Unasked { .. })));
    }
}
