//! From the fields of a secret to what is served.

use std::sync::Arc;

use zeroize::Zeroizing;

use crate::secrets::{Identity, Roots, Secret};
use crate::tls::cert;

/// What a name of trust anchors ends with.
pub(super) const CACERT: &str = "-cacert";

/// The fields that are read.
pub(super) const FIELDS: [&str; 7] = ["token", "cacert", "ca.crt", "tls.crt", "tls.key", "cert", "key"];

/// A field of a secret, by its name.
pub(super) type Field<'a> = &'a dyn Fn(&str) -> Option<Zeroizing<Vec<u8>>>;

/// Whether a secret of this name is one of a gateway's at all.
pub(super) fn is_ours(name: &str) -> bool {
    !name.starts_with("istio") && !name.starts_with("prometheus")
}

/// Which secrets a resource may be in: its own, and for trust anchors the compound one.
pub(super) fn secrets_of(resource: &str) -> Vec<&str> {
    let base = resource.strip_suffix(CACERT).filter(|base| !base.is_empty());
    std::iter::once(resource).chain(base).collect()
}

/// What is wrong with a secret, without a word of its contents.
#[derive(Debug, thiserror::Error)]
pub(super) enum BadSecret {
    #[error("it has a field token, so it is a service account's and not served")]
    Token,
    #[error("it has neither cacert nor tls.crt")]
    NoAnchors,
    #[error("its trust anchors cannot be read: {0}")]
    Anchors(#[source] cert::Error),
    #[error("its field {0} is missing or empty")]
    Missing(&'static str),
    #[error("with it the secrets of gateways would take more than 32 MB")]
    Room,
    #[error("its pair cannot be served: {0}")]
    Pair(#[source] cert::Error),
}

/// The resource in a secret of name `secret`; `None` when it has none of that kind.
///
/// # Errors
/// When it cannot be served.
pub(super) fn resource(name: &str, secret: &str, field: Field<'_>) -> Result<Option<Secret>, BadSecret> {
    if field("token").is_some() {
        return Err(BadSecret::Token);
    }
    let some = |name: &str| field(name).filter(|value| !value.is_empty());
    if name.ends_with(CACERT) {
        let own = name == secret;
        let pem = some("cacert").or_else(|| some("ca.crt")).or_else(|| some("tls.crt").filter(|_| own));
        let Some(pem) = pem else {
            return if own { Err(BadSecret::NoAnchors) } else { Ok(None) };
        };
        cert::parse_chain(&pem).map_err(BadSecret::Anchors)?;
        return Ok(Some(Secret::Roots(Arc::new(Roots { pem: pem.to_vec() }))));
    }
    let (cert_field, key_field) =
        if some("cert").is_some() { ("cert", "key") } else { ("tls.crt", "tls.key") };
    let chain = some(cert_field).ok_or(BadSecret::Missing(cert_field))?;
    let key = some(key_field).ok_or(BadSecret::Missing(key_field))?;
    cert::check_pair(&chain, &key).map_err(BadSecret::Pair)?;
    Ok(Some(Secret::Identity(Arc::new(Identity { chain: chain.to_vec(), key }))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Vec<u8>, Vec<u8>) {
        let made = rcgen::generate_simple_self_signed(vec!["gw".to_owned()]).unwrap();
        (made.cert.pem().into_bytes(), made.signing_key.serialize_pem().into_bytes())
    }

    fn read(name: &str, secret: &str, fields: &[(&str, &[u8])]) -> Result<Option<&'static str>, BadSecret> {
        let field =
            |name: &str| fields.iter().find(|(n, _)| *n == name).map(|(_, v)| Zeroizing::new(v.to_vec()));
        resource(name, secret, &field).map(|found| {
            found.map(|secret| match secret {
                Secret::Identity(_) => "pair",
                Secret::Roots(_) => "roots",
            })
        })
    }

    #[test]
    fn secrets_of_every_kind() {
        let ((cert, key), (_, other)) = (pair(), pair());
        let tls: &[(&str, &[u8])] = &[("tls.crt", &cert), ("tls.key", &key)];
        assert_eq!(read("a", "a", tls).unwrap(), Some("pair"));
        assert_eq!(
            read("a", "a", &[("cert", &cert), ("key", &key), ("tls.crt", b"x")]).unwrap(),
            Some("pair")
        );
        assert_eq!(
            read("a", "a", &[("cert", b""), ("tls.crt", &cert), ("tls.key", &key)]).unwrap(),
            Some("pair")
        );
        assert_eq!(read("a-cacert", "a-cacert", &[("cacert", &cert)]).unwrap(), Some("roots"));
        assert_eq!(read("a-cacert", "a-cacert", tls).unwrap(), Some("roots"));
        assert_eq!(read("a-cacert", "a", &[("cacert", &cert)]).unwrap(), Some("roots"));
        assert_eq!(read("a-cacert", "a", tls).unwrap(), None, "a pair's certificate is no anchor");
        for (fields, why) in [
            (&[("tls.crt", &cert[..]), ("tls.key", &other)][..], "pair"),
            (&[("tls.crt", b"garbage"), ("tls.key", &key)], "pair"),
            (&[("tls.crt", &cert)], "tls.key"),
            (&[("cert", &cert), ("tls.key", &key)], "key"),
            (&[("tls.crt", &cert), ("tls.key", &key), ("token", b"t")], "token"),
        ] {
            let error = read("a", "a", fields).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("BEGIN"), "{error}");
        }
        assert!(read("a-cacert", "a-cacert", &[("cacert", b"garbage")]).is_err());
    }

    #[test]
    fn names() {
        assert!(is_ours("gw") && !is_ours("istio-token") && !is_ours("prometheus-x"));
        assert_eq!(secrets_of("a-cacert"), ["a-cacert", "a"]);
        assert_eq!(secrets_of("a"), ["a"]);
        assert_eq!(secrets_of("-cacert"), ["-cacert"]);
    }
}
