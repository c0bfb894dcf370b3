//! The flags and variables as given, and how options are derived from them and from the host. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::detect::Force;
use super::error::Setting;
use super::options::{Cidr, Dns, Mode, Options, Wild, split};
use super::verify::Names;

/// The values of all flags and variables, defaults applied, before any check.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// `-p`, 15001
    pub envoy_port: String,
    /// `-z`, 15006
    pub inbound_capture_port: String,
    /// `-e`, 15008
    pub inbound_tunnel_port: String,
    /// `-u`
    pub proxy_uid: String,
    /// `-g`
    pub proxy_gid: String,
    /// `-m`
    pub interception_mode: String,
    /// `-b`
    pub inbound_ports: String,
    /// `-d`
    pub local_exclude_ports: String,
    /// `-c`
    pub exclude_interfaces: String,
    /// `-i`
    pub service_cidr: String,
    /// `-x`
    pub service_exclude_cidr: String,
    /// `-q`
    pub outbound_ports: String,
    /// `-o`
    pub outbound_ports_exclude: String,
    /// `-k`
    pub kube_virt_interfaces: String,
    /// `-t`, 1337
    pub tproxy_mark: String,
    /// `-r`, 133
    pub tproxy_route_table: String,
    /// `-n`
    pub dry_run: bool,
    /// 15002
    pub probe_port: u16,
    /// 5 s
    pub probe_timeout: std::time::Duration,
    /// `--skip-rule-apply`
    pub skip_rule_apply: bool,
    /// `--run-validation`
    pub run_validation: bool,
    /// `--redirect-dns`
    pub redirect_dns: bool,
    /// `--capture-all-dns`
    pub capture_all_dns: bool,
    /// `--drop-invalid`
    pub drop_invalid: bool,
    /// `--dual-stack`
    pub dual_stack: bool,
    /// `--network-namespace`
    pub network_namespace: String,
    /// `--cni-mode`
    pub cni_mode: bool,
    /// `--reconcile`
    pub reconcile: bool,
    /// `--cleanup-only`
    pub cleanup_only: bool,
    /// `--force-apply`
    pub force_apply: bool,
    /// `--native-nftables`
    pub native_nftables: bool,
    /// `--force-iptables-binary`
    pub force_iptables_binary: String,
    /// `ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR`, 127.0.0.1/32
    pub loopback_cidr: String,
    /// `ISTIO_OUTBOUND_OWNER_GROUPS`, `*`
    pub owner_groups: String,
    /// `ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE`
    pub owner_groups_exclude: String,
    /// `ENVOY_USER`, istio-proxy
    pub envoy_user: String,
    /// `DRY_RUN_FILE_PATH`
    pub dry_run_file: String,
    /// Not of a flag: a clean-up (`vm clean`) that goes on without an address and without name servers, since it takes away
    /// the rules of every family whatever the host has
    pub whatever_host: bool,
}

/// What the host says.
#[derive(Debug, Clone)]
pub struct Host {
    /// Addresses of all interfaces in the kernel's order.
    pub addresses: Vec<IpAddr>,
    /// `/etc/resolv.conf`, or why it cannot be read.
    pub resolv_conf: Result<String, String>,
    /// Users, groups, services.
    pub names: Names,
}

/// Options, the address family of the host, and warnings to log.
#[derive(Debug, Clone)]
pub struct Resolved {
    /// What the rules are made of.
    pub options: Options,
    /// The first usable address.
    pub host_ip: IpAddr,
    /// Which programs are demanded.
    pub force: Option<Force>,
    /// The lists of users and of groups that are the proxy's own, as given or by default.
    pub proxy_ids: [String; 2],
    /// Lines for the log.
    pub warnings: Vec<String>,
}

/// Names of more owner groups than this are refused, as the Go agent does.
const MAX_OWNER_GROUPS: usize = 64;

