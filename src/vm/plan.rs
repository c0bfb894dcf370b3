//! What Istio's start script derives from the variables, as a value. Pure.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::accounts::{Account, Accounts};

/// Whom the agent runs as when nobody says otherwise.
pub(crate) const USER: &str = "istio-proxy";
/// Where the agent's log goes unless `ISTIO_LOG_DIR` says otherwise.
pub(crate) const LOGS: &str = "./var/log/istio";

/// What the machine says.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// Its name up to the first dot.
    pub hostname: String,
    /// Its first address that others can reach.
    pub address: Option<String>,
    /// Its users.
    pub accounts: Accounts,
    /// Who runs this.
    pub uid: u32,
}

/// What is to be done.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// The agent's whole environment.
    pub env: BTreeMap<String, String>,
    /// Where istiod is by the settings; it stands in `PROXY_CONFIG` behind what was given there.
    pub istiod: Option<String>,
    /// The agent's command line behind the program's name.
    pub words: Vec<String>,
    /// Whom to become; `None` when that is who runs this.
    pub become_user: Option<Account>,
    /// Flags of `istio-iptables`; `None` when rules are somebody else's business.
    pub rules: Option<Vec<String>>,
    /// Where standard output and errors go; `None` where they go now.
    pub logs: Option<PathBuf>,
    /// Odd things that stop nothing.
    pub warnings: Vec<String>,
}

/// Derives it.
///
/// # Errors
/// Every value that cannot be used, one line each.
pub(crate) fn plan(mut env: BTreeMap<String, String>, machine: &Machine) -> Result<Plan, Vec<String>> {
    let mut errors = Vec::new();
    let mut warnings = Vec::new();
    let or = |env: &BTreeMap<String, String>, name: &str, default: &str| {
        some(env, name).unwrap_or_else(|| default.to_owned())
    };
    let tproxy = or(&env, "ISTIO_INBOUND_INTERCEPTION_MODE", "") == "TPROXY";
    let user = or(&env, "EXEC_USER", USER);
    let account = account(&user, tproxy, machine, &mut errors);

    let namespace = or(&env, "ISTIO_NAMESPACE", "default");
    let system = or(&env, "ISTIO_SYSTEM_NAMESPACE", "istio-system");
    let pilot = some(&env, "PILOT_ADDRESS")
        .or_else(|| some(&env, "ISTIO_PILOT_PORT").map(|port| format!("istiod.{system}.svc:{port}")));
    let ca = some(&env, "CA_ADDR").or_else(|| pilot.clone()).unwrap_or(format!("istiod.{system}.svc:15012"));
    env.insert("CA_ADDR".into(), ca);
    for name in ["PROV_CERT", "OUTPUT_CERTS"] {
        env.entry(name.into()).or_insert_with(|| "./etc/certs".to_owned());
    }
    match some(&env, "ISTIO_SVC_IP").or_else(|| machine.address.clone()) {
        Some(address) if address.parse::<std::net::IpAddr>().is_ok() => {
            env.insert("INSTANCE_IP".into(), address);
        }
        Some(address) => errors.push(format!("ISTIO_SVC_IP={address}: this is no IP address")),
        None => warnings.push(
            "this machine has no address that others can reach, and ISTIO_SVC_IP names none".to_owned(),
        ),
    }
    old_settings(&mut env, pilot.as_deref(), &mut warnings);
    let config = some(&env, "PROXY_CONFIG").unwrap_or_else(|| {
        let service = or(&env, "ISTIO_SERVICE", "rawvm");
        let policy = or(&env, "ISTIO_CP_AUTH", "MUTUAL_TLS");
        format!("serviceCluster: {service}\ncontrolPlaneAuthPolicy: {policy}\n")
    });
    let config = match &pilot {
        Some(pilot) => format!("{}\ndiscoveryAddress: {pilot}\n", config.trim_end()),
        None => config,
    };
    env.insert("PROXY_CONFIG".into(), config);
    env.insert("POD_NAME".into(), some(&env, "POD_NAME").unwrap_or_else(|| machine.hostname.clone()));
    env.insert("POD_NAMESPACE".into(), namespace);

    let own_rules = or(&env, "ISTIO_CUSTOM_IP_TABLES", "") == "true";
    if machine.uid != 0 && !own_rules {
        errors.push(
            "packet redirection needs root: run this as root, or set ISTIO_CUSTOM_IP_TABLES=true if somebody else makes the rules"
                .to_owned(),
        );
    }
    let mut words = vec!["proxy".to_owned()];
    words.extend(or(&env, "ISTIO_AGENT_FLAGS", "").split_whitespace().map(str::to_owned));
    let Some(account) = account.filter(|_| errors.is_empty()) else { return Err(errors) };
    let rules = (!own_rules).then(|| exclusions(&env, &account, tproxy, machine));
    let become_user = (account.uid != machine.uid || tproxy).then_some(account);
    let place = env.get("ISTIO_LOG_DIR").map_or(LOGS, String::as_str);
    let logs = (become_user.is_some() && !place.is_empty()).then(|| PathBuf::from(place));
    Ok(Plan { env, istiod: pilot, words, become_user, rules, logs, warnings })
}

