//! What the agent runs with, for people: YAML without secrets.

use serde_json::Value;

use super::Sources;
use super::args::{self, Flag};
use super::env::{REDIRECT, VARS, WITHOUT_EFFECT, var};
use crate::base::quote::{self, REDACTED};

/// Holds whole HTTP requests.
const PROBERS: &str = "ISTIO_KUBE_APP_PROBERS";
/// Parts of names whose values are secrets.
const SECRET: [&str; 12] = [
    "TOKEN",
    "PASSWORD",
    "PASSWD",
    "PASSPHRASE",
    "PWD",
    "PRIVATE_KEY",
    "SECRET",
    "CREDENTIAL",
    "API_KEY",
    "APIKEY",
    "ACCESS_KEY",
    "AUTHORIZATION",
];

/// Beginnings of names of headers, which carry credentials more often than not.
const HEADERS: [&str; 2] = ["XDS_HEADER_", "CA_HEADER_"];

/// Whether the value of a name that is not in our table must not be shown. Members of ProxyConfig are
/// written in camelCase, variables and headers with underscores or dashes.
fn secret(name: &str) -> bool {
    let upper = name.to_ascii_uppercase().replace('-', "_");
    if upper == PROBERS || HEADERS.iter().any(|prefix| upper.starts_with(prefix)) {
        return true;
    }
    let names_a_file = upper.ends_with("_PATH") || upper.ends_with("_FILE");
    !names_a_file && SECRET.iter().any(|s| upper.contains(s))
}

// Without the users and passwords of the URLs in it. The URL of a proxy may lack its scheme, and its password is often
// written as it is, whatever characters it has.
fn without_users(name: &str, text: &str) -> String {
    if name.to_ascii_uppercase().ends_with("_PROXY") {
        let Some((user, host)) = text.rsplit_once('@') else { return text.to_owned() };
        let scheme = user.split_once("://").map(|(scheme, _)| format!("{scheme}://")).unwrap_or_default();
        return format!("{scheme}{REDACTED}@{host}");
    }
    quote::without_users(text)
}

fn redacted(name: &str, value: &Value) -> Value {
    match value {
        // Of a probe the header's name, and the program without its arguments.
        Value::Object(object) => {
            let of = |(key, value): (&String, &Value)| {
                let value = match (name, key.as_str()) {
                    ("httpHeaders", "value") => REDACTED.into(),
                    (_, key) => redacted(key, value),
                };
                (key.clone(), value)
            };
            Value::Object(object.iter().map(of).collect())
        }
        Value::Array(items) if name == "command" => {
            let hidden = |(n, v): (usize, &Value)| if n == 0 { v.clone() } else { REDACTED.into() };
            Value::Array(items.iter().enumerate().map(hidden).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|v| redacted(name, v)).collect()),
        // `credentialName` names a secret, which is not one.
        Value::String(text) if secret(name) && name != "credentialName" && !text.is_empty() => {
            REDACTED.into()
        }
        Value::String(text) if name == "path" && text.contains('?') => {
            format!("{}?...", text.split('?').next().unwrap_or_default()).into()
        }
        Value::String(text) => without_users(name, text).into(),
        other => other.clone(),
    }
}

/// The effective ProxyConfig as YAML, keys sorted, secrets left out.
#[must_use]
pub(crate) fn proxy_config(config: &Sources) -> String {
    let mut out = String::new();
    yaml(&redacted("", &config.mesh.to_json()), 0, &mut out);
    out
}

/// The pod's name and namespace, as the first half of the node's id shows them.
#[must_use]
pub(crate) fn pod(config: &Sources) -> String {
    format!("{}.{}", config.settings.text(var::POD_NAME), config.settings.text(var::POD_NAMESPACE))
}

/// What is given and has no effect.
#[must_use]
pub(crate) fn without_effect(config: &Sources) -> Vec<String> {
    let s = &config.settings;
    let old = args::PROXY.iter().filter(|f| f.old && f.help.contains("without effect"));
    let old = old.filter(|f| config.flags.get(f.name).is_some()).map(|f| format!("--{}", f.name));
    // Those the injector always sets are in every pod.
    let everywhere = ["GOMAXPROCS", "TOKEN_AUDIENCES"];
    let without = WITHOUT_EFFECT.iter().filter(|n| !everywhere.contains(n));
    let without = without.filter(|n| s.env().get(n).is_some()).map(|n| (*n).to_owned());
    let mut names: Vec<String> = old.chain(without).collect();
    if s.some_text(var::CA_ADDR).is_some() && s.flag(var::FILE_MOUNTED_CERTS) {
        names.push("CA_ADDR (FILE_MOUNTED_CERTS takes certificates from files)".to_owned());
    }
    names
}

