//! The API server: one secret of one namespace, listed and then watched by its name.
//!
//! A watch is resumed where it ended (its resource version); one that the server no longer knows (410) begins
//! with a list ([`mod@keep`]). The token is read for each request, as the kubelet rotates it; the CA's file likewise.

mod error;
mod keep;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, StatusCode, header};
use rustls::crypto::CryptoProvider;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::time::{Instant, timeout, timeout_at};
use zeroize::Zeroizing;

pub(super) use self::error::{Error, Why};
pub(super) use self::keep::Held;
use self::keep::{Ended, Server, keep};
use super::answer::{Event, List};
use crate::base::bounded;
use crate::base::lane::{self, Lane};
use crate::fetch::{Dialer, Get, Reply, Tls};

static FILES: Lane = Lane::new("the service account's files", 2);
/// How long they may take to be read.
const READ: Duration = Duration::from_secs(10);
/// The head of an answer, and a whole list.
const TIME: Duration = Duration::from_secs(30);
/// What the server is asked to end a watch after (its own clients draw five to ten minutes).
const WATCH: Duration = Duration::from_secs(300);
/// ... and what is waited for it: a watch on which nothing comes for longer is half open.
const SILENCE: Duration = Duration::from_secs(330);
/// A list of one secret, or one event: the server allows a secret 1 MiB, which is more in base64.
const LONGEST: usize = 4 << 20;
/// Most secrets are smaller; those that are not are gathered so many at a time, whoever follows them.
const USUAL: usize = 16 << 10;
static LARGE: Semaphore = Semaphore::const_new(2);

/// How the API server is reached.
pub(crate) struct Api {
    /// `https://host:port`.
    pub base: String,
    /// Whose secrets.
    pub namespace: String,
    /// The service account's token.
    pub token: PathBuf,
    /// What the server is verified with.
    pub ca: PathBuf,
    /// Time after which everything is listed anew; zero: never.
    pub resync: Duration,
    /// What TLS is made of.
    pub crypto: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Api({}, namespace {})", self.base, self.namespace)
    }
}

/// The turn of a large event: room for it, until it must be whole.
struct Turn {
    until: Instant,
    _place: SemaphorePermit<'static>,
}

impl Turn {
    /// Waits as long as it takes: whoever is before has until `until`, and the wait ends with its watch.
    async fn new() -> Self {
        let place = LARGE.acquire().await.expect("it is never closed");
        Self { until: Instant::now() + TIME, _place: place }
    }
}

impl Server for Api {
    async fn list(&self, secret: &str) -> Result<(Held, String), Error> {
        let whole = async {
            let mut reply = self.ask(secret, "list", "").await?;
            let body = reply.in_turn(LONGEST, USUAL, &LARGE).await;
            let (body, _turn) = body.map_err(|e| self.broken(Why::Fetch(e)))?;
            let list: List = serde_json::from_slice(&body).map_err(|_| self.broken(Why::List))?;
            let List { metadata, items } = list;
            let found =
                items.map(|items| items.0).into_iter().flatten().find(|item| item.metadata.name == secret);
            Ok((found.map_or(Held::Absent, Held::Secret), metadata.resource_version))
        };
        timeout(TIME, whole).await.unwrap_or_else(|_| Err(self.broken(Why::Silent)))
    }

    async fn follow(
        &self,
        secret: &str,
        from: &mut String,
        at: usize,
        tell: &mpsc::Sender<(usize, Held)>,
    ) -> Result<Ended, Error> {
        let query = format!(
            "&watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={from}",
            WATCH.as_secs()
        );
        let asked = timeout(TIME, self.ask(secret, "watch", &query)).await;
        let reply = match asked {
            Ok(Err(Error::Gone)) => return Ok(Ended::Stale),
            Ok(reply) => reply?,
            Err(_) => return Err(self.broken(Why::Silent)),
        };
        // A break ends it as the server does: what was not whole comes again.
        let pieces = stream::unfold(reply, async |mut reply| {
            let piece = reply.piece().await.ok().flatten()?;
            Some((piece, reply))
        });
        self.events(std::pin::pin!(pieces), secret, from, at, tell).await
    }
}

impl Api {
    /// Watches `secret`: sends its current value and every change, until the future is dropped.
    pub(super) async fn watch(&self, secret: &str, at: usize, tell: mpsc::Sender<(usize, Held)>) {
        keep(self, self.resync, secret, at, tell).await;
    }

