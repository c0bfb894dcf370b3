//! A netlink socket for the few questions we have about the network, without an `ip` program.
//!
//! Messages are those of `netlink-packet-route`. Why not `rtnetlink` above it: it needs a task that drives its
//! connection, and the questions are asked where there is no runtime yet. With the message crates that we share with it,
//! it takes 1.3 MB of binary and 1 MB of resident memory.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    DecodeError, Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader,
    NetlinkMessage, NetlinkPayload, NetlinkSerializable, NlasIterator, Parseable,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkFlags, LinkHeader, LinkMessage};
use netlink_sys::{
    Socket, SocketAddr,
    protocols::{NETLINK_NETFILTER, NETLINK_ROUTE},
};

/// Attempts at a dump that a change of the network interrupts.
const DUMPS: usize = 5;

/// The kernel's numbers for what is asked and told (`linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Kind {
    /// `RTM_GETLINK`.
    GetLink = 18,
    /// `RTM_NEWADDR`.
    NewAddress = 20,
    /// `RTM_DELADDR`.
    DelAddress = 21,
    /// `RTM_GETADDR`.
    GetAddress = 22,
    /// `RTM_NEWROUTE`.
    NewRoute = 24,
    /// `RTM_DELROUTE`.
    DelRoute = 25,
    /// `RTM_NEWRULE`.
    NewRule = 32,
    /// `RTM_DELRULE`.
    DelRule = 33,
    /// `RTM_GETRULE`.
    GetRule = 34,
    /// `NFT_MSG_GETTABLE` of the subsystem `NFNL_SUBSYS_NFTABLES` (`linux/netfilter/nfnetlink.h`).
    GetTable = 10 << 8 | 1,
}

/// A question of the netfilter family: `struct nfgenmsg` alone, here for `NFPROTO_INET`.
struct AskInet;

impl Emitable for AskInet {
    fn buffer_len(&self) -> usize {
        4
    }

    fn emit(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&[1, 0, 0, 0]);
    }
}

/// `NFTA_TABLE_NAME`, and the length of `struct nfgenmsg` before a table's attributes.
const NAME_OF_TABLE: u16 = 1;
const TABLE_HEADER: usize = 4;

/// `IFLA_IFNAME`, and the length of the fixed part before a link's attributes (`struct ifinfomsg`).
const NAME_OF_LINK: u16 = 3;
const LINK_HEADER: usize = 16;

/// A message whose body is read, or not, by whoever knows what it is. The crate's own enum over every
/// kind of message would link half a megabyte of readers for devices and queues that we never ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Raw {
    kind: u16,
    body: Vec<u8>,
}

impl NetlinkSerializable for Raw {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.body.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.body);
    }
}

impl NetlinkDeserializable for Raw {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self { kind: header.message_type, body: payload.to_vec() })
    }
}

/// An open socket in the network namespace it was opened in.
#[derive(Debug)]
pub(crate) struct Netlink(Socket);

/// A network interface with its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Interface {
    /// The kernel's number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// It is up.
    pub up: bool,
    /// It is the loopback device.
    pub loopback: bool,
    /// In the kernel's order: IPv4 before IPv6.
    pub addresses: Vec<IpAddr>,
}

