//! Opens ports, the same on each machine: on all addresses means those of both families, however `bindv6only` is set.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};

use crate::base::errno;

/// Opens a port with `open` on all addresses: of both families, or of IPv4 where the kernel has no other.
///
/// # Errors
/// Those of `open`.
pub(crate) fn everywhere<S>(port: u16, open: impl Fn(SocketAddr) -> io::Result<S>) -> io::Result<S> {
    match open((Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(error) if errno::no_family(&error) => open((Ipv4Addr::UNSPECIFIED, port).into()),
        other => other,
    }
}

/// A listener, for whose clients the kernel keeps up to `backlog` until they are accepted; it has its own bound
/// (`net.core.somaxconn`).
///
/// # Errors
/// The system's.
pub(crate) fn tcp(at: SocketAddr, backlog: i32) -> io::Result<TcpListener> {
    let socket = socket(at, Type::STREAM)?;
    // A port that was ours a moment ago is free. A sandbox that refuses the option has a port all the same.
    let _ = socket.set_reuse_address(true);
    socket.bind(&at.into())?;
    socket.listen(backlog)?;
    TcpListener::from_std(socket.into())
}

/// A socket for datagrams.
///
/// # Errors
/// The system's.
pub(crate) fn udp(at: SocketAddr) -> io::Result<UdpSocket> {
    let socket = socket(at, Type::DGRAM)?;
    socket.bind(&at.into())?;
    UdpSocket::from_std(socket.into())
}

fn socket(at: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(at), kind, None)?;
    if at.is_ipv6() {
        // Where the option is refused it may be as it should be.
        socket.set_only_v6(false).or_else(|error| match socket.only_v6() {
            Ok(false) => Ok(()),
            _ => Err(error),
        })?;
    }
    socket.set_nonblocking(true)?;
    Ok(socket)
}
