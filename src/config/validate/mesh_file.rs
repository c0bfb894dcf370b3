//! What the Go agent checks in the rest of a mesh file. Neither agent uses any of it, but a file that istiod would refuse
//! ends the start.

mod traffic;

use serde_json::Value;

use super::{Fault, Object, Problems, are_labels, in_range, is_label};

/// One millisecond, which is as fine as spans may be, in nanoseconds.
const MILLISECOND: i128 = 1_000_000;
/// The longest `connectTimeout`, in nanoseconds.
const HOUR: i128 = 3_600_000 * MILLISECOND;
/// Labels that order places, which `failover` does as well.
const PLACES: [&str; 3] =
    ["topology.kubernetes.io/region", "topology.kubernetes.io/zone", "topology.istio.io/subzone"];

/// Everything wrong with it.
#[must_use]
pub fn mesh(document: &Object) -> Vec<Fault> {
    let mut p = Problems::default();
    if let Some(port) = document.get("proxyListenPort").and_then(Value::as_i64) {
        p.check("proxyListenPort", "invalid proxy listen port", in_range(port));
    }
    let (at, coarse) = ("connectTimeout", "only durations to ms precision are supported");
    match document.get(at).and_then(nanos) {
        Some(span) if !(MILLISECOND..=HOUR).contains(&span) => {
            p.add(at, "invalid connect timeout: it must be within 1ms..1h");
        }
        Some(span) if span % MILLISECOND != 0 => p.add(at, format!("invalid connect timeout: {coarse}")),
        _ => {}
    }
    let at = "protocolDetectionTimeout";
    if document.get(at).and_then(nanos).is_some_and(|span| span % MILLISECOND != 0) {
        p.add(at, format!("invalid protocol detection timeout: {coarse}"));
    }
    let curves = document.get("meshMTLS").and_then(|tls| tls.get("ecdhCurves"));
    if all(curves).next().is_some() {
        p.add("meshMTLS.ecdhCurves", "mesh mTLS does not support ECDH curves; set them in tlsDefaults");
    }
    let aliases = all(document.get("trustDomainAliases"));
    for domain in document.get("trustDomain").into_iter().chain(aliases).filter_map(Value::as_str) {
        if !is_trust_domain(domain) {
            p.add("trustDomain", format!("invalid trust domain {domain:?}: it must consist of DNS labels"));
        }
    }
    for (n, settings) in all(document.get("serviceSettings")).enumerate() {
        for host in all(settings.get("hosts")).filter_map(Value::as_str).filter(|host| !is_host(host)) {
            p.add(&format!("serviceSettings[{n}].hosts"), format!("invalid host {host:?}"));
        }
    }
    if let Some(setting) = document.get("localityLbSetting") {
        locality(&mut p, setting);
    }
    if let Some(setting) = document.get("zoneAwareLbSetting") {
        traffic::zones(&mut p, setting);
    }
    if let Some(policy) = document.get("defaultTrafficPolicy") {
        traffic::policy(&mut p, policy);
    }
    p.0
}

fn all(list: Option<&Value>) -> impl Iterator<Item = &Value> {
    list.and_then(Value::as_array).into_iter().flatten()
}

fn text<'a>(of: &'a Value, key: &str) -> &'a str {
    of.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn nanos(value: &Value) -> Option<i128> {
    crate::config::go::duration(value.as_str()?).ok().map(|span| span.nanos().into())
}

// An empty last label is allowed.
fn is_trust_domain(domain: &str) -> bool {
    !domain.is_empty() && domain.strip_suffix('.').unwrap_or(domain).split('.').all(is_label)
}

// A name whose first label may be, or begin with, a star.
fn is_host(host: &str) -> bool {
    let (first, rest) = host.split_once('.').map_or((host, None), |(first, rest)| (first, Some(rest)));
    let bare = first.strip_prefix("*-").or(first.strip_prefix('*')).unwrap_or(first);
    let begins = first == "*" || first.len() <= 63 && is_label(bare);
    host.len() <= 255 && begins && rest.is_none_or(are_labels)
}

// Weights of one place must sum to 100; only one way of distributing may be given.
fn locality(p: &mut Problems, setting: &Value) {
    let at = "localityLbSetting";
    let rules = |key: &str| all(setting.get(key)).collect::<Vec<_>>();
    let (distribute, failover) = (rules("distribute"), rules("failover"));
    if !distribute.is_empty() && !failover.is_empty() {
        return p.add(at, "can not simultaneously specify 'distribute' and 'failover'");
    }
    let mut order = all(setting.get("failoverPriority")).filter_map(Value::as_str);
    if let Some(label) = order.find(|label| !failover.is_empty() && PLACES.contains(label)) {
        let reason = format!(
            "can not simultaneously set 'failover' and topology label '{label}' in 'failover_priority'"
        );
        return p.add(at, reason);
    }
    for rule in &distribute {
        let to = rule.get("to").and_then(Value::as_object).into_iter().flatten();
        let weights: Vec<(&str, i64)> =
            to.map(|(place, w)| (place.as_str(), w.as_i64().unwrap_or(0))).collect();
        if weights.iter().any(|(_, weight)| !(1..=100).contains(weight)) {
            return p.add(at, "locality weight must be in range [1, 100]");
        }
        let total: i64 = weights.iter().map(|(_, weight)| weight).sum();
        if total != 100 {
            return p.add(at, format!("total locality weight {total} != 100"));
        }
        places(p, at, weights.iter().map(|(place, _)| *place));
    }
    places(p, at, distribute.iter().map(|rule| text(rule, "from")));
    regions(p, at, "locality lb", &failover);
}

fn regions(p: &mut Problems, at: &str, what: &str, failover: &[&Value]) {
    for rule in failover {
        let (from, to) = (text(rule, "from"), text(rule, "to"));
        if from == to {
            p.add(at, format!("{what} failover settings must specify different regions: {from:?}"));
        }
        if from.contains('/') || to.contains('/') {
            p.add(at, format!("{what} failover only specify region"));
        }
        if from.contains('*') || to.contains('*') {
            p.add(at, format!("{what} failover region should not contain '*' wildcard"));
        }
    }
}

// Places `region/zone/subzone`, the last of which may end with a star; none may be part of one before it. The Go agent
// does not notice a star behind what it covers.
fn places<'a>(p: &mut Problems, at: &str, list: impl Iterator<Item = &'a str>) {
    let mut before: Vec<Vec<&str>> = Vec::new();
    for place in list {
        let stars = place.matches('*').count();
        if stars > 1 || stars == 1 && !place.ends_with('*') {
            return p.add(
                at,
                format!("locality {place} wildcard '*' number can not exceed 1 and must be in the end"),
            );
        }
        let mut parts: Vec<&str> = place.splitn(3, '/').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return p.add(at, format!("locality {place} must not contain empty region/zone/subzone info"));
        }
        let star = parts.pop_if(|last| *last == "*").is_some();
        let overlap = |other: &Vec<&str>| parts.starts_with(other) || !star && other.starts_with(&parts);
        if before.iter().any(overlap) {
            return p.add(at, format!("locality {place} overlap with previous specified ones"));
        }
        before.push(parts);
    }
}
