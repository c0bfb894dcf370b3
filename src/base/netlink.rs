//! A netlink socket for the few questions we have about the network, without an `ip` program.

use std::io;
use std::net::IpAddr;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// A dump that a change of the network interrupts is repeated so often.
const DUMPS: usize = 5;

/// An open socket in the network namespace it was opened in.
#[derive(Debug)]
pub struct Netlink(Socket);

/// A network interface with its addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
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
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self(socket))
    }

    /// All interfaces in order of their numbers.
    ///
    /// # Errors
    /// The system's.
    pub fn interfaces(&self) -> io::Result<Vec<Interface>> {
        let links = self.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()))?;
        let mut out: Vec<Interface> = links
            .into_iter()
            .filter_map(|message| {
                let RouteNetlinkMessage::NewLink(link) = message else { return None };
                let name = link.attributes.iter().find_map(|a| match a {
                    LinkAttribute::IfName(name) => Some(name.clone()),
                    _ => None,
                })?;
                Some(Interface {
                    index: link.header.index,
                    name,
                    up: link.header.flags.contains(LinkFlags::Up),
                    loopback: link.header.flags.contains(LinkFlags::Loopback),
                    addresses: Vec::new(),
                })
            })
            .collect();
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
    pub fn addresses(&self) -> io::Result<Vec<(u32, IpAddr)>> {
        let found = self.dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()))?;
        let address = |message| match message {
            RouteNetlinkMessage::NewAddress(m) => {
                let pick = |local: bool| {
                    m.attributes.iter().find_map(|a| match a {
                        AddressAttribute::Local(ip) if local => Some(*ip),
                        AddressAttribute::Address(ip) if !local => Some(*ip),
                        _ => None,
                    })
                };
                pick(true).or_else(|| pick(false)).map(|ip| (m.header.index, ip))
            }
            _ => None,
        };
        Ok(found.into_iter().filter_map(address).collect())
    }

    /// Asks the kernel to change something, and waits for its word.
    ///
    /// # Errors
    /// The kernel's.
    pub fn change(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(message, NLM_F_REQUEST | NLM_F_ACK | flags)?;
        self.receive(&mut Vec::new())
    }

    /// Asks for a list.
    ///
    /// # Errors
    /// The kernel's.
    pub fn dump(&self, ask: &RouteNetlinkMessage) -> io::Result<Vec<RouteNetlinkMessage>> {
        let mut last = io::Error::other("netlink dump interrupted");
        for _ in 0..DUMPS {
            self.send(ask.clone(), NLM_F_REQUEST | NLM_F_DUMP)?;
            let mut seen = Vec::new();
            match self.receive(&mut seen) {
                Ok(()) => return Ok(seen),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    fn send(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.0.send(&bytes, 0).map(|_| ())
    }

    // Reads until the kernel says done, or acknowledges, or refuses.
    fn receive(&self, seen: &mut Vec<RouteNetlinkMessage>) -> io::Result<()> {
        loop {
            let (bytes, _) = self.0.recv_from_full()?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(|e| io::Error::other(format!("netlink answer: {e}")))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_device_is_always_there() {
        let interfaces = Netlink::open().unwrap().interfaces().unwrap();
        assert!(interfaces.iter().any(|i| i.loopback && i.name == "lo"), "{interfaces:?}");
    }
}
