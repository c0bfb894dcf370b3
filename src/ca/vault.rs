//! Client of HashiCorp Vault's certificate store (and of OpenBao's, which has the same API).
//!
//! A signature is two requests: a login with the workload's token, and the signing itself with what the login
//! gave. Both belong to one attempt; attempts, pauses and deadlines are those of the other CAs. Nothing that
//! Vault says beside the certificates is repeated: an answer may hold a token. Redirects are not followed, since
//! they would hand the workload's token to another host.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::{HeaderMap, HeaderValue};
use rustls::crypto::CryptoProvider;
use serde_json::{Value, json};
use tonic::{Code, Status};
use zeroize::Zeroizing;

use super::attempts::{Attempts, Failed, watched};
use super::{CaClient, Error};
use crate::base::error::chain;
use crate::base::lane;
use crate::base::metrics::Metrics;
use crate::fetch::url::{Url, shown};
use crate::fetch::{Dialer, Get, Proxies, Tls};
use crate::istiod::auth::TokenSource;
use crate::trouble::Reporter;

/// Before what is said of a login.
pub(super) const LOGIN: &str = "login: ";

/// No answer with a chain is longer.
const ANSWER: usize = 1 << 20;

/// What a client needs.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `VAULT_ADDR`.
    pub address: String,
    /// `VAULT_ROLE`.
    pub role: String,
    /// `VAULT_AUTH_PATH`, below `/v1/`.
    pub auth_path: String,
    /// `VAULT_SIGN_CSR_PATH`, below `/v1/`.
    pub sign_path: String,
    /// `VAULT_NAMESPACE`; may be empty.
    pub namespace: String,
    /// `VAULT_TLS_ROOT_CERT`: trusted beside the system's roots; may be empty.
    pub roots: Vec<u8>,
    /// HTTP proxies on the way.
    pub proxies: Proxies,
    /// What TLS is made of.
    pub crypto: Arc<CryptoProvider>,
    /// Bound of one attempt.
    pub attempt_timeout: Duration,
    /// Bound of a call with all its attempts.
    pub total_timeout: Duration,
}

/// Why there can be no client.
#[derive(Debug, thiserror::Error)]
#[error("{name}={value}: {why}")]
pub(crate) struct Bad {
    name: &'static str,
    value: String,
    why: String,
}

/// Where a Vault is asked.
struct Endpoints {
    login: String,
    sign: String,
    authority: String,
}

impl Config {
    /// Whether address and paths can be meant.
    ///
    /// # Errors
    /// When one cannot; the variable is named.
    pub(crate) fn check(&self) -> Result<(), Bad> {
        self.endpoints().map(drop)
    }

    fn endpoints(&self) -> Result<Endpoints, Bad> {
        let bad = |name, value: &str, why: &str| Bad { name, value: shown(value), why: why.to_owned() };
        let address = self.address.trim_end_matches('/');
        let url = Url::parse(address).map_err(|e| bad("VAULT_ADDR", address, &e.to_string()))?;
        if url.user.is_some() || url.target.contains('?') {
            return Err(bad("VAULT_ADDR", address, "it has a user or a query, which have no place in it"));
        }
        let at = |name: &'static str, path: &str| {
            let path = path.trim_matches('/');
            let path = path.strip_prefix("v1/").unwrap_or(path);
            let whole = format!("{address}/v1/{path}");
            match Url::parse(&whole) {
                Ok(_) if !path.is_empty() && !path.contains(['?', '#']) => Ok(whole),
                _ => Err(bad(name, path, "it is a path below /v1/")),
            }
        };
        let login = at("VAULT_AUTH_PATH", &self.auth_path)?;
        let sign = at("VAULT_SIGN_CSR_PATH", &self.sign_path)?;
        let header = |name, text: &str| {
            HeaderValue::from_str(text).map_err(|_| bad(name, text, "it cannot stand in a header")).map(drop)
        };
        header("VAULT_NAMESPACE", &self.namespace)?;
        Ok(Endpoints { login, sign, authority: url.authority() })
    }
}

/// The client.
#[derive(Debug)]
pub(crate) struct Client {
    config: Config,
    // The workload's token, asked for at each attempt.
    tokens: Arc<dyn TokenSource>,
    login: String,
    sign: String,
    endpoint: String,
    dialer: Dialer,
    attempts: Attempts,
    // Who is told why an attempt failed; whoever calls ends the trouble.
    trouble: Arc<Reporter>,
}

