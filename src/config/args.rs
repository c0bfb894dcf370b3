//! The command line, read by the rules of pflag and cobra that people's scripts rely on.
//!
//! clap cannot be told these rules (a boolean takes no following word; on `proxy` an unknown flag
//! swallows the next bare word), so the words are read here and clap prints the help.

use super::go;
use crate::base::error::BoxError;

/// What a flag takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Any text.
    Text,
    /// A boolean; without `=` it is `true` and takes no word.
    Bool,
    /// An integer of so many bits.
    Int(u32),
    /// A decimal integer of so many bits: a zero in front is no base.
    Decimal(u32),
    /// An unsigned integer of so many bits.
    Uint(u32),
    /// A Go duration.
    Duration,
    /// Text that adds up.
    Array,
}

/// One flag of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flag {
    /// Long name without dashes.
    pub name: &'static str,
    /// One letter, or `'\0'`.
    pub short: char,
    /// What it takes.
    pub kind: Kind,
    /// Default as text.
    pub default: &'static str,
    /// Meaning, one sentence.
    pub help: &'static str,
    /// A flag of releases before 1.9: its value takes effect as it did then.
    pub old: bool,
}

impl Flag {
    /// A flag of today.
    #[must_use]
    pub(crate) const fn new(
        name: &'static str,
        kind: Kind,
        default: &'static str,
        help: &'static str,
    ) -> Self {
        Self { name, short: '\0', kind, default, help, old: false }
    }

    /// A flag of old releases.
    #[must_use]
    pub(crate) const fn old(name: &'static str, kind: Kind, help: &'static str) -> Self {
        Self { name, short: '\0', kind, default: "", help, old: true }
    }

    /// With a one-letter form.
    #[must_use]
    pub(crate) const fn short(mut self, short: char) -> Self {
        self.short = short;
        self
    }
}

/// The flag that every command has.
pub(crate) const HELP: Flag =
    Flag::new("help", Kind::Bool, "false", "what the command does, and its flags").short('h');

/// The words of a command line, sorted out.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Parsed {
    values: Vec<(&'static str, String)>,
    /// Words that belong to no flag.
    pub positional: Vec<String>,
    /// `-h` or `--help` was among them, and not switched off again.
    pub help: bool,
    /// Flags nobody knows, where they are tolerated.
    pub unknown: Vec<String>,
    /// Flags of old releases whose value cannot be read, each with the reason, where they are tolerated.
    pub passed_over: Vec<String>,
}

// A value may be a token.
impl std::fmt::Debug for Parsed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.values.iter().map(|(name, _)| *name).collect();
        f.debug_struct("Parsed")
            .field("flags", &names)
            .field("positional", &self.positional)
            .finish_non_exhaustive()
    }
}

impl Parsed {
    /// The last value given for a flag.
    #[must_use]
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.values.iter().rev().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    /// Every value given for a flag.
    #[must_use]
    pub(crate) fn all(&self, name: &str) -> Vec<&str> {
        self.values.iter().filter(|(n, _)| *n == name).map(|(_, v)| v.as_str()).collect()
    }

    /// Whether a boolean is on.
    #[must_use]
    pub(crate) fn is_true(&self, flags: &[Flag], name: &str) -> bool {
        go::boolean(self.or_default(flags, name)) == Some(true)
    }

    /// The value, or the flag's default.
    #[must_use]
    pub(crate) fn or_default<'a>(&'a self, flags: &'a [Flag], name: &str) -> &'a str {
        let default = flags.iter().find(|f| f.name == name).map_or("", |f| f.default);
        self.get(name).unwrap_or(default)
    }
}

/// Words that cannot be read, as pflag says it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// `--=x` and the like.
    #[error("bad flag syntax: --{0}")]
    Syntax(String),
    /// No flag has this name.
    #[error("unknown flag: --{0}")]
    Unknown(String),
    /// No flag has this letter.
    #[error("unknown shorthand flag: {letter:?} in -{word}")]
    UnknownLetter {
        /// The letter.
        letter: char,
        /// The word it stands in, from it on.
        word: String,
    },
    /// The words end after it.
    #[error("flag needs an argument: {0}")]
    NoArgument(String),
    /// A value of another type.
    #[error("invalid argument {value:?} for {flag:?} flag: {source}")]
    Invalid {
        /// The value.
        value: String,
        /// The flag, as it is shown.
        flag: String,
        /// Why it is none.
        source: BoxError,
    },
}

