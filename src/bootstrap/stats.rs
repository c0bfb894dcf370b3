//! What Envoy counts, how its stats become tags, where it sends them.

use std::collections::BTreeMap;

use serde_json::{Map, Number, Value, json};

use super::{Error, HostPort, Node, Options, duration, typed};

/// Envoy's own default, in nanoseconds.
const DEFAULT_FLUSH: i64 = 5_000_000_000;

/// What Envoy takes as flush interval, in nanoseconds; anything else keeps it from starting.
const FLUSH: std::ops::Range<i64> = 1_000_000..300_000_000_000;

const TAGS_BEFORE: [(&str, &str); 9] = [
    ("cluster_name", r"^cluster(\.(.+);)"),
    ("http_conn_manager_prefix", r"^http\.(((?:[_.[:digit:]\w]*|[_\[\]aAbBcCdDeEfF[:digit:]\w\:]*));\.)"),
    ("thread_name", r"^server(\.(.+))\.watchdog"),
    ("tcp_prefix", r"^tcp\.((.*?)\.)\w+?$"),
    ("response_code", r"_rq(_(\d{3}))$"),
    ("response_code_class", r"_rq(_(\dxx))$"),
    (
        "http_conn_manager_listener_prefix",
        r"^listener(?=\.).*?\.http\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)",
    ),
    ("listener_address", r"^listener\.(((?:[_.[:digit:]]*|[_\[\]aAbBcCdDeEfF[:digit:]]*))\.)"),
    ("mongo_prefix", r"^mongo\.(.+?)\.(collection|cmd|cx_|op_|delays_|decoding_)(.*?)$"),
];

const TAGS_AFTER: [(&str, &str); 7] = [
    ("cache", r"(cache\.(.+?)\.)"),
    ("component", r"(component\.(.+?)\.)"),
    ("tag", r"(tag\.(.+?);\.)"),
    ("wasm_filter", r"(wasm_filter\.(.+?)\.)"),
    ("authz_enforce_result", r"rbac(\.(allowed|denied))"),
    ("authz_dry_run_action", r"(\.istio_dry_run_(allow|deny)_)"),
    ("authz_dry_run_result", r"(\.shadow_(allowed|denied))"),
];

/// How often stats are sent and unused ones dropped, in protobuf's JSON form.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Intervals {
    pub(crate) flush: Option<String>,
    pub(crate) eviction: Option<String>,
}

impl Intervals {
    /// From the annotations; a bad one is warned about and left out.
    pub(crate) fn of(node: &Node) -> Self {
        let read = |key: &str| {
            let text = node.annotation(key)?;
            let parsed = duration::parse(text);
            parsed.inspect_err(|why| tracing::warn!("annotation {key} is ignored: {why}")).ok()
        };
        let key = "sidecar.istio.io/statsFlushInterval";
        let flush = read(key).filter(|flush| {
            let fits = FLUSH.contains(flush);
            if !fits {
                let flush = duration::seconds(*flush);
                tracing::warn!(
                    "annotation {key} is ignored: Envoy takes 1ms up to less than 5m, not {flush}"
                );
            }
            fits
        });
        let key = "sidecar.istio.io/statsEvictionInterval";
        let eviction = read(key).filter(|eviction| {
            let flush = flush.unwrap_or(DEFAULT_FLUSH);
            let multiple = *eviction > 0 && eviction % flush == 0;
            if !multiple {
                let (eviction, flush) = (duration::seconds(*eviction), duration::seconds(flush));
                tracing::warn!("annotation {key} is ignored: {eviction} is no whole multiple of the flush interval {flush}");
            }
            multiple
        });
        Self { flush: flush.map(duration::seconds), eviction: eviction.map(|e| whole(e, flush)) }
    }
}

