//! Addresses, policy rules and routes beside the rules, over netlink (no `ip` program needed).
//!
//! The Go agent adds the policy rule anew at each run, never removes any of it, and adds it even when it
//! was asked to clean up. Here each thing is looked for first; a clean-up takes all of it away, and a
//! reconcile what the new settings have no use for, also in a table that earlier settings named.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use netlink_packet_core::{Emitable, NLM_F_CREATE, NLM_F_EXCL, Parseable};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleHeader, RuleMessage};
use rustix::io::Errno;

use super::error::Error;
use crate::base::netlink::{Kind, Netlink};

/// The address Envoy's inbound pass-through connects from on IPv6.
const PASSTHROUGH_V6: Ipv6Addr = Ipv6Addr::new(0, 0, 0, 0, 0, 0, 0, 6);
/// The loopback device is the first of every network namespace.
const LO: u32 = 1;
/// What is to be there is.
const ALREADY: [Errno; 1] = [Errno::EXIST];
/// What is to go is not there.
const GONE: [Errno; 5] =
    [Errno::NOENT, Errno::SRCH, Errno::ADDRNOTAVAIL, Errno::AFNOSUPPORT, Errno::OPNOTSUPP];

/// A new address is looked at so often, every so long: it takes less than a millisecond unless the
/// machine is busy.
const SETTLE: u32 = 200;
const SETTLE_STEP: Duration = Duration::from_millis(5);

/// Mark and table of TPROXY's policy rule and route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tproxy {
    /// Packets with this mark
    pub mark: u32,
    /// are looked up in this table, where everything is local.
    pub table: u32,
}

/// Things beside the rules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Things {
    /// `::6` on the loopback device.
    pub address: bool,
    /// Policy rule and route of IPv4.
    pub v4: Option<Tproxy>,
    /// Policy rule and route of IPv6.
    pub v6: Option<Tproxy>,
}

/// Makes and takes away what stands beside the rules.
#[derive(Debug)]
pub(crate) struct Side(Netlink);