// Bash's ${X:-default}: an empty value is none.
fn some(env: &BTreeMap<String, String>, name: &str) -> Option<String> {
    env.get(name).filter(|value| !value.is_empty()).cloned()
}

// Names and values of old sidecar.env files.
fn old_settings(env: &mut BTreeMap<String, String>, pilot: Option<&str>, warnings: &mut Vec<String>) {
    if some(env, "ISTIO_LOCAL_EXCLUDE_PORTS").is_none()
        && let Some(ports) = some(env, "ISTIO_INBOUND_EXCLUDE_PORTS")
    {
        warnings.push(
            "ISTIO_INBOUND_EXCLUDE_PORTS is the old name of ISTIO_LOCAL_EXCLUDE_PORTS and is used as such: write the new one"
                .to_owned(),
        );
        env.insert("ISTIO_LOCAL_EXCLUDE_PORTS".into(), ports);
    }
    let secure = pilot.is_none_or(|pilot| pilot.ends_with(":15012"));
    if secure && some(env, "ISTIO_CP_AUTH").as_deref() == Some("NONE") {
        warnings.push(
            "ISTIO_CP_AUTH=NONE would mean plain text towards port 15012, which only speaks TLS: MUTUAL_TLS is used; take the \
             variable away"
                .to_owned(),
        );
        env.insert("ISTIO_CP_AUTH".into(), "MUTUAL_TLS".to_owned());
    }
}

// With TPROXY the agent must be root, and only its group tells its packets from others'.
fn account(name: &str, tproxy: bool, machine: &Machine, errors: &mut Vec<String>) -> Option<Account> {
    let Some(account) = machine.accounts.user(name) else {
        errors.push(machine.accounts.lack(name, " (EXEC_USER)"));
        return None;
    };
    if machine.uid != 0 && (account.uid != machine.uid || tproxy) {
        errors.push(format!("only root can become {name}: run this as root or as {name}"));
        return None;
    }
    if tproxy {
        return Some(Account { name: "root".to_owned(), uid: 0, gid: account.gid });
    }
    Some(account)
}