/// The variables of the table that are set, `NAME=value` by name, secrets left out. `PROXY_CONFIG` is part
/// of the effective ProxyConfig and not repeated.
#[must_use]
pub(crate) fn variables(config: &Sources) -> Vec<String> {
    let env = config.settings.env();
    let ours = VARS.iter().filter(|v| v.name != "PROXY_CONFIG" && v.part != REDIRECT);
    let mut out: Vec<String> = ours
        .filter_map(|v| {
            let value = env.get(v.name)?;
            // Probes may send credentials in headers of theirs.
            let hidden = v.name == PROBERS && !value.is_empty();
            let shown = if hidden { REDACTED.to_owned() } else { without_users(v.name, value) };
            Some(format!("{}={shown:?}", v.name))
        })
        .collect();
    for prefix in HEADERS {
        out.extend(env.with_prefix(prefix).map(|(name, _)| format!("{prefix}{name}={REDACTED:?}")));
    }
    out.sort();
    out
}

/// One `FLAG: --name="value"` a flag, by name, as the Go agent logs them; those of old releases only where
/// given.
#[must_use]
pub(crate) fn flags(parsed: &super::args::Parsed, table: &[Flag]) -> Vec<String> {
    let mut shown: Vec<&Flag> = table.iter().filter(|f| !f.old || parsed.get(f.name).is_some()).collect();
    shown.sort_by_key(|f| f.name);
    // The plug-in has a name, and no token.
    let hidden = |name: &str| secret(name) && name != "tokenManagerPlugin";
    let line = |f: &&Flag| match (f.kind, hidden(f.name)) {
        (_, true) if parsed.get(f.name).is_some() => format!("FLAG: --{}={REDACTED:?}", f.name),
        (super::args::Kind::Array, _) => {
            let all = parsed.all(f.name);
            let all = if all.is_empty() { vec![f.default] } else { all };
            format!("FLAG: --{}=\"[{}]\"", f.name, all.join(","))
        }
        (kind, _) => {
            let value = super::args::shown(kind, parsed.or_default(table, f.name));
            format!("FLAG: --{}={:?}", f.name, without_users(f.name, &value))
        }
    };
    shown.iter().map(line).collect()
}

fn yaml(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(object) => {
            let mut entries: Vec<_> = object.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            for (key, value) in entries {
                out.push_str(&" ".repeat(indent));
                out.push_str(&scalar(key));
                member(value, indent, out);
            }
        }
        Value::Array(items) => {
            for item in items {
                out.push_str(&" ".repeat(indent));
                out.push('-');
                if let Value::Object(object) = item {
                    out.push_str(if object.is_empty() { " {}\n" } else { "\n" });
                    yaml(item, indent + 2, out);
                } else {
                    out.push(' ');
                    out.push_str(&plain(item));
                    out.push('\n');
                }
            }
        }
        other => {
            out.push_str(&plain(other));
            out.push('\n');
        }
    }
}

fn member(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(object) if !object.is_empty() => {
            out.push_str(":\n");
            yaml(value, indent + 2, out);
        }
        Value::Array(items) if !items.is_empty() => {
            out.push_str(":\n");
            yaml(value, indent, out);
        }
        other => {
            out.push_str(": ");
            out.push_str(&plain(other));
            out.push('\n');
        }
    }
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => scalar(text),
        other => other.to_string(),
    }
}