/// Reads `words` with the given flags; `tolerant` passes over unknown flags as `proxy` does.
///
/// # Errors
/// In pflag's words; the exit status is 255 then.
pub(crate) fn parse(words: &[String], flags: &[Flag], tolerant: bool) -> Result<Parsed, Error> {
    let mut out = Parsed::default();
    let mut at = 0;
    while at < words.len() {
        let word = &words[at];
        at += 1;
        if word == "--" {
            out.positional.extend_from_slice(&words[at..]);
            break;
        } else if let Some(long) = word.strip_prefix("--") {
            long_flag(long, words, &mut at, flags, tolerant, &mut out)?;
        } else if let Some(shorts) = word.strip_prefix('-').filter(|s| !s.is_empty()) {
            short_flags(shorts, words, &mut at, flags, tolerant, &mut out)?;
        } else {
            out.positional.push(word.clone());
        }
    }
    out.help = out.is_true(&[HELP], HELP.name);
    Ok(out)
}

fn known(flags: &[Flag], is: impl Fn(&Flag) -> bool) -> Option<Flag> {
    flags.iter().chain(&[HELP]).find(|flag| is(flag)).copied()
}

fn long_flag(
    long: &str,
    words: &[String],
    at: &mut usize,
    flags: &[Flag],
    tolerant: bool,
    out: &mut Parsed,
) -> Result<(), Error> {
    let (name, value) = match long.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (long, None),
    };
    if name.is_empty() || name.starts_with('-') {
        return Err(Error::Syntax(long.to_owned()));
    }
    let Some(flag) = known(flags, |f| f.name == name) else {
        if !tolerant {
            return Err(Error::Unknown(name.to_owned()));
        }
        out.unknown.push(format!("--{name}"));
        if value.is_none() && words.get(*at).is_some_and(|w| !w.starts_with('-')) {
            *at += 1;
        }
        return Ok(());
    };
    let value = match (value, flag.kind) {
        (Some(value), _) => value.to_owned(),
        (None, Kind::Bool) => "true".to_owned(),
        // To the Go agent of today old flags are unknown ones: without a value they are passed over.
        (None, _) if flag.old && words.get(*at).is_none_or(|w| w.starts_with('-')) => {
            out.unknown.push(format!("--{name}"));
            return Ok(());
        }
        (None, _) => {
            let word = words.get(*at).ok_or_else(|| Error::NoArgument(format!("--{name}")))?;
            *at += 1;
            word.clone()
        }
    };
    if let Err(reason) = check(&flag, &value) {
        // To the Go agent of today the flag is unknown, and its value nothing to end for.
        if !(flag.old && tolerant) {
            return Err(reason);
        }
        out.passed_over.push(reason.to_string());
        return Ok(());
    }
    out.values.push((flag.name, value));
    Ok(())
}

fn short_flags(
    shorts: &str,
    words: &[String],
    at: &mut usize,
    flags: &[Flag],
    tolerant: bool,
    out: &mut Parsed,
) -> Result<(), Error> {
    let mut rest = shorts;
    while let Some(letter) = rest.chars().next() {
        let cluster = rest;
        rest = &rest[letter.len_utf8()..];
        // Without a value behind it the sign is a letter like any other.
        let given = rest.strip_prefix('=').filter(|value| !value.is_empty());
        let Some(flag) = known(flags, |f| f.short == letter && letter != '\0') else {
            if !tolerant {
                return Err(Error::UnknownLetter { letter, word: cluster.to_owned() });
            }
            out.unknown.push(format!("-{letter}"));
            if given.is_some() {
                return Ok(());
            }
            if rest.is_empty() && words.get(*at).is_some_and(|w| !w.starts_with('-')) {
                *at += 1;
            }
            continue;
        };
        let value = if let Some(value) = given {
            std::mem::take(&mut rest);
            value.to_owned()
        } else if flag.kind == Kind::Bool {
            "true".to_owned()
        } else if !rest.is_empty() {
            std::mem::take(&mut rest).to_owned()
        } else {
            let lacking = || Error::NoArgument(format!("{letter:?} in -{cluster}"));
            let word = words.get(*at).ok_or_else(lacking)?;
            *at += 1;
            word.clone()
        };
        check(&flag, &value)?;
        out.values.push((flag.name, value));
    }
    Ok(())
}

/// The value as pflag shows it again: a number without its base, a boolean as a word.
pub(crate) fn shown(kind: Kind, value: &str) -> String {
    let number = match kind {
        Kind::Bool => return go::boolean(value).map_or_else(|| value.to_owned(), |on| on.to_string()),
        Kind::Int(bits) => go::integer(value, bits),
        Kind::Decimal(bits) => go::decimal(value, bits),
        Kind::Uint(bits) => go::integer(value, bits + 1),
        Kind::Text | Kind::Duration | Kind::Array => return value.to_owned(),
    };
    number.map_or_else(|_| value.to_owned(), |number| number.to_string())
}