// Whose packets pass: the user's number and the group's own number, which on a machine differ often. Istio's script
// leaves both to a default that takes the user's number for the group's.
fn exclusions(
    env: &BTreeMap<String, String>,
    account: &Account,
    tproxy: bool,
    machine: &Machine,
) -> Vec<String> {
    // Replaced whole where rules of other settings are there, so traffic never passes beside Envoy.
    let mut flags = vec!["--reconcile".to_owned()];
    // Root is everybody's user; its packets must not all pass.
    let user = if tproxy { machine.accounts.user(USER).map(|user| user.uid) } else { Some(account.uid) };
    if some(env, "PROXY_UID").is_none() {
        flags.extend(user.map(|uid| format!("--proxy-uid={uid}")));
    }
    if some(env, "PROXY_GID").is_none() {
        flags.push(format!("--proxy-gid={}", account.gid));
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nistio-proxy:x:998:997::/var/lib/istio:/bin/false\n";

    fn planned(pairs: &[(&str, &str)], uid: u32) -> Result<Plan, Vec<String>> {
        let machine = Machine {
            hostname: "vm-1".into(),
            address: Some("10.0.0.7".into()),
            accounts: Accounts::parse(PASSWD),
            uid,
        };
        plan(pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(), &machine)
    }

    #[test]
    fn defaults_are_those_of_the_script() {
        let plan =
            planned(&[("ISTIO_NAMESPACE", "shop"), ("ISTIO_AGENT_FLAGS", "--domain x  --concurrency=2")], 0);
        let plan = plan.unwrap();
        for (name, value) in [
            ("CA_ADDR", "istiod.istio-system.svc:15012"),
            ("PROV_CERT", "./etc/certs"),
            ("OUTPUT_CERTS", "./etc/certs"),
            ("INSTANCE_IP", "10.0.0.7"),
            ("POD_NAME", "vm-1"),
            ("POD_NAMESPACE", "shop"),
            ("PROXY_CONFIG", "serviceCluster: rawvm\ncontrolPlaneAuthPolicy: MUTUAL_TLS\n"),
        ] {
            assert_eq!(plan.env[name], value, "{name}");
        }
        assert_eq!(plan.words, ["proxy", "--domain", "x", "--concurrency=2"]);
        assert_eq!(plan.become_user.unwrap().uid, 998);
        assert_eq!(plan.rules.unwrap(), ["--reconcile", "--proxy-uid=998", "--proxy-gid=997"]);
        assert_eq!(plan.logs.unwrap(), PathBuf::from("./var/log/istio"));
    }

    #[test]
    fn a_sidecar_env_of_0_8_means_what_it_meant_and_never_plain_text_by_accident() {
        let old = [("ISTIO_CP_AUTH", "NONE"), ("ISTIO_INBOUND_EXCLUDE_PORTS", "22,3306")];
        let plan = planned(&old, 0).unwrap();
        assert_eq!(plan.env["ISTIO_LOCAL_EXCLUDE_PORTS"], "22,3306");
        assert!(plan.env["PROXY_CONFIG"].contains("MUTUAL_TLS"), "{}", plan.env["PROXY_CONFIG"]);
        assert_eq!(plan.warnings.len(), 2, "{:?}", plan.warnings);
        // The port of plain text was asked for by name.
        let plan =
            planned(&[old[0], old[1], ("ISTIO_PILOT_PORT", "15010"), ("ISTIO_LOCAL_EXCLUDE_PORTS", "1")], 0);
        let plan = plan.unwrap();
        assert_eq!(plan.env["ISTIO_LOCAL_EXCLUDE_PORTS"], "1");
        assert!(plan.env["PROXY_CONFIG"].contains("controlPlaneAuthPolicy: NONE"));
        assert_eq!(plan.warnings, Vec::<String>::new());
    }

    #[test]
    fn given_values_beat_defaults_and_empty_ones_do_not() {
        let plan = planned(
            &[
                ("PILOT_ADDRESS", "pilot:15012"),
                ("CA_ADDR", ""),
                ("OUTPUT_CERTS", ""),
                ("PROXY_CONFIG", "concurrency: 1"),
                ("ISTIO_SVC_IP", "192.0.2.1"),
                ("PROXY_UID", "5"),
                ("ISTIO_LOG_DIR", ""),
            ],
            0,
        )
        .unwrap();
        assert_eq!(plan.env["CA_ADDR"], "pilot:15012");
        assert_eq!(plan.env["OUTPUT_CERTS"], "");
        assert_eq!(plan.env["PROXY_CONFIG"], "concurrency: 1\ndiscoveryAddress: pilot:15012\n");
        assert_eq!(plan.env["INSTANCE_IP"], "192.0.2.1");
        assert_eq!(plan.rules.unwrap(), ["--reconcile", "--proxy-gid=997"]);
        assert!(plan.logs.is_none());
    }

    #[test]
    fn tproxy_is_root_with_the_proxys_group() {
        let plan = planned(&[("ISTIO_INBOUND_INTERCEPTION_MODE", "TPROXY")], 0).unwrap();
        let account = plan.become_user.unwrap();
        assert_eq!((account.uid, account.gid), (0, 997));
        assert_eq!(plan.rules.unwrap(), ["--reconcile", "--proxy-uid=998", "--proxy-gid=997"]);
    }

    #[test]
    fn all_faults_are_told_together() {
        let errors =
            planned(&[("EXEC_USER", "nobody-here"), ("ISTIO_SVC_IP", "vm.example")], 1000).unwrap_err();
        assert_eq!(errors.len(), 3, "{errors:?}");
    }

    #[test]
    fn its_own_user_runs_it_without_root_when_rules_are_made_elsewhere() {
        let plan = planned(&[("ISTIO_CUSTOM_IP_TABLES", "true")], 998).unwrap();
        assert!(plan.become_user.is_none() && plan.rules.is_none() && plan.logs.is_none());
    }
}
