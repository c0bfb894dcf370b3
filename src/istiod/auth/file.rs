//! `CREDENTIAL_FETCHER_TYPE=JWT`: a token file, read at every attempt.
//!
//! A missing or empty file is no error: the call goes out without the header, which lets a rebooted VM
//! authenticate by certificate. One line is logged per change of its condition.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use super::claims::{self, Claims};
use super::{Error, Token, TokenSource};
use crate::base::clock::{Clock, rfc3339};
use crate::base::lane::Lane;
use crate::base::reading;
use crate::base::seldom::Seldom;
use crate::trouble::{Kind, Report};

/// A token goes into one HTTP header, which servers limit to a fraction of this.
const MAX_TOKEN: u64 = 64 << 10;
/// Clocks of a cluster differ by less.
const SKEW: Duration = Duration::from_secs(60);

/// Token files are read for each call to istiod; a disk that stands still holds so many threads and no more.
static FILES: Lane = Lane::new("token files", 2);

/// Far above what a disk needs that works, and well within the limit of a call.
const PATIENCE: Duration = Duration::from_secs(2);
/// Files may change as often as they like.
static CHANGES: Seldom = Seldom::new(30);

/// Reads `./var/run/secrets/tokens/istio-token` or the like.
pub struct TokenFile {
    path: PathBuf,
    /// The audience istiod expects (`istio-ca` unless it was told otherwise); only for the log.
    audience: String,
    clock: Arc<dyn Clock>,
    last: Mutex<Condition>,
}

/// What there is to say about the file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Condition {
    Good,
    Missing,
    /// By the system's word, and what that is.
    Unreadable(String, Kind),
    NoText(String),
    /// Something else than a JSON Web Token, of so many bytes: istiod judges.
    NoJwt(usize),
    Empty,
    Expired(SystemTime),
    WrongAudience(Vec<String>),
    /// Issued at a date that is yet to come.
    Future(SystemTime),
}

impl fmt::Debug for TokenFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenFile").field("path", &self.path).finish_non_exhaustive()
    }
}

impl TokenFile {
    /// Tokens from `path`, judged for the log by `audience` and the dates of `clock`.
    #[must_use]
    pub fn new(path: PathBuf, audience: impl Into<String>, clock: Arc<dyn Clock>) -> Self {
        Self { path, audience: audience.into(), clock, last: Mutex::new(Condition::Good) }
    }

    /// The token as the file stands now.
    #[cfg(debug_assertions)]
    #[must_use]
    pub fn read(&self) -> Option<Token> {
        self.judged(text(&self.path))
    }

    fn judged(&self, text: std::io::Result<Zeroizing<String>>) -> Option<Token> {
        let (token, condition) = self.examine(text);
        self.tell(condition);
        token
    }

    fn examine(&self, text: std::io::Result<Zeroizing<String>>) -> (Option<Token>, Condition) {
        match text {
            Ok(text) => match Token::new(&text) {
                Some(token) => {
                    let condition = self.judge(&token, self.clock.now());
                    (Some(token), condition)
                }
                None => (None, Condition::Empty),
            },
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => (None, Condition::Missing),
            Err(e) if e.kind() == std::io::ErrorKind::Other => (None, Condition::NoText(e.to_string())),
            Err(e) => {
                let kind = Kind::of_io(&e).unwrap_or(Kind::TokenUnreadable);
                (None, Condition::Unreadable(e.to_string(), kind))
            }
        }
    }

    fn judge(&self, token: &Token, now: SystemTime) -> Condition {
        match claims::read(token.expose()) {
            Some(Claims { expires: Some(at), .. }) if at <= now => Condition::Expired(at),
            Some(Claims { issued: Some(at), .. }) if at > now + SKEW => Condition::Future(at),
            Some(claims) if !claims.audiences.is_empty() && !claims.audiences.contains(&self.audience) => {
                Condition::WrongAudience(claims.audiences)
            }
            None => Condition::NoJwt(token.expose().len()),
            // Nothing wrong with it: istiod judges.
            Some(_) => Condition::Good,
        }
    }

    fn tell(&self, condition: Condition) {
        let mut last = self.last.lock().expect("no panic holds this lock");
        if *last == condition {
            return;
        }
        let path = self.path.display();
        match &condition {
            Condition::Good => {
                if let Some(more) = CHANGES.may() {
                    tracing::info!(target: "security", "the token in {path} is usable again{more}");
                }
            }
            // The trouble is told when istiod refuses: it may take what looks odd from here.
            other => tracing::debug!(target: "security", "the token {path}: {other:?}"),
        }
        *last = condition;
    }
}

// Of a kind that tells it from a file that holds no token.
fn silent() -> std::io::Error {
    let why = format!("its disk does not answer within {PATIENCE:?}");
    std::io::Error::new(std::io::ErrorKind::TimedOut, why)
}

fn text(path: &Path) -> std::io::Result<Zeroizing<String>> {
    let file = reading::open(path, None)?;
    let size = file.metadata()?.len().min(MAX_TOKEN);
    // Sized once: a buffer that grows would leave copies of the token behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(size).unwrap_or(0) + 32));
    file.take(MAX_TOKEN + 1).read_to_end(&mut bytes)?;
    text_of(&bytes).map(|text| Zeroizing::new(text.to_owned())).map_err(std::io::Error::other)
}