// The Go agent cuts fractions of a second; that stays where the result is still what Envoy accepts.
fn whole(eviction: i64, flush: Option<i64>) -> String {
    let cut = eviction - eviction % 1_000_000_000;
    let usable = cut > 0 && cut % flush.unwrap_or(DEFAULT_FLUSH) == 0;
    duration::seconds(if usable { cut } else { eviction })
}

/// The section `stats_config`.
pub(crate) fn config(options: &Options) -> Value {
    let mut members = Map::new();
    members.insert("use_all_default_tags".into(), json!(false));
    members.insert("stats_tags".into(), tags(options));
    if let Some(buckets) = histogram_buckets(&options.node) {
        members.insert("histogram_bucket_settings".into(), buckets);
    }
    members.insert("stats_matcher".into(), json!({"inclusion_list": {"patterns": patterns(options)}}));
    Value::Object(members)
}

/// The names of extra tags: the proxy config's, then the annotation's; no empty one, none twice.
pub(crate) fn extra_tags(options: &Options) -> Vec<String> {
    let annotation = options.node.annotation("sidecar.istio.io/extraStatTags").unwrap_or_default();
    let mut names: Vec<String> = Vec::new();
    for name in options.extra_stat_tags.iter().map(String::as_str).chain(annotation.split(',')) {
        if !name.is_empty() && !names.iter().any(|n| n == name) {
            names.push(name.to_owned());
        }
    }
    names
}

fn tags(options: &Options) -> Value {
    let tag = |name: &str, regex: &str| json!({"tag_name": name, "regex": regex});
    let mut list: Vec<Value> = TAGS_BEFORE.iter().map(|(n, r)| tag(n, r)).collect();
    list.extend(extra_tags(options).iter().map(|name| tag(name, &format!(r"({name}=\.=(.*?);\.;)"))));
    list.extend(TAGS_AFTER.iter().map(|(n, r)| tag(n, r)));
    Value::Array(list)
}

/// The entries of one kind: the annotation's if there is one, else the proxy config's; `{pod_ip}` becomes
/// one entry per address of the node.
pub(crate) fn inclusion(options: &Options, annotation: &str, config: &[String]) -> Vec<String> {
    let given: Vec<String> = match options.node.annotation(annotation) {
        Some(text) => text.split(',').map(str::to_owned).collect(),
        None => config.to_vec(),
    };
    let mut entries = Vec::new();
    for entry in given {
        if entry.contains("{pod_ip}") {
            entries.extend(options.node.addresses.iter().map(|ip| entry.replace("{pod_ip}", ip)));
        } else {
            entries.push(entry);
        }
    }
    entries
}

pub(crate) const PREFIXES: &str = "sidecar.istio.io/statsInclusionPrefixes";
pub(crate) const SUFFIXES: &str = "sidecar.istio.io/statsInclusionSuffixes";
pub(crate) const REGEXPS: &str = "sidecar.istio.io/statsInclusionRegexps";
/// Prefixes that are kept whatever the operator says.
pub(crate) const NEEDED_PREFIXES: [&str; 5] =
    ["cluster_manager", "listener_manager", "server", "cluster.xds-grpc", "wasm"];
/// Suffixes that are kept whatever the operator says.
pub(crate) const NEEDED_SUFFIXES: [&str; 4] =
    ["rbac.allowed", "rbac.denied", "shadow_allowed", "shadow_denied"];
/// Of Envoy's stats, what tells that a drained Envoy has nothing left to do, and what it has left.
const ACTIVE: [&str; 2] = ["downstream_cx_active", "downstream_rq_active"];
/// Stats of routes that istiod names.
pub(crate) const ROUTE_REGEX: &str = r"vhost\..*\.route\..*";

/// What a drain counts.
pub(crate) fn counted(options: &Options) -> &'static [&'static str] {
    match (options.exit_on_zero_connections, options.drain_counts_requests) {
        (false, _) => &[],
        (true, false) => &ACTIVE[..1],
        (true, true) => &ACTIVE,
    }
}

