//! Addresses, policy rules and routes beside the rules, over netlink (no `ip` program needed).
//!
//! The Go agent adds the policy rule anew at each run, never removes any of it, and adds it even when it
//! was asked to clean up. Here each thing is looked for first, and a clean-up takes away what an apply
//! with the same settings adds.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::base::netlink::Netlink;

/// The address Envoy's inbound pass-through connects from on IPv6.
const PASSTHROUGH_V6: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);
/// The loopback device is the first of every network namespace.
const LO: u32 = 1;
/// `EEXIST`, `ESRCH`, `EADDRNOTAVAIL`, `ENOENT`: what is to be there is, or what is to go is gone.
const ALREADY: [i32; 1] = [17];
const GONE: [i32; 3] = [2, 3, 99];

/// What is needed beside the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// IPv6 rules are made: `::6` on the loopback device.
    pub ipv6: bool,
    /// TPROXY captures something: mark and table of the policy rule and route.
    pub tproxy: Option<(u32, u32)>,
}

/// Makes and takes away what stands beside the rules.
#[derive(Debug)]
pub struct Side(Netlink);

impl Side {
    /// In the current network namespace.
    ///
    /// # Errors
    /// The system's.
    pub fn open() -> io::Result<Self> {
        Netlink::open().map(Self)
    }

    /// Adds what is wanted; what is there already stays as it is.
    ///
    /// # Errors
    /// One line that names the step.
    pub fn add(&self, wanted: Wanted) -> Result<(), String> {
        let step =
            |what: &'static str| move |e: io::Error| format!("failed to configure routes: {what}: {e}");
        if wanted.ipv6 {
            self.change(RouteNetlinkMessage::NewAddress(passthrough()), true)
                .map_err(step("failed to add IPv6 inbound address"))?;
            tracing::info!("Added ::6 address on the loopback iface");
        }
        let Some((mark, table)) = wanted.tproxy else { return Ok(()) };
        for v6 in families(wanted.ipv6) {
            if !self.has_rule(v6, mark, table).map_err(step("failed to list netlink rules"))? {
                self.change(RouteNetlinkMessage::NewRule(policy(v6, mark, table)), true)
                    .map_err(step("failed to configure netlink rule"))?;
            }
            self.change(RouteNetlinkMessage::NewRoute(local_route(v6, table)), true)
                .map_err(step("failed to add route"))?;
        }
        Ok(())
    }

    /// Takes away what an apply with the same settings adds, repeated policy rules of older runs
    /// included; what is not there is passed over.
    ///
    /// # Errors
    /// One line that names the step.
    pub fn remove(&self, wanted: Wanted) -> Result<(), String> {
        let step = |what: &'static str| move |e: io::Error| format!("failed to remove {what}: {e}");
        if wanted.ipv6 {
            self.change(RouteNetlinkMessage::DelAddress(passthrough()), false)
                .map_err(step("the ::6 address"))?;
        }
        let Some((mark, table)) = wanted.tproxy else { return Ok(()) };
        for v6 in families(wanted.ipv6) {
            while self.has_rule(v6, mark, table).map_err(step("a policy rule"))? {
                self.change(RouteNetlinkMessage::DelRule(policy(v6, mark, table)), false)
                    .map_err(step("a policy rule"))?;
            }
            self.change(RouteNetlinkMessage::DelRoute(local_route(v6, table)), false)
                .map_err(step("the local route"))?;
        }
        Ok(())
    }

    fn has_rule(&self, v6: bool, mark: u32, table: u32) -> io::Result<bool> {
        let mut ask = RuleMessage::default();
        ask.header.family = family(v6);
        let rules = self.0.dump(&RouteNetlinkMessage::GetRule(ask))?;
        Ok(rules.into_iter().any(|message| match message {
            RouteNetlinkMessage::NewRule(rule) => {
                let marked = rule.attributes.contains(&RuleAttribute::FwMark(mark));
                let extended = rule.attributes.contains(&RuleAttribute::Table(table));
                rule.header.family == family(v6)
                    && marked
                    && (extended || u32::from(rule.header.table) == table)
            }
            _ => false,
        }))
    }

    fn change(&self, message: RouteNetlinkMessage, add: bool) -> io::Result<()> {
        let tolerated: &[i32] = if add { &ALREADY } else { &GONE };
        match self.0.change(message, if add { NLM_F_CREATE | NLM_F_EXCL } else { 0 }) {
            Err(e) if e.raw_os_error().is_some_and(|n| tolerated.contains(&n)) => Ok(()),
            other => other,
        }
    }
}

fn families(ipv6: bool) -> impl Iterator<Item = bool> {
    std::iter::once(false).chain(ipv6.then_some(true))
}

fn family(v6: bool) -> AddressFamily {
    if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

fn passthrough() -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet6;
    message.header.prefix_len = 128;
    message.header.index = LO;
    message.attributes.push(AddressAttribute::Local(IpAddr::V6(PASSTHROUGH_V6)));
    message.attributes.push(AddressAttribute::Address(IpAddr::V6(PASSTHROUGH_V6)));
    message
}

fn policy(v6: bool, mark: u32, table: u32) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family(v6);
    message.header.action = RuleAction::ToTable;
    message.header.table = u8::try_from(table).unwrap_or(0);
    message.attributes.push(RuleAttribute::FwMark(mark));
    message.attributes.push(RuleAttribute::Table(table));
    message
}

fn local_route(v6: bool, table: u32) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(v6);
    message.header.table = u8::try_from(table).unwrap_or(0);
    message.header.protocol = RouteProtocol::Boot;
    message.header.scope = RouteScope::Host;
    message.header.kind = RouteType::Local;
    let any: IpAddr = if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let destination = match any {
        IpAddr::V4(a) => RouteAddress::Inet(a),
        IpAddr::V6(a) => RouteAddress::Inet6(a),
    };
    message.attributes.push(RouteAttribute::Destination(destination));
    message.attributes.push(RouteAttribute::Oif(LO));
    message.attributes.push(RouteAttribute::Table(table));
    message
}
