//! What ProxyConfig's `readinessProbe` asks for, with the agent's defaults, and what is refused. Pure.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use crate::proto::istio::networking::v1alpha3::readiness_probe::HealthCheckMethod;
use crate::proto::istio::networking::v1alpha3::{HttpHealthCheckConfig, ReadinessProbe};

/// How the application is checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Before the first probe.
    pub initial_delay: Duration,
    /// Of one probe of the application; 1 s where it was not given.
    pub timeout: Duration,
    /// From one probe to the next; 10 s where it was not given.
    pub period: Duration,
    /// Successes in a row that make it healthy; 1 where it was not given.
    pub success_threshold: u32,
    /// Failures in a row that make it unhealthy; 1 where it was not given (the API's comment says 3).
    pub failure_threshold: u32,
    /// What is asked.
    pub method: Method,
    /// The address that HTTP probes leave from.
    pub source: IpAddr,
}

/// What is asked of the application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Method {
    /// A GET, judged by its status.
    Http {
        /// `http` or `https`; anything else fails at each probe, as in the Go agent.
        scheme: String,
        /// Without brackets.
        host: String,
        /// Above 65535 every probe fails.
        port: u32,
        /// A URL reference, of which path and query count.
        path: String,
        /// In the order given; `Host` names the host asked for.
        headers: Vec<(String, String)>,
    },
    /// A connection, judged by whether it comes about.
    Tcp {
        /// Without brackets.
        host: String,
        /// Above 65535 every probe fails.
        port: u32,
    },
    /// A command, judged by its exit status.
    Exec {
        /// At least one word; no shell.
        command: Vec<String>,
    },
    /// `grpc.health.v1.Health/Check`, without TLS.
    Grpc {
        /// Without brackets.
        host: String,
        /// Above 65535 every probe fails.
        port: u32,
        /// Empty: the server as a whole.
        service: String,
    },
}

impl fmt::Display for Method {
    // Headers may hold credentials and commands passwords: neither is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http { scheme, host, port, path, .. } => {
                let path = path.split('?').next().unwrap_or_default();
                write!(f, "{scheme} GET of {path} at {host} port {port}")
            }
            Self::Tcp { host, port } => write!(f, "connecting to {host} port {port}"),
            Self::Exec { command } => {
                write!(f, "running {}", command.first().map_or("nothing", String::as_str))
            }
            Self::Grpc { host, port, service } if service.is_empty() => {
                write!(f, "the gRPC health service at {host} port {port}")
            }
            Self::Grpc { host, port, service } => {
                write!(f, "the gRPC health service for {service} at {host} port {port}")
            }
        }
    }
}

/// An invalid probe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("readinessProbe in ProxyConfig is refused, so the application's health is not checked: {0}")]
pub struct Refused(String);

impl Config {
    /// The probe with defaults filled in. `host`: the host that is asked where the probe names none;
    /// `source`: the address that HTTP probes leave from.
    ///
    /// # Errors
    /// When a number is negative, there is no method, or the command is empty.
    pub fn new(probe: &ReadinessProbe, host: &str, source: IpAddr) -> Result<Self, Refused> {
        let number = |name: &str, value: i32, default: u32| match u32::try_from(value) {
            Ok(0) => Ok(default),
            Ok(value) => Ok(value),
            Err(_) => Err(Refused(format!("{name} is {value}; it must be 0 (the default) or more"))),
        };
        let seconds = |name, value, default| {
            number(name, value, default).map(|seconds| Duration::from_secs(u64::from(seconds)))
        };
        Ok(Self {
            initial_delay: seconds("initialDelaySeconds", probe.initial_delay_seconds, 0)?,
            timeout: seconds("timeoutSeconds", probe.timeout_seconds, 1)?,
            period: seconds("periodSeconds", probe.period_seconds, 10)?,
            success_threshold: number("successThreshold", probe.success_threshold, 1)?,
            failure_threshold: number("failureThreshold", probe.failure_threshold, 1)?,
            method: method(probe.health_check_method.as_ref(), host)?,
            source,
        })
    }
}

