//! `--run-validation`: does a connection to the pass-through address come out at the capture ports?
//!
//! Listens on the loopback address at the outbound and inbound capture ports, connects every second to
//! the pass-through address at the probe port, and is content when an accepted connection's original
//! destination is that port: then the rules, whoever made them, redirect.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::base::tasks::{Panicked, Set};

/// What to probe.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// The pod's address; its family decides.
    pub host_ip: IpAddr,
    /// The two capture ports, as given.
    pub ports: [String; 2],
    /// Destination of the probing connections.
    pub probe_port: u16,
    /// How long success may take.
    pub limit: Duration,
}

/// Why the validation failed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum Error {
    /// Neither port could be bound.
    #[error("no listener available: {0}")]
    NoListener(String),
    /// Nothing came through in time.
    #[error("validation timeout: no connection to {target} was redirected within {limit:?}")]
    Timeout {
        /// Where it connected.
        target: SocketAddr,
        /// How long it tried.
        limit: Duration,
    },
    /// A defect of ours.
    #[error("validation broke off: {0}")]
    Defect(#[from] Panicked),
}

/// Runs the probe to success, failure or its limit.
///
/// # Errors
/// See [`Error`].
pub(crate) async fn run(config: &Config) -> Result<(), Error> {
    let v6 = config.host_ip.is_ipv6();
    let address = |v4: &str, v6_text: &str| -> IpAddr {
        (if v6 { v6_text } else { v4 }).parse().expect("both are constants of this file")
    };
    let listen = address("127.0.0.1", "::1");
    let target = SocketAddr::new(address("127.0.0.6", "::6"), config.probe_port);
    let (mut listeners, mut reasons) = (Vec::new(), Vec::new());
    for port in &config.ports {
        let at = || port.trim().parse().map(|port| SocketAddr::new(listen, port));
        match at().map_err(|_| io::Error::other("not a port number")).and_then(bind) {
            Ok(listener) => {
                tracing::info!("Listening on {listen} port {port}");
                listeners.push(listener);
            }
            Err(e) => {
                tracing::error!("Failed to listen on {listen} port {port}: {e}");
                reasons.push(format!("{listen} port {port}: {e}"));
            }
        }
    }
    if listeners.is_empty() {
        return Err(Error::NoListener(reasons.join("; ")));
    }
    if config.limit.is_zero() {
        // No time is too little, however fast the first connection would be.
        return Err(Error::Timeout { target, limit: config.limit });
    }
    let mut tasks = Set::new("validation");
    for listener in listeners {
        tasks.spawn(serve(listener, config.probe_port, v6));
    }
    tasks.spawn(connect(listen, target));
    let found = timeout(config.limit, tasks.next()).await;
    tasks.stop().await;
    match found {
        Ok(Ok(())) => {
            tracing::info!("Validation passed, iptables rules established");
            Ok(())
        }
        Ok(Err(defect)) => Err(defect.into()),
        Err(_) => Err(Error::Timeout { target, limit: config.limit }),
    }
}

fn bind(at: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), None)?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    socket.bind(&at.into())?;
    socket.listen(64)?;
    TcpListener::from_std(socket.into())
}

// Ends when a connection's original destination is the probe port; other connections are answered.
async fn serve(listener: TcpListener, probe_port: u16, v6: bool) {
    loop {
        let Ok((mut stream, peer)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let port = match original_port(&stream, v6) {
            Ok(port) => port,
            Err(e) => {
                tracing::debug!("a connection from {peer} has no original destination: {e}");
                continue;
            }
        };
        let _ = timeout(Duration::from_secs(1), stream.write_all(port.to_string().as_bytes())).await;
        let _ = stream.shutdown().await;
        if port == probe_port {
            tracing::info!("a connection from {peer} to port {probe_port} was redirected here");
            return;
        }
    }
}

fn original_port(stream: &TcpStream, v6: bool) -> io::Result<u16> {
    let socket = SockRef::from(stream);
    let original = if v6 { socket.original_dst_v6() } else { socket.original_dst_v4() }?;
    original.as_socket().map(|a| a.port()).ok_or_else(|| io::Error::other("not an IP address"))
}

async fn connect(from: IpAddr, target: SocketAddr) {
    loop {
        let attempt = async {
            let socket = if target.is_ipv6() { TcpSocket::new_v6()? } else { TcpSocket::new_v4()? };
            socket.bind(SocketAddr::new(from, 0))?;
            socket.connect(target).await.map(drop)
        };
        if let Ok(Err(e)) = timeout(Duration::from_secs(1), attempt).await {
            tracing::debug!("probing connection to {target}: {e}");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}
