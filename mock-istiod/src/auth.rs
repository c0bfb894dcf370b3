//! Who calls: a service-account token or a client certificate. The order and the texts are istiod's.

use http::HeaderMap;

use crate::jwt;

/// What the transport knows about a caller.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    /// The connection's number.
    pub connection: u64,
    /// It came over TLS.
    pub tls: bool,
    /// The URI names of the verified client certificate.
    pub names: Vec<String>,
}

/// The caller's identities.
///
/// # Errors
/// The reasons of both authenticators.
pub fn authenticate(peer: &Peer, headers: &HeaderMap, trust_domain: &str) -> Result<Vec<String>, String> {
    if !peer.names.is_empty() {
        return Ok(peer.names.clone());
    }
    by_token(headers, trust_domain)
        .map(|identity| vec![identity])
        .map_err(|e| format!("no client certificate is presented; target JWT extraction error: {e}"))
}

fn by_token(headers: &HeaderMap, trust_domain: &str) -> Result<String, String> {
    let mut values = headers.get_all("authorization").iter().peekable();
    if values.peek().is_none() {
        return Err("no HTTP authorization header exists".to_owned());
    }
    let token = values
        .filter_map(|value| value.to_str().ok())
        .find_map(|value| value.strip_prefix("Bearer "))
        .ok_or("no bearer token exists in HTTP authorization header")?;
    let subject = jwt::verify(token).map_err(|e| format!("failed to validate the JWT: {e}"))?;
    jwt::identity(&subject, trust_domain).ok_or_else(|| format!("invalid sub {subject}"))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::jwt::Token;

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().fold(HeaderMap::new(), |mut map, value| {
            map.append("authorization", HeaderValue::from_str(value).unwrap());
            map
        })
    }

    #[test]
    fn the_first_bearer_counts() {
        let token = Token::of("demo", "client").sign();
        let good = headers(&["Basic abc", &format!("Bearer {token}")]);
        let peer = Peer::default();
        assert_eq!(authenticate(&peer, &good, "td").unwrap(), ["spiffe://td/ns/demo/sa/client"]);
        for (bad, reason) in [
            (headers(&[]), "no HTTP authorization header"),
            (headers(&[&format!("bearer {token}")]), "no bearer token"),
            (headers(&["Bearer x"]), "failed to validate"),
        ] {
            let error = authenticate(&peer, &bad, "td").unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_certificate_comes_before_the_token() {
        let peer = Peer { names: vec!["spiffe://td/ns/a/sa/b".into()], ..Peer::default() };
        assert_eq!(authenticate(&peer, &headers(&["Bearer x"]), "td").unwrap(), ["spiffe://td/ns/a/sa/b"]);
    }
}
