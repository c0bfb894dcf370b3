//! Why a connection could not be had: where, in which phase, the cause, and what usually helps.

use std::fmt;
use std::path::PathBuf;

use crate::tls::anchors::{self, Unvouched};
use crate::trouble::{Kind, Report, span};

/// The part of a dial that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The configured address cannot be read.
    Address,
    /// Name to addresses.
    Resolve,
    /// TCP.
    Connect,
    /// The CONNECT request to an HTTP proxy.
    Proxy,
    /// The TLS handshake and the choice of HTTP/2.
    Tls,
    /// Loading the client certificate that the server asked for.
    ClientCertificate,
}

#[cfg(test)]
impl Phase {
    /// A name of it.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::Resolve => "resolve",
            Self::Connect => "connect",
            Self::Proxy => "proxy",
            Self::Tls => "tls",
            Self::ClientCertificate => "client_certificate",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Address => "address",
            Self::Resolve => "name resolution",
            Self::Connect => "TCP connect",
            Self::Proxy => "HTTP proxy",
            Self::Tls => "TLS handshake",
            Self::ClientCertificate => "client certificate",
        })
    }
}

/// Why a dial failed. All kinds pass when their cause is repaired, so each is worth another dial after
/// a pause.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// No usable root certificate, now or at an earlier dial.
    #[error("failed to create TLS dial option with root certificates: {path}: {reason}", path = path.display())]
    Roots {
        /// The root file; empty for the system's pool.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The connection was not established.
    #[error("cannot connect to {address}: {phase}: {reason}{hint}")]
    Dial {
        /// As configured, and the address tried where one was.
        address: String,
        /// Where it stopped.
        phase: Phase,
        /// What it is.
        kind: Kind,
        /// The cause, with its sources.
        reason: String,
        /// The usual cause, starting with `; `, or empty.
        hint: String,
    },
    /// Time ran out.
    #[error("cannot connect to {address}: no answer within {} ({phase})", span(*after))]
    Timeout {
        /// As configured.
        address: String,
        /// The bound that passed.
        after: std::time::Duration,
        /// What it was doing.
        phase: Phase,
    },
}

/// How the system ends its word for a file that is not there.
const NOT_THERE: &str = "(os error 2)";

impl Error {
    /// As a trouble: the cause without the hint, and the hint.
    #[must_use]
    pub fn report(&self) -> Report {
        match self {
            Self::Roots { path, reason } => {
                let system = path.as_os_str() == "SYSTEM";
                let missing = !system && reason.ends_with(NOT_THERE);
                let kind = match Kind::of_start(reason) {
                    Some(kind) => kind,
                    None if missing => Kind::RootMissing,
                    None => Kind::RootBroken,
                };
                Report::new(kind, self.to_string()).about(path.display().to_string())
            }
            Self::Dial { address, phase, kind, reason, hint } => {
                // The subject is the address as configured, without the one that was tried.
                let configured = address.split(" (").next().unwrap_or(address);
                let detail = format!("cannot connect to {address}: {phase}: {reason}");
                Report::new(*kind, detail).hint(hint.clone()).about(configured)
            }
            Self::Timeout { address, phase, .. } => {
                let kind = match phase {
                    Phase::Address => Kind::AddressInvalid,
                    Phase::Resolve => Kind::NameNotResolved,
                    Phase::Connect => Kind::ConnectionTimedOut,
                    Phase::Proxy => Kind::ProxyRefused,
                    Phase::Tls | Phase::ClientCertificate => Kind::IstiodSilent,
                };
                Report::new(kind, self.to_string()).about(address.clone())
            }
        }
    }

    /// A name of its kind.
    #[cfg(test)]
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Roots { .. } => "roots",
            Self::Dial { phase, .. } => phase.label(),
            Self::Timeout { .. } => "timeout",
        }
    }
}

/// What a failed TCP connection is.
pub(super) fn tcp_kind(error: &std::io::Error) -> Kind {
    use std::io::ErrorKind as E;
    match error.kind() {
        E::ConnectionRefused => Kind::ConnectionRefused,
        E::TimedOut => Kind::ConnectionTimedOut,
        _ => Kind::of_io(error).unwrap_or(Kind::ConnectionFailed),
    }
}

/// What a connection is that breaks within its TLS handshake.
pub(super) fn broken_kind(error: &std::io::Error) -> Kind {
    match error.kind() {
        // Of what was sent nothing has arrived: as silent as a peer that the dial has given up by its own clock.
        std::io::ErrorKind::TimedOut => Kind::IstiodSilent,
        _ => Kind::TlsFailed,
    }
}

/// What a failed TLS handshake is.
pub(super) fn tls_kind(error: &rustls::Error) -> Kind {
    use rustls::{AlertDescription as Alert, CertificateError as Cert, Error};
    match error {
        Error::InvalidCertificate(cert) => match cert {
            Cert::UnknownIssuer | Cert::BadSignature => Kind::RootDoesNotSign,
            Cert::Other(why) if unvouched(why) => Kind::RootDoesNotSign,
            Cert::NotValidForName | Cert::NotValidForNameContext { .. } => Kind::ServerNameMismatch,
            Cert::Expired | Cert::ExpiredContext { .. } => Kind::ServerCertificateExpired,
            Cert::NotValidYet | Cert::NotValidYetContext { .. } => Kind::ServerCertificateNotYetValid,
            // Whoever has signed it: the certificate itself is of no use.
            _ => Kind::TlsFailed,
        },
        Error::AlertReceived(
            Alert::CertificateRequired | Alert::BadCertificate | Alert::UnknownCA | Alert::CertificateExpired,
        ) => Kind::ClientCertificateRefused,
        _ => Kind::TlsFailed,
    }
}

