//! Capture rules: there, whole, and whether packets go through them. Read only, and only as far as this user may.

use super::Check;
use crate::config::parts::capture::Capture;
use crate::iptables::look::{self, Found, Set};
use crate::iptables::run::Real;

const NAME: &str = "capture";

pub(super) fn checks(config: Capture) -> Vec<Check> {
    if let Some(why) = config.none {
        return vec![Check::skip(NAME, why)];
    }
    let mut runner = Real { path: config.path, sandbox: None, ending: Default::default() };
    let found = look::look(&mut runner);
    judge(&found, config.in_pod)
}

fn judge(found: &Found, in_pod: bool) -> Vec<Check> {
    if let Some(set) = found.sets.iter().find(|set| set.guarded) {
        let said = format!(
            "a run of istio-iptables was cut in the middle: all traffic is blocked ({})",
            set.program
        );
        return vec![Check::warn(
            NAME,
            said,
            "run pilot-agent istio-iptables again with its flags; it finishes the work",
        )];
    }
    if found.sets.is_empty() && found.tables.is_empty() {
        if !found.unread.is_empty() {
            let why = found.unread.join("; ");
            return vec![Check::skip(NAME, format!("the rules cannot be read by this user: {why}"))];
        }
        if in_pod {
            let hint = "was istio-init or istio-cni at work when the pod started? Without rules the application's traffic bypasses the proxy";
            return vec![Check::warn(NAME, "there are no capture rules", hint)];
        }
        return vec![Check::skip(
            NAME,
            "there are no capture rules: nothing is sent through the proxy by itself",
        )];
    }
    let mut out = Vec::new();
    for set in &found.sets {
        out.push(of_set(set));
    }
    if !found.tables.is_empty() {
        out.push(Check::ok(NAME, format!("nftables: {}", found.tables.join(", "))));
    }
    out
}

fn of_set(set: &Set) -> Check {
    let Set { program, rules, jumps, packets, .. } = set;
    if jumps.is_empty() {
        let said = format!("{program}: {rules} rules of ours, and nothing leads to them");
        return Check::warn(NAME, said, "run pilot-agent istio-iptables again, with --reconcile");
    }
    let said =
        format!("{program}: {rules} rules, entered from {}, {packets} packets so far", jumps.join(", "));
    Check::ok(NAME, said)
}
