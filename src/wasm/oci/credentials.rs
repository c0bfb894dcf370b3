//! Credentials from a Docker config file. Pure.
//!
//! Helpers (`credsStore`, `credHelpers`) are programs that the agent's image does not have; they are not run.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use zeroize::{ZeroizeOnDrop, Zeroizing};

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

#[derive(Deserialize)]
struct Document {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize, ZeroizeOnDrop)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    auth: String,
    #[serde(default)]
    identitytoken: String,
    #[serde(default)]
    registrytoken: String,
}

/// The credentials for the first of `keys` that the document knows; without any, nobody is named.
pub(super) fn find(document: &str, keys: &[String]) -> Result<Credentials, BadConfig> {
    if document.trim() == "null" {
        return Err(BadConfig::Null);
    }
    let document: Document = serde_json::from_str(document)
        .map_err(|e| BadConfig::Syntax { line: e.line(), column: e.column() })?;
    let exact = keys.iter().find_map(|key| document.auths.get(key));
    let entry = exact.or_else(|| {
        keys.iter()
            .find_map(|key| document.auths.iter().find(|(known, _)| hostname(known) == key).map(|(_, e)| e))
    });
    let Some(entry) = entry else { return Ok(Credentials::default()) };
    let basic = if entry.auth.is_empty() {
        let named = !entry.username.is_empty() || !entry.password.is_empty();
        named.then(|| Zeroizing::new(STANDARD.encode(format!("{}:{}", entry.username, entry.password))))
    } else {
        let plain = STANDARD.decode(entry.auth.trim()).map(Zeroizing::new);
        let plain = plain.map_err(|_| BadConfig::Base64)?;
        if !plain.contains(&b':') {
            return Err(BadConfig::UserPassword);
        }
        // Some tools pad the password with zeros.
        let end = plain.iter().rposition(|b| *b != 0).map_or(0, |at| at + 1);
        Some(Zeroizing::new(STANDARD.encode(&plain[..end])))
    };
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
            "https://old.io/v1/": {"username": "o"}}, "credsStore": "x"}"#;
        assert_eq!(basic(document, &["r.io"]).as_deref(), Some("u:p"));
        assert_eq!(basic(document, &["r.io/team/x", "r.io"]).as_deref(), Some("u:q"));
        assert_eq!(basic(document, &["r.io/other", "r.io"]).as_deref(), Some("u:p"));
        assert_eq!(basic(document, &["https://index.docker.io/v1/"]).as_deref(), Some("h:b"));
        assert_eq!(basic(document, &["old.io"]).as_deref(), Some("o:"));
        assert_eq!(basic(document, &["else.io"]), None);
        assert_eq!(basic("{}", &["r.io"]), None);
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
            r#"{"auths": {"r.io": "s3cret"}}"#,
            r#"{"auths": {"r.io": {"auth": "s3cret!"}}}"#,
            r#"{"auths": {"r.io": {"auth": "czNjcmV0"}}}"#,
        ] {
            let error = find(bad, &["r.io".to_owned()]).err().expect(bad);
            assert!(!error.to_string().contains("s3cret"), "{error}");
        }
    }
}
