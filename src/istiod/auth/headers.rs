//! The metadata of a call, by the rules of Go's gRPC library.

use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue};
use zeroize::Zeroizing;

use super::Token;

/// Metadata sent with every call. The values of extra headers are mostly secrets, so `Debug` names them only.
#[derive(Clone, Default)]
pub struct CallHeaders {
    /// `clusterid`, sent even when empty.
    pub cluster_id: String,
    /// `XDS_HEADER_*` or `CA_HEADER_*`: lower-cased name and value.
    pub extra: Vec<(String, String)>,
}

impl fmt::Debug for CallHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.extra.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("CallHeaders").field("cluster_id", &self.cluster_id).field("extra", &names).finish()
    }
}

/// Metadata that no call can carry; it fails before it leaves. Never names a value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// HTTP/2 or gRPC has no such name.
    #[error(
        "header name {0:?} is not allowed in HTTP/2: rename the XDS_HEADER_ or CA_HEADER_ variable it comes from"
    )]
    Name(String),
    /// The value holds more than printable ASCII.
    #[error("the value of header {0:?} contains characters that are not printable ASCII")]
    Value(String),
    /// The token cannot be a header.
    #[error("the token contains characters that are not printable ASCII: is its file a token?")]
    Token,
}

/// Names that belong to the protocol; Go's gRPC library drops these without a word, and sends others of gRPC's own.
const RESERVED: [&str; 8] = [
    "content-type",
    "user-agent",
    "te",
    "grpc-message-type",
    "grpc-encoding",
    "grpc-message",
    "grpc-status",
    "grpc-timeout",
];
/// Names that belong to a connection; HTTP/2 refuses the whole request.
const FORBIDDEN: [&str; 5] = ["connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade"];

impl CallHeaders {
    /// Adds `clusterid`, the extra headers and the token to a request's headers. A name that occurs
    /// twice is appended, so `XDS_HEADER_AUTHORIZATION` stands beside the token.
    ///
    /// # Errors
    /// When one of them cannot be sent; `into` is then to be thrown away.
    pub fn apply(&self, token: Option<&Token>, into: &mut HeaderMap) -> Result<(), HeaderError> {
        into.append("clusterid", value("clusterid", &self.cluster_id)?);
        for (name, text) in &self.extra {
            let lower = name.to_ascii_lowercase();
            if lower.starts_with(':') {
                continue;
            }
            if lower.is_empty() || FORBIDDEN.contains(&lower.as_str()) {
                return Err(HeaderError::Name(name.clone()));
            }
            if RESERVED.contains(&lower.as_str()) {
                continue;
            }
            // gRPC is stricter than HTTP: only these letters.
            if !lower.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'z' | b'-' | b'_' | b'.')) {
                return Err(HeaderError::Name(name.clone()));
            }
            let key =
                HeaderName::from_bytes(lower.as_bytes()).map_err(|_| HeaderError::Name(name.clone()))?;
            let text = if lower.ends_with("-bin") {
                HeaderValue::from_str(&STANDARD_NO_PAD.encode(text))
                    .map_err(|_| HeaderError::Value(name.clone()))?
            } else {
                value(name, text)?
            };
            into.append(key, text);
        }
        if let Some(token) = token {
            let text = Zeroizing::new(format!("Bearer {}", token.expose()));
            let mut bearer = HeaderValue::from_str(&text).map_err(|_| HeaderError::Token)?;
            bearer.set_sensitive(true);
            into.append(AUTHORIZATION, bearer);
        }
        Ok(())
    }
}

fn value(name: &str, text: &str) -> Result<HeaderValue, HeaderError> {
    let refused = || HeaderError::Value(name.to_owned());
    if !text.bytes().all(|b| (0x20..=0x7e).contains(&b)) {
        return Err(refused());
    }
    let mut value = HeaderValue::from_str(text).map_err(|_| refused())?;
    // Extra headers exist mostly to carry secrets.
    value.set_sensitive(name != "clusterid");
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(extra: &[(&str, &str)]) -> Result<HeaderMap, HeaderError> {
        let extra = extra.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let headers = CallHeaders { cluster_id: "c1".to_owned(), extra };
        let mut map = HeaderMap::new();
        headers.apply(Token::new(" secret\n").as_ref(), &mut map).map(|()| map)
    }

    fn all(map: &HeaderMap, name: &str) -> Vec<String> {
        map.get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn repeated_names_stand_beside_each_other() {
        let map = apply(&[("authorization", "Basic x"), ("clusterid", "c2"), ("foo", " =a "), ("empty", "")])
            .unwrap();
        assert_eq!(all(&map, "authorization"), ["Basic x", "Bearer secret"]);
        assert_eq!(all(&map, "clusterid"), ["c1", "c2"]);
        assert_eq!(all(&map, "foo"), [" =a "]);
        assert_eq!(all(&map, "empty"), [""]);
    }

    #[test]
    fn empty_cluster_id_and_no_token() {
        let mut map = HeaderMap::new();
        CallHeaders::default().apply(None, &mut map).unwrap();
        assert_eq!(all(&map, "clusterid"), [""]);
        assert_eq!(map.len(), 1);
    }

    #[test]
    fn binary_values_are_encoded_and_protocol_names_dropped() {
        let map = apply(&[
            ("x-bin", "a\n"),
            ("grpc-timeout", "1S"),
            ("grpc-trace-bin", "b"),
            ("grpc-previous", "1"),
            ("te", "x"),
            ("User-Agent", "x"),
            (":path", "/"),
        ])
        .unwrap();
        assert_eq!(all(&map, "x-bin"), ["YQo"]);
        assert_eq!(
            (all(&map, "grpc-trace-bin"), all(&map, "grpc-previous")),
            (vec!["Yg".into()], vec!["1".into()])
        );
        assert_eq!(map.len(), 5);
    }

    #[test]
    fn what_http2_forbids_fails_the_call() {
        for name in ["connection", "a b", "a:b", "ü", "", "x!"] {
            assert_eq!(apply(&[(name, "v")]).unwrap_err(), HeaderError::Name(name.to_owned()), "{name}");
        }
        assert_eq!(apply(&[("a", "v\n")]).unwrap_err(), HeaderError::Value("a".to_owned()));
        let mut map = HeaderMap::new();
        let broken = Token::new("a\nb");
        let error = CallHeaders::default().apply(broken.as_ref(), &mut map).unwrap_err();
        assert_eq!(error, HeaderError::Token);
        assert!(!format!("{:?}", apply(&[]).unwrap()).contains("secret"));
    }
}
