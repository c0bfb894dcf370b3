//! A UDP socket whose answers come from the address that was asked.
//!
//! A socket on a wildcard address (`0.0.0.0`, `::`) is asked at all addresses of the machine, and the kernel sends what
//! goes out from the one it likes best. A client that has connected its socket does not take that, and nor does the
//! kernel where a rule of iptables has sent the query here: it finds no connection that the answer belongs to. So the
//! kernel is asked to tell with each datagram where it was sent to, and that goes with the answer. A socket on one
//! address needs none of this. The standard library, `socket2` and `rustix` do not know these messages, `nix` does.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::AsRawFd;

use nix::cmsg_space;
use nix::libc::{in_addr, in_pktinfo, in6_addr, in6_pktinfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt, sockopt,
};
use tokio::io::Interest;
use tokio::net::UdpSocket;

/// See the module.
#[derive(Debug)]
pub(crate) struct Socket {
    io: UdpSocket,
    wildcard: bool,
}

/// Who has sent a datagram, and where to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) from: SocketAddr,
    // Where it is not known, the kernel chooses.
    at: Option<IpAddr>,
}

impl Socket {
    /// Takes over a bound socket.
    ///
    /// # Errors
    /// When the kernel does not tell addresses.
    pub(crate) fn new(io: UdpSocket) -> io::Result<Self> {
        let bound = io.local_addr()?;
        let wildcard = bound.ip().is_unspecified();
        match bound {
            _ if !wildcard => {}
            SocketAddr::V4(_) => setsockopt(&io, sockopt::Ipv4PacketInfo, &true)?,
            SocketAddr::V6(_) => setsockopt(&io, sockopt::Ipv6RecvPacketInfo, &true)?,
        }
        Ok(Self { io, wildcard })
    }

    /// The next datagram; what does not fit in `buffer` is lost.
    ///
    /// # Errors
    /// When the kernel has none to give.
    pub(crate) async fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, Asked)> {
        if !self.wildcard {
            let (length, from) = self.io.recv_from(buffer).await?;
            return Ok((length, Asked { from, at: None }));
        }
        self.io.async_io(Interest::READABLE, || self.take(buffer)).await
    }

    fn take(&self, buffer: &mut [u8]) -> io::Result<(usize, Asked)> {
        let mut space = cmsg_space!(in6_pktinfo);
        let mut into = [IoSliceMut::new(buffer)];
        let fd = self.io.as_raw_fd();
        let message = recvmsg::<SockaddrStorage>(fd, &mut into, Some(&mut space), MsgFlags::empty())?;
        let from = message.address.as_ref().and_then(address).ok_or(io::ErrorKind::InvalidData)?;
        let at = message.cmsgs()?.find_map(|told| match told {
            ControlMessageOwned::Ipv4PacketInfo(info) => {
                Some(IpAddr::from(info.ipi_addr.s_addr.to_ne_bytes()))
            }
            ControlMessageOwned::Ipv6PacketInfo(info) => Some(IpAddr::from(info.ipi6_addr.s6_addr)),
            _ => None,
        });
        Ok((message.bytes, Asked { from, at }))
    }

    /// Answers the one who has asked.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub(crate) async fn answer(&self, reply: &[u8], asked: &Asked) -> io::Result<()> {
        let Some(at) = asked.at else {
            return self.io.send_to(reply, asked.from).await.map(drop);
        };
        self.io.async_io(Interest::WRITABLE, || self.give(reply, asked.from, at)).await
    }

    fn give(&self, reply: &[u8], to: SocketAddr, at: IpAddr) -> io::Result<()> {
        let (v4, v6);
        let told = match at {
            IpAddr::V4(ip) => {
                let s_addr = u32::from_ne_bytes(ip.octets());
                v4 = in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: in_addr { s_addr },
                    ipi_addr: in_addr { s_addr: 0 },
                };
                ControlMessage::Ipv4PacketInfo(&v4)
            }
            IpAddr::V6(ip) => {
                v6 = in6_pktinfo { ipi6_addr: in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 };
                ControlMessage::Ipv6PacketInfo(&v6)
            }
        };
        let (reply, to) = ([IoSlice::new(reply)], SockaddrStorage::from(to));
        sendmsg(self.io.as_raw_fd(), &reply, &[told], MsgFlags::empty(), Some(&to))?;
        Ok(())
    }
}

fn address(of: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = of.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| of.as_sockaddr_in6().map(|v6| SocketAddr::V6(SocketAddrV6::from(*v6))))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn answered(bound: &str, at: &str) {
        let socket = Socket::new(UdpSocket::bind(bound).await.unwrap()).unwrap();
        let port = socket.io.local_addr().unwrap().port();
        let any = if at.starts_with('[') { "[::]:0" } else { "0.0.0.0:0" };
        let client = UdpSocket::bind(any).await.unwrap();
        client.connect(format!("{at}:{port}")).await.unwrap();
        client.send(b"who").await.unwrap();
        let mut buffer = [0; 16];
        let (length, asked) = socket.receive(&mut buffer).await.unwrap();
        assert_eq!(
            (&buffer[..length], asked.from.port()),
            (&b"who"[..], client.local_addr().unwrap().port())
        );
        socket.answer(b"me", &asked).await.unwrap();
        // Connected: an answer from elsewhere would never come.
        let length = tokio::time::timeout(Duration::from_secs(30), client.recv(&mut buffer)).await;
        assert_eq!(&buffer[..length.expect("no answer came").unwrap()], b"me", "{bound} asked at {at}");
    }

    #[tokio::test]
    async fn an_answer_comes_from_the_address_that_was_asked() {
        for (bound, at) in [
            ("0.0.0.0:0", "127.0.0.2"),
            ("0.0.0.0:0", "127.0.0.1"),
            ("127.0.0.3:0", "127.0.0.3"),
            ("[::]:0", "[::1]"),
            ("[::]:0", "127.0.0.2"),
            ("[::1]:0", "[::1]"),
        ] {
            answered(bound, at).await;
        }
    }
}
