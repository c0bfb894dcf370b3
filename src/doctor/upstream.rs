//! The way to istiod and to the CA: name, every address, TLS, and whether gRPC answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;
use x509_parser::prelude::{FromDer, X509Name};

use super::{Check, Scene};
use crate::agent;
use crate::base::clock::System;
use crate::config::parts;
use crate::config::parts::identity::Fetcher;
use crate::istiod::auth::{TokenFile, TokenSource};
use crate::istiod::{self, Connector, Error, Look, Peer, Phase, Stream};
use crate::tls::cert::{self, Cert};
use crate::trouble::Kind;
use crate::xds::probe::{self, Refused};

/// How long all addresses together may take, TLS included.
const DIAL: Duration = Duration::from_secs(5);
/// How long istiod may take to answer a ping on a stream of ours, a dial included.
const STREAM: Duration = Duration::from_secs(6);
/// A server's certificate with less life than this is worth a warning: istiod renews its own in time.
const SHORT: Duration = Duration::from_secs(3600);

/// What was found out.
#[derive(Default)]
pub(super) struct Upstream {
    pub(super) checks: Vec<Check>,
    /// What servers have shown, for the clock.
    pub(super) chains: Vec<Vec<Cert>>,
    /// istiod's own time.
    pub(super) date: Option<String>,
}

/// istiod, and the CA where it is another.
pub(super) async fn checks(scene: &Scene) -> Upstream {
    let mut out = Upstream::default();
    // A root that is not there is told above.
    let xds = scene.xds.clone();
    let ca = scene.ca.as_ref().ok().and_then(|ca| ca.as_ref()?.connection()).cloned();
    let ca = ca.filter(|ca| xds.as_ref().is_none_or(|xds| xds.address != ca.address));
    let (mut first, second) = tokio::join!(server(scene, "istiod", xds, true), async {
        match ca {
            Some(ca) => server(scene, "the CA", Some(ca), false).await,
            None => Upstream::default(),
        }
    });
    out.checks.append(&mut first.checks);
    out.checks.extend(second.checks);
    out.chains = first.chains.into_iter().chain(second.chains).collect();
    out.date = first.date;
    out
}

async fn server(scene: &Scene, who: &str, config: Option<istiod::Config>, stream: bool) -> Upstream {
    let mut out = Upstream::default();
    let skipped =
        |why: &str| ["connect", "tls", "grpc"].map(|name| Check::skip(name, format!("{who}: {why}")));
    let Some(config) = config else {
        out.checks.extend(skipped("the roots above come first"));
        return out;
    };
    let address = config.address.clone();
    let plain = matches!(config.transport, istiod::Transport::Plaintext);
    let connector = match super::beside("roots", scene.end, move || Connector::new(config)).await {
        Ok(Ok(connector)) => connector,
        // Told among the files.
        Ok(Err(_)) => {
            out.checks.extend(skipped("the roots above come first"));
            return out;
        }
        Err(late) => {
            out.checks.push(late);
            out.checks.extend(skipped("the roots come first"));
            return out;
        }
    };
    let (look, grpc) = tokio::join!(connector.look(DIAL), async {
        if stream { Some(ads(scene, &connector).await) } else { None }
    });
    let look = match look {
        Ok(look) => look,
        Err(error) => {
            let name = if phase(&error) == Some(Phase::Resolve) { "name" } else { "connect" };
            out.checks.push(failed(name, &error));
            out.checks.push(Check::skip("grpc", format!("{who}: there is no connection")));
            return out;
        }
    };
    out.checks.push(connect(who, &address, &look));
    for peer in &look.peers {
        let chain: Vec<Cert> = peer.chain.iter().filter_map(|der| cert::parse_der(der).ok()).collect();
        if !chain.is_empty() {
            out.chains.push(chain);
        }
    }
    let shaken = look.peers.iter().any(|p| p.outcome.is_ok());
    if !plain && look.peers.iter().any(|p| p.reached == Phase::Tls) {
        out.checks.push(tls(who, &look, scene.now));
    }
    match grpc {
        Some((check, date)) if shaken => {
            out.checks.push(check);
            out.date = date;
        }
        Some(_) => out.checks.push(Check::skip("grpc", format!("{who}: there is no connection"))),
        None => {}
    }
    out
}

fn connect(who: &str, address: &str, look: &Look) -> Check {
    let open = |p: &&Peer| !matches!(p.reached, Phase::Connect | Phase::Proxy) || p.outcome.is_ok();
    let answered: Vec<&Peer> = look.peers.iter().filter(open).collect();
    let silent: Vec<&Peer> = look.peers.iter().filter(|p| !open(p)).collect();
    if answered.is_empty() {
        // No answer tells more than a refusal: somebody is there and the packets are lost.
        let timed_out = |p: &&&Peer| matches!(p.outcome, Err(Error::Timeout { .. }));
        let worst = silent.iter().find(timed_out).or(silent.first());
        return match worst.and_then(|p| p.outcome.as_ref().err()) {
            Some(error) => failed("connect", error),
            None => {
                Check::fail("connect", Kind::NameNotResolved, format!("{who} at {address} has no address"))
            }
        };
    }
    let list = |peers: &[&Peer]| peers.iter().map(|p| p.address.to_string()).collect::<Vec<_>>().join(", ");
    let mut said = format!("{who} at {address} answers at {}", list(&answered));
    if !silent.is_empty() {
        said.push_str(&format!(", and not at {}", list(&silent)));
        let here = silent.iter().all(|p| p.address.ip().is_loopback());
        if !here {
            return Check::warn(
                "connect",
                said,
                "connections try all addresses; look why some do not answer",
            );
        }
    }
    Check::ok("connect", said)
}

