//! Credentials from a Docker config file. Pure.
//!
//! Helpers (`credsStore`, `credHelpers`) are programs that the agent's image does not have; they are not run.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

/// What a registry or its token server is shown. Never printed.
#[derive(Default)]
pub(super) struct Credentials {
    /// User and password, as Basic authentication wants them: joined and encoded.
    pub(super) basic: Option<Zeroizing<String>>,
    /// To be exchanged for a token.
    pub(super) identity: Option<Zeroizing<String>>,
    /// A token as it is.
    pub(super) registry: Option<Zeroizing<String>>,
}

/// A Docker config that cannot be used. The parser's own words would repeat what it stumbled over.
#[derive(Debug, thiserror::Error)]
pub(in crate::wasm) enum BadConfig {
    #[error("the image pull secret is no Docker config: it is null")]
    Null,
    #[error("the image pull secret is no Docker config: at line {line} column {column}")]
    Syntax { line: usize, column: usize },
    #[error("the image pull secret is no Docker config: auth is not base64")]
    Base64,
    #[error("the image pull secret is no Docker config: auth is not user:password in base64")]
    UserPassword,
}

#[derive(Default)]
struct Document {
    auths: BTreeMap<String, Option<Entry>>,
}

#[derive(Default, ZeroizeOnDrop)]
struct Entry {
    username: String,
    password: String,
    auth: String,
    identitytoken: String,
    registrytoken: String,
}

/// An object as Docker's own library reads it: names in any case; of equal ones each counts, in their order.
trait Object: Default {
    /// Reads the value of the field `name`, which is in small letters.
    fn field<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

impl Object for Document {
    fn field<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        if name != "auths" {
            return map.next_value::<IgnoredAny>().map(drop);
        }
        match map.next_value()? {
            Some(more) => self.auths.extend::<BTreeMap<_, _>>(more),
            None => self.auths.clear(),
        }
        Ok(())
    }
}

impl Object for Entry {
    fn field<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error> {
        let field = match name {
            "username" => &mut self.username,
            "password" => &mut self.password,
            "auth" => &mut self.auth,
            "identitytoken" => &mut self.identitytoken,
            "registrytoken" => &mut self.registrytoken,
            _ => return map.next_value::<IgnoredAny>().map(drop),
        };
        if let Some(text) = map.next_value()? {
            field.zeroize();
            *field = text;
        }
        Ok(())
    }
}

struct Read<T>(PhantomData<T>);

impl<'de, T: Object> Visitor<'de> for Read<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut out = T::default();
        while let Some(name) = map.next_key::<String>()? {
            out.field(&name.to_ascii_lowercase(), &mut map)?;
        }
        Ok(out)
    }
}

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Read(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(Read(PhantomData))
    }
}

/// The credentials for the first of `keys` that the document knows; without any, nobody is named.
pub(super) fn find(document: &str, keys: &[String]) -> Result<Credentials, BadConfig> {
    if document.trim() == "null" {
        return Err(BadConfig::Null);
    }
    let refused = |e: &serde_json::Error| BadConfig::Syntax { line: e.line(), column: e.column() };
    // What follows the document is not looked at, as by Docker itself.
    let mut reader = serde_json::Deserializer::from_str(document);
    let document = Document::deserialize(&mut reader).map_err(|e| refused(&e))?;
    let exact = keys.iter().find_map(|key| document.auths.get(key));
    let entry = exact.or_else(|| {
        keys.iter()
            .find_map(|key| document.auths.iter().find(|(known, _)| hostname(known) == key).map(|(_, e)| e))
    });
    let Some(entry) = entry.and_then(Option::as_ref) else { return Ok(Credentials::default()) };
    let pair = if entry.auth.is_empty() {
        Zeroizing::new(format!("{}:{}", entry.username, entry.password).into_bytes())
    } else {
        // Tools that encode by the line leave the line breaks in.
        let text = Zeroizing::new(entry.auth.trim().replace(['\r', '\n'], ""));
        let mut plain =
            STANDARD.decode(text.as_bytes()).map(Zeroizing::new).map_err(|_| BadConfig::Base64)?;
        if !plain.contains(&b':') {
            return Err(BadConfig::UserPassword);
        }
        // Some tools pad the password with zeros.
        let end = plain.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
        plain.truncate(end);
        plain
    };
    // Half a pair is nobody: a registry would refuse it what everybody may have.
    let whole = pair.iter().position(|b| *b == b':').is_some_and(|at| at > 0 && at + 1 < pair.len());
    let basic = whole.then(|| Zeroizing::new(STANDARD.encode(pair.as_slice())));
    let some = |text: &String| Some(text.clone()).filter(|t| !t.is_empty()).map(Zeroizing::new);
    Ok(Credentials { basic, identity: some(&entry.identitytoken), registry: some(&entry.registrytoken) })
}

