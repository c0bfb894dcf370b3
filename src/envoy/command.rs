//! Envoy's argument list and what it is made from; pure.
//!
//! The order is the Go agent's (1.30.3), since people compare and parse it. Nothing here reads a file,
//! a variable or a clock.

use std::ffi::OsString;
use std::path::Path;

/// `--local-address-ip-version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IpVersion {
    /// At least one address of the proxy is IPv4.
    V4,
    /// None is, or none is known.
    #[default]
    V6,
}

impl IpVersion {
    /// What the proxy's addresses mean; one that cannot be parsed counts as absent, and an IPv4 address mapped into
    /// IPv6 as IPv6.
    #[must_use]
    pub fn of(addresses: &[impl AsRef<str>]) -> Self {
        let v4 = |a: &str| a.parse::<std::net::Ipv4Addr>().is_ok();
        if addresses.iter().any(|a| v4(a.as_ref())) { Self::V4 } else { Self::V6 }
    }
}

/// What the arguments are made from. Defaults are those of the Go agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// `drainDuration` in seconds.
    pub drain_seconds: i64,
    /// Family of the addresses that Envoy gives itself.
    pub ip_version: IpVersion,
    /// `fileFlushInterval` in milliseconds, negative ones as they are; unset: one second.
    pub file_flush_milliseconds: Option<i64>,
    /// `fileFlushMinSizeKb`; 0: left out.
    pub file_flush_min_size_kb: u32,
    /// Log levels.
    pub log: LogLevels,
    /// `ENVOY_SKIP_DEPRECATED_LOGS`.
    pub skip_deprecated_logs: bool,
    /// `ISTIO_ENVOY_ENABLE_CORE_DUMP`.
    pub core_dump: bool,
    /// Compact JSON from the file of `ISTIO_BOOTSTRAP_OVERRIDE` ([`override_text`], [`override_value`]).
    pub override_json: Option<String>,
    /// Worker threads; 0: one per hardware thread.
    pub concurrency: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            drain_seconds: 45,
            ip_version: IpVersion::V4,
            file_flush_milliseconds: None,
            file_flush_min_size_kb: 0,
            log: LogLevels { base: "warning".to_owned(), components: String::new() },
            skip_deprecated_logs: true,
            core_dump: false,
            override_json: None,
            concurrency: 0,
        }
    }
}

/// One of several Envoys that replace each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Epoch<'a> {
    /// `--restart-epoch`.
    pub number: u32,
    /// What the epochs find each other by; unknown until the first has chosen it.
    pub base_id: Option<u32>,
    /// Where the first epoch writes the base id it chose.
    pub base_id_path: &'a Path,
    /// How long the parent lives on after the new epoch has taken over, in seconds.
    pub parent_shutdown_seconds: u64,
    /// No predecessor runs any more: there is nobody to take over from.
    pub alone: bool,
}

/// Envoy's arguments after its name.
#[must_use]
pub(crate) fn arguments(config: &Path, options: &Options, epoch: Option<&Epoch<'_>>) -> Vec<OsString> {
    let flush = options.file_flush_milliseconds.unwrap_or(1000);
    let mut args: Vec<OsString> = vec!["-c".into(), config.into()];
    let mut two = |name: &str, value: String| args.extend([name.into(), value.into()]);
    two("--drain-time-s", options.drain_seconds.to_string());
    two("--drain-strategy", "immediate".to_owned());
    two(
        "--local-address-ip-version",
        if options.ip_version == IpVersion::V4 { "v4" } else { "v6" }.to_owned(),
    );
    two("--file-flush-interval-msec", flush.to_string());
    match epoch {
        None => args.push("--disable-hot-restart".into()),
        Some(epoch) => args.extend(epoch_arguments(epoch)),
    }
    args.push("--allow-unknown-static-fields".into());
    let mut two = |wanted: bool, name: &str, value: String| {
        if wanted {
            args.extend([name.into(), value.into()]);
        }
    };
    two(
        options.file_flush_min_size_kb > 0,
        "--file-flush-min-size-kb",
        options.file_flush_min_size_kb.to_string(),
    );
    two(!options.log.base.is_empty(), "-l", options.log.base.clone());
    two(!options.log.components.is_empty(), "--component-log-level", options.log.components.clone());
    if options.skip_deprecated_logs {
        args.push("--skip-deprecated-logs".into());
    }
    if options.core_dump {
        args.push("--enable-core-dump".into());
    }
    if let Some(json) = options.override_json.as_ref().filter(|j| !j.is_empty()) {
        args.extend(["--config-yaml".into(), json.into()]);
    }
    if options.concurrency > 0 {
        args.extend(["--concurrency".into(), options.concurrency.to_string().into()]);
    }
    args
}

