//! Answers kept for a while: a small positive cache (`DNS_CACHE_MAX_TTL`), and old answers for when no nameserver
//! answers (`DNS_SERVE_STALE`, after RFC 8767). Pure.
//!
//! Only whole answers that hold records are kept. That a name is not there, or has no such record, is never kept: it
//! passes as it comes, and takes away what was kept before. How a query came is not part of its key: whoever tells the answer
//! sees whether there is room for it.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::wire;

/// Answers kept at most; the oldest gives way.
const MOST: usize = 1024;
/// An answer that is larger is not kept.
const LARGEST: usize = 4096;
/// What an old answer says it may be kept, in seconds (RFC 8767).
const STALE_TTL: u32 = 30;

/// How long answers are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Config {
    /// As fresh ones at most, and never longer than they say themselves; zero: not at all.
    pub fresh: Duration,
    /// Beyond that, for when nobody answers; zero: not at all.
    pub stale: Duration,
}

#[derive(Debug)]
struct Kept {
    reply: Vec<u8>,
    at: Instant,
    ttl: Duration,
}

/// The answers, by question.
#[derive(Debug)]
pub(super) struct Cache {
    config: Config,
    kept: HashMap<Vec<u8>, Kept>,
}

impl Cache {
    /// None where nothing is to be kept.
    pub(super) fn new(config: Config) -> Option<Self> {
        (config != Config::default()).then(|| Self { config, kept: HashMap::new() })
    }

    /// A fresh answer to this query.
    pub(super) fn fresh(&self, query: &[u8], now: Instant) -> Option<Vec<u8>> {
        let kept = self.kept.get(key(query)?)?;
        let age = now.duration_since(kept.at);
        (age < kept.ttl.min(self.config.fresh))
            .then(|| told(kept, query, |ttl| ttl.saturating_sub(seconds(age))))
    }

    /// An answer that was good not long ago.
    pub(super) fn stale(&self, query: &[u8], now: Instant) -> Option<Vec<u8>> {
        let kept = self.kept.get(key(query)?)?;
        let age = now.duration_since(kept.at);
        (age < kept.ttl + self.config.stale).then(|| told(kept, query, |ttl| ttl.min(STALE_TTL)))
    }

    /// A nameserver has answered.
    pub(super) fn answered(&mut self, query: &[u8], reply: &[u8], now: Instant) {
        // A longer one came over TCP, where it may have 64 kB: as many of those would be 64 MB. And a reply that does not say
        // what it answers may be anybody's who guessed a number.
        let worth_it = query.len() <= wire::UDP_MIN && wire::repeats_question(reply);
        let Some(key) = key(query).filter(|_| worth_it) else { return };
        let ttl = wire::ttls(reply).filter(|_| wire::is_whole_answer(reply) && reply.len() <= LARGEST);
        let least = ttl.and_then(|places| places.iter().filter_map(|at| wire::ttl_at(reply, *at)).min());
        let Some(least) = least.filter(|ttl| *ttl > 0) else {
            if !wire::is_failure(reply) && !wire::is_cut(reply) {
                self.kept.remove(key);
            }
            return;
        };
        if self.kept.len() >= MOST && !self.kept.contains_key(key) {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.at).map(|(key, _)| key.clone());
            oldest.and_then(|key| self.kept.remove(&key));
        }
        let ttl = Duration::from_secs(u64::from(least));
        self.kept.insert(key.to_vec(), Kept { reply: reply.to_vec(), at: now, ttl });
    }
}

// A query without its number: flags, question and what is added to it.
fn key(query: &[u8]) -> Option<&[u8]> {
    query.get(2..)
}

fn seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

