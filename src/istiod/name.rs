//! Addresses and names: host and port of an endpoint, and the name its certificate must carry.

pub(super) use crate::net::proxy::split;

/// The default name of istiod, for agents that reach it as some form of `localhost`.
const ISTIOD: &str = "istiod.istio-system.svc";

/// The TLS server name: `over` if set, of which a port does not count; else the host, where any `localhost` stands for
/// istiod.
#[must_use]
pub(super) fn server_name(address: &str, over: Option<&str>) -> String {
    if let Some(name) = over.filter(|n| !n.is_empty()) {
        return split(name).map_or(name, |(host, _)| host).to_owned();
    }
    let host = split(address).map_or(address, |(host, _)| host);
    if host.contains("localhost") { ISTIOD.to_owned() } else { host.to_owned() }
}

/// The server name as `:authority`, which wants brackets around an IPv6 address.
#[must_use]
pub(super) fn authority(name: &str) -> String {
    if name.contains(':') { format!("[{name}]") } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_name_follows_the_rules_in_order() {
        for (address, over, name) in [
            ("istiod.istio-system.svc:15012", None, "istiod.istio-system.svc"),
            ("localhost:15012", None, ISTIOD),
            ("my.localhost.lan:15012", None, ISTIOD),
            ("10.0.0.1:15012", None, "10.0.0.1"),
            ("[fd00::1]:15012", None, "fd00::1"),
            ("10.0.0.1:15012", Some("istiod.x.svc"), "istiod.x.svc"),
            ("localhost:15012", Some("istiod.x.svc"), "istiod.x.svc"),
            ("localhost:15012", Some(""), ISTIOD),
            ("localhost:15012", Some("istiod.x.svc:15012"), "istiod.x.svc"),
            ("localhost:15012", Some("[fd00::1]:15012"), "fd00::1"),
            ("localhost:15012", Some("fd00::1"), "fd00::1"),
            ("istiod-without-port", None, "istiod-without-port"),
        ] {
            assert_eq!(server_name(address, over), name, "{address}");
        }
        assert_eq!(authority("fd00::1"), "[fd00::1]");
    }
}
