//! Which Istio release is followed where two of them exclude each other, and the ports that 1.31 added.
//!
//! The rest of 1.31 is additive and needs no choice. With `ISTIO_COMPAT_VERSION=1.30` what 1.31 refuses
//! at start is taken as 1.30 took it (addresses of the application's metrics, `connectionSettings`,
//! `ISTIO_META_ENABLE_SELF_DISCOVERY`), and istiod is told 1.30's version and metadata.

use super::env::{Key, Settings, kinds, var};
use super::mesh::Effective;
use crate::base::build_info;

/// Envoy's metrics listeners behind mutual TLS: its own metrics, the merged ones.
pub(crate) const SECURE_PORTS: [Key<kinds::Int>; 2] =
    [var::ENVOY_SECURE_METRICS_PORT, var::ENVOY_SECURE_MERGED_METRICS_PORT];

/// A release whose behaviour is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// 1.30, and what the releases before it had in common with it.
    V1_30,
    /// 1.31.
    #[default]
    V1_31,
}

impl Release {
    /// `ISTIO_COMPAT_VERSION`: a release with or without its patch number.
    ///
    /// # Errors
    /// One line, for any other text.
    pub fn of(text: &str) -> Result<Self, String> {
        let minor = text.split('.').take(2).collect::<Vec<_>>().join(".");
        match minor.as_str() {
            "" | "1.31" => Ok(Self::V1_31),
            "1.30" => Ok(Self::V1_30),
            _ => Err(format!(
                "ISTIO_COMPAT_VERSION={text}: not a release that can be followed; write 1.30 or 1.31, or take it away"
            )),
        }
    }

    /// The version sent to istiod as `ISTIO_VERSION`.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::V1_30 => "1.30.3",
            Self::V1_31 => build_info::ISTIO_VERSION,
        }
    }
}

/// What is wrong with the ports of Envoy's own listeners. Envoy refuses a bootstrap with such a port, in
/// words that do not name the variable.
pub(super) fn ports(
    settings: &Settings,
    mesh: &Effective,
    dns: bool,
    warnings: &mut Vec<String>,
) -> Vec<String> {
    let mut errors = Vec::new();
    let mut taken: Vec<(i64, String)> = vec![
        (mesh.proxy.proxy_admin_port.into(), "of Envoy's admin interface (proxyAdminPort)".to_owned()),
        (mesh.proxy.status_port.into(), "of the agent's status server (statusPort)".to_owned()),
        (15001, "of outbound capture".to_owned()),
        (15006, "of inbound capture".to_owned()),
    ];
    for key in [var::ENVOY_STATUS_PORT, var::ENVOY_PROMETHEUS_PORT] {
        let (name, port) = (key.name(), settings.int(key));
        if u16::try_from(port).is_err() {
            errors.push(format!("{name}={port}: a port must be in the range 0..65535"));
        }
        taken.push((port, format!("of {name}")));
    }
    let address = settings.text(var::DNS_PROXY_ADDR).rsplit(':').next().and_then(|port| port.parse().ok());
    if let Some(port) = address.filter(|_| dns) {
        taken.push((port, "of the agent's DNS server (DNS_PROXY_ADDR)".to_owned()));
    }
    for key in SECURE_PORTS {
        let (name, port) = (key.name(), settings.int(key));
        if port < 0 {
            warnings.push(format!(
                "{name}={port} gives no listener, but is told to istiod: write a port, or 0 for none"
            ));
        } else if u16::try_from(port).is_err() {
            errors.push(format!("{name}={port}: a port must be in the range 1..65535, or 0 for no listener"));
        } else if let Some((_, whose)) = taken.iter().find(|(other, _)| port > 0 && *other == port) {
            errors.push(format!(
                "{name}={port}: this is the port {whose}, and Envoy would refuse its configuration; name a port of its own, for instance 15091 or 15092"
            ));
        }
        taken.push((port, format!("of {name}")));
    }
    errors
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::env::Env;

    #[test]
    fn only_known_releases() {
        assert_eq!(Release::of("1.30.3"), Ok(Release::V1_30));
        assert_eq!(Release::of(""), Ok(Release::V1_31));
        assert_eq!(Release::V1_31.version(), build_info::ISTIO_VERSION);
        for bad in ["1.3", "1.29", "latest", "1.32.0", "31"] {
            assert!(Release::of(bad).unwrap_err().contains("1.30 or 1.31"), "{bad}");
        }
    }

    fn check(pairs: &[(&str, &str)], dns: bool) -> (Vec<String>, Vec<String>) {
        let (settings, _) = Settings::read(&Env::of(pairs));
        let mut warnings = Vec::new();
        (ports(&settings, &Effective::new(), dns, &mut warnings), warnings)
    }

    #[test]
    fn a_port_of_its_own() {
        let [plain, merged] = SECURE_PORTS.map(Key::name);
        assert_eq!(check(&[(plain, "15091"), (merged, "15092")], true), (vec![], vec![]));
        for taken in ["15000", "15001", "15006", "15020", "15021", "15090", "65536"] {
            let (errors, _) = check(&[(merged, taken)], false);
            assert!(matches!(errors.as_slice(), [one] if one.starts_with(merged)), "{taken}: {errors:?}");
        }
        assert_eq!(check(&[(plain, "15053")], false).0.len(), 0);
        assert_eq!(check(&[(plain, "15053")], true).0.len(), 1);
        let (errors, _) = check(&[(plain, "15091"), (merged, "15091")], false);
        assert!(errors[0].contains("of ENVOY_SECURE_METRICS_PORT"), "{errors:?}");
        let (errors, warnings) = check(&[(plain, "-1")], false);
        assert_eq!((errors.len(), warnings.len()), (0, 1));
    }
}