fn check(flag: &Flag, value: &str) -> Result<(), Error> {
    let source: BoxError = match flag.kind {
        Kind::Text | Kind::Array => return Ok(()),
        Kind::Bool => match go::boolean(value) {
            Some(_) => return Ok(()),
            None => format!("strconv.ParseBool: parsing {value:?}: invalid syntax").into(),
        },
        Kind::Int(bits) => match go::integer(value, bits) {
            Ok(_) => return Ok(()),
            Err(reason) => reason.into(),
        },
        Kind::Decimal(bits) => match go::decimal(value, bits) {
            Ok(_) => return Ok(()),
            Err(reason) => reason.into(),
        },
        Kind::Uint(bits) => match go::integer(value, bits + 1) {
            Ok(n) if n >= 0 && !value.starts_with(['+', '-']) => return Ok(()),
            Ok(_) => format!("strconv.ParseUint: parsing {value:?}: invalid syntax").into(),
            Err(reason) => reason.to_string().replace("ParseInt", "ParseUint").into(),
        },
        Kind::Duration => match go::duration(value) {
            Ok(_) => return Ok(()),
            Err(reason) => reason.into(),
        },
    };
    let shown = match flag.short {
        '\0' => format!("--{}", flag.name),
        letter => format!("-{letter}, --{}", flag.name),
    };
    Err(Error::Invalid { value: value.to_owned(), flag: shown, source })
}

/// Flags that every command takes.
pub(crate) const LOGGING: &[Flag] = &[
    Flag::new(
        "log_output_level",
        Kind::Text,
        "",
        "comma list of scope:level added to default:info,grpc:none; levels debug, info, warn, error, fatal, none",
    ),
    Flag::new(
        "log_stacktrace_level",
        Kind::Text,
        "default:none",
        "same grammar; accepted, nothing to attach",
    ),
    Flag::new(
        "log_caller",
        Kind::Text,
        "",
        "comma list of scopes whose lines carry file and line; all for every one",
    ),
    Flag::new("log_as_json", Kind::Bool, "false", "write the agent's and Envoy's logs as JSON"),
    Flag::new("log_target", Kind::Array, "stdout", "stdout, stderr or a file to append to; may be repeated"),
    Flag::new(
        "vklog",
        Kind::Decimal(32),
        "0",
        "verbosity of the Kubernetes library; accepted, there is none here",
    ),
];

/// The flag that shows what would run.
pub(crate) const DRY_RUN: &str = "dry-run";

