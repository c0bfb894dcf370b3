//! Prints rules as one atomic `nft` transaction over tables of family `inet`.

use super::model::{Match, OUR_CHAINS, Proto, Rule, Table, Target};

/// Tables of ours, whether or not the current options need them.
pub(crate) const TABLES: [(&str, Table); 3] =
    [("istio-proxy-nat", Table::Nat), ("istio-proxy-mangle", Table::Mangle), ("istio-proxy-raw", Table::Raw)];

/// `istio-output` for `ISTIO_OUTPUT`.
#[must_use]
pub(crate) fn chain_name(chain: &str) -> String {
    chain.to_ascii_lowercase().replace('_', "-")
}

fn base_chain(table: Table, chain: &str) -> &'static str {
    match (table, chain) {
        (Table::Nat, "PREROUTING") => "{ type nat hook prerouting priority -100 ; }",
        (Table::Nat, _) => "{ type nat hook output priority -100 ; }",
        (Table::Mangle, "PREROUTING") => "{ type filter hook prerouting priority -150 ; }",
        (Table::Mangle, _) => "{ type route hook output priority -150 ; }",
        (_, "PREROUTING") => "{ type filter hook prerouting priority -300 ; }",
        (..) => "{ type filter hook output priority -300 ; }",
    }
}

// nft reads left to right and prints what it was given; the order is the one of the Go agent's rules.
fn rank(m: &Match, zone: bool) -> u8 {
    match m {
        Match::In(_) | Match::Out(_) => 0,
        Match::Proto(_) => 1,
        Match::Src(_) | Match::Dst { .. } => {
            if zone {
                4
            } else {
                2
            }
        }
        Match::CtState(_) => 2,
        Match::Dport { .. } | Match::DportsNot(_) | Match::Sport(_) => 3,
        Match::Mark { .. } | Match::ConnMark(_) => 5,
        Match::Uid { .. } | Match::Gid { .. } => 6,
    }
}

/// Conditions and verdict of one rule in nft's words.
#[must_use]
pub(crate) fn expression(rule: &Rule) -> String {
    let zone = matches!(rule.target, Target::CtZone(_));
    let mut matches: Vec<&Match> = rule.matches.iter().collect();
    matches.sort_by_key(|m| rank(m, zone));
    let proto = matches
        .iter()
        .find_map(|m| if let Match::Proto(p) = m { Some(*p) } else { None })
        .unwrap_or(Proto::Tcp);
    let mut words: Vec<String> = matches.iter().map(|m| condition(m, proto)).collect();
    if rule.chain == "PREROUTING" && rule.matches == [Match::CtState("INVALID")] {
        words.insert(0, "meta l4proto tcp".to_owned());
    }
    words.push(verdict(rule));
    words.join(" ")
}

fn condition(m: &Match, proto: Proto) -> String {
    let neq = |not: &bool| if *not { "!= " } else { "" };
    let ip = |cidr: &str| if cidr.contains(':') { "ip6" } else { "ip" };
    let p = proto.name();
    match m {
        Match::In(name) => format!("iifname {}", interface(name)),
        Match::Out(name) => format!("oifname {}", interface(name)),
        Match::Proto(p) => format!("meta l4proto {}", p.name()),
        Match::Src(cidr) => format!("{} saddr {cidr}", ip(cidr)),
        Match::Dst { not, cidr } => format!("{} daddr {}{cidr}", ip(cidr), neq(not)),
        Match::Dport { not, port } => format!("{p} dport {}{port}", neq(not)),
        Match::DportsNot(ports) => format!("{p} dport != {{ {} }}", ports.join(", ")),
        Match::Sport(port) => format!("{p} sport {port}"),
        Match::Uid { not, id } => format!("skuid {}{id}", neq(not)),
        Match::Gid { not, id } => format!("skgid {}{id}", neq(not)),
        Match::CtState(state) => format!("ct state {}", state.to_ascii_lowercase()),
        Match::Mark { not, mark } => format!("meta mark {}{mark}", neq(not)),
        Match::ConnMark(mark) => format!("ct mark {mark}"),
    }
}

// Quoted: it may be named like a word of nft's language. `eth+` is every name that begins so, as for iptables.
fn interface(name: &str) -> String {
    name.strip_suffix('+').map_or_else(|| format!("\"{name}\""), |stem| format!("\"{stem}*\""))
}

fn verdict(rule: &Rule) -> String {
    match &rule.target {
        Target::Return => "counter return".to_owned(),
        Target::Drop => "counter drop".to_owned(),
        Target::Accept => "counter accept".to_owned(),
        Target::Jump(chain) => format!("counter jump {}", chain_name(chain)),
        Target::Redirect { port, .. } => format!("counter redirect to :{port}"),
        Target::SetMark(mark) => format!("counter meta mark set {mark}"),
        Target::Tproxy { mark, port } => {
            let v6 = rule.matches.iter().any(|m| matches!(m, Match::Dst { cidr, .. } if cidr.contains(':')));
            let ip = if v6 { "ip6" } else { "ip" };
            format!("tproxy {ip} to :{port} meta mark set {mark} counter accept")
        }
        Target::CtZone(zone) => format!("counter ct zone set {zone}"),
        Target::SaveMark => "counter ct mark set mark".to_owned(),
        Target::RestoreMark => "counter meta mark set ct mark".to_owned(),
    }
}