impl Client {
    /// A client, and its counter of retries in `metrics`.
    ///
    /// # Errors
    /// When the address or a path is invalid.
    ///
    /// # Panics
    /// When a second CA client is made for one registry.
    pub(crate) fn new(
        config: Config,
        tokens: Arc<dyn TokenSource>,
        metrics: &Metrics,
        trouble: Arc<Reporter>,
    ) -> Result<Self, Bad> {
        let Endpoints { login, sign, authority } = config.endpoints()?;
        if !login.starts_with("https:") {
            tracing::warn!(target: "citadelclient", "Vault at {authority} is called in plain text");
        }
        let tls = Some(Arc::new(Tls::with_more_roots(config.crypto.clone(), config.roots.clone())));
        Ok(Self {
            login,
            sign,
            endpoint: authority,
            dialer: Dialer { tls, proxies: config.proxies.clone(), names: &lane::NAMES, ..Dialer::default() },
            attempts: Attempts::new(config.attempt_timeout, config.total_timeout, metrics),
            tokens,
            trouble,
            config,
        })
    }

    async fn call(&self, csr_pem: &str, ttl: Duration) -> Result<Vec<String>, Error> {
        let mut series = self.attempts.begin();
        let mut sent = false;
        loop {
            let attempt = self.attempt(csr_pem, ttl, &mut sent);
            let failed = match watched(attempt, series.until(), &self.endpoint, &self.trouble).await {
                Ok(chain) => return Ok(chain),
                Err(failed) => failed,
            };
            self.trouble.report(failed.error.report());
            let (wait, said) = series.again(failed, sent)?;
            tracing::debug!(target: "citadelclient", "{said}");
            tokio::time::sleep(wait).await;
        }
    }

    async fn attempt(&self, csr_pem: &str, ttl: Duration, sent: &mut bool) -> Result<Vec<String>, Failed> {
        let token = match self.tokens.token().await {
            Ok(Some(token)) => token,
            Ok(None) => {
                return Err(self.refused(
                    Code::Unauthenticated,
                    "login: there is no token to log in with",
                    "; is the projected volume istio-token mounted?",
                ));
            }
            Err(error) => {
                let hint = "; the token is what Vault's login takes, so nothing was sent";
                return Err(self.refused(Code::Unauthenticated, &format!("{LOGIN}{error}"), hint));
            }
        };
        let body = json!({ "jwt": token.expose(), "role": self.config.role });
        let answer = self.post("login", &self.login, None, body).await?;
        let client_token = answer.pointer("/auth/client_token").and_then(Value::as_str);
        let Some(client_token) = client_token.filter(|t| !t.is_empty()) else {
            return Err(self.unusable("login: there is no text auth.client_token in it"));
        };
        let client_token = Zeroizing::new(client_token.to_owned());
        let body = json!({
            "format": "pem",
            "csr": csr_pem,
            "ttl": format!("{}s", ttl.as_secs()),
            "exclude_cn_from_sans": true,
        });
        *sent = true;
        let answer = self.post("signature", &self.sign, Some(&client_token), body).await?;
        chain_in(&answer).map_err(|why| self.unusable(why))
    }

    async fn post(
        &self,
        step: &str,
        url: &str,
        client_token: Option<&str>,
        body: Value,
    ) -> Result<Value, Failed> {
        let mut headers = HeaderMap::new();
        let secret = client_token.into_iter().map(|token| ("x-vault-token", token));
        let namespace = Some(self.config.namespace.as_str()).filter(|n| !n.is_empty());
        for (name, text) in secret.chain(namespace.map(|n| ("x-vault-namespace", n))) {
            let mut value = HeaderValue::from_str(text)
                .map_err(|_| self.unusable(&format!("{step}: its token cannot stand in a header")))?;
            value.set_sensitive(true);
            headers.insert(name, value);
        }
        let body = Bytes::from(body.to_string());
        let connect = |e: crate::fetch::Error| {
            let temporary = e.is_temporary() || matches!(e, crate::fetch::Error::Connect { .. });
            let source = format!("{step}: {}", chain(&e)).into();
            Failed { error: Error::Connect { endpoint: self.endpoint.clone(), source }, retry: temporary }
        };
        let get = Get::new(url).map_err(connect)?;
        let sent = get.headers(headers).post("application/json", body).dialer(&self.dialer).keep(None).send();
        let mut reply = sent.await.map_err(connect)?;
        let status = reply.status().as_u16();
        if status != 200 {
            return Err(self.status(step, status));
        }
        let text = match reply.bytes(ANSWER).await {
            Ok(text) => Zeroizing::new(text),
            Err(crate::fetch::Error::TooLong(limit)) => {
                return Err(self.unusable(&format!("{step}: it is longer than {limit} bytes")));
            }
            Err(error) => return Err(connect(error)),
        };
        // What serde says may repeat a part of the answer.
        serde_json::from_slice(&text).map_err(|_| self.unusable(&format!("{step}: it is no JSON")))
    }