fn patterns(options: &Options) -> Vec<Value> {
    let prefix = |p: &str| json!({"prefix": p});
    let suffix = |s: &str| json!({"suffix": s});
    let regex = |r: &str| json!({"safe_regex": {"regex": r}});
    let of = |annotation, config: &[String]| {
        // Envoy refuses an empty pattern, and with it the whole bootstrap.
        inclusion(options, annotation, config).into_iter().filter(|e| !e.is_empty())
    };
    let matcher = &options.stats_matcher;
    let mut list = vec![prefix("reporter=")];
    if options.discovery() {
        list.push(prefix("workload_discovery"));
    }
    list.extend(of(PREFIXES, &matcher.prefixes).map(|p| prefix(&p)));
    list.extend(NEEDED_PREFIXES.map(prefix));
    list.extend(of(SUFFIXES, &matcher.suffixes).map(|s| suffix(&s)));
    list.extend(NEEDED_SUFFIXES.map(suffix));
    list.extend(counted(options).iter().map(|s| suffix(s)));
    list.extend(of(REGEXPS, &matcher.regexps).map(|r| regex(&r)));
    list.push(regex(ROUTE_REGEX));
    list.extend([prefix("component"), prefix("istio")]);
    list
}

/// Buckets by prefix of the stat, from the annotation; none if it is absent, bad or empty.
pub(crate) fn histogram_buckets(node: &Node) -> Option<Value> {
    let key = "sidecar.istio.io/statsHistogramBuckets";
    let text = node.annotation(key)?;
    let parsed: BTreeMap<String, Option<Vec<f64>>> = serde_json::from_str(text)
        .inspect_err(|why| {
            tracing::warn!("annotation {key} is ignored: not a JSON object of lists of numbers: {why}");
        })
        .ok()?;
    for (prefix, buckets) in &parsed {
        let mut sorted: Vec<f64> = buckets.iter().flatten().copied().collect();
        sorted.sort_by(f64::total_cmp);
        if sorted.first().is_some_and(|n| *n <= 0.0) || sorted.windows(2).any(|w| w[0] == w[1]) {
            tracing::warn!(
                "annotation {key} is ignored: buckets of {prefix:?} must be above 0 and all different"
            );
            return None;
        }
    }
    let number = |n: &f64| {
        let integral = n.fract() == 0.0 && n.abs() < 1e15;
        #[expect(clippy::cast_possible_truncation, reason = "whole and below 10^15")]
        let value = if integral { Some(Number::from(*n as i64)) } else { Number::from_f64(*n) };
        value.map_or(Value::Null, Value::Number)
    };
    let list: Vec<Value> = parsed
        .iter()
        .map(|(prefix, buckets)| {
            let buckets: Vec<Value> = buckets.iter().flatten().map(number).collect();
            json!({"match": {"prefix": prefix}, "buckets": buckets})
        })
        .collect();
    if list.is_empty() { None } else { Some(Value::Array(list)) }
}

/// The section `stats_sinks`; the access log service is no sink.
pub(crate) fn sinks(options: &Options) -> Result<Vec<Value>, Error> {
    let mut list = Vec::new();
    if options.metrics_service.as_ref().is_some_and(|s| !s.address.is_empty()) {
        list.push(typed(
            "envoy.stat_sinks.metrics_service",
            "envoy.config.metrics.v3.MetricsServiceConfig",
            json!({
                "transport_api_version": "V3",
                "grpc_service": {"envoy_grpc": {"cluster_name": super::clusters::METRICS.sni}},
            }),
        ));
    }
    if !options.statsd_address.is_empty() {
        let address = HostPort::parse("statsd", &options.statsd_address, &options.host_ip)?;
        list.push(typed(
            "envoy.stat_sinks.statsd",
            "envoy.config.metrics.v3.StatsdSink",
            json!({"address": {"socket_address": address.json()}}),
        ));
    }
    Ok(list)
}