/// Rules as nft wants them: variants of both families side by side, doubles of a family-less verdict once.
#[must_use]
pub(crate) fn select(rules: &[Rule], ipv6: bool) -> Vec<&Rule> {
    let mut out: Vec<&Rule> = Vec::new();
    for rule in rules {
        if rule.family == Some(super::model::Family::V6) && !ipv6 {
            continue;
        }
        // A jump without address conditions made once for each family (DNS) is one rule here.
        let addressless = !rule.matches.iter().any(|m| matches!(m, Match::Src(_) | Match::Dst { .. }));
        let double = rule.family.is_some()
            && addressless
            && out.iter().any(|r| {
                r.table == rule.table
                    && r.chain == rule.chain
                    && r.matches == rule.matches
                    && r.target == rule.target
            });
        if !double {
            out.push(rule);
        }
    }
    out
}

/// The transaction that makes the kernel hold exactly `rules` in our tables: all three are deleted and
/// those with rules made anew, in one commit, so nothing of earlier options stays active.
#[must_use]
pub fn transaction(rules: &[Rule], ipv6: bool) -> String {
    let rules = select(rules, ipv6);
    let mut text = String::new();
    for (name, _) in TABLES {
        text.push_str(&format!("add table inet {name}\ndelete table inet {name}\n"));
    }
    for (name, table) in TABLES {
        let of_table: Vec<&Rule> = rules.iter().copied().filter(|r| r.table == table).collect();
        if of_table.is_empty() {
            continue;
        }
        text.push_str(&format!("add table inet {name}\n"));
        for (chain, base) in chains(&of_table) {
            let suffix = if base { format!(" {}", base_chain(table, chain)) } else { String::new() };
            text.push_str(&format!("add chain inet {name} {}{suffix}\n", chain_name(chain)));
        }
        append_rules(&mut text, name, &of_table);
    }
    text
}

/// The transaction that leaves nothing of ours behind.
#[must_use]
pub(crate) fn removal() -> String {
    TABLES.iter().map(|(name, _)| format!("add table inet {name}\ndelete table inet {name}\n")).collect()
}

fn chains(rules: &[&Rule]) -> Vec<(&'static str, bool)> {
    let mut found: Vec<(&'static str, bool)> = Vec::new();
    for chain in ["PREROUTING", "OUTPUT"] {
        if rules.iter().any(|r| r.chain == chain) {
            found.push((chain, true));
        }
    }
    let used = |chain: &str| {
        rules.iter().any(|r| r.chain == chain || matches!(r.target, Target::Jump(c) if c == chain))
    };
    found.extend(OUR_CHAINS.iter().filter(|c| used(c)).map(|c| (*c, false)));
    found
}

fn append_rules(text: &mut String, table: &str, rules: &[&Rule]) {
    let mut lengths: std::collections::HashMap<&str, u32> = std::collections::HashMap::new();
    for rule in rules {
        let length = lengths.entry(rule.chain).or_default();
        let chain = chain_name(rule.chain);
        let expression = expression(rule);
        // Positions count from 0 here; an insert beyond the end is an append.
        match rule.insert.map(|at| at - 1).filter(|at| at < length) {
            Some(at) => text.push_str(&format!("insert rule inet {table} {chain} index {at} {expression}\n")),
            None => text.push_str(&format!("add rule inet {table} {chain} {expression}\n")),
        }
        *length += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::iptables::rules::generate;
    use crate::iptables::settings::{Host, Settings, resolve};
    use crate::iptables::verify::Names;

    // nft lists conditions and rules in the order in which it was given them, and so do recordings.
    #[test]
    fn conditions_and_ranges_stand_in_the_order_of_the_go_agent() {
        let text = str::to_owned;
        let settings = Settings {
            interception_mode: text("TPROXY"),
            inbound_ports: text("80"),
            service_cidr: text("fd00::/8,10.0.0.0/8"),
            service_exclude_cidr: text("fd01::/16,10.1.0.0/16"),
            kube_virt_interfaces: text("net1"),
            tproxy_mark: text("1337"),
            tproxy_route_table: text("133"),
            loopback_cidr: text("127.0.0.1/32"),
            envoy_port: text("15001"),
            inbound_capture_port: text("15006"),
            inbound_tunnel_port: text("15008"),
            owner_groups: text("*"),
            ..Settings::default()
        };
        let host = Host {
            addresses: vec!["fd00:9::2".parse().unwrap()],
            resolv_conf: Ok(String::new()),
            names: Names::default(),
        };
        let rules = generate(&resolve(&settings, &host).unwrap().options);
        let text = transaction(&rules, true);
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}\n{text}"));
        at("meta l4proto tcp ct state related,established tcp dport 80 counter jump istio-divert");
        for (first, second) in [
            ("istio-output ip daddr 10.1.0.0/16", "istio-output ip6 daddr fd01::/16"),
            ("istio-output ip daddr 10.0.0.0/8", "istio-output ip6 daddr fd00::/8"),
            ("\"net1\" ip daddr 10.0.0.0/8", "\"net1\" ip6 daddr fd00::/8"),
        ] {
            assert!(at(first) < at(second), "{text}");
        }
    }
}
