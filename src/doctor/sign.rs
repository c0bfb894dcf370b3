//! The whole way of a certificate: a key that is thrown away is signed by the CA.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::{Check, Scene};
use crate::agent;
use crate::base::bounded;
use crate::base::clock::{Clock, System};
use crate::base::metrics::Metrics;
use crate::ca::CaClient;
use crate::ca::csr::{self, Effort};
use crate::config::parts::Error as Refusal;
use crate::config::parts::identity::{self, Fetcher};
use crate::istiod::RootFiles;
use crate::istiod::auth::{Mock, TokenFile, TokenSource};
use crate::secrets;
use crate::tls::cert::{self, Cert};
use crate::tls::chain;
use crate::trouble::Kind;

const NAME: &str = "sign";
/// Making a key and having it signed may take so long.
const LIMIT: Duration = Duration::from_secs(10);

/// Has one signed when `asked`.
pub(super) async fn checks(scene: &Scene, asked: bool) -> Check {
    if scene.plan.as_ref().is_some_and(|p| p.file_mounted) {
        return Check::skip(NAME, "certificates come from files, no CA is asked");
    }
    if !asked {
        return Check::skip(NAME, "not asked for: with --sign the CA signs for a throw-away key");
    }
    let (client, secrets) = match prepare(scene).await {
        Ok(prepared) => prepared,
        Err(skipped) => return skipped,
    };
    let limit = LIMIT.min(scene.end.saturating_duration_since(Instant::now()));
    let started = Instant::now();
    let work = async {
        let key = csr::generate_off_runtime(&secrets.key, Effort::Race).await.map_err(|e| e.to_string())?;
        let request = csr::request(&key, &secrets.identity).map_err(|e| e.to_string())?;
        let answer = match client.sign(&request, secrets.ttl).await {
            Ok(entries) => client.root_bundle().await.map(|roots| (entries, roots)),
            Err(error) => Err(error),
        };
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
    let took = started.elapsed();
    match answer {
        Ok((entries, roots)) => match issued(&entries, &spki, scene.now) {
            Ok(cert) => refusable(scene, &entries, &roots, secrets.mounted.root)
                .await
                .unwrap_or_else(|| signed(&cert, &secrets.identity, scene.now, took)),
            Err(defect) => defect,
        },
        Err(error) => refused(&error),
    }
}

// The agent's own client of the CA, and what it would ask for; or why the CA is not asked.
async fn prepare(scene: &Scene) -> Result<(Arc<dyn CaClient>, secrets::Config), Check> {
    let config = &scene.config;
    let clock: Arc<dyn Clock> = Arc::new(System);
    let tokens: Arc<dyn TokenSource> = match scene.fetcher() {
        Fetcher::Mock => Arc::new(Mock),
        Fetcher::GoogleComputeEngine(_) => {
            let why = "a fresh token of the metadata server would be left in the token file";
            return Err(Check::skip(NAME, why));
        }
        Fetcher::File => Arc::new(TokenFile::new(config.token.clone(), agent::AUDIENCE, clock.clone())),
    };
    let mounted = || Check::skip(NAME, "certificates are mounted, no CA is asked");
    let first = || Check::skip(NAME, "the configuration and the roots above come first");
    let signer = scene.ca.as_ref().map_err(|_| first())?.as_ref().ok_or_else(mounted)?;
    let client =
        agent::ca_client(signer, tokens, &Metrics::new(), &clock, &RootFiles::default(), &Arc::default())
            .await;
    let told = |error: &Refusal| scene.refused.iter().any(|refused| refused.text == error.text);
    let client = client.map_err(|error| match error.kind {
        // Looked at above, with a line for each file.
        Kind::RootMissing | Kind::RootBroken => first(),
        _ if told(&error) => first(),
        kind => Check::fail(NAME, kind, error.text).hint("").broken(),
    });
    let client = client?.ok_or_else(mounted)?;
    match scene.plan.as_ref().zip(identity::tokens(config).ok()) {
        Some((plan, tokens)) => Ok((client, identity::identity(config, plan, tokens).secrets())),
        None => Err(Check::skip(NAME, "the configuration above comes first")),
    }
}

// The certificate for our key in the CA's answer; or the answer's defect.
fn issued(entries: &[String], spki: &[u8], now: SystemTime) -> Result<Cert, Check> {
    let unusable = |said: &str| Check::fail(NAME, Kind::CertificateUnusable, said);
    let leaf = entries.first().ok_or_else(|| unusable("the answer holds no certificate"))?;
    let certs = cert::parse_chain(leaf.as_bytes()).map_err(|e| unusable(&e.to_string()))?;
    let Some(cert) = certs.into_iter().next().filter(|c| c.spki == spki) else {
        let mut later = entries.iter().skip(1).filter_map(|pem| cert::parse_chain(pem.as_bytes()).ok());
        return Err(unusable(if later.any(|certs| certs.iter().any(|c| c.spki == spki)) {
            "the certificates are out of order: that of the key that was sent is not the first"
        } else {
            "the certificate is not for the key that was sent"
        }));
    };
    if cert.not_after < now {
        let ago = super::token::ago(now, cert.not_after);
        return Err(unusable(&format!("the certificate that the CA issued expired {ago} ago")));
    }
    Ok(cert)
}

// What peers have against the chain, which the agent serves all the same. Mounted roots are served beside the CA's.
async fn refusable(scene: &Scene, entries: &[String], roots: &[String], mounted: PathBuf) -> Option<Check> {
    let read = |pem: &String| cert::parse_chain(pem.as_bytes()).unwrap_or_default();
    let certs: Vec<Cert> = entries.iter().flat_map(read).collect();
    let mut anchors: Vec<Cert> = roots.iter().flat_map(read).collect();
    if anchors.is_empty() {
        anchors = entries.last().map(read).unwrap_or_default();
    }
    chain::flaw(&certs, &anchors, scene.now)?;
    // The disk may not answer, and a pipe in its place may have no writer.
    let mounted = match super::beside(NAME, scene.end, move || bounded::usual(&mounted)).await {
        Ok(read) => read.ok().and_then(|pem| cert::parse_chain(&pem).ok()).unwrap_or_default(),
        Err(late) => return Some(late),
    };
    anchors.extend(chain::concerned(mounted, &certs));
    let flaw = chain::flaw(&certs, &anchors, scene.now)?;
    let said = format!(
        "peers refuse the chain of the certificate that the CA issued: {flaw} (further roots that istiod may send with \
         the configuration are not known here)"
    );
    Some(Check::warn(NAME, said, Kind::CertificateChain.hint()))
}

// The CA has signed, for `identity` or for somebody else.
fn signed(cert: &Cert, identity: &str, now: SystemTime, took: Duration) -> Check {
    let left = cert.not_after.duration_since(now).unwrap_or_default();
    let (whom, span, took) = (cert.names().join(", "), crate::trouble::span(left), took.as_millis());
    let signed = format!("the CA signed a throw-away key for {whom}, valid for {span}, in {took} ms");
    if cert.uris.iter().any(|uri| uri == identity) {
        return Check::ok(NAME, signed);
    }
    Check::warn(
        NAME,
        format!("{signed}; {identity} was asked for, peers will see the former"),
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
