//! Flags and variables of `istio-iptables`: either one line of complaint, or documents that hold one rule a
//! line and nothing that was smuggled in by a value.
#![no_main]

use std::net::IpAddr;

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::iptables::model::Family;
use pilot_agent::testing::iptables::settings::{Host, Settings, name_servers, resolve};
use pilot_agent::testing::iptables::verify::{self, Names};
use pilot_agent::testing::iptables::{nft, restore, rules, state};

type Texts = ([String; 8], [String; 8], (String, String, String), [bool; 5]);

fuzz_target!(|input: Texts| {
    let ([port, inbound, tunnel, uid, gid, mode, ports, exclude], more, (owners, without, resolv), on) =
        input;
    let [interfaces, cidr, not, out, never, virt, mark, loopback] = more;
    let settings = Settings {
        envoy_port: port,
        inbound_capture_port: inbound,
        inbound_tunnel_port: tunnel,
        proxy_uid: uid,
        proxy_gid: gid,
        interception_mode: if on[4] { "TPROXY".to_owned() } else { mode },
        inbound_ports: ports,
        local_exclude_ports: exclude,
        exclude_interfaces: interfaces,
        service_cidr: cidr,
        service_exclude_cidr: not,
        outbound_ports: out,
        outbound_ports_exclude: never,
        kube_virt_interfaces: virt,
        tproxy_mark: mark,
        tproxy_route_table: "133".to_owned(),
        loopback_cidr: if loopback.is_empty() { "127.0.0.1/32".to_owned() } else { loopback },
        owner_groups: owners,
        owner_groups_exclude: without,
        redirect_dns: on[0],
        capture_all_dns: on[1],
        drop_invalid: on[2],
        dual_stack: on[3],
        ..Settings::default()
    };
    let addresses: Vec<IpAddr> = vec![[10, 0, 0, 2].into(), [0xfd00, 0, 0, 0, 0, 0, 0, 2].into()];
    let _ = name_servers(&resolv);
    let host = Host { addresses, resolv_conf: Ok(resolv), names: Names::default() };
    let options = match resolve(&settings, &host) {
        Ok(resolved) => resolved.options,
        Err(reason) => return told(&reason.to_string()),
    };
    let rules = rules::generate(&options);
    for family in [Family::V4, Family::V6] {
        let count = restore::of_family(&rules, family).count();
        let document = restore::document(&rules, family);
        let lines = document.lines().filter(|line| line.starts_with("-A ") || line.starts_with("-I "));
        assert_eq!(lines.count(), count, "{document}");
        for rule in restore::of_family(&rules, family) {
            // One word in, one word out: a blank around an element is the only thing that gets lost.
            let (words, line) = (restore::words(rule), restore::words(rule).join(" "));
            assert_eq!(words.len(), state::split_words(&line).len(), "{line}");
        }
        let _ = verify::wanted(&rules, family);
    }
    let transaction = nft::transaction(&rules, options.ipv6);
    assert!(
        transaction.lines().all(|line| ["add ", "delete ", "insert "].iter().any(|w| line.starts_with(w)))
    );
});

fn told(reason: &str) {
    assert!(!reason.is_empty() && !reason.contains('\n'), "{reason:?}");
}
