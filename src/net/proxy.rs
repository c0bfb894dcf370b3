//! `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, by the rules of Go's HTTP library, and the CONNECT request.
//!
//! Why not the matcher of hyper-util: it follows curl's rules, which differ (ports in `NO_PROXY`,
//! loopback always direct), and brings two crates for them.

use std::io;
use std::net::IpAddr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::percent::decode_lossy;

/// A proxy's answer to CONNECT is a few hundred bytes; more is no proxy.
const MAX_ANSWER: usize = 8 << 10;

/// Host and port of `host:port` or `[v6]:port`; `None` when it does not split.
#[must_use]
pub(crate) fn split(address: &str) -> Option<(&str, &str)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = match host.strip_prefix('[') {
        Some(inner) => inner.strip_suffix(']')?,
        None if host.contains(':') => return None,
        None => host,
    };
    (!host.contains(['[', ']'])).then_some((host, port))
}

/// Why nobody goes through the proxy. Its URL is never repeated: it may hold a password.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the proxy (HTTPS_PROXY or HTTP_PROXY) has scheme {0:?}, only http:// proxies are supported")]
    Scheme(String),
    #[error("the proxy (HTTPS_PROXY or HTTP_PROXY) is not of the form http://host:port")]
    Form,
    #[error(transparent)]
    Send(io::Error),
    #[error("it closed during CONNECT: {0}")]
    Closed(#[source] io::Error),
    #[error("its answer to CONNECT has no end")]
    Endless,
    /// Its first line.
    #[error("it answered CONNECT with {0:?}")]
    Refused(String),
}

/// A proxy to go through.
pub(crate) struct Proxy {
    /// Without brackets.
    pub host: String,
    /// A number.
    pub port: String,
    /// `Basic ...`, from the URL's user part; never logged.
    authorization: Option<String>,
}

impl Proxy {
    /// The proxy for `host:port`, when the settings (its URL, and whom it is not for) want one.
    ///
    /// # Errors
    /// When the URL is none, or of a proxy that is not plain HTTP. Never repeats it: it may hold a password.
    pub(crate) fn for_target(
        settings: Option<&(String, String)>,
        host: &str,
        port: &str,
    ) -> Result<Option<Self>, Error> {
        match settings {
            Some((url, no)) if !url.trim().is_empty() && !excluded(no, host, port) => {
                Self::parse(url).map(Some)
            }
            _ => Ok(None),
        }
    }

    fn parse(url: &str) -> Result<Self, Error> {
        let rest = match url.trim().split_once("://") {
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => rest,
            Some((scheme, _)) => return Err(Error::Scheme(scheme.to_owned())),
            None => url.trim(),
        };
        let rest = rest.split(['/', '?', '#']).next().unwrap_or_default();
        let (user, address) = match rest.rsplit_once('@') {
            Some((user, address)) => (Some(user), address),
            None => (None, rest),
        };
        let bare = address.strip_prefix('[').and_then(|a| a.strip_suffix(']'));
        let (host, port) = match (split(address), bare) {
            (Some(parts), _) => parts,
            (None, Some(v6)) => (v6, "80"),
            (None, None) if !address.contains(':') => (address, "80"),
            (None, None) => ("", ""),
        };
        if host.is_empty() || port.parse::<u16>().is_err() {
            return Err(Error::Form);
        }
        let authorization = user.map(|user| {
            let (name, password) = user.split_once(':').unwrap_or((user, ""));
            format!(
                "Basic {}",
                STANDARD.encode([&decode_lossy(name)[..], b":", &decode_lossy(password)].concat())
            )
        });
        Ok(Self { host: host.to_owned(), port: port.to_owned(), authorization })
    }

    /// The value of `Proxy-Authorization` (`Basic ...`), where the URL names a user. A secret.
    #[must_use]
    pub(crate) fn authorization(&self) -> Option<&str> {
        self.authorization.as_deref()
    }

    /// Asks the proxy on `io` for a tunnel to `target` (`host:port`). Nothing past the answer is read.
    ///
    /// # Errors
    /// What the proxy says against it, or how the connection ended.
    pub(crate) async fn tunnel(&self, io: &mut TcpStream, target: &str) -> Result<(), Error> {
        let mut request =
            format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\nUser-Agent: pilot-agent\r\n");
        if let Some(authorization) = &self.authorization {
            request.push_str("Proxy-Authorization: ");
            request.push_str(authorization);
            request.push_str("\r\n");
        }
        request.push_str("\r\n");
        io.write_all(request.as_bytes()).await.map_err(Error::Send)?;
        let mut answer = Vec::with_capacity(128);
        while !answer.ends_with(b"\r\n\r\n") {
            if answer.len() == MAX_ANSWER {
                return Err(Error::Endless);
            }
            // Byte by byte: a server may speak first through the tunnel, and those bytes are not ours.
            answer.push(io.read_u8().await.map_err(Error::Closed)?);
        }
        let line = String::from_utf8_lossy(&answer);
        let line = line.lines().next().unwrap_or_default().to_owned();
        let mut words = line.split(' ');
        match (words.next(), words.next()) {
            (Some(version), Some("200")) if version.starts_with("HTTP/1.") => Ok(()),
            _ => Err(Error::Refused(line)),
        }
    }
}