/// Derives the options.
///
/// # Errors
/// One line that names the setting, its value and what is wrong with it.
pub fn resolve(s: &Settings, host: &Host) -> Result<Resolved, Setting> {
    let mut warnings = Vec::new();
    let (host_ip, ipv6) = match own_address(&host.addresses, s.dual_stack) {
        Err(Setting::NoAddress) if s.whatever_host => (Ipv4Addr::UNSPECIFIED.into(), false),
        other => other?,
    };
    let uid = if s.proxy_uid.is_empty() {
        host.names.users.get(&s.envoy_user).cloned().unwrap_or_else(|| "1337".to_owned())
    } else {
        s.proxy_uid.clone()
    };
    let gid = if s.proxy_gid.is_empty() { uid.clone() } else { s.proxy_gid.clone() };
    let dns = dns(s, &host.resolv_conf, &mut warnings)?;
    let owner_include = Wild::parse(&s.owner_groups);
    if let Wild::List(groups) = &owner_include
        && groups.len() > MAX_OWNER_GROUPS
    {
        return Err(Setting::OwnerGroups { most: MAX_OWNER_GROUPS, groups: groups.clone() });
    }
    let force = match s.force_iptables_binary.as_str() {
        "" => None,
        "legacy" => Some(Force::Legacy),
        "nft" => Some(Force::Nft),
        other => return Err(Setting::Binary(other.to_owned())),
    };
    let loopback_v4 = loopback(&s.loopback_cidr)?;
    let [outbound_exclude, outbound_include] = ranges(s)?;
    let options = Options {
        outbound_port: s.envoy_port.clone(),
        inbound_port: s.inbound_capture_port.clone(),
        tunnel_port: s.inbound_tunnel_port.clone(),
        proxy_uids: split(&uid),
        proxy_gids: split(&gid),
        mode: if s.interception_mode == "TPROXY" { Mode::Tproxy } else { Mode::Redirect },
        tproxy_mark: s.tproxy_mark.clone(),
        tproxy_table: s.tproxy_route_table.clone(),
        native: s.native_nftables,
        captures_inbound: !s.inbound_ports.is_empty(),
        inbound_include: Wild::parse(&s.inbound_ports),
        inbound_exclude: split(&s.local_exclude_ports),
        owner_include,
        owner_exclude: split(&s.owner_groups_exclude),
        outbound_include,
        outbound_exclude: outbound_exclude.unwrap_or_default(),
        outbound_ports: split(&s.outbound_ports),
        outbound_ports_exclude: split(&s.outbound_ports_exclude),
        kube_virt: split(&s.kube_virt_interfaces),
        exclude_interfaces: split(&s.exclude_interfaces),
        dns,
        drop_invalid: s.drop_invalid,
        loopback_v4,
        ipv6,
    };
    match one_word_each(&options) {
        // No rule is made of them.
        _ if s.skip_rule_apply => {}
        // A clean-up takes away what the kernel shows, in the kernel's words.
        Err(reason) if s.dry_run || s.cleanup_only => warnings.push(reason.to_string()),
        checked => checked?,
    }
    Ok(Resolved { options, host_ip, force, proxy_ids: [uid, gid], warnings })
}

// `-x` and `-i`, `None` for `*`. The ranges of IPv4 first: native rules of both families stand in one chain, and so does
// the Go agent write them. Where no rules are made nothing reads them.
fn ranges(s: &Settings) -> Result<[Option<Vec<Cidr>>; 2], Setting> {
    if s.skip_rule_apply {
        return Ok([None, None]);
    }
    if s.service_exclude_cidr == "*" {
        return Err(Setting::ExcludesAll);
    }
    let read = |text: &str| -> Result<Vec<Cidr>, Setting> {
        let mut all = split(text).iter().map(|c| Cidr::parse(c)).collect::<Result<Vec<_>, _>>()?;
        all.sort_by_key(Cidr::is_v6);
        Ok(all)
    };
    let exclude = read(&s.service_exclude_cidr)?;
    let include = if s.service_cidr == "*" { None } else { Some(read(&s.service_cidr)?) };
    Ok([Some(exclude), include])
}