/// Whether a connection that broke after its handshake broke because of the client's certificate: in TLS 1.3 the
/// server's word comes that late.
#[must_use]
pub(crate) fn refused_late(text: &str) -> bool {
    const ALERTS: [&str; 7] = [
        "BadCertificate",
        "UnknownCa",
        "UnknownCA",
        "DecryptError",
        "CertificateExpired",
        "CertificateUnknown",
        "CertificateRequired",
    ];
    text.split_once("received fatal alert: ")
        .is_some_and(|(_, alert)| ALERTS.iter().any(|a| alert.starts_with(a)))
}

/// What a failed TLS handshake says, without what only the library's authors can read.
pub(super) fn tls_reason(error: &rustls::Error) -> String {
    use rustls::{CertificateError as Cert, Error};
    let what = match error {
        Error::InvalidCertificate(Cert::UnsupportedSignatureAlgorithmContext { .. }) => {
            "a signature in its chain is of a kind that is not supported (SHA-1?)".to_owned()
        }
        Error::InvalidCertificate(Cert::Other(other)) => other.to_string(),
        Error::InvalidCertificate(Cert::ExpiredContext { time, not_after }) => {
            format!(
                "certificate expired at {}, and this machine's clock says {}",
                date(*not_after),
                date(*time)
            )
        }
        Error::InvalidCertificate(Cert::NotValidYetContext { time, not_before }) => {
            let (begins, now) = (date(*not_before), date(*time));
            format!("certificate not valid yet: it is from {begins} on, and this machine's clock says {now}")
        }
        _ => return error.to_string(),
    };
    format!("invalid peer certificate: {what}")
}

fn unvouched(why: &rustls::OtherError) -> bool {
    why.0.is::<Unvouched>()
}

fn date(at: rustls_pki_types::UnixTime) -> String {
    anchors::date(i64::try_from(at.as_secs()).unwrap_or(i64::MAX))
}

/// What usually helps against a failed TLS handshake.
pub(super) fn tls_hint(error: &rustls::Error, roots: &str, name: &str) -> String {
    use rustls::{AlertDescription as Alert, CertificateError as Cert, Error};
    match error {
        Error::InvalidCertificate(Cert::UnknownIssuer | Cert::BadSignature) => {
            format!(
                "; none of the roots in {roots} has signed the server's certificate: is it the root of this istiod?"
            )
        }
        Error::InvalidCertificate(Cert::Other(why)) if unvouched(why) => {
            format!("; look at the roots in {roots} and at the clock of this machine")
        }
        Error::InvalidCertificate(Cert::NotValidForName | Cert::NotValidForNameContext { .. }) => {
            format!("; the server's certificate is not for {name:?}: set ISTIOD_SAN to a name that it has")
        }
        Error::InvalidCertificate(
            Cert::Expired | Cert::ExpiredContext { .. } | Cert::NotValidYet | Cert::NotValidYetContext { .. },
        ) => "; check the clock of this machine and the certificate of istiod".to_owned(),
        Error::InvalidCertificate(_) => {
            "; istiod's certificate cannot be used, whoever has signed it: issue another, for server authentication, with \
             an RSA key of 2048 bits or more or an ECDSA one, and SHA-256 or better"
                .to_owned()
        }
        Error::InvalidMessage(_) => "; this port does not seem to speak TLS (15010 is plain text)".to_owned(),
        Error::NoApplicationProtocol | Error::AlertReceived(Alert::NoApplicationProtocol) => {
            "; the server must negotiate HTTP/2 (ALPN h2)".to_owned()
        }
        Error::AlertReceived(
            Alert::CertificateRequired | Alert::BadCertificate | Alert::UnknownCA | Alert::CertificateExpired,
        ) => "; the server refused our client certificate, or wants one".to_owned(),
        _ => String::new(),
    }
}

/// The gRPC code's name as the specification spells it.
#[must_use]
pub(crate) fn code_name(code: tonic::Code) -> &'static str {
    use tonic::Code;
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use rustls::{CertificateError as Cert, Error as Tls, OtherError};

    use super::*;

    #[test]
    fn a_certificate_that_is_of_no_use_does_not_send_people_to_the_root_file() {
        let unsupported = Cert::UnsupportedSignatureAlgorithmContext {
            signature_algorithm_id: vec![6, 9],
            supported_algorithms: Vec::new(),
        };
        let other = Cert::Other(OtherError(std::sync::Arc::new(std::io::Error::other("a short key"))));
        for (error, said) in
            [(Cert::InvalidPurpose, "InvalidPurpose"), (unsupported, "not supported"), (other, "a short key")]
        {
            let error = Tls::InvalidCertificate(error);
            assert_eq!(tls_kind(&error), Kind::TlsFailed, "{error:?}");
            assert!(tls_hint(&error, "root.pem", "istiod").contains("issue another"), "{error:?}");
            let reason = tls_reason(&error);
            assert!(reason.contains(said) && !reason.contains("{"), "{reason}");
        }
        let time =
            |seconds| rustls_pki_types::UnixTime::since_unix_epoch(std::time::Duration::from_secs(seconds));
        let early = Cert::NotValidYetContext { time: time(1_000_000_000), not_before: time(1_700_000_000) };
        let early = tls_reason(&Tls::InvalidCertificate(early));
        assert!(
            early.contains("from 2023-11-14T22:13:20Z on") && early.contains("2001-09-09T01:46:40Z"),
            "{early}"
        );
        let unknown = Tls::InvalidCertificate(Cert::UnknownIssuer);
        assert_eq!(tls_kind(&unknown), Kind::RootDoesNotSign);
        assert_eq!(tls_reason(&unknown), unknown.to_string());
    }
}