fn epoch_arguments(epoch: &Epoch<'_>) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["--restart-epoch".into(), epoch.number.to_string().into()];
    args.extend(["--parent-shutdown-time-s".into(), epoch.parent_shutdown_seconds.to_string().into()]);
    match epoch.base_id {
        Some(id) => args.extend(["--base-id".into(), id.to_string().into()]),
        None => {
            args.extend(["--use-dynamic-base-id".into(), "--base-id-path".into(), epoch.base_id_path.into()])
        }
    }
    if epoch.alone {
        args.push("--skip-hot-restart-on-no-parent".into());
    }
    args
}

/// The levels that Envoy knows; `warn` is another word for the third but last.
pub(crate) const LEVELS: [&str; 7] = ["trace", "debug", "info", "warning", "error", "critical", "off"];

/// `-l` and `--component-log-level`; empty: not given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LogLevels {
    /// Level of everything else.
    pub base: String,
    /// `component:level` pairs joined by commas.
    pub components: String,
}

impl LogLevels {
    /// Splits `--proxyLogLevel`, into which component levels may be mixed; these take the place of
    /// `--proxyComponentLogLevel`. Also gives the items that mean nothing, for a warning.
    ///
    /// The last base level wins, even an empty one (`info,` gives none, as in the Go agent).
    #[must_use]
    pub fn parse(levels: &str, components: &str) -> (Self, Vec<String>) {
        let (mut base, mut named, mut wrong) = ("", Vec::new(), Vec::new());
        for item in levels.split(',') {
            match item.matches(':').count() {
                // 0.8 called it so.
                0 => base = if item == "err" { "error" } else { item },
                1 => named.push(item),
                _ => wrong.push(item.to_owned()),
            }
        }
        let components = if named.is_empty() { components.to_owned() } else { named.join(",") };
        (Self { base: base.to_owned(), components }, wrong)
    }
}

/// The text of the override file with `$(HOST_IP)` replaced; an IPv6 address gets brackets, once. To be
/// read as YAML and handed to [`override_value`].
#[must_use]
pub(crate) fn override_text(text: &str, host_ip: &str) -> String {
    if host_ip.contains(':') {
        let bracketed = format!("[{host_ip}]");
        text.replace("[$(HOST_IP)]", &bracketed).replace("$(HOST_IP)", &bracketed)
    } else {
        text.replace("$(HOST_IP)", host_ip)
    }
}

/// The override as `--config-yaml` carries it: compact, keys sorted. `None` for an empty one (the Go
/// agent passes `null`, which Envoy refuses).
#[must_use]
pub(crate) fn override_value(value: &serde_json::Value) -> Option<String> {
    if value.is_null() {
        return None;
    }
    let mut out = String::new();
    write_json(value, &mut out);
    Some(out)
}

// By hand because keys must come out sorted, whatever order serde_json keeps them in.
fn write_json(value: &serde_json::Value, out: &mut String) {
    use serde_json::Value;
    let separate = |out: &mut String, i: usize| {
        if i > 0 {
            out.push(',');
        }
    };
    match value {
        Value::String(text) => out.push_str(&json_string(text)),
        Value::Number(number) => out.push_str(&json_number(number)),
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separate(out, i);
                write_json(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => {
            let sorted: std::collections::BTreeMap<_, _> = map.iter().collect();
            out.push('{');
            for (i, (key, value)) in sorted.into_iter().enumerate() {
                separate(out, i);
                out.push_str(&json_string(key));
                out.push(':');
                write_json(value, out);
            }
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

// Go's encoder writes an exponent below 1e-6 and from 1e21 only.
fn json_number(number: &serde_json::Number) -> String {
    let Some(float) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    if float == 0.0 || (1e-6..1e21).contains(&float.abs()) {
        return float.to_string();
    }
    let text = format!("{float:e}");
    if text.contains("e-") { text } else { text.replace('e', "e+") }
}

// Go's encoder also escapes what would be markup in HTML.
fn json_string(text: &str) -> String {
    serde_json::Value::from(text)
        .to_string()
        .replace('<', "\\u003c")
        .replace('>', "\\u003e")
        .replace('&', "\\u0026")
        .replace('\u{2028}', "\\u2028")
        .replace('\u{2029}', "\\u2029")
}

#[cfg(test)]
mod tests;
