//! One run of `istio-iptables`, from settings to exit status.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use super::alone;
use super::apply::{self, Others};
use super::error::{Error, Setting};
use super::exec::Ending;
use super::hold::Hold;
use super::net::{Side, Things, Tproxy};
use super::options::{Mode, Options};
use super::run::{Real, Sandbox};
use super::settings::{self, Host, Resolved, Settings};
use super::verify::Names;
use super::{dry, native, probe, rules, show};
use crate::base::netlink::Netlink;

/// Everything was done.
pub(crate) const OK: u8 = 0;
/// A setting, a program or the kernel stood in the way.
pub(crate) const FAILED: u8 = 1;
/// The validation did not succeed.
pub(crate) const NOT_VALIDATED: u8 = 126;

/// Runs it; gives the exit status. `path` is the `PATH`, `env` prints the environment block.
pub(crate) async fn run(settings: &Settings, path: &str, env: &BTreeMap<String, String>) -> u8 {
    match programme(settings, path, env).await {
        Ok(code) => code,
        Err(reason) => {
            tracing::error!("{reason}");
            eprintln!("Error: {reason}");
            FAILED
        }
    }
}

async fn programme(settings: &Settings, path: &str, env: &BTreeMap<String, String>) -> Result<u8, Error> {
    show::environment(env, settings.native_nftables);
    let host = host();
    let resolved = settings::resolve(settings, &host)?;
    resolved.warnings.iter().for_each(|w| tracing::warn!("{w}"));
    show::config(settings, &resolved);
    let mut hold = Hold::begin().map_err(Error::Signals)?;
    if !settings.skip_rule_apply {
        let mut wanted = wanted(&resolved.options);
        if !settings.dry_run && !settings.cleanup_only {
            // Before anything is changed.
            wanted = Ok(wanted?);
        }
        let rules = rules::generate(&resolved.options);
        let sandbox = settings.cni_mode.then(|| Sandbox { lock: settings.network_namespace.clone() });
        let ending = Ending::watched().map_err(Error::Signals)?;
        let _alone = if settings.dry_run { None } else { Some(alone::begin(&ending).await?) };
        let mut runner = Real { path: path.to_owned(), sandbox, ending };
        let mut others = Others::default();
        if settings.native_nftables {
            others = native::run(&mut runner, settings, &resolved, &rules, &host.names)?;
        } else if settings.dry_run {
            dry::run(settings, &resolved, &rules);
        } else {
            others = apply::run(&mut runner, settings, &resolved, &rules, &host.names)?;
            others.gone |= native::remove_leftovers(&mut runner);
        }
        if settings.dry_run {
            tracing::info!("dry run: addresses, policy rules and routes stay as they are");
        } else {
            beside(settings, &resolved.options, wanted, others)?;
        }
    }
    if !settings.run_validation {
        return Ok(OK);
    }
    tokio::select! {
        result = validate(settings, &resolved) => result,
        signal = hold.asked() => Err(Error::Ended(signal)),
    }
}

fn number(what: &'static str, text: &str) -> Result<u32, Setting> {
    text.parse().map_err(|source| Setting::Number { what, text: text.to_owned(), source })
}

// What has to stand beside the rules.
fn wanted(o: &Options) -> Result<Things, Setting> {
    let captures = o.mode == Mode::Tproxy && o.captures_inbound;
    let v4 = if captures {
        let table = number("InboundTProxyRouteTable", &o.tproxy_table)?;
        Some(Tproxy { table, mark: number("InboundTProxyMark", &o.tproxy_mark)? })
    } else {
        None
    };
    Ok(Things { address: o.ipv6, v4, v6: v4.filter(|_| o.ipv6) })
}

// Addresses, policy rules and routes: added with the rules; taken away by a clean-up, and by whatever takes
// away the rules of settings that wanted them. What rules that are left standing need stays.
fn beside(
    settings: &Settings,
    o: &Options,
    wanted: Result<Things, Setting>,
    mut others: Others,
) -> Result<(), Error> {
    let wanted = wanted?;
    let removes = settings.cleanup_only || settings.reconcile || others.gone;
    if !removes && wanted == Things::default() {
        return Ok(());
    }
    let side = Side::open().map_err(|source| Error::Routes { step: "netlink", source })?;
    let wanted =
        if settings.cleanup_only { Things { address: others.v6, ..Things::default() } } else { wanted };
    if !settings.cleanup_only {
        side.add(wanted)?;
    }
    if removes && !wanted.address {
        side.remove_address();
    }
    if removes && !others.tproxy {
        let named = number("InboundTProxyRouteTable", &o.tproxy_table).ok();
        others.marks.extend(number("InboundTProxyMark", &o.tproxy_mark));
        side.remove_tproxy(named, &others.marks, wanted);
    }
    Ok(())
}

async fn validate(settings: &Settings, resolved: &Resolved) -> Result<u8, Error> {
    let o = &resolved.options;
    let config = probe::Config {
        host_ip: resolved.host_ip,
        ports: [o.outbound_port.clone(), o.inbound_port.clone()],
        probe_port: settings.probe_port,
        limit: settings.probe_timeout,
    };
    match probe::run(&config).await {
        Ok(()) => Ok(OK),
        Err(reason) => {
            tracing::error!("{reason}");
            tracing::error!(
                "the pod's traffic is not redirected to Envoy: was the istio-cni node agent ready when the pod \
                 started? Is this container's user one of the proxy's ({})? Delete the pod to have it set up anew",
                o.proxy_uids.join(",")
            );
            eprintln!("Error: {reason}");
            Ok(NOT_VALIDATED)
        }
    }
}

/// What this host says: addresses, name servers, names of users and services.
pub(crate) fn host() -> Host {
    let addresses = Netlink::open().and_then(|n| n.addresses()).map_or_else(
        |e| {
            tracing::warn!("the addresses of the network interfaces cannot be read: {e}");
            Vec::new()
        },
        |list| list.into_iter().map(|(_, ip)| ip).collect::<Vec<IpAddr>>(),
    );
    let resolv_conf = read("/etc/resolv.conf").map_err(|e: io::Error| e.to_string());
    Host { addresses, resolv_conf, names: names(read) }
}

// A comment, or a person's name, may be in another encoding.
fn read(path: &str) -> io::Result<String> {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

fn names(read: impl Fn(&str) -> io::Result<String>) -> Names {
    // name:x:number:… in both files; of a name that stands there twice the first line counts.
    let table = |path: &str| -> BTreeMap<String, String> {
        let text = read(path).unwrap_or_default();
        let entry = |line: &str| {
            let mut fields = line.split(':');
            Some((fields.next()?.to_owned(), fields.nth(1)?.to_owned()))
        };
        text.lines().rev().filter_map(entry).collect()
    };
    let services = read("/etc/services").unwrap_or_default();
    let services = services.lines().filter_map(|line| {
        let mut words = line.split('#').next()?.split_whitespace();
        let (name, port) = (words.next()?, words.next()?.split('/').next()?);
        Some((name.to_owned(), port.to_owned()))
    });
    Names { users: table("/etc/passwd"), groups: table("/etc/group"), services: services.collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_the_c_library_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("passwd");
        let lines = b"root:x:0:0::/:\nistio-proxy:x:1500:1500:J\xfcrgen:/:\nistio-proxy:x:1501:1501::/:\n";
        std::fs::write(&file, lines).unwrap();
        let names = names(|_| read(file.to_str().unwrap()));
        assert_eq!(names.users["root"], "0");
        assert_eq!(names.users["istio-proxy"], "1500", "the first line counts");
    }
}