// iptables-restore splits its lines at blanks, so an element with a blank inside would smuggle further
// conditions into the rule; and to nft an operator before a number turns a condition round. A blank around
// an element does no harm and is accepted, as ever.
fn one_word_each(o: &Options) -> Result<(), Setting> {
    const OPERATORS: &[char] = &[
        '"', '\'', '\\', ';', '{', '}', '(', ')', '[', ']', '!', '<', '>', '=', '#', '$', '&', '|', '^', '~',
    ];
    let one = |text: &str| vec![text.to_owned()];
    let wild = |w: &Wild| if let Wild::List(l) = w { l.clone() } else { Vec::new() };
    let mut settings = vec![
        ("envoy-port", one(&o.outbound_port)),
        ("inbound-capture-port", one(&o.inbound_port)),
        ("inbound-tunnel-port", one(&o.tunnel_port)),
        ("proxy-uid", o.proxy_uids.clone()),
        ("proxy-gid", o.proxy_gids.clone()),
        ("istio-inbound-ports", wild(&o.inbound_include)),
        ("istio-local-exclude-ports", o.inbound_exclude.clone()),
        ("ISTIO_OUTBOUND_OWNER_GROUPS", wild(&o.owner_include)),
        ("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", o.owner_exclude.clone()),
        ("istio-outbound-ports", o.outbound_ports.clone()),
        ("istio-local-outbound-ports-exclude", o.outbound_ports_exclude.clone()),
        ("kube-virt-interfaces", o.kube_virt.clone()),
        ("istio-exclude-interfaces", o.exclude_interfaces.clone()),
    ];
    if o.mode == Mode::Tproxy {
        settings.push(("istio-inbound-tproxy-mark", one(&o.tproxy_mark)));
        settings.push(("istio-inbound-tproxy-route-table", one(&o.tproxy_table)));
    }
    for (name, value) in settings.iter().flat_map(|(name, values)| values.iter().map(move |v| (*name, v))) {
        let word = value.trim();
        let broken = value.contains(|c: char| c.is_control() && c != '\t');
        if broken || word.is_empty() || word.contains(char::is_whitespace) || word.contains(OPERATORS) {
            return Err(Setting::Word { name, value: value.clone() });
        }
    }
    Ok(())
}

// The first usable address decides; with dual stack the walk goes on to the first IPv6 one.
fn own_address(addresses: &[IpAddr], dual_stack: bool) -> Result<(IpAddr, bool), Setting> {
    let mut first = None;
    let mut ipv6 = false;
    for address in addresses.iter().map(IpAddr::to_canonical).filter(usable) {
        let address = &address;
        first.get_or_insert(*address);
        ipv6 = address.is_ipv6();
        if !dual_stack || ipv6 {
            break;
        }
    }
    first.map(|ip| (ip, ipv6)).ok_or(Setting::NoAddress)
}

fn usable(address: &IpAddr) -> bool {
    match address {
        IpAddr::V4(a) => {
            let link_local_multicast = a.octets()[..3] == [224, 0, 0];
            !(a.is_loopback() || a.is_link_local() || link_local_multicast || a.is_unspecified())
        }
        IpAddr::V6(a) => {
            let link_local_multicast = a.octets()[0] == 0xff && a.octets()[1] & 0x0f == 0x02;
            !(a.is_loopback() || a.is_unicast_link_local() || link_local_multicast)
        }
    }
}

fn loopback(text: &str) -> Result<Cidr, Setting> {
    let cidr = Cidr::parse(text).map_err(|source| Setting::LoopbackCidr { text: text.to_owned(), source })?;
    if cidr.is_v6() || !cidr.is_loopback() {
        return Err(Setting::Loopback { text: text.to_owned(), found: cidr.addr });
    }
    if !(8..=32).contains(&cidr.len) {
        return Err(Setting::LoopbackMask { text: text.to_owned(), found: cidr.len });
    }
    Ok(cidr)
}

fn dns(s: &Settings, resolv: &Result<String, String>, warnings: &mut Vec<String>) -> Result<Dns, Setting> {
    if !s.redirect_dns {
        return Ok(Dns::Off);
    }
    if s.capture_all_dns {
        return Ok(Dns::All);
    }
    let text = match resolv {
        Err(_) if s.whatever_host => return Ok(Dns::All),
        Err(e) => return Err(Setting::ResolvConf(e.clone())),
        Ok(text) => text,
    };
    let (v4, v6) = name_servers(text);
    if v4.is_empty() && v6.is_empty() {
        warnings.push(
            "DNS capture is switched off: /etc/resolv.conf names no server; --capture-all-dns needs none"
                .to_owned(),
        );
        return Ok(Dns::Off);
    }
    Ok(Dns::Servers { v4, v6 })
}

