//! The node's addresses: `INSTANCE_IP` first, then those of the interfaces.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::base::netlink::{Interface, Netlink};

/// An unspecified address means that the network is still being set up: look again, but not for ever.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const LIMIT: Duration = Duration::from_secs(120);

/// No address is IPv4, and there is one.
#[must_use]
pub(crate) fn all_ipv6(addresses: &[String]) -> bool {
    // A zone (`fe80::9%eth0`) is no part of the address.
    let known = addresses.iter().filter_map(|a| a.split('%').next()?.parse::<IpAddr>().ok());
    let mut known = known.peekable();
    known.peek().is_some() && known.all(|a| a.is_ipv6())
}

/// Addresses by the Go agent's rules; never empty. A network that is still being set up is waited for no longer than
/// `patience`.
#[must_use]
pub(crate) fn of_host(instance_ip: &str, excluded: &str, patience: Duration) -> (Vec<String>, Vec<String>) {
    let (begun, limit) = (Instant::now(), patience.min(LIMIT));
    loop {
        let interfaces = match Netlink::open().and_then(|n| n.interfaces()) {
            Ok(interfaces) => interfaces,
            Err(e) => {
                let warning = format!("the addresses of the network interfaces cannot be read: {e}");
                return (choose(instance_ip, excluded, &[]).0, vec![warning]);
            }
        };
        if !interfaces.iter().flat_map(|i| &i.addresses).any(IpAddr::is_unspecified) {
            return choose(instance_ip, excluded, &interfaces);
        }
        if begun.elapsed() >= limit {
            return choose(instance_ip, excluded, &[]);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// The list and warnings about names of interfaces that are not there. Pure.
#[must_use]
pub(crate) fn choose(
    instance_ip: &str,
    excluded: &str,
    interfaces: &[Interface],
) -> (Vec<String>, Vec<String>) {
    let mut warnings = Vec::new();
    let instance = canonical(instance_ip);
    let usable =
        |i: &Interface| i.addresses.iter().map(IpAddr::to_canonical).filter(useful).collect::<Vec<_>>();
    let mut private: Vec<IpAddr> =
        interfaces.iter().filter(|i| i.up && !i.loopback).flat_map(&usable).collect();
    if private.is_empty() {
        private = vec![IpAddr::from([127, 0, 0, 1]), IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1u16])];
    }
    for name in excluded.split(',').filter(|n| !n.is_empty()) {
        match interfaces.iter().find(|i| i.name == name) {
            Some(interface) => {
                let gone = usable(interface);
                private.retain(|a| !gone.contains(a));
            }
            None => warnings.push(format!("excluded interface {name:?} does not exist and is passed over")),
        }
    }
    let mut all: Vec<String> = private.iter().map(IpAddr::to_string).collect();
    if let Some(instance) = instance {
        all.retain(|a| *a != instance);
        all.insert(0, instance);
    } else if !instance_ip.is_empty() {
        warnings.push(format!("INSTANCE_IP={instance_ip} is no IP address and is passed over"));
    }
    (all, warnings)
}

// Go's text form; an IPv6 address keeps its zone.
fn canonical(text: &str) -> Option<String> {
    match text.split_once('%') {
        None => text.parse::<IpAddr>().ok().map(|a| a.to_string()),
        Some((_, "")) => None,
        Some((address, zone)) => {
            let address: std::net::Ipv6Addr = address.parse().ok()?;
            address.to_ipv4_mapped().is_none().then(|| format!("{address}%{zone}"))
        }
    }
}

fn useful(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => {
            !(a.is_loopback() || a.is_link_local() || a.octets()[..3] == [224, 0, 0] || a.is_unspecified())
        }
        IpAddr::V6(a) => {
            let link_local_multicast = a.octets()[0] == 0xff && a.octets()[1] & 0x0f == 2;
            !(a.is_loopback() || a.is_unicast_link_local() || link_local_multicast || a.is_unspecified())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, addresses: &[&str]) -> Interface {
        Interface {
            index: 2,
            name: name.to_owned(),
            up: true,
            loopback: name == "lo",
            addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        }
    }

    #[test]
    fn the_instance_comes_first_and_excluded_ones_go() {
        let all = [
            interface("lo", &["127.0.0.1"]),
            interface("eth0", &["10.0.0.5", "fe80::1", "fd00::5"]),
            interface("net1", &["10.9.0.1"]),
        ];
        assert_eq!(choose("10.0.0.5", "", &all).0, ["10.0.0.5", "fd00::5", "10.9.0.1"]);
        let (list, warnings) = choose("", "net1,nope", &all);
        assert_eq!(list, ["10.0.0.5", "fd00::5"]);
        assert_eq!(warnings.len(), 1);
        assert_eq!(choose("192.0.2.1", "", &all[..1]).0, ["192.0.2.1", "127.0.0.1", "::1"]);
        assert_eq!(choose("fe80::9%eth0", "", &all[1..2]).0, ["fe80::9%eth0", "10.0.0.5", "fd00::5"]);
        assert_eq!(choose("::ffff:10.0.0.5", "", &all[1..2]).0[0], "::ffff:10.0.0.5");
        let six = |list: &[&str]| all_ipv6(&list.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(six(&["fe80::9%eth0"]) && six(&["fd00::5", "no"]));
        assert!(!six(&["fe80::9%eth0", "10.0.0.5"]) && !six(&[]) && !six(&["no"]));
        let (list, warnings) = choose("10.9.0.300", "", &all[1..2]);
        assert_eq!((list.len(), warnings.len()), (2, 1));
    }
}