/// Flags of `proxy`.
pub(crate) const PROXY: &[Flag] = &[
    Flag::new("domain", Kind::Text, "", "DNS suffix of the node; empty: <POD_NAMESPACE>.svc.cluster.local"),
    Flag::new("meshConfig", Kind::Text, "./etc/istio/config/mesh", "mesh configuration file; may be missing"),
    Flag::new(
        "serviceCluster",
        Kind::Text,
        "istio-proxy",
        "used only where ProxyConfig sets serviceCluster to nothing",
    ),
    Flag::new("concurrency", Kind::Int(64), "0", "Envoy's worker threads; not 0 overrides ProxyConfig"),
    Flag::new("proxyLogLevel", Kind::Text, "warning", "Envoy's log level, and component:level items"),
    Flag::new(
        "proxyComponentLogLevel",
        Kind::Text,
        "",
        "Envoy's component levels where proxyLogLevel has none",
    ),
    Flag::new("templateFile", Kind::Text, "", "template of Envoy's bootstrap"),
    Flag::new("outlierLogPath", Kind::Text, "", "file for outlier ejection events"),
    Flag::new("profiling", Kind::Bool, "true", "serve /debug/pprof on the status port"),
    Flag::new(
        "stsPort",
        Kind::Int(64),
        "0",
        "port of the security token service on localhost, and STS_PORT in node metadata; 0: no service",
    ),
    Flag::new(
        "tokenManagerPlugin",
        Kind::Text,
        "",
        "who changes tokens in the service: GoogleTokenExchange (also where the flag is not given), or Passthrough (ours); any other: nobody",
    ),
    Flag::new(
        "gateway-secrets-dir",
        Kind::Text,
        "",
        "ours: folder of a gateway's secrets, <name>/tls.crt, tls.key and ca.crt",
    ),
    Flag::new(
        "gatewayUdsPath",
        Kind::Text,
        "",
        "ours: socket of a gateway's secrets; empty: ./var/run/ingress_gateway/sds",
    ),
    Flag::new("workloadUDSPath", Kind::Text, "", "ours: socket of SDS_CALLER_TOKENS; before WORKLOAD_SDS"),
    Flag::new(
        "dry-run",
        Kind::Bool,
        "false",
        "ours: print the effective configuration and the bootstrap, then exit",
    ),
    Flag::old("configPath", Kind::Text, "folder of generated files (ProxyConfig configPath)"),
    Flag::old("binaryPath", Kind::Text, "Envoy's binary (ProxyConfig binaryPath)"),
    Flag::old("drainDuration", Kind::Duration, "ProxyConfig drainDuration"),
    Flag::old(
        "parentShutdownDuration",
        Kind::Duration,
        "ENVOY_PARENT_SHUTDOWN_DURATION; with a certificate in /etc/certs also hot restart when it changes, as in 0.8 to 1.5",
    ),
    Flag::old("discoveryAddress", Kind::Text, "istiod (ProxyConfig discoveryAddress)"),
    Flag::old("zipkinAddress", Kind::Text, "ProxyConfig tracing.zipkin.address"),
    Flag::old("lightstepAddress", Kind::Text, "passed over: Envoy has no such tracer any more"),
    Flag::old("lightstepAccessToken", Kind::Text, "as --lightstepAddress"),
    Flag::old("lightstepSecure", Kind::Bool, "as --lightstepAddress"),
    Flag::old("lightstepCacertPath", Kind::Text, "as --lightstepAddress"),
    Flag::old("datadogAgentAddress", Kind::Text, "ProxyConfig tracing.datadog.address"),
    Flag::old(
        "connectTimeout",
        Kind::Duration,
        "accepted, without effect: Envoy connects to the agent's socket, not to istiod",
    ),
    Flag::old("statsdUdpAddress", Kind::Text, "ProxyConfig statsdUdpAddress"),
    Flag::old("envoyMetricsService", Kind::Text, "ProxyConfig envoyMetricsService as JSON"),
    Flag::old("envoyAccessLogService", Kind::Text, "ProxyConfig envoyAccessLogService as JSON"),
    Flag::old("proxyAdminPort", Kind::Uint(16), "ProxyConfig proxyAdminPort"),
    Flag::old(
        "controlPlaneAuthPolicy",
        Kind::Text,
        "ProxyConfig controlPlaneAuthPolicy; NONE towards port 15012 keeps TLS, as in 1.5",
    ),
    Flag::old("customConfigFile", Kind::Text, "ProxyConfig customConfigFile"),
    Flag::old(
        "dnsRefreshRate",
        Kind::Text,
        "accepted, without effect: Envoy resolves no istiod any more; collectors follow the records' own life",
    ),
    Flag::old("controlPlaneBootstrap", Kind::Bool, "accepted, without effect"),
    Flag::old("disableInternalTelemetry", Kind::Bool, "accepted, without effect"),
    Flag::old("statusPort", Kind::Uint(16), "ProxyConfig statusPort; 0: no status server"),
    Flag::old("trust-domain", Kind::Text, "TRUST_DOMAIN"),
    Flag::old("pilotIdentity", Kind::Text, "accepted, without effect"),
    Flag::old("mixerIdentity", Kind::Text, "accepted, without effect"),
    Flag::old(
        "id",
        Kind::Text,
        "middle part of the node id; empty: POD_NAME.POD_NAMESPACE, or by serviceregistry",
    ),
    Flag::old("ip", Kind::Text, "INSTANCE_IP"),
    Flag::old(
        "serviceregistry",
        Kind::Text,
        "Kubernetes; Consul: id <ip>.service.consul, domain service.consul; any other: id <ip>, no domain",
    ),
    Flag::old("log_rotate", Kind::Text, "accepted, without effect"),
    Flag::old("log_rotate_max_age", Kind::Text, "accepted, without effect"),
    Flag::old("log_rotate_max_size", Kind::Text, "accepted, without effect"),
    Flag::old("log_rotate_max_backups", Kind::Text, "accepted, without effect"),
    Flag::old("applicationPorts", Kind::Text, "accepted, without effect"),
    Flag::old(
        "availabilityZone",
        Kind::Text,
        "ProxyConfig availabilityZone, and the zone of Envoy's locality where nothing newer names one",
    ),
    Flag::old("discoveryRefreshDelay", Kind::Text, "ProxyConfig discoveryRefreshDelay"),
    Flag::old("bootstrapv2", Kind::Bool, "accepted, without effect"),
    Flag::old("envoyMetricsServiceAddress", Kind::Text, "ProxyConfig envoyMetricsServiceAddress"),
];