/// The name servers by family; unreadable ones are skipped, a zone is cut off, repeats stay.
#[must_use]
pub fn name_servers(text: &str) -> (Vec<Ipv4Addr>, Vec<Ipv6Addr>) {
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("nameserver") {
            continue;
        }
        let address = words.next().unwrap_or_default();
        let read = match address.split_once('%') {
            None => address.parse(),
            Some((_, "")) => continue,
            Some((address, _)) => address.parse().map(IpAddr::V6),
        };
        match read {
            Ok(IpAddr::V4(a)) => v4.push(a),
            Ok(IpAddr::V6(a)) => v6.push(a),
            Err(_) => {}
        }
    }
    (v4, v6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Host {
        Host {
            addresses: vec!["10.0.0.2".parse().unwrap()],
            resolv_conf: Ok(String::new()),
            names: Names::default(),
        }
    }

    #[test]
    fn servers_are_read_as_the_go_agent_does() {
        let (v4, v6) = name_servers(
            "# c\nnameserver 10.0.0.1 # x\nnameserver fe80::1%eth0\nnameserver 10.0.0.5%eth0\nnameserver fe80::2%\nnameserver nonsense\nnameserver\n  \
             nameserver 10.0.0.2\nNAMESERVER 10.0.0.4\n",
        );
        assert_eq!(v4, ["10.0.0.1".parse::<Ipv4Addr>().unwrap(), "10.0.0.2".parse().unwrap()]);
        assert_eq!(v6, ["fe80::1".parse::<Ipv6Addr>().unwrap()]);
    }

    #[test]
    fn settings_that_no_rule_is_made_of_are_not_judged() {
        let text = str::to_owned;
        let settings = Settings {
            loopback_cidr: text("127.0.0.1/32"),
            service_cidr: text("10.0.0.1"),
            service_exclude_cidr: text("*"),
            inbound_ports: text("80 81"),
            proxy_uid: text("1337,"),
            ..Settings::default()
        };
        let host = host();
        assert_eq!(resolve(&settings, &host).unwrap_err(), Setting::ExcludesAll);
        let settings = Settings { skip_rule_apply: true, ..settings };
        let resolved = resolve(&settings, &host).unwrap();
        assert_eq!(resolved.proxy_ids, ["1337,", "1337,"], "shown as given");
        let settings = Settings { loopback_cidr: String::new(), ..settings };
        assert!(resolve(&settings, &host).is_err(), "this is judged in any case");
    }

    #[test]
    fn a_clean_up_goes_on_with_words_that_no_rule_may_be_made_of() {
        let settings = Settings {
            loopback_cidr: "127.0.0.1/32".to_owned(),
            inbound_ports: "80 81".to_owned(),
            inbound_capture_port: "15006".to_owned(),
            ..Settings::default()
        };
        let refused = resolve(&settings, &host()).unwrap_err();
        let settings = Settings { cleanup_only: true, ..settings };
        assert_eq!(resolve(&settings, &host()).unwrap().warnings, [refused.to_string()]);
    }

    #[test]
    fn owner_groups_stand_in_one_rule_as_long_as_it_loads() {
        let in_one = |groups: u32, native| {
            let settings = Settings {
                loopback_cidr: "127.0.0.1/32".to_owned(),
                owner_groups: (0..groups).map(|n| n.to_string()).collect::<Vec<_>>().join(","),
                native_nftables: native,
                dry_run: true,
                ..Settings::default()
            };
            let host = host();
            let rules = crate::iptables::rules::generate(&resolve(&settings, &host).unwrap().options);
            rules.iter().filter(|rule| rule.chain == "ISTIO_OUTPUT_OWNER").count() == 0
        };
        for (groups, iptables, native) in
            [(49, true, true), (50, false, true), (63, false, true), (64, false, false)]
        {
            assert_eq!((in_one(groups, false), in_one(groups, true)), (iptables, native), "{groups}");
        }
    }

    #[test]
    fn a_list_that_names_nothing_is_not_empty() {
        let of = |ports: &str| Settings {
            loopback_cidr: "127.0.0.1/32".to_owned(),
            inbound_ports: ports.to_owned(),
            dry_run: true,
            ..Settings::default()
        };
        let host = host();
        let jumps = |ports| {
            let rules = crate::iptables::rules::generate(&resolve(&of(ports), &host).unwrap().options);
            rules.iter().filter(|r| r.chain == "PREROUTING").count()
        };
        assert_eq!([jumps(""), jumps(","), jumps("80")], [0, 1, 1]);
    }

    #[test]
    fn the_first_usable_address_decides_unless_dual_stack() {
        let list: Vec<IpAddr> =
            ["127.0.0.1", "169.254.1.1", "10.0.0.1", "fd00::1"].map(|a| a.parse().unwrap()).into();
        assert_eq!(own_address(&list, false), Ok((list[2], false)));
        assert_eq!(own_address(&list, true), Ok((list[2], true)));
        assert_eq!(own_address(&list[3..], false), Ok((list[3], true)));
        assert!(own_address(&list[..2], true).is_err());
    }
}