impl Side {
    /// In the current network namespace.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open() -> io::Result<Self> {
        Netlink::open().map(Self)
    }

    /// Adds things; what is there already stays as it is.
    ///
    /// # Errors
    /// One line that names the step.
    pub(crate) fn add(&self, things: Things) -> Result<(), Error> {
        let step = |step: &'static str| move |source: io::Error| Error::Routes { step, source };
        if things.address {
            self.change(Kind::NewAddress, &passthrough(), true)
                .map_err(step("failed to add IPv6 inbound address"))?;
            self.settle();
            tracing::info!("Added ::6 address on the loopback iface");
        }
        for (v6, t) in things.tproxy() {
            let rules = self.rules(v6).map_err(step("failed to list netlink rules"))?;
            if !rules.iter().any(|rule| plain(rule) == Some(t)) {
                self.change(Kind::NewRule, &policy(v6, t), true)
                    .map_err(step("failed to configure netlink rule"))?;
            }
            self.change(Kind::NewRoute, &local_route(v6, t.table), true)
                .map_err(step("failed to add route"))?;
        }
        Ok(())
    }

    // For a moment the kernel calls a new address tentative, even on the loopback device, and nobody can
    // bind it.
    fn settle(&self) {
        let tentative = |message: &AddressMessage| {
            let ours = message.attributes.contains(&AddressAttribute::Address(IpAddr::V6(PASSTHROUGH_V6)));
            ours && message.header.flags.contains(AddressHeaderFlags::Tentative)
        };
        for _ in 0..SETTLE {
            match self.0.dump(Kind::GetAddress, &AddressMessage::default(), AddressMessage::parse) {
                Ok(all) if all.iter().any(tentative) => std::thread::sleep(SETTLE_STEP),
                _ => return,
            }
        }
        tracing::warn!("the ::6 address is still tentative; Envoy cannot bind it yet");
    }

    /// Takes the `::6` address away.
    pub(crate) fn remove_address(&self) {
        log("the ::6 address", self.change(Kind::DelAddress, &passthrough(), false).map(drop));
    }

    /// Takes away the policy rules and the routes that runs with whatever settings added, apart from `keep`: in
    /// the table that is `named` the rules of any mark, in others those of `marks`, which are ours. What
    /// cannot be removed is logged, and the rest is still tried.
    pub(crate) fn remove_tproxy(&self, named: Option<u32>, marks: &BTreeSet<u32>, keep: Things) {
        for (v6, kept) in [(false, keep.v4), (true, keep.v6)] {
            match self.rules(v6) {
                Ok(rules) => {
                    for (table, known) in tables(&rules, named, marks) {
                        log("policy rules", self.empty(v6, table, known, kept, &rules));
                    }
                }
                Err(e) => log("policy rules", Err(e)),
            }
        }
    }

    // The route, and then what leads to it. Of a table that nobody named only the route tells that it is ours.
    fn empty(
        &self,
        v6: bool,
        table: u32,
        known: bool,
        kept: Option<Tproxy>,
        rules: &[RuleMessage],
    ) -> io::Result<()> {
        if kept.is_none_or(|t| t.table != table) {
            let had = self.change(Kind::DelRoute, &local_route(v6, table), false);
            if !known && !matches!(had, Ok(true)) {
                return had.map(drop);
            }
            log("the local route", had.map(drop));
        }
        for rule in rules {
            if plain(rule).is_some_and(|t| t.table == table && Some(t) != kept) {
                self.change(Kind::DelRule, rule, false)?;
            }
        }
        Ok(())
    }

    // All policy rules of a family.
    fn rules(&self, v6: bool) -> io::Result<Vec<RuleMessage>> {
        let mut ask = RuleMessage::default();
        ask.header.family = family(v6);
        let mut rules = self.0.dump(Kind::GetRule, &ask, RuleMessage::parse)?;
        rules.retain(|rule| rule.header.family == family(v6));
        Ok(rules)
    }

    // Whether anything changed.
    fn change(&self, kind: Kind, message: &impl Emitable, add: bool) -> io::Result<bool> {
        let tolerated: &[Errno] = if add { &ALREADY } else { &GONE };
        match self.0.change(kind, message, if add { NLM_F_CREATE | NLM_F_EXCL } else { 0 }) {
            Ok(()) => Ok(true),
            Err(e) if Errno::from_io_error(&e).is_some_and(|e| tolerated.contains(&e)) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

fn log(what: &str, result: io::Result<()>) {
    if let Err(e) = result {
        tracing::warn!("failed to remove {what}: {e}");
    }
}

// The tables to look at, and whether they are ours for certain. One that somebody else's rule leads to as well
// is left alone, unless it was named.
fn tables(rules: &[RuleMessage], named: Option<u32>, marks: &BTreeSet<u32>) -> BTreeMap<u32, bool> {
    let ours = |rule: &RuleMessage| plain(rule).is_some_and(|t| marks.contains(&t.mark));
    let mut found: BTreeMap<u32, bool> =
        rules.iter().filter(|rule| ours(rule)).map(|rule| (table_of(rule), false)).collect();
    found.retain(|table, _| rules.iter().all(|rule| ours(rule) || table_of(rule) != *table));
    found.extend(named.map(|table| (table, true)));
    found
}

fn table_of(rule: &RuleMessage) -> u32 {
    let extended = rule.attributes.iter().find_map(|a| match a {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    extended.unwrap_or_else(|| u32::from(rule.header.table))
}

// Mark and table of a rule that has no other condition, as ours have none.
fn plain(rule: &RuleMessage) -> Option<Tproxy> {
    let RuleHeader { dst_len: 0, src_len: 0, tos: 0, action: RuleAction::ToTable, flags, .. } = &rule.header
    else {
        return None;
    };
    let mut mark = None;
    for attribute in &rule.attributes {
        match attribute {
            RuleAttribute::FwMark(value) => mark = Some(*value),
            RuleAttribute::FwMask(u32::MAX) | RuleAttribute::SuppressPrefixLen(u32::MAX) => {}
            RuleAttribute::Table(_) | RuleAttribute::Priority(_) | RuleAttribute::Protocol(_) => {}
            _ => return None,
        }
    }
    mark.filter(|_| flags.is_empty()).map(|mark| Tproxy { mark, table: table_of(rule) })
}

impl Things {
    fn tproxy(&self) -> impl Iterator<Item = (bool, Tproxy)> {
        let of = |v6: bool, t: Option<Tproxy>| t.map(|t| (v6, t));
        of(false, self.v4).into_iter().chain(of(true, self.v6))
    }
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

fn policy(v6: bool, t: Tproxy) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = family(v6);
    message.header.action = RuleAction::ToTable;
    message.header.table = u8::try_from(t.table).unwrap_or(0);
    message.attributes.push(RuleAttribute::FwMark(t.mark));
    message.attributes.push(RuleAttribute::Table(t.table));
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