fn tls(who: &str, look: &Look, now: SystemTime) -> Check {
    let name = look.server_name.clone().unwrap_or_default();
    let at = |p: &&Peer| p.reached == Phase::Tls || p.outcome.is_ok();
    let peers: Vec<&Peer> = look.peers.iter().filter(at).collect();
    if let Some((peer, error)) = peers.iter().find_map(|p| Some((p, p.outcome.as_ref().err()?)))
        && !peers.iter().any(|p| p.outcome.is_ok())
    {
        let mut check = failed("tls", error);
        if let Some(leaf) = peer.chain.first().and_then(|der| cert::parse_der(der).ok()) {
            let last = peer.chain.last().and_then(|der| cert::parse_der(der).ok());
            let issuer = last.map(|c| subject(&c.issuer)).unwrap_or_default();
            let names = names(&leaf.der);
            check.said.push_str(&format!(
                " (shown: a certificate for {}, valid {} to {}, signed in the end by {issuer}; trusted: {})",
                if names.is_empty() { "no name".to_owned() } else { names.join(", ") },
                crate::base::clock::rfc3339(leaf.not_before),
                crate::base::clock::rfc3339(leaf.not_after),
                look.roots
            ));
        }
        return check;
    }
    let Some(peer) = peers.iter().find(|p| p.outcome.is_ok()) else {
        return Check::skip("tls", format!("{who}: no address came so far"));
    };
    let version = match &peer.outcome {
        Ok(connection) => match &connection.io {
            Stream::Tls(io) => io.get_ref().1.protocol_version().map(|v| format!("{v:?}").replace('_', ".")),
            Stream::Plain(_) => None,
        },
        Err(_) => None,
    };
    let version = version.unwrap_or_default();
    let certs: Vec<Cert> = peer.chain.iter().filter_map(|der| cert::parse_der(der).ok()).collect();
    let root = certs.last().map(|c| subject(&c.issuer)).unwrap_or_default();
    let Some(leaf) = certs.first() else {
        return Check::ok("tls", format!("{who}: {version}, name {name}"));
    };
    let left = leaf.not_after.duration_since(now).unwrap_or_default();
    let said = format!(
        "{who}: {version}, the certificate is for {name}, valid for {} more, signed by {root} of {}",
        crate::trouble::span(left),
        look.roots
    );
    if left < SHORT {
        return Check::warn("tls", said, "istiod should have renewed it by now: look at istiod");
    }
    Check::ok("tls", said)
}

async fn ads(scene: &Scene, connector: &Connector) -> (Check, Option<String>) {
    let tokens: Arc<dyn TokenSource> = match scene.fetcher() {
        Fetcher::Mock => Arc::new(crate::istiod::auth::Mock),
        // The file as it stands; a metadata server's answer would be left in it.
        _ => Arc::new(TokenFile::new(scene.config.token.clone(), agent::AUDIENCE, Arc::new(System))),
    };
    let headers = parts::istiod::headers(&scene.config, "XDS_HEADER_");
    let limit = STREAM.min(scene.end.saturating_duration_since(Instant::now()));
    let address = &connector.config().address;
    match probe::probe(connector, tokens.as_ref(), &headers, limit).await {
        Ok(taken) => {
            let ping = taken.ping.as_millis();
            let said = format!("istiod at {} takes a stream of configuration (ping {ping} ms)", taken.peer);
            (Check::ok("grpc", said), taken.date)
        }
        Err(Refused::Silent) => {
            let said =
                format!("istiod at {address} takes the connection and answers no ping within {limit:?}");
            (Check::fail("grpc", Kind::IstiodSilent, said), None)
        }
        Err(Refused::Ended(status) | Refused::Unopened(status)) if istiod::refused_late(status.message()) => {
            let said = format!("{address}: {}", status.message());
            (Check::fail("grpc", Kind::ClientCertificateRefused, said), None)
        }
        Err(Refused::Unopened(status)) => {
            let said = format!("no stream could be opened at {address}: {}", status.message());
            (Check::fail("grpc", Kind::AdsRefused, said), None)
        }
        Err(Refused::Ended(status)) => {
            let code = crate::ca::code_name(status.code());
            let said = format!(
                "istiod at {address} refuses the stream of configuration: {code}: {}",
                status.message()
            );
            let check = Check::fail("grpc", Kind::AdsRefused, said);
            let hint = probe::hint(&status);
            (if hint.is_empty() { check } else { check.hint(hint) }, None)
        }
    }
}

fn phase(error: &Error) -> Option<Phase> {
    match error {
        Error::Dial { phase, .. } | Error::Timeout { phase, .. } => Some(*phase),
        Error::Roots { .. } => None,
    }
}

fn failed(name: &'static str, error: &Error) -> Check {
    let report = error.report();
    Check::fail(name, report.kind, report.detail.clone()).hint(report.hint_text())
}

/// A name in a certificate, as people write it.
pub(super) fn subject(der: &[u8]) -> String {
    match X509Name::from_der(der) {
        Ok((_, name)) if name.iter().next().is_some() => name.to_string(),
        _ => "a name that is empty".to_owned(),
    }
}

fn names(der: &[u8]) -> Vec<String> {
    use x509_parser::prelude::{GeneralName, X509Certificate};
    let Ok((_, cert)) = X509Certificate::from_der(der) else { return Vec::new() };
    let Ok(Some(san)) = cert.subject_alternative_name() else { return Vec::new() };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match <[u8; 4]>::try_from(*bytes) {
            Ok(v4) => Some(std::net::Ipv4Addr::from(v4).to_string()),
            Err(_) => <[u8; 16]>::try_from(*bytes).ok().map(|v6| std::net::Ipv6Addr::from(v6).to_string()),
        },
        _ => None,
    };
    san.value.general_names.iter().filter_map(name).take(8).collect()
}