    // What a watch brings, until it ends or falls silent.
    async fn events(
        &self,
        mut pieces: impl Stream<Item = Bytes> + Unpin + Send,
        secret: &str,
        from: &mut String,
        at: usize,
        tell: &mpsc::Sender<(usize, Held)>,
    ) -> Result<Ended, Error> {
        let (mut rest, mut turn) = (Zeroizing::new(Vec::new()), None::<Turn>);
        loop {
            let until = turn.as_ref().map_or_else(|| Instant::now() + SILENCE, |turn| turn.until);
            let piece = match timeout_at(until, pieces.next()).await {
                Ok(Some(piece)) => piece,
                Err(_) if turn.is_some() => return Err(self.broken(Why::Slow)),
                Ok(None) | Err(_) => return Ok(Ended::Resume),
            };
            // A line may come a byte at a time, and a piece may be nothing but ends of lines.
            let mut new = rest.len();
            let mut begin = 0;
            rest.extend_from_slice(&piece);
            while let Some(length) = rest[new..].iter().position(|b| *b == b'\n') {
                tokio::task::consume_budget().await;
                let line = &rest[begin..new + length];
                new += length + 1;
                begin = new;
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                let event: Event = serde_json::from_slice(line).map_err(|_| self.broken(Why::Event))?;
                let held = match event.r#type.as_str() {
                    "ERROR" if event.object.code == 410 => return Ok(Ended::Stale),
                    "ERROR" => {
                        return Err(self.broken(Why::Watch(event.object.code)));
                    }
                    "DELETED" => Some(Held::Absent),
                    "ADDED" | "MODIFIED" => None,
                    _ => {
                        from.clone_from(&event.object.metadata.resource_version);
                        continue;
                    }
                };
                if event.object.metadata.name != secret {
                    continue;
                }
                from.clone_from(&event.object.metadata.resource_version);
                if tell.send((at, held.unwrap_or(Held::Secret(event.object)))).await.is_err() {
                    return Ok(Ended::Resume);
                }
            }
            rest.drain(..begin);
            if rest.len() > LONGEST {
                return Err(self.broken(Why::Long));
            }
            if rest.len() <= USUAL && turn.take().is_some() {
                rest = Zeroizing::new(rest.to_vec());
            } else if rest.len() > USUAL && turn.is_none() {
                turn = Some(Turn::new().await);
            }
        }
    }

    async fn ask(&self, secret: &str, verb: &'static str, query: &str) -> Result<Reply, Error> {
        let namespace = &self.namespace;
        let url = format!(
            "{}/api/v1/namespaces/{namespace}/secrets?fieldSelector=metadata.name%3D{secret}{query}",
            self.base
        );
        let (ca, token) = (self.ca.clone(), self.token.clone());
        let read = move || (bounded::usual(&ca), bounded::usual(&token).map(Zeroizing::new));
        let (ca, token) = FILES.within(READ, read).await.map_err(|e| self.broken(Why::Disk(e)))?;
        let ca = ca.map_err(|source| self.broken(Why::Ca { path: self.ca.clone(), source }))?;
        let token = token.map_err(|source| self.broken(Why::Token { path: self.token.clone(), source }))?;
        // Whoever is sent none refuses it, and would be blamed for that; a server whose issuer is in no file, too.
        if crate::tls::cert::each_cert(&ca).all(|der| der.is_err()) {
            return Err(self.broken(Why::NoCa(self.ca.clone())));
        }
        let no_token = || self.broken(Why::NoToken(self.token.clone()));
        let token = std::str::from_utf8(&token).map_err(|_| no_token())?;
        let token = Some(token.trim()).filter(|token| !token.is_empty()).ok_or_else(no_token)?;
        let bearer = Zeroizing::new(format!("Bearer {token}"));
        let mut bearer = HeaderValue::from_str(&bearer).map_err(|_| no_token())?;
        bearer.set_sensitive(true);
        let headers = HeaderMap::from_iter([
            (header::AUTHORIZATION, bearer),
            (header::ACCEPT, HeaderValue::from_static("application/json")),
        ]);
        let tls = Some(Arc::new(Tls::with_roots(self.crypto.clone(), ca)));
        let dialer = Dialer { tls, names: &lane::NAMES, ..Dialer::default() };
        let get = Get::new(&url).map_err(|e| self.broken(Why::Fetch(e)))?.headers(headers);
        let sent = get.dialer(&dialer).keep(None).buffer(USUAL).follow(|_, _| false).send().await;
        let reply = sent.map_err(|e| self.broken(Why::Fetch(e)))?;
        match reply.status() {
            StatusCode::OK => Ok(reply),
            StatusCode::GONE => Err(Error::Gone),
            StatusCode::UNAUTHORIZED => Err(self.broken(Why::Unauthorized)),
            StatusCode::FORBIDDEN => Err(Error::Forbidden { verb, namespace: namespace.clone() }),
            other => Err(self.broken(Why::Status(other.as_u16()))),
        }
    }

    fn broken(&self, why: Why) -> Error {
        Error::Broken { base: self.base.clone(), why }
    }
}

#[cfg(test)]
mod tests {
    use super::keep::PAUSE;
    use super::*;
    use crate::base::beside::turns_of_others;

    fn api() -> Api {
        Api {
            base: "https://server".into(),
            namespace: "ns".into(),
            token: PathBuf::new(),
            ca: PathBuf::new(),
            resync: Duration::ZERO,
            crypto: crate::tls::provider::provider(crate::tls::provider::Compliance::None).0,
        }
    }