// Bare where it would be read back as the same text, quoted otherwise.
fn scalar(text: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "./_$()".contains(c);
    let inner = |c: char| harmless(c) || "-:@+=".contains(c);
    let safe = text.starts_with(harmless) && text.chars().all(inner) && !text.ends_with(':');
    let same = || super::yaml::to_json(text).is_ok_and(|v| v == *text);
    if safe && same() { text.to_owned() } else { Value::from(text).to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::env::Env;
    use crate::config::{args, read, yaml};
    use std::path::Path;
    use std::sync::Arc;

    fn config(pairs: &[(&str, &str)]) -> Arc<Sources> {
        let empty = tempfile::tempdir().unwrap();
        let parsed = args::parse(&[], args::PROXY, true).unwrap();
        read(parsed, &Env::of(pairs), Path::new(empty.path()), |_| None).unwrap()
    }

    #[test]
    fn what_is_shown_reads_back_and_holds_no_secret() {
        let proxy = r#"{"tracing": {"lightstep": {"address": "a:1", "accessToken": "hunter2"}},
            "proxyMetadata": {"MY_API_KEY": "hunter2", "A": "yes", "B": "x: y", "K_PATH": "/p"},
            "readinessProbe": {"httpGet": {"port": 1, "path": "/h?hunter2",
                "httpHeaders": [{"name": "x", "value": "hunter2"}]}},
            "extraStatTags": ["one", "2"], "gatewayTopology": {}}"#;
        let other =
            config(&[("PROXY_CONFIG", r#"{"readinessProbe": {"exec": {"command": ["check", "hunter2"]}}}"#)]);
        let config = config(&[("PROXY_CONFIG", proxy), ("XDS_HEADER_X", "hunter2"), ("CA_ADDR", "ca:1")]);
        let shown = proxy_config(&config);
        assert!(!shown.contains("hunter2"), "{shown}");
        let back = yaml::to_json(&shown).unwrap();
        let mut want = config.mesh.to_json();
        want["tracing"]["lightstep"]["accessToken"] = REDACTED.into();
        want["proxyMetadata"]["MY_API_KEY"] = REDACTED.into();
        let probe = &mut want["readinessProbe"];
        probe["httpGet"]["path"] = "/h?...".into();
        probe["httpGet"]["httpHeaders"][0]["value"] = REDACTED.into();
        assert_eq!(back, want, "{shown}");
        let shown = proxy_config(&other);
        assert!(shown.contains("- check") && !shown.contains("hunter2"), "{shown}");
        assert_eq!(variables(&config), ["CA_ADDR=\"ca:1\"", "XDS_HEADER_X=\"<redacted>\""]);
    }

    #[test]
    fn headers_probes_and_passwords_of_urls_are_left_out() {
        let proxy = r#"{"proxyMetadata": {"XDS_HEADER_X-Auth": "hunter2", "CA_HEADER_COOKIE": "hunter2",
            "KEY_PASSPHRASE": "hunter2", "MY_PRIVATE_KEY": "hunter2", "db-pwd": "hunter2",
            "HTTPS_PROXY": "http://u:hunter2@p:1", "http_proxy": "u:hunter2/?@x@p:1", "no_proxy": "a,b",
            "A": "see https://hunter2@h/p?q@r, http://i/x@y", "ISTIO_KUBE_APP_PROBERS": "hunter2"}}"#;
        let config = config(&[
            ("PROXY_CONFIG", proxy),
            ("STS_UPSTREAM_URL", "https://u:hunter2@s:1/p"),
            ("CA_ADDR", "a@b:1"),
        ]);
        let shown = proxy_config(&config);
        assert!(!shown.contains("hunter2"), "{shown}");
        for part in
            ["\"http://<redacted>@p:1\"", "\"<redacted>@p:1\"", "https://<redacted>@h/p?q@r, http://i/x@y"]
        {
            assert!(shown.contains(part), "{part}: {shown}");
        }
        let variables = variables(&config);
        assert_eq!(variables, ["CA_ADDR=\"a@b:1\"", "STS_UPSTREAM_URL=\"https://<redacted>@s:1/p\""]);
    }

    #[test]
    fn flags_are_sorted_quoted_and_redacted() {
        let table: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
        let words = "--domain=a\"b --lightstepAccessToken hunter2 --log_target=x --log_target=y \
                     --concurrency=0x10 --profiling=T --vklog=08 --tokenManagerPlugin=P";
        let words: Vec<String> = words.split(' ').map(str::to_owned).collect();
        let parsed = args::parse(&words, &table, true).unwrap();
        let lines = flags(&parsed, &table);
        assert!(lines.is_sorted(), "{lines:#?}");
        for line in [
            "FLAG: --domain=\"a\\\"b\"",
            "FLAG: --log_target=\"[x,y]\"",
            "FLAG: --concurrency=\"16\"",
            "FLAG: --profiling=\"true\"",
            "FLAG: --vklog=\"8\"",
            "FLAG: --tokenManagerPlugin=\"P\"",
            "FLAG: --lightstepAccessToken=\"<redacted>\"",
        ] {
            assert!(lines.iter().any(|l| l == line), "{line} in {lines:#?}");
        }
        assert!(!lines.iter().any(|l| l.contains("configPath")));
    }
}
