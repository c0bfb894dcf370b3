//! The whole way of a certificate: a key that is thrown away is signed by the CA.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Check, Scene};
use crate::agent;
use crate::base::clock::{Clock, System};
use crate::base::metrics::Metrics;
use crate::ca::csr::{self, Effort};
use crate::config::parts;
use crate::config::parts::identity::{self, Fetcher};
use crate::istiod::auth::{Mock, TokenFile, TokenSource};
use crate::tls::cert;
use crate::trouble::Kind;

const NAME: &str = "sign";
/// Making a key and having it signed may take so long.
const LIMIT: Duration = Duration::from_secs(10);

/// Has one signed when `asked`.
pub(super) async fn checks(scene: &Scene, asked: bool) -> Check {
    let config = &scene.config;
    if scene.plan.as_ref().is_some_and(|p| p.file_mounted) {
        return Check::skip(NAME, "certificates come from files, no CA is asked");
    }
    if !asked {
        return Check::skip(NAME, "not asked for: with --sign the CA signs for a throw-away key");
    }
    let clock: Arc<dyn Clock> = Arc::new(System);
    let tokens: Arc<dyn TokenSource> = match scene.fetcher() {
        Fetcher::Mock => Arc::new(Mock),
        Fetcher::GoogleComputeEngine(_) => {
            return Check::skip(NAME, "a fresh token of the metadata server would be left in the token file");
        }
        Fetcher::File => Arc::new(TokenFile::new(config.token.clone(), agent::AUDIENCE, clock.clone())),
    };
    let signer = match parts::ca::signer(config, false) {
        Ok(Some(signer)) => signer,
        Ok(None) => return Check::skip(NAME, "certificates are mounted, no CA is asked"),
        Err(_) => return Check::skip(NAME, "the roots above come first"),
    };
    let client = match agent::ca_client(&signer, tokens, &Metrics::new(), &clock, &Arc::default()).await {
        Ok(Some(client)) => client,
        Ok(None) => return Check::skip(NAME, "certificates are mounted, no CA is asked"),
        Err(_) => return Check::skip(NAME, "the roots above come first"),
    };
    let secrets = match scene.plan.as_ref().zip(identity::tokens(config).ok()) {
        Some((plan, tokens)) => identity::identity(config, plan, tokens).secrets(),
        None => return Check::skip(NAME, "the configuration above comes first"),
    };
    let limit = LIMIT.min(scene.end.saturating_duration_since(Instant::now()));
    let started = Instant::now();
    let work = async {
        let key = csr::generate_off_runtime(&secrets.key, Effort::Race).await.map_err(|e| e.to_string())?;
        let request = csr::request(&key, &secrets.identity).map_err(|e| e.to_string())?;
        let answer = client.sign(&request, secrets.ttl).await;
        Ok::<_, String>((answer, key.spki()))
    };
    let (answer, spki) = match tokio::time::timeout(limit, work).await {
        Ok(Ok(done)) => done,
        Ok(Err(why)) => {
            return Check::fail(NAME, Kind::ConfigInvalid, why)
                .hint("look at WORKLOAD_RSA_KEY_SIZE and ECC_SIGNATURE_ALGORITHM");
        }
        Err(_) => {
            let said = format!("the CA did not sign within {limit:?}");
            return Check::fail(NAME, Kind::CertificateNotAnswered, said);
        }
    };
    let entries = match answer {
        Ok(entries) => entries,
        Err(error) => return refused(&error),
    };
    let leaf = entries.first().map(|pem| cert::parse_chain(pem.as_bytes()));
    let unusable = |said: &str| Check::fail(NAME, Kind::CertificateUnusable, said);
    let certs = match leaf {
        Some(Ok(certs)) => certs,
        Some(Err(e)) => return unusable(&e.to_string()),
        None => return unusable("the answer holds no certificate"),
    };
    let Some(first) = certs.first().filter(|c| c.spki == spki) else {
        let later = entries.iter().skip(1).filter_map(|pem| cert::parse_chain(pem.as_bytes()).ok());
        return unusable(if later.flatten().any(|c| c.spki == spki) {
            "the certificates are out of order: that of the key that was sent is not the first"
        } else {
            "the certificate is not for the key that was sent"
        });
    };
    let Ok(left) = first.not_after.duration_since(scene.now) else {
        let ago = super::token::ago(scene.now, first.not_after);
        return unusable(&format!("the certificate that the CA issued expired {ago} ago"));
    };
    let (whom, span) = (first.uris.join(", "), crate::trouble::span(left));
    let took = started.elapsed().as_millis();
    let signed = format!("the CA signed a throw-away key for {whom}, valid for {span}, in {took} ms");
    if first.uris.contains(&secrets.identity) {
        return Check::ok(NAME, signed);
    }
    Check::warn(
        NAME,
        format!("{signed}; {} was asked for, peers will see the former", secrets.identity),
        "check TRUST_DOMAIN, POD_NAMESPACE and SERVICE_ACCOUNT if that is not meant",
    )
}

fn refused(error: &crate::ca::Error) -> Check {
    use crate::ca::Error;
    match error {
        Error::Unsent(inner) => refused(inner),
        Error::Connect { .. } => Check::skip(NAME, "the way to the CA above comes first"),
        _ => {
            let report = error.report();
            Check::fail(NAME, report.kind, report.detail.clone()).hint(report.hint_text())
        }
    }
}
