//! What of the settings would end `vm run` with its rules half-way to be made, found without running anything.
//!
//! `istio-iptables` passes ports, users and groups on as they are, since iptables takes ranges and names, too, and is the
//! judge; its answer is a line number of a document nobody has seen. Here each value is named with its variable.

use super::{FLAGS, variables};
use crate::config::args::Parsed;
use crate::config::env::{Env, var};
use crate::iptables::error::Setting;
use crate::iptables::options::{Cidr, split};
use crate::iptables::settings::{Host, Settings, resolve};

const PORTS: &str =
    "a port is a number up to 65535, a range a:b or a name of /etc/services; commas separate several";
const USERS: &str = "a user is a number or a name of /etc/passwd; commas separate several";
const GROUPS: &str = "a group is a number or a name of /etc/group; commas separate several";
const NUMBER: &str = "it is a number";

/// Every value that no rule can be made of, one line each: variable, value, reason.
#[must_use]
pub(crate) fn faults(settings: &Settings, parsed: &Parsed, env: &Env, host: &Host) -> Vec<String> {
    let s = settings;
    // Under the name somebody has written: a flag's or that of the variable that counts.
    let source = |flag: &str| match parsed.get(flag) {
        Some(_) => format!("--{flag}"),
        None => {
            let all = variables(flag);
            let set = all.iter().find(|name| env.get(name).is_some()).or(all.last());
            set.map_or_else(|| format!("--{flag}"), Clone::clone)
        }
    };
    let names = &host.names;
    let native = s.native_nftables;
    let port = |text: &str| is_port(text, native) || names.services.contains_key(text);
    let user = |text: &str| is_id(text) || names.users.contains_key(text);
    let group = |text: &str| is_id(text) || names.groups.contains_key(text);
    let number = |text: &str| text.parse::<u32>().is_ok();
    let mut out = Vec::new();
    let mut each = |name: String, text: &str, good: &dyn Fn(&str) -> bool, why: &str| {
        let bad = split(text).into_iter().find(|one| !good(one.trim()));
        out.extend(bad.map(|bad| format!("{name}={text}: {bad:?} cannot be used: {why}")));
    };
    for (flag, text) in [
        ("inbound-capture-port", &s.inbound_capture_port),
        ("inbound-tunnel-port", &s.inbound_tunnel_port),
        ("istio-inbound-ports", &s.inbound_ports),
        ("istio-local-exclude-ports", &s.local_exclude_ports),
        ("istio-outbound-ports", &s.outbound_ports),
        ("istio-local-outbound-ports-exclude", &s.outbound_ports_exclude),
    ] {
        let all = flag == "istio-inbound-ports" && text == "*";
        each(source(flag), if all { "" } else { text }, &port, PORTS);
    }
    each(source("proxy-uid"), &s.proxy_uid, &user, USERS);
    each(source("proxy-gid"), &s.proxy_gid, &group, GROUPS);
    let include = if s.owner_groups == "*" { "" } else { &s.owner_groups };
    each(var::ISTIO_OUTBOUND_OWNER_GROUPS.name().to_owned(), include, &group, GROUPS);
    let exclude = var::ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE.name().to_owned();
    each(exclude, &s.owner_groups_exclude, &group, GROUPS);
    if s.interception_mode == "TPROXY" {
        each(source("istio-inbound-tproxy-mark"), &s.tproxy_mark, &number, NUMBER);
        each(source("istio-inbound-tproxy-route-table"), &s.tproxy_route_table, &number, NUMBER);
    }
    for (flag, text) in
        [("istio-service-cidr", &s.service_cidr), ("istio-service-exclude-cidr", &s.service_exclude_cidr)]
    {
        let list = if text == "*" { Vec::new() } else { split(text) };
        let wrong = list.iter().find_map(|one| Cidr::parse(one).err());
        out.extend(wrong.map(|e| {
            let all = if flag == "istio-service-cidr" { ", or * for all" } else { "" };
            format!("{}={text}: {e}: ranges are address/length, separated by commas{all}", source(flag))
        }));
    }
    if let Err(error) = resolve(settings, host) {
        let told = match &error {
            Setting::Cidr(_) if !out.is_empty() => None,
            Setting::Word { name, .. } if out.iter().any(|line| line.starts_with(&source(name))) => None,
            Setting::Word { name, .. } if FLAGS.iter().any(|flag| flag.name == *name) => {
                Some(format!("{}: {error}", source(name)))
            }
            _ => Some(error.to_string()),
        };
        out.extend(told);
    }
    out
}