    #[tokio::test]
    async fn empty_files_of_the_service_account_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let (token, ca) = (path("token"), path("ca.crt"));
        let base = "https://127.0.0.1:1".to_owned();
        let api = Api { base, token: token.clone(), ca: ca.clone(), ..api() };
        let why = async || match api.ask("web", "list", "").await {
            Ok(_) => panic!("nobody listens there"),
            Err(error) => error.to_string(),
        };
        std::fs::write(&token, " \n").unwrap();
        std::fs::write(&ca, "no PEM").unwrap();
        assert!(why().await.ends_with("ca.crt holds no certificate"), "{}", why().await);
        let root = rcgen::generate_simple_self_signed(vec!["a".to_owned()]).unwrap();
        std::fs::write(&ca, root.cert.pem()).unwrap();
        assert!(why().await.ends_with("token holds no token"), "{}", why().await);
        std::fs::write(&token, "T").unwrap();
        assert!(why().await.contains("cannot connect"), "{}", why().await);
    }

    fn event(of: &str, name: &str, version: u32) -> Bytes {
        let object = serde_json::json!({"metadata": {"name": name, "resourceVersion": version.to_string()}});
        format!("{}\n", serde_json::json!({"type": of, "object": object})).into()
    }

    // Pieces, each after so many seconds; then the other side is gone without a word.
    fn half_open(pieces: Vec<(u64, Bytes)>) -> impl Stream<Item = Bytes> + Unpin + Send {
        let sent = stream::iter(pieces).then(|(after, piece)| async move {
            tokio::time::sleep(Duration::from_secs(after)).await;
            piece
        });
        Box::pin(sent.chain(stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn a_half_open_watch_ends_and_is_resumed_from_what_was_seen() {
        let (tell, mut told) = mpsc::channel(8);
        let half = event("MODIFIED", "own", 9);
        let pieces = vec![
            (0, event("MODIFIED", "own", 5)),
            // Whatever comes shows that the other side is there; a bookmark moves what it is resumed from.
            (329, event("BOOKMARK", "own", 7)),
            (329, half.slice(..20)),
        ];
        let (began, mut from) = (Instant::now(), "4".to_owned());
        let ended = api().events(half_open(pieces), "own", &mut from, 3, &tell).await;
        assert!(matches!(ended, Ok(Ended::Resume)), "not as a failure: nothing is wrong with the secret");
        assert_eq!(from, "7", "the last whole event");
        let waited = began.elapsed().checked_sub(Duration::from_secs(2 * 329)).unwrap();
        assert!(waited >= SILENCE && waited < SILENCE + PAUSE, "{waited:?}");
        assert!(matches!(told.try_recv(), Ok((3, Held::Secret(_)))));
        assert!(told.try_recv().is_err(), "half an event is none");
    }

    #[tokio::test]
    async fn events_come_in_any_pieces_and_leave_others_their_turn() {
        let both = [event("MODIFIED", "own", 5), event("MODIFIED", "own", 6)].concat();
        let bytes = both.iter().map(|byte| Bytes::from(vec![*byte]));
        let ends = Bytes::from(vec![b'\n'; 100_000]);
        let pieces = bytes.chain([ends, both.clone().into()]);
        let (tell, mut told) = mpsc::channel(8);
        let (mut from, api) = ("4".to_owned(), api());
        let watch = api.events(stream::iter(pieces), "own", &mut from, 0, &tell);
        let (ended, turns) = turns_of_others(watch).await;
        assert!(matches!(ended, Ok(Ended::Resume)));
        assert_eq!(from, "6");
        assert_eq!(std::iter::from_fn(|| told.try_recv().ok()).count(), 4);
        assert!(turns >= 100, "{turns}");
    }

    #[tokio::test(start_paused = true)]
    async fn of_large_events_a_few_are_gathered_at_a_time_and_not_for_long() {
        let api = api();
        // 40 kB of an event that never ends, by ten watches.
        let watches = (0..10).map(|_| async {
            let (tell, _told) = mpsc::channel(8);
            let pieces = vec![(0, Bytes::from(vec![b'a'; 20_000])); 2];
            let mut from = "4".to_owned();
            let ended = api.events(half_open(pieces), "own", &mut from, 0, &tell).await;
            assert!(matches!(ended, Err(Error::Broken { why: Why::Slow, .. })));
        });
        let began = Instant::now();
        futures_util::future::join_all(watches).await;
        // Two at a time.
        let took = began.elapsed();
        assert!(took >= TIME * 5 && took < TIME * 5 + PAUSE, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_is_asked_to_end_before_its_silence_is_a_fault() {
        assert!(WATCH < SILENCE);
        let (tell, _told) = mpsc::channel(8);
        let mut from = "4".to_owned();
        let ended = api().events(stream::empty(), "own", &mut from, 0, &tell).await;
        assert!(matches!(ended, Ok(Ended::Resume)) && from == "4");
        let gone = serde_json::json!({"type": "ERROR", "object": {"code": 410}});
        let gone = half_open(vec![(1, format!("{gone}\n").into())]);
        assert!(matches!(api().events(gone, "own", &mut from, 0, &tell).await, Ok(Ended::Stale)));
    }
}
