//! What 1.31 checks in the mesh's own traffic settings.

use serde_json::Value;

use super::{MILLISECOND, PLACES, Problems, all, nanos, regions};

/// `zoneAwareLbSetting`: places within a region are Envoy's affair.
pub(super) fn zones(p: &mut Problems, setting: &Value) {
    let at = "zoneAwareLbSetting";
    for label in all(setting.get("failoverPriority")).filter_map(Value::as_str).filter(|l| PLACES.contains(l))
    {
        p.add(at, format!("'failover_priority' for zone aware lb must not use topology label '{label}'"));
    }
    regions(p, at, "zone aware lb", &all(setting.get("failover")).collect::<Vec<_>>());
}

/// `defaultTrafficPolicy`: as the policies of a DestinationRule.
pub(super) fn policy(p: &mut Problems, policy: &Value) {
    let inside = |key: &str| policy.get(key).map(|value| (format!("defaultTrafficPolicy.{key}"), value));
    if let Some((at, pool)) = inside("connectionPool") {
        let (http, tcp) = (pool.get("http"), pool.get("tcp"));
        if http.is_none() && tcp.is_none() {
            p.add(&at, "connection pool must have at least one field");
        }
        http.into_iter().for_each(|http| http_pool(p, &format!("{at}.http"), http));
        tcp.into_iter().for_each(|tcp| tcp_pool(p, &format!("{at}.tcp"), tcp));
    }
    if let Some((at, outliers)) = inside("outlierDetection") {
        outlier(p, &at, outliers);
    }
}

fn http_pool(p: &mut Problems, at: &str, http: &Value) {
    for key in [
        "http1MaxPendingRequests",
        "http2MaxRequests",
        "maxRequestsPerConnection",
        "maxRetries",
        "maxConcurrentStreams",
    ] {
        not_negative(p, at, http, key);
    }
    span(p, at, http, "idleTimeout");
    let upgrades = http.get("h2UpgradePolicy").is_some_and(|policy| policy == "UPGRADE");
    if upgrades && http.get("useClientProtocol").is_some_and(|on| on == true) {
        p.add(at, "use client protocol must not be true when H2UpgradePolicy is UPGRADE");
    }
}

fn tcp_pool(p: &mut Problems, at: &str, tcp: &Value) {
    not_negative(p, at, tcp, "maxConnections");
    span(p, at, tcp, "connectTimeout");
    span(p, at, tcp, "maxConnectionDuration");
    // Zero means none here.
    if tcp.get("idleTimeout").and_then(nanos).is_some_and(|span| span / MILLISECOND != 0) {
        span(p, at, tcp, "idleTimeout");
    }
    if let Some(keepalive) = tcp.get("tcpKeepalive") {
        let at = format!("{at}.tcpKeepalive");
        span(p, &at, keepalive, "time");
        span(p, &at, keepalive, "interval");
    }
}

fn outlier(p: &mut Problems, at: &str, outlier: &Value) {
    span(p, at, outlier, "baseEjectionTime");
    span(p, at, outlier, "interval");
    let split = outlier.get("splitExternalLocalOriginErrors").is_some_and(|on| on == true);
    if !split && number(outlier, "consecutiveLocalOriginFailures") > 0 {
        p.add(
            at,
            "outlier detection consecutive local origin failures is specified, but split external local origin \
             errors is set to false",
        );
    }
    for key in ["maxEjectionPercent", "minHealthPercent"] {
        let percent = number(outlier, key);
        if !(0..=100).contains(&percent) {
            p.add(&format!("{at}.{key}"), format!("percentage {percent} is not in range 0..100"));
        }
    }
}

fn number(of: &Value, key: &str) -> i64 {
    of.get(key).and_then(Value::as_i64).unwrap_or(0)
}

fn not_negative(p: &mut Problems, at: &str, of: &Value, key: &str) {
    if number(of, key) < 0 {
        p.add(&format!("{at}.{key}"), "must be non-negative");
    }
}

fn span(p: &mut Problems, at: &str, of: &Value, key: &str) {
    match of.get(key).and_then(nanos) {
        Some(span) if span < MILLISECOND => {
            p.add(&format!("{at}.{key}"), "duration must be greater than 1ms");
        }
        Some(span) if span % MILLISECOND != 0 => {
            p.add(&format!("{at}.{key}"), "only durations to ms precision are supported");
        }
        _ => {}
    }
}