// A range counts with an open end, too; between the two nft wants a hyphen.
fn is_port(text: &str, native: bool) -> bool {
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u16>().ok().filter(|_| digits)
    };
    if number(text).is_some() {
        return true;
    }
    let Some((low, high)) = text.split_once(if native { '-' } else { ':' }) else { return false };
    match (number(low), number(high)) {
        (Some(low), Some(high)) => low <= high,
        (Some(_), None) => !native && high.is_empty(),
        (None, Some(_)) => !native && low.is_empty(),
        (None, None) => false,
    }
}

// The largest number means "nobody" to the kernel.
fn is_id(text: &str) -> bool {
    let number = |text: &str| text.parse::<u32>().is_ok_and(|id| id != u32::MAX);
    number(text) || text.split_once('-').is_some_and(|(low, high)| number(low) && number(high))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::config::args;
    use crate::iptables::verify::Names;

    fn told(pairs: &[(&str, &str)]) -> Vec<String> {
        let env = Env::from_os(pairs.iter().map(|(k, v)| (OsString::from(k), OsString::from(v))));
        let parsed = args::parse(&[], FLAGS, false).unwrap();
        let one = |name: &str, number: &str| [(name.to_owned(), number.to_owned())].into_iter().collect();
        let names = Names {
            users: one("istio-proxy", "998"),
            groups: one("istio", "997"),
            services: one("ssh", "22"),
        };
        let host = Host {
            addresses: vec!["10.0.0.1".parse().unwrap()],
            resolv_conf: Ok("nameserver 10.0.0.2\n".to_owned()),
            names,
        };
        faults(&super::super::settings(&parsed, &env), &parsed, &env, &host)
    }

    #[test]
    fn what_istioctl_and_people_write_is_good() {
        for pairs in [
            &[("ISTIO_INBOUND_PORTS", "*"), ("ISTIO_SERVICE_CIDR", "*")][..],
            &[("ISTIO_INBOUND_PORTS", "8080, 9000:9100,ssh,0,65535,")],
            &[("ISTIO_LOCAL_EXCLUDE_PORTS", "22,15090,15021,15020"), ("PROXY_UID", "1337,istio-proxy,5-9")],
            &[("PROXY_GID", "istio"), ("FORCE_IPTABLES_BINARY", "nft"), ("ISTIO_META_DNS_CAPTURE", "true")],
            &[("ISTIO_SERVICE_CIDR", "10.0.0.0/8,fd00::/8"), ("ISTIO_OUTBOUND_OWNER_GROUPS", "istio,7")],
            &[("ISTIO_INBOUND_PORTS", "80-90"), ("NATIVE_NFTABLES", "true")],
        ] {
            assert_eq!(told(pairs), Vec::<String>::new(), "{pairs:?}");
        }
    }

    #[test]
    fn each_wrong_value_is_named_with_its_variable() {
        for (name, value, part) in [
            ("ISTIO_INBOUND_PORTS", "99999,abc", "\"99999\" cannot be used: a port"),
            ("ISTIO_LOCAL_EXCLUDE_PORTS", "22;80", "\"22;80\" cannot be used"),
            ("ISTIO_OUTBOUND_PORTS", "9:8", "\"9:8\""),
            ("INBOUND_CAPTURE_PORT", "+15006", "\"+15006\""),
            ("PROXY_UID", "abc", "\"abc\" cannot be used: a user"),
            ("PROXY_GID", "4294967295", "a group"),
            ("ISTIO_OUTBOUND_OWNER_GROUPS", "none-such", "a group"),
            ("ISTIO_SERVICE_CIDR", "foo", "no '/'"),
            ("ISTIO_SERVICE_EXCLUDE_CIDR", "10.0.0.0/33", "out of range"),
        ] {
            let lines = told(&[(name, value)]);
            let begin = format!("{name}={value}: ");
            assert!(
                lines.len() == 1 && lines[0].starts_with(&begin) && lines[0].contains(part),
                "{name}: {lines:?}"
            );
        }
        let lines = told(&[("FORCE_IPTABLES_BINARY", "bogus"), ("PROXY_UID", "abc")]);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[1].contains("FORCE_IPTABLES_BINARY value \"bogus\""), "{lines:?}");
        let lines =
            told(&[("ISTIO_INBOUND_INTERCEPTION_MODE", "TPROXY"), ("ISTIO_INBOUND_TPROXY_MARK", "x")]);
        assert_eq!(lines, ["ISTIO_INBOUND_TPROXY_MARK=x: \"x\" cannot be used: it is a number"]);
    }
}