// The answer with the query's number, and what it says of its age changed.
fn told(kept: &Kept, query: &[u8], ttl: impl Fn(u32) -> u32) -> Vec<u8> {
    let mut reply = kept.reply.clone();
    reply[..2].copy_from_slice(&query[..2]);
    for at in wire::ttls(&kept.reply).unwrap_or_default() {
        if let Some(old) = wire::ttl_at(&reply, at) {
            reply[at..at + 4].copy_from_slice(&ttl(old).to_be_bytes());
        }
    }
    reply
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(id: u16) -> Vec<u8> {
        let mut out = id.to_be_bytes().to_vec();
        out.extend_from_slice(b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01");
        out
    }

    // An answer of two addresses with these times.
    fn reply(ttls: [u32; 2], rcode: u8, records: u8) -> Vec<u8> {
        let mut out = query(9);
        (out[2], out[3], out[7]) = (0x81, 0x80 | rcode, records);
        for ttl in ttls.into_iter().take(usize::from(records)) {
            out.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01");
            out.extend_from_slice(&ttl.to_be_bytes());
            out.extend_from_slice(b"\x00\x04\x0a\x00\x00\x01");
        }
        out
    }

    const S: fn(u64) -> Duration = Duration::from_secs;

    #[tokio::test]
    async fn fresh_for_its_time_old_for_a_while_and_never_what_is_not_there() {
        let now = Instant::now();
        assert!(Cache::new(Config::default()).is_none());
        let mut cache = Cache::new(Config { fresh: S(60), stale: S(30) }).unwrap();
        cache.answered(&query(1), &reply([20, 300], 0, 2), now);
        let fresh = cache.fresh(&query(7), now + S(5)).unwrap();
        assert_eq!(fresh, {
            let mut r = reply([15, 295], 0, 2);
            r[..2].copy_from_slice(&[0, 7]);
            r
        });
        assert_eq!(cache.fresh(&query(7), now + S(20)), None);
        let stale = cache.stale(&query(7), now + S(49)).unwrap();
        assert_eq!(&stale[2..], &reply([20, 30], 0, 2)[2..]);
        assert_eq!(cache.stale(&query(7), now + S(50)), None);
        // A nameserver that fails takes nothing away; one that says there is nothing does.
        cache.answered(&query(1), &reply([0, 0], 2, 0), now);
        assert!(cache.stale(&query(7), now).is_some());
        for rcode in [3, 0] {
            cache.answered(&query(1), &reply([20, 20], 0, 2), now);
            cache.answered(&query(1), &reply([0, 0], rcode, 0), now);
            assert_eq!(cache.stale(&query(7), now), None, "rcode {rcode}");
        }
    }

    #[tokio::test]
    async fn a_reply_without_its_question_changes_nothing() {
        let now = Instant::now();
        let mut cache = Cache::new(Config { fresh: S(60), stale: S(60) }).unwrap();
        let bare = |records: u8| {
            let mut out = reply([20, 20], 0, records);
            out.drain(12..19);
            out[5] = 0;
            out
        };
        assert!(wire::well_formed(&bare(0)));
        cache.answered(&query(1), &bare(2), now);
        assert_eq!(cache.stale(&query(7), now), None);
        cache.answered(&query(1), &reply([20, 20], 0, 2), now);
        cache.answered(&query(1), &bare(0), now);
        assert!(cache.fresh(&query(7), now).is_some());
    }

    #[tokio::test]
    async fn it_is_bounded() {
        let now = Instant::now();
        let mut cache = Cache::new(Config { fresh: S(60), stale: S(0) }).unwrap();
        for n in 0..2000_u16 {
            let mut asked = query(1);
            asked.extend_from_slice(&n.to_be_bytes());
            cache.answered(&asked, &reply([20, 20], 0, 1), now + S(u64::from(n)));
        }
        assert_eq!(cache.kept.len(), MOST);
    }

    #[tokio::test]
    async fn long_questions_are_not_kept() {
        let now = Instant::now();
        let mut cache = Cache::new(Config { fresh: S(60), stale: S(60) }).unwrap();
        for (length, kept) in [(wire::UDP_MIN, true), (wire::UDP_MIN + 1, false), (60_000, false)] {
            let mut asked = query(1);
            asked.resize(length, 0);
            cache.answered(&asked, &reply([20, 20], 0, 1), now);
            assert_eq!(
                (cache.fresh(&asked, now).is_some(), cache.stale(&asked, now).is_some()),
                (kept, kept)
            );
        }
    }
}