/// Whether the target is reached directly.
fn excluded(no_proxy: &str, host: &str, port: &str) -> bool {
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let ip = host.parse::<IpAddr>().ok();
    if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
        return true;
    }
    no_proxy.split(',').map(|entry| entry.trim().to_ascii_lowercase()).any(|entry| {
        if entry.is_empty() {
            return false;
        }
        if entry == "*" {
            return true;
        }
        if let (Some((net, bits)), Some(ip)) = (entry.split_once('/'), ip)
            && let (Ok(net), Ok(bits)) = (net.parse::<IpAddr>(), bits.parse::<u32>())
        {
            return in_network(ip, net, bits);
        }
        let (name, wanted) = match split(&entry) {
            Some((name, port)) => (name, Some(port)),
            None => (entry.trim_start_matches('[').trim_end_matches(']'), None),
        };
        if wanted.is_some_and(|w| w != port) {
            return false;
        }
        if let Ok(excluded) = name.parse::<IpAddr>() {
            return ip == Some(excluded);
        }
        if ip.is_some() {
            return false;
        }
        let name = name.strip_prefix('*').filter(|n| n.starts_with('.')).unwrap_or(name);
        match name.strip_prefix('.') {
            Some(_) => host.ends_with(name),
            None => host == name || host.strip_suffix(name).is_some_and(|front| front.ends_with('.')),
        }
    })
}

fn in_network(ip: IpAddr, net: IpAddr, bits: u32) -> bool {
    let (ip, net, width) = match (ip, net) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    bits <= width && (ip ^ net).checked_shr(width - bits).unwrap_or(0) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_split_as_in_go() {
        assert_eq!(split("istiod.istio-system.svc:15012"), Some(("istiod.istio-system.svc", "15012")));
        assert_eq!(split("[::1]:15012"), Some(("::1", "15012")));
        assert_eq!(split(":15012"), Some(("", "15012")));
        for bad in ["istiod", "::1:15012", "[::1:15012", "::1]:15012", "[[::1]]:1", ""] {
            assert_eq!(split(bad), None, "{bad}");
        }
    }

    #[test]
    fn no_proxy_follows_gos_rules() {
        for (list, host, port, direct) in [
            ("", "istiod.x", "15012", false),
            ("", "localhost", "15012", true),
            ("", "127.0.0.1", "15012", true),
            ("", "::1", "15012", true),
            ("*", "istiod.x", "15012", true),
            ("svc", "istiod.x.svc", "15012", true),
            (".svc", "istiod.x.svc", "15012", true),
            ("*.svc", "istiod.x.svc", "15012", true),
            (".svc", "svc", "15012", false),
            ("svc", "svc", "15012", true),
            ("vc", "istiod.x.svc", "15012", false),
            ("a, istiod.x", "ISTIOD.x", "15012", true),
            ("istiod.x:15012", "istiod.x", "15012", true),
            ("istiod.x:443", "istiod.x", "15012", false),
            ("10.0.0.0/8", "10.1.2.3", "15012", true),
            ("10.0.0.0/8", "11.1.2.3", "15012", false),
            ("0.0.0.0/0", "11.1.2.3", "15012", true),
            ("10.1.2.3", "10.1.2.3", "15012", true),
            ("fd00::/8", "fd12::1", "15012", true),
            ("10.0.0.0/99", "10.1.2.3", "15012", false),
        ] {
            assert_eq!(excluded(list, host, port), direct, "{list} {host}:{port}");
        }
    }

    #[test]
    fn proxy_urls_are_read_and_passwords_never_shown() {
        let proxy = Proxy::parse("http://us%20er:p%40ss@proxy.lan:3128/").unwrap();
        assert_eq!((proxy.host.as_str(), proxy.port.as_str()), ("proxy.lan", "3128"));
        assert_eq!(proxy.authorization.as_deref(), Some("Basic dXMgZXI6cEBzcw=="));
        assert_eq!(Proxy::parse("proxy.lan").unwrap().port, "80");
        assert_eq!(Proxy::parse("http://[fd00::1]").unwrap().host, "fd00::1");
        for bad in ["https://u:secret@p:1", "http://u:secret@", "http://u:secret@p:x"] {
            let error = Proxy::parse(bad).err().unwrap().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