/// The text of a token's file.
///
/// # Errors
/// With what keeps it from being a token that can be sent.
pub(crate) fn text_of(bytes: &[u8]) -> Result<&str, &'static str> {
    if bytes.len() as u64 > MAX_TOKEN {
        return Err("it is larger than 64 KB, which no token is");
    }
    let text = std::str::from_utf8(bytes).map_err(|_| "it is not text")?.trim();
    // A token that was wrapped, or two of them.
    if text.contains(|c: char| !(' '..='~').contains(&c)) {
        return Err("it has line breaks or other characters that no token has");
    }
    Ok(text)
}

impl TokenSource for TokenFile {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, Error>> {
        Box::pin(async {
            let path = self.path.clone();
            let text = FILES.run(move || text(&path));
            let text = match tokio::time::timeout(PATIENCE, text).await {
                Ok(read) => read.and_then(|text| text),
                Err(_) => Err(silent()),
            };
            Ok(self.judged(text))
        })
    }

    fn look(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { drop(self.token().await) })
    }

    fn trouble(&self) -> Option<Report> {
        let path = self.path.display();
        // As it was read last: whoever asks has just used it.
        let last = self.last.lock().expect("no panic holds this lock").clone();
        let report = match last {
            Condition::Good => return None,
            Condition::Missing => (Kind::TokenMissing, format!("there is no token in {path}")),
            Condition::Unreadable(why, kind) => (kind, format!("cannot read the token {path}: {why}")),
            Condition::NoText(why) => (Kind::TokenMalformed, format!("{path} holds no token: {why}")),
            Condition::NoJwt(length) => {
                (Kind::TokenMalformed, format!("{path} holds {length} bytes that are no JSON Web Token"))
            }
            Condition::Empty => (Kind::TokenMalformed, format!("the token {path} is empty")),
            Condition::Expired(at) => {
                (Kind::TokenExpired, format!("the token in {path} has expired, at {}", rfc3339(at)))
            }
            Condition::WrongAudience(has) => (
                Kind::TokenWrongAudience,
                format!(
                    "the token in {path} is for audience {has:?}, istiod usually wants {:?}",
                    self.audience
                ),
            ),
            Condition::Future(at) => (
                Kind::ClockWrong,
                format!(
                    "the token in {path} was issued at {}, but this machine's clock says {}",
                    rfc3339(at),
                    rfc3339(self.clock.now())
                ),
            ),
        };
        Some(report.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::clock::Fixed;
    use base64::Engine;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use std::time::UNIX_EPOCH;

    #[test]
    fn a_token_that_cannot_be_opened_for_want_of_descriptors_needs_no_other_rights() {
        let file = TokenFile::new("token".into(), "istio-ca", Arc::new(Fixed::at(SystemTime::now())));
        let kind = |number| {
            file.judged(Err(std::io::Error::from_raw_os_error(number)));
            file.trouble().map(|report| report.kind)
        };
        assert_eq!(kind(24), Some(Kind::OpenFiles));
        assert_eq!(kind(13), Some(Kind::TokenUnreadable));
    }

    #[test]
    fn the_file_is_read_every_time_and_its_condition_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let clock = Fixed::at(UNIX_EPOCH + Duration::from_secs(1000));
        let file = TokenFile::new(path.clone(), "istio-ca", Arc::new(clock));
        let jwt = |claims: &str| format!("e30.{}.s\n", URL_SAFE_NO_PAD.encode(claims));
        let condition = || file.last.lock().unwrap().clone();

        assert!(file.read().is_none());
        assert_eq!((condition(), file.trouble().unwrap().kind), (Condition::Missing, Kind::TokenMissing));
        for (text, sent, wanted) in [
            (" one \n".to_owned(), true, Condition::NoJwt(3)),
            // As `kubectl -o json` prints it.
            (format!("\"{}\"", jwt(r#"{"exp":1001}"#).trim()), true, Condition::NoJwt(24)),
            ("a\nb".to_owned(), false, Condition::NoText(super::text_of(b"a\nb").unwrap_err().to_owned())),
            (" \n".to_owned(), false, Condition::Empty),
            (
                jwt(r#"{"exp":999,"aud":"istio-ca"}"#),
                true,
                Condition::Expired(UNIX_EPOCH + Duration::from_secs(999)),
            ),
            (jwt(r#"{"iat":1061}"#), true, Condition::Future(UNIX_EPOCH + Duration::from_secs(1061))),
            (jwt(r#"{"iat":1060}"#), true, Condition::Good),
            (jwt(r#"{"exp":1001,"aud":["a"]}"#), true, Condition::WrongAudience(vec!["a".to_owned()])),
            (jwt(r#"{"exp":1001,"aud":["a","istio-ca"]}"#), true, Condition::Good),
        ] {
            std::fs::write(&path, &text).unwrap();
            let token = file.read();
            assert_eq!(token.as_ref().map(Token::expose), sent.then(|| text.trim()), "{text}");
            assert_eq!(condition(), wanted);
        }
        std::fs::write(&path, vec![b'x'; 70_000]).unwrap();
        assert!(file.read().is_none());
        std::fs::write(&path, [0xff, 0xfe]).unwrap();
        assert!(file.read().is_none());
        assert_eq!(file.trouble().unwrap().kind, Kind::TokenMalformed);
        // A disk that does not answer says nothing of the token.
        assert!(file.judged(Err(silent())).is_none());
        assert_eq!(file.trouble().unwrap().kind, Kind::TokenUnreadable);
    }
}
