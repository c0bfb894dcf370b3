//! Service-account tokens as Kubernetes projects them: minted, and verified as istiod would.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, encode};
use rcgen::{KeyPair, PKCS_RSA_SHA256};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The issuer of a Kubernetes cluster's projected tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// The audience that istiod expects (its `TOKEN_AUDIENCES`).
pub const AUDIENCE: &str = "istio-ca";

struct Keys {
    encoding: EncodingKey,
    decoding: DecodingKey,
    public: String,
}

/// The key that signs tokens. One per process: making an RSA key takes tens of milliseconds.
fn keys() -> &'static Keys {
    static KEYS: OnceLock<Keys> = OnceLock::new();
    KEYS.get_or_init(|| {
        let pair = KeyPair::generate_for(&PKCS_RSA_SHA256).expect("RSA keys can be made");
        let public = pair.public_key_pem();
        let encoding = EncodingKey::from_rsa_pem(pair.serialize_pem().as_bytes()).expect("our own PEM");
        let decoding = DecodingKey::from_rsa_pem(public.as_bytes()).expect("our own PEM");
        Keys { encoding, decoding, public }
    })
}

/// What verifies tokens, in PEM, for others that are shown one.
#[must_use]
pub fn public_key_pem() -> String {
    keys().public.clone()
}

/// What stands in a token.
#[derive(Debug, Clone)]
pub struct Token {
    /// `iss`.
    pub issuer: String,
    /// `aud`.
    pub audience: String,
    /// `sub`.
    pub subject: String,
    /// From now to `exp`; may lie in the past.
    pub expires: Expiry,
}

/// When a token ends.
#[derive(Debug, Clone, Copy)]
pub enum Expiry {
    /// So long from now.
    In(Duration),
    /// It ended so long ago.
    Ago(Duration),
}

impl Token {
    /// A good token of service account `account` in `namespace`, valid for twelve hours.
    #[must_use]
    pub fn of(namespace: &str, account: &str) -> Self {
        Self {
            issuer: ISSUER.to_owned(),
            audience: AUDIENCE.to_owned(),
            subject: format!("system:serviceaccount:{namespace}:{account}"),
            expires: Expiry::In(Duration::from_secs(12 * 3600)),
        }
    }

    /// Signs it (RS256). Two calls never give the same text: each has an ID of its own.
    ///
    /// # Panics
    /// Never; the claims are plain JSON.
    #[must_use]
    pub fn sign(&self) -> String {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let end = match self.expires {
            Expiry::In(time) => now + time,
            Expiry::Ago(time) => now - time,
        };
        let claims = json!({
            "iss": self.issuer,
            "aud": [self.audience],
            "sub": self.subject,
            "iat": now.as_secs(),
            "nbf": now.as_secs(),
            "exp": end.as_secs(),
            "jti": format!("{:032x}", rand::random::<u128>()),
        });
        encode(&Header::new(Algorithm::RS256), &claims, &keys().encoding).expect("claims can be signed")
    }
}

/// The `sub` of a token that passes: signature, issuer, audience, expiry.
///
/// # Errors
/// One line that says which check failed.
pub fn verify(token: &str) -> Result<String, String> {
    #[derive(Deserialize, Serialize)]
    struct Claims {
        sub: String,
    }
    let mut rules = Validation::new(Algorithm::RS256);
    rules.set_issuer(&[ISSUER]);
    rules.set_audience(&[AUDIENCE]);
    rules.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
    rules.leeway = 0;
    decode::<Claims>(token, &keys().decoding, &rules).map(|data| data.claims.sub).map_err(|e| e.to_string())
}

/// `spiffe://<td>/ns/<ns>/sa/<sa>` of a subject `system:serviceaccount:<ns>:<sa>`.
#[must_use]
pub fn identity(subject: &str, trust_domain: &str) -> Option<String> {
    let mut parts = subject.split(':');
    let identity = match (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()) {
        ("system", "serviceaccount", namespace, account, None)
            if !namespace.is_empty() && !account.is_empty() =>
        {
            format!("spiffe://{trust_domain}/ns/{namespace}/sa/{account}")
        }
        _ => return None,
    };
    Some(identity)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_token_passes_and_each_check_refuses() {
        let good = Token::of("demo", "client");
        assert_eq!(verify(&good.sign()).unwrap(), "system:serviceaccount:demo:client");
        for bad in [
            Token { issuer: "https://elsewhere".into(), ..good.clone() },
            Token { audience: "vault".into(), ..good.clone() },
            Token { expires: Expiry::Ago(Duration::from_secs(2)), ..good.clone() },
        ] {
            assert!(verify(&bad.sign()).is_err(), "{bad:?}");
        }
        let mut forged = good.sign();
        forged.replace_range(forged.len() - 8.., "AAAAAAAA");
        assert!(verify(&forged).is_err());
    }

    #[test]
    fn identities_need_all_four_parts() {
        assert_eq!(identity("system:serviceaccount:a:b", "td").as_deref(), Some("spiffe://td/ns/a/sa/b"));
        for bad in ["system:serviceaccount:a", "system:serviceaccount::b", "system:node:a:b", "a:b:c:d:e", ""]
        {
            assert_eq!(identity(bad, "td"), None, "{bad}");
        }
    }
}
