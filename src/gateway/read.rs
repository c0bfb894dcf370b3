//! From the fields of a secret to what is served.

use std::sync::Arc;

use zeroize::Zeroizing;

use crate::secrets::{Identity, Roots, Secret};
use crate::tls::cert;

/// What a name of trust anchors ends with.
pub(super) const CACERT: &str = "-cacert";

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

/// The resource in a secret of name `secret`; `None` when it has none of that kind.
///
/// # Errors
/// What is wrong with it, without a word of its contents.
pub(super) fn resource(name: &str, secret: &str, field: Field<'_>) -> Result<Option<Secret>, String> {
    if field("token").is_some() {
        return Err("it has a field token, so it is a service account's and not served".to_owned());
    }
    let some = |name: &str| field(name).filter(|value| !value.is_empty());
    if name.ends_with(CACERT) {
        let own = name == secret;
        let pem = some("cacert").or_else(|| some("ca.crt")).or_else(|| some("tls.crt").filter(|_| own));
        let Some(pem) = pem else {
            return if own { Err("it has neither cacert nor tls.crt".to_owned()) } else { Ok(None) };
        };
        cert::parse_chain(&pem).map_err(|e| format!("its trust anchors cannot be read: {e}"))?;
        return Ok(Some(Secret::Roots(Arc::new(Roots { pem: pem.to_vec() }))));
    }
    let (cert_field, key_field) =
        if some("cert").is_some() { ("cert", "key") } else { ("tls.crt", "tls.key") };
    let missing = |name: &str| format!("its field {name} is missing or empty");
    let chain = some(cert_field).ok_or_else(|| missing(cert_field))?;
    let key = some(key_field).ok_or_else(|| missing(key_field))?;
    cert::check_pair(&chain, &key).map_err(|e| format!("its pair cannot be served: {e}"))?;
    Ok(Some(Secret::Identity(Arc::new(Identity { chain: chain.to_vec(), key }))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Vec<u8>, Vec<u8>) {
        let made = rcgen::generate_simple_self_signed(vec!["gw".to_owned()]).unwrap();
        (made.cert.pem().into_bytes(), made.signing_key.serialize_pem().into_bytes())
    }

    fn read(name: &str, secret: &str, fields: &[(&str, &[u8])]) -> Result<Option<&'static str>, String> {
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
        assert_eq!(read("a", "a", tls), Ok(Some("pair")));
        assert_eq!(read("a", "a", &[("cert", &cert), ("key", &key), ("tls.crt", b"x")]), Ok(Some("pair")));
        assert_eq!(read("a", "a", &[("cert", b""), ("tls.crt", &cert), ("tls.key", &key)]), Ok(Some("pair")));
        assert_eq!(read("a-cacert", "a-cacert", &[("cacert", &cert)]), Ok(Some("roots")));
        assert_eq!(read("a-cacert", "a-cacert", tls), Ok(Some("roots")));
        assert_eq!(read("a-cacert", "a", &[("cacert", &cert)]), Ok(Some("roots")));
        assert_eq!(read("a-cacert", "a", tls), Ok(None), "a pair's certificate is no anchor");
        for (fields, why) in [
            (&[("tls.crt", &cert[..]), ("tls.key", &other)][..], "pair"),
            (&[("tls.crt", b"garbage"), ("tls.key", &key)], "pair"),
            (&[("tls.crt", &cert)], "tls.key"),
            (&[("cert", &cert), ("tls.key", &key)], "key"),
            (&[("tls.crt", &cert), ("tls.key", &key), ("token", b"t")], "token"),
        ] {
            let error = read("a", "a", fields).unwrap_err();
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
