//! Golden files: for each mode the documents of both families and the nft transaction, so that a change
//! of any rule or of their order is seen as a difference of text.

use std::path::PathBuf;

use super::generate;
use crate::iptables::model::Family;
use crate::iptables::settings::{Host, Settings, resolve};
use crate::iptables::verify::Names;
use crate::iptables::{nft, restore};

/// What the flags say when nothing is said, for user 1337.
fn plain() -> Settings {
    let text = str::to_owned;
    Settings {
        envoy_port: text("15001"),
        inbound_capture_port: text("15006"),
        inbound_tunnel_port: text("15008"),
        proxy_uid: text("1337"),
        tproxy_mark: text("1337"),
        tproxy_route_table: text("133"),
        loopback_cidr: text("127.0.0.1/32"),
        owner_groups: text("*"),
        ..Settings::default()
    }
}

/// What the injector asks for.
fn sidecar() -> Settings {
    Settings {
        interception_mode: "REDIRECT".to_owned(),
        inbound_ports: "*".to_owned(),
        local_exclude_ports: "15090,15021,15020".to_owned(),
        service_cidr: "*".to_owned(),
        ..plain()
    }
}

fn tproxy() -> Settings {
    Settings { interception_mode: "TPROXY".to_owned(), ..sidecar() }
}

const V4: &[&str] = &["10.0.0.2"];
const V6: &[&str] = &["fd00::2"];

/// One golden file: its name, the pod's addresses, its resolvers, and what was asked for.
struct Case(&'static str, &'static [&'static str], &'static str, Settings);

fn cases() -> Vec<Case> {
    let text = str::to_owned;
    let one = "nameserver 10.96.0.10\n";
    vec![
        Case("nothing-asked-for", V4, one, plain()),
        Case("sidecar", V4, one, sidecar()),
        Case("sidecar-v6", V6, one, sidecar()),
        Case("inbound-ports", V4, one, Settings { inbound_ports: text("80,8000:8010"), ..plain() }),
        Case(
            "outbound-ranges",
            V6,
            one,
            Settings {
                service_cidr: text("10.1.2.3/8,fd00::/8"),
                service_exclude_cidr: text("10.9.0.0/16,fd01::/16"),
                outbound_ports: text("27017"),
                outbound_ports_exclude: text("9999"),
                ..plain()
            },
        ),
        Case("loopback-range-captured", V4, one, Settings { service_cidr: text("127.1.2.3/32"), ..plain() }),
        Case("wider-loopback", V4, one, Settings { loopback_cidr: text("127.0.0.0/8"), ..tproxy() }),
        Case(
            "interfaces",
            V4,
            one,
            Settings {
                exclude_interfaces: text("eth9"),
                kube_virt_interfaces: text("net1,net2"),
                ..sidecar()
            },
        ),
        Case(
            "interfaces-and-ranges",
            V4,
            one,
            Settings {
                kube_virt_interfaces: text("net1,net2"),
                service_cidr: text("10.0.0.0/8,172.16.0.0/12"),
                ..sidecar()
            },
        ),
        Case("users", V4, one, Settings { proxy_uid: text("1337,0"), proxy_gid: text("1338"), ..sidecar() }),
        Case("owners-captured", V4, one, Settings { owner_groups: text("java,202"), ..sidecar() }),
        Case("owners-left-alone", V4, one, Settings { owner_groups_exclude: text("888,ftp"), ..sidecar() }),
        Case("no-owner-captured", V4, one, Settings { owner_groups: String::new(), ..sidecar() }),
        Case("dns", V4, one, Settings { redirect_dns: true, ..sidecar() }),
        Case(
            "dns-both-families",
            V6,
            "nameserver 10.96.0.10\nnameserver fd00::10\n",
            Settings { redirect_dns: true, ..sidecar() },
        ),
        Case("dns-v4-resolver-on-v6", V6, one, Settings { redirect_dns: true, ..sidecar() }),
        Case(
            "dns-v6-resolver-on-v4",
            V4,
            "nameserver fd00::10\n",
            Settings { redirect_dns: true, ..sidecar() },
        ),
        Case("dns-all", V4, one, Settings { redirect_dns: true, capture_all_dns: true, ..sidecar() }),
        Case("drop-invalid", V4, one, Settings { drop_invalid: true, ..sidecar() }),
        Case("tproxy", V4, one, tproxy()),
        Case("tproxy-v6", V6, one, tproxy()),
        Case("tproxy-ports", V4, one, Settings { inbound_ports: text("80,443"), ..tproxy() }),
        Case("tproxy-nothing-inbound", V4, one, Settings { inbound_ports: String::new(), ..tproxy() }),
        Case(
            "tproxy-interfaces",
            V4,
            one,
            Settings { exclude_interfaces: text("eth9"), drop_invalid: true, ..tproxy() },
        ),
        Case(
            "other-ports-and-mark",
            V4,
            one,
            Settings {
                envoy_port: text("25001"),
                inbound_capture_port: text("25006"),
                inbound_tunnel_port: text("25008"),
                tproxy_mark: text("7"),
                ..tproxy()
            },
        ),
    ]
}

fn made(case: &Case) -> String {
    let Case(_, addresses, resolv_conf, settings) = case;
    let host = Host {
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
        resolv_conf: Ok((*resolv_conf).to_owned()),
        names: Names::default(),
    };
    let options = resolve(settings, &host).unwrap().options;
    let rules = generate(&options);
    let mut text = format!("# iptables-restore\n{}", restore::document(&rules, Family::V4));
    if options.ipv6 {
        text += &format!("\n# ip6tables-restore\n{}", restore::document(&rules, Family::V6));
    }
    text + &format!("\n# nft\n{}", nft::transaction(&rules, options.ipv6))
}

fn file(case: &Case) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("testdata/golden/iptables/{}.rules", case.0))
}

#[test]
#[expect(clippy::disallowed_methods, reason = "UPDATE_GOLDEN says to write instead of to compare")]
fn rules_equal_the_golden_files() {
    for case in cases() {
        let made = made(&case);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(file(&case), &made).unwrap();
        }
        let wanted = std::fs::read_to_string(file(&case)).unwrap_or_default();
        let first = made.lines().zip(wanted.lines()).find(|(a, b)| a != b);
        assert!(
            made == wanted,
            "{}: {first:?}; if that is meant, run with UPDATE_GOLDEN=1 and look at the change",
            case.0
        );
    }
}

#[test]
fn every_golden_file_has_a_case() {
    let folder = file(&cases()[0]).parent().unwrap().to_owned();
    let files = std::fs::read_dir(folder).unwrap().count();
    assert_eq!(files, cases().len());
}