impl Netlink {
    /// Opens it.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn open() -> io::Result<Self> {
        Self::of(NETLINK_ROUTE)
    }

    /// Opens one that speaks of packet filters.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn netfilter() -> io::Result<Self> {
        Self::of(NETLINK_NETFILTER)
    }

    fn of(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// All interfaces in order of their numbers.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn interfaces(&self) -> io::Result<Vec<Interface>> {
        let mut out = self.dump(Kind::GetLink, &LinkMessage::default(), link)?;
        out.sort_by_key(|i| i.index);
        for (index, address) in self.addresses()? {
            if let Some(interface) = out.iter_mut().find(|i| i.index == index) {
                interface.addresses.push(address);
            }
        }
        Ok(out)
    }

    /// Every address with the number of its interface, in the kernel's order.
    ///
    /// # Errors
    /// The system's, after five tries when the dump was interrupted.
    pub(crate) fn addresses(&self) -> io::Result<Vec<(u32, IpAddr)>> {
        let found = self.dump(Kind::GetAddress, &AddressMessage::default(), AddressMessage::parse)?;
        let address = |m: AddressMessage| {
            let pick = |local: bool| {
                m.attributes.iter().find_map(|a| match a {
                    AddressAttribute::Local(ip) if local => Some(*ip),
                    AddressAttribute::Address(ip) if !local => Some(*ip),
                    _ => None,
                })
            };
            pick(true).or_else(|| pick(false)).map(|ip| (m.header.index, ip))
        };
        Ok(found.into_iter().filter_map(address).collect())
    }

    /// The names of nftables' tables of family `inet`; for a socket of [`Netlink::netfilter`].
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn inet_tables(&self) -> io::Result<Vec<String>> {
        self.dump(Kind::GetTable, &AskInet, |body| text(body, TABLE_HEADER, NAME_OF_TABLE))
    }

    /// Asks the kernel to change something, and waits for its word.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn change(&self, kind: Kind, message: &impl Emitable, flags: u16) -> io::Result<()> {
        self.send(kind, message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        self.receive(&mut Vec::new())
    }

    /// Asks for a list; `read` makes an element of a message's body.
    ///
    /// # Errors
    /// The kernel's, and what `read` refuses.
    pub(crate) fn dump<T>(
        &self,
        kind: Kind,
        ask: &impl Emitable,
        read: impl Fn(&[u8]) -> Result<T, DecodeError>,
    ) -> io::Result<Vec<T>> {
        let mut last = io::Error::other("netlink dump interrupted");
        for _ in 0..DUMPS {
            self.send(kind, ask, NLM_F_REQUEST | NLM_F_DUMP)?;
            let mut seen = Vec::new();
            match self.receive(&mut seen) {
                Ok(()) => {
                    return seen.iter().map(|raw| read(&raw.body)).collect::<Result<_, _>>().map_err(unread);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    fn send(&self, kind: Kind, message: &impl Emitable, flags: u16) -> io::Result<()> {
        let mut raw = Raw { kind: kind as u16, body: vec![0; message.buffer_len()] };
        message.emit(&mut raw.body);
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(raw));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.0.send(&bytes, 0).map(|_| ())
    }

    // Reads until the kernel says done, or acknowledges, or refuses.
    fn receive(&self, seen: &mut Vec<Raw>) -> io::Result<()> {
        loop {
            let (bytes, _) = self.0.recv_from_full()?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let message = NetlinkMessage::<Raw>::deserialize(rest).map_err(unread)?;
                let length = usize::try_from(message.header.length).unwrap_or(0);
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(error) if error.code.is_none() => return Ok(()),
                    NetlinkPayload::Error(error) => return Err(error.to_io()),
                    NetlinkPayload::InnerMessage(inner) => seen.push(inner),
                    _ => {}
                }
                rest = rest.get(length.next_multiple_of(4).max(1)..).unwrap_or_default();
            }
        }
    }
}

fn unread(error: DecodeError) -> io::Error {
    io::Error::other(format!("netlink answer: {error}"))
}

// The text of an attribute that follows a fixed part; empty when there is none.
fn text(body: &[u8], header: usize, kind: u16) -> Result<String, DecodeError> {
    let mut found = String::new();
    for attribute in NlasIterator::new(body.get(header..).unwrap_or_default()) {
        let attribute = attribute?;
        if attribute.kind() == kind {
            let text = String::from_utf8_lossy(attribute.value());
            text.trim_end_matches('\0').clone_into(&mut found);
        }
    }
    Ok(found)
}

// A link without a name is none that anybody could mean.
fn link(body: &[u8]) -> Result<Interface, DecodeError> {
    let header = LinkHeader::parse(body)?;
    Ok(Interface {
        index: header.index,
        name: text(body, LINK_HEADER, NAME_OF_LINK)?,
        up: header.flags.contains(LinkFlags::Up),
        loopback: header.flags.contains(LinkFlags::Loopback),
        addresses: Vec::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_always_there() {
        let interfaces = Netlink::open().unwrap().interfaces().unwrap();
        assert!(interfaces.iter().any(|i| i.loopback && i.name == "lo"), "{interfaces:?}");
    }
}