/// The host of a key, which may be a URL.
fn hostname(key: &str) -> &str {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn basic(document: &str, keys: &[&str]) -> Option<String> {
        let keys: Vec<String> = keys.iter().map(|k| (*k).to_owned()).collect();
        let encoded = find(document, &keys).unwrap().basic?;
        Some(String::from_utf8(STANDARD.decode(encoded.as_bytes()).unwrap()).unwrap())
    }

    #[test]
    fn the_first_key_that_is_known_counts() {
        let document = r#"{"auths": {
            "r.io": {"username": "u", "password": "p"},
            "r.io/team/x": {"auth": "dTpxAAA="},
            "https://index.docker.io/v1/": {"auth": "aDpi"},
            "https://old.io/v1/": {"username": "o", "password": "p"}}, "credsStore": "x"}"#;
        assert_eq!(basic(document, &["r.io"]).as_deref(), Some("u:p"));
        assert_eq!(basic(document, &["r.io/team/x", "r.io"]).as_deref(), Some("u:q"));
        assert_eq!(basic(document, &["r.io/other", "r.io"]).as_deref(), Some("u:p"));
        assert_eq!(basic(document, &["https://index.docker.io/v1/"]).as_deref(), Some("h:b"));
        assert_eq!(basic(document, &["old.io"]).as_deref(), Some("o:p"));
        assert_eq!(basic(document, &["else.io"]), None);
        assert_eq!(basic("{}", &["r.io"]), None);
        for nobody in [
            r#"{"auths": null}"#,
            r#"{"auths": {"r.io": null}}"#,
            r#"{"auths": {"r.io": {"username": "u"}}}"#,
            r#"{"auths": {"r.io": {"password": "p"}}}"#,
            r#"{"auths": {"r.io": {"auth": "dTo="}}}"#,
            r#"{"auths": {"r.io": {"auth": "OnA="}}}"#,
            r#"{"auths": {"r.io": {"username": null, "password": null, "auth": null}}}"#,
        ] {
            assert_eq!(basic(nobody, &["r.io"]), None, "{nobody}");
        }
        let other = r#"{"auths": {"other.io": {"auth": "!"}, "r.io": {"auth": "dTpx"}}, "HttpHeaders": 1}"#;
        assert_eq!(basic(other, &["r.io"]).as_deref(), Some("u:q"));
        let wrapped = r#"{"auths": {"r.io": {"auth": "dT\r\npx\n"}}} and more"#;
        assert_eq!(basic(wrapped, &["r.io"]).as_deref(), Some("u:q"));
        let twice = r#"{"auths": {"r.io": {"auth": "dTpx"}, "a.io": {"auth": "aDpi"}},
            "Auths": {"r.io": {"Username": "x", "password": "p", "username": "y", "USERNAME": null}}}"#;
        assert_eq!(basic(twice, &["r.io"]).as_deref(), Some("y:p"));
        assert_eq!(basic(twice, &["a.io"]).as_deref(), Some("h:b"));
        assert_eq!(basic(r#"{"auths": {"r.io": {"auth": "dTpx"}}, "auths": null}"#, &["r.io"]), None);
        let tokens = r#"{"auths": {"r.io": {"identitytoken": "i", "registrytoken": "t"}}}"#;
        let found = find(tokens, &["r.io".to_owned()]).unwrap();
        assert_eq!((found.identity.unwrap().as_str(), found.registry.unwrap().as_str()), ("i", "t"));
    }

    #[test]
    fn what_cannot_be_read_is_refused_without_a_word_of_it() {
        for bad in [
            "null",
            "",
            "s3cret",
            "[]",
            r#"{"auths": {"r.io": "s3cret"}}"#,
            r#"{"auths": {"r.io": {"auth": "s3cret!"}}}"#,
            r#"{"auths": {"r.io": {"auth": "czNjcmV0"}}}"#,
        ] {
            let error = find(bad, &["r.io".to_owned()]).err().expect(bad);
            assert!(!error.to_string().contains("s3cret"), "{error}");
        }
    }
}
