//! Ports of Envoy's own listeners: none may be another's.

use super::env::{Key, Settings, kinds, var};
use super::mesh::Effective;

/// Envoy's metrics listeners behind mutual TLS: its own metrics, the merged ones.
pub(crate) const SECURE_PORTS: [Key<kinds::Int>; 2] =
    [var::ENVOY_SECURE_METRICS_PORT, var::ENVOY_SECURE_MERGED_METRICS_PORT];

/// What is wrong with the ports of Envoy's own listeners. Envoy refuses a bootstrap with such a port, in
/// words that do not name the variable.
pub(super) fn check(
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

    fn check(pairs: &[(&str, &str)], dns: bool) -> (Vec<String>, Vec<String>) {
        let (settings, _) = Settings::read(&Env::of(pairs));
        let mut warnings = Vec::new();
        (super::check(&settings, &Effective::new(), dns, &mut warnings), warnings)
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