    fn status(&self, step: &str, status: u16) -> Failed {
        let (code, hint) = match status {
            300..=399 => (
                Code::FailedPrecondition,
                "; redirects are not followed: VAULT_ADDR must lead to the active node",
            ),
            400 => (
                Code::InvalidArgument,
                "; are VAULT_ROLE and the role that signs right, and may it sign SECRET_TTL?",
            ),
            403 => (
                Code::PermissionDenied,
                "; is the service account bound to VAULT_ROLE, and does its policy allow VAULT_SIGN_CSR_PATH?",
            ),
            404 => (Code::NotFound, "; is there such a path (VAULT_AUTH_PATH, VAULT_SIGN_CSR_PATH)?"),
            429 => (Code::ResourceExhausted, "; Vault is asked too often"),
            412 | 472 | 473 | 500..=599 => {
                (Code::Unavailable, "; Vault's own log and seal status name the reason")
            }
            _ => (Code::Unknown, "; is this a Vault?"),
        };
        let mut failed = self.refused(code, &format!("{step}: HTTP status {status}"), hint);
        failed.retry = matches!(status, 412 | 429 | 472 | 473 | 500..=599);
        failed
    }

    fn refused(&self, code: Code, why: &str, hint: &'static str) -> Failed {
        let status = Box::new(Status::new(code, why));
        Failed { error: Error::Status { endpoint: self.endpoint.clone(), status, hint }, retry: false }
    }

    fn unusable(&self, why: &str) -> Failed {
        let error = Error::Answer { endpoint: self.endpoint.clone(), reason: why.to_owned() };
        Failed { error, retry: false }
    }
}

/// The certificate and what stands above it, each with a line end.
fn chain_in(answer: &Value) -> Result<Vec<String>, &'static str> {
    let data = answer.get("data").ok_or("signature: there is no data in it")?;
    let certificate = data.get("certificate").and_then(Value::as_str);
    let certificate = certificate
        .filter(|text| !text.trim().is_empty())
        .ok_or("signature: there is no text data.certificate in it")?;
    let above = data.get("ca_chain").and_then(Value::as_array);
    let above = above.ok_or("signature: there is no list data.ca_chain in it")?;
    let line = |text: &str| format!("{}\n", text.trim_end());
    let mut chain = vec![line(certificate)];
    for one in above {
        chain.push(line(one.as_str().ok_or("signature: a member of data.ca_chain is no text")?));
    }
    if chain.len() < 2 {
        return Err("signature: its chain has fewer than two certificates (leaf and root)");
    }
    Ok(chain)
}

impl CaClient for Client {
    fn sign<'a>(&'a self, csr_pem: &'a str, ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        Box::pin(self.call(csr_pem, ttl))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_of_every_shape() {
        let good = json!({"data": {"certificate": "A", "ca_chain": ["B\n", "C"]}});
        assert_eq!(chain_in(&good).unwrap(), ["A\n", "B\n", "C\n"]);
        for bad in [
            json!({}),
            json!([]),
            json!({"data": null}),
            json!({"data": {"certificate": 7, "ca_chain": ["B"]}}),
            json!({"data": {"certificate": "A"}}),
            json!({"data": {"certificate": " ", "ca_chain": ["B"]}}),
            json!({"data": {"certificate": "A", "ca_chain": []}}),
            json!({"data": {"certificate": "A", "ca_chain": "B"}}),
            json!({"data": {"certificate": "A", "ca_chain": [null]}}),
        ] {
            assert!(chain_in(&bad).is_err(), "{bad}");
        }
    }

    fn client(address: &str, auth: &str) -> Result<Client, Bad> {
        let config = Config {
            address: address.into(),
            role: "r".into(),
            auth_path: auth.into(),
            sign_path: "/v1/pki/sign/r/".into(),
            namespace: String::new(),
            roots: Vec::new(),
            proxies: Proxies::default(),
            crypto: crate::tls::provider::provider(crate::tls::provider::Compliance::None).0,
            attempt_timeout: Duration::from_secs(1),
            total_timeout: Duration::from_secs(1),
        };
        Client::new(config, Arc::new(crate::istiod::auth::Mock), &Metrics::new(), Reporter::default().into())
    }

    #[test]
    fn paths_are_below_v1() {
        let made = client("https://vault:8200/", "auth/kubernetes/login").unwrap();
        assert_eq!(made.login, "https://vault:8200/v1/auth/kubernetes/login");
        assert_eq!(made.sign, "https://vault:8200/v1/pki/sign/r");
        for (address, auth, name) in [
            ("vault:8200", "a", "VAULT_ADDR"),
            ("https://u:s3cret@vault", "a", "VAULT_ADDR"),
            ("https://vault", "", "VAULT_AUTH_PATH"),
            ("https://vault", "a?b", "VAULT_AUTH_PATH"),
        ] {
            let error = client(address, auth).unwrap_err().to_string();
            assert!(error.starts_with(name) && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn statuses_worth_another_try() {
        let made = client("https://vault", "a").unwrap();
        for (status, again) in [
            (400, false),
            (403, false),
            (404, false),
            (307, false),
            (412, true),
            (429, true),
            (472, true),
            (473, true),
            (500, true),
            (503, true),
        ] {
            assert_eq!(made.status("login", status).retry, again, "{status}");
        }
    }
}