fn method(method: Option<&HealthCheckMethod>, default_host: &str) -> Result<Method, Refused> {
    let or_default = |host: &str| if host.is_empty() { default_host } else { host }.to_owned();
    Ok(match method {
        None => {
            let text = "it has no method; write one of httpGet, tcpSocket, exec, grpc";
            return Err(Refused(text.to_owned()));
        }
        Some(HealthCheckMethod::HttpGet(get)) => http(get, or_default(&get.host)),
        Some(HealthCheckMethod::TcpSocket(tcp)) => {
            Method::Tcp { host: or_default(&tcp.host), port: tcp.port }
        }
        Some(HealthCheckMethod::Exec(exec)) if exec.command.first().is_none_or(String::is_empty) => {
            return Err(Refused("exec has no command; write the program and its arguments".to_owned()));
        }
        Some(HealthCheckMethod::Exec(exec)) => Method::Exec { command: exec.command.clone() },
        Some(HealthCheckMethod::Grpc(grpc)) => {
            Method::Grpc { host: default_host.to_owned(), port: grpc.port, service: grpc.service.clone() }
        }
    })
}

fn http(get: &HttpHealthCheckConfig, host: String) -> Method {
    let or = |value: &str, default: &str| if value.is_empty() { default } else { value }.to_owned();
    Method::Http {
        scheme: or(&get.scheme, "http").to_lowercase(),
        host,
        port: get.port,
        path: or(&get.path, "/"),
        headers: get.http_headers.iter().map(|h| (h.name.clone(), h.value.clone())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Config, String> {
        let probe: ReadinessProbe = serde_json::from_str(json).unwrap();
        Config::new(&probe, "10.0.0.7", IpAddr::from([127, 0, 0, 6])).map_err(|e| e.to_string())
    }

    #[test]
    fn zeros_mean_the_agents_defaults() {
        let config = read(r#"{"tcpSocket": {"port": 9000}}"#).unwrap();
        let second = Duration::from_secs(1);
        assert_eq!(
            (config.initial_delay, config.timeout, config.period),
            (Duration::ZERO, second, 10 * second)
        );
        assert_eq!((config.success_threshold, config.failure_threshold), (1, 1));
        assert_eq!(config.method, Method::Tcp { host: "10.0.0.7".to_owned(), port: 9000 });
        let config = read(r#"{"httpGet": {"port": 80, "scheme": "HTTPS", "host": "a"}}"#).unwrap();
        let Method::Http { scheme, host, path, .. } = &config.method else { panic!("{config:?}") };
        assert_eq!((scheme.as_str(), host.as_str(), path.as_str()), ("https", "a", "/"));
        let grpc = read(r#"{"grpc": {"port": 1, "service": "s"}, "periodSeconds": 3}"#).unwrap();
        assert_eq!(grpc.period, 3 * second);
        assert_eq!(grpc.method.to_string(), "the gRPC health service for s at 10.0.0.7 port 1");
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_its_name() {
        for (json, said) in [
            ("{}", "no method"),
            (r#"{"exec": {}}"#, "exec has no command"),
            (r#"{"exec": {"command": [""]}}"#, "exec has no command"),
            (r#"{"periodSeconds": -1, "tcpSocket": {"port": 1}}"#, "periodSeconds is -1"),
            (r#"{"initialDelaySeconds": -5, "tcpSocket": {"port": 1}}"#, "initialDelaySeconds is -5"),
            (r#"{"timeoutSeconds": -5, "tcpSocket": {"port": 1}}"#, "timeoutSeconds is -5"),
            (r#"{"successThreshold": -5, "tcpSocket": {"port": 1}}"#, "successThreshold is -5"),
            (
                r#"{"failureThreshold": -2147483648, "tcpSocket": {"port": 1}}"#,
                "failureThreshold is -2147483648",
            ),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.starts_with("readinessProbe in ProxyConfig") && error.contains(said), "{error}");
        }
    }

    #[test]
    fn what_is_shown_holds_no_secrets() {
        let config = read(
            r#"{"httpGet": {"port": 80, "path": "/h?token=one", "httpHeaders": [{"name": "authorization", "value": "two"}]}}"#,
        );
        assert_eq!(config.unwrap().method.to_string(), "http GET of /h at 10.0.0.7 port 80");
        let config = read(r#"{"exec": {"command": ["check", "--password=three"]}}"#).unwrap();
        assert_eq!(config.method.to_string(), "running check");
    }
}
