//! The nameservers; with `DNS_FORWARD_ADAPTIVE` those that are known to answer come first. Pure.

use std::collections::HashMap;
use std::time::Duration;

use rand::seq::SliceRandom;
use tokio::time::Instant;

/// For so long one that has not answered is asked last; doubled with each failure, up to [`LONGEST`].
const SHUNNED: Duration = Duration::from_secs(5);
const LONGEST: Duration = Duration::from_secs(120);

/// The nameservers, and how they did.
#[derive(Debug, Default)]
pub(super) struct Servers {
    all: Vec<String>,
    failed: HashMap<String, (u32, Instant)>,
}

impl Servers {
    pub(super) fn new(all: Vec<String>) -> Self {
        Self { all, failed: HashMap::new() }
    }

    /// Others from now on; how those did that stay is kept.
    pub(super) fn renew(&mut self, all: Vec<String>) {
        self.failed.retain(|server, _| all.contains(server));
        self.all = all;
    }

    /// As `resolv.conf` has them.
    pub(super) fn all(&self) -> &[String] {
        &self.all
    }

    /// In which order to ask: those that answer in random order, then the others, the one that failed longest ago
    /// first.
    pub(super) fn order(&self, now: Instant) -> Vec<String> {
        let until = |server: &String| {
            let (times, at) = self.failed.get(server)?;
            let shunned = SHUNNED.saturating_mul(1 << (times - 1).min(10)).min(LONGEST);
            Some(*at + shunned).filter(|until| *until > now)
        };
        let (mut good, mut bad): (Vec<_>, Vec<_>) =
            self.all.iter().cloned().partition(|server| until(server).is_none());
        good.shuffle(&mut rand::rng());
        bad.sort_by_key(|server| self.failed.get(server).map(|(_, at)| *at));
        good.extend(bad);
        good
    }

    /// It has answered.
    pub(super) fn answered(&mut self, server: &str) {
        self.failed.remove(server);
    }

    /// It has not.
    pub(super) fn failed(&mut self, server: &str, now: Instant) {
        let (times, at) = self.failed.entry(server.to_owned()).or_insert((0, now));
        (*times, *at) = (times.saturating_add(1), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_does_not_answer_is_asked_last_for_a_while() {
        let now = Instant::now();
        let mut servers = Servers::new(["a", "b", "c"].map(str::to_owned).to_vec());
        servers.failed("a", now);
        servers.failed("b", now + Duration::from_secs(1));
        let at = now + Duration::from_secs(2);
        assert_eq!(servers.order(at), ["c", "a", "b"]);
        let mut later = servers.order(now + Duration::from_secs(5));
        assert_eq!(later.pop().as_deref(), Some("b"), "a is forgiven");
        servers.answered("b");
        servers.answered("a");
        let firsts: std::collections::BTreeSet<String> =
            (0..200).map(|_| servers.order(at).remove(0)).collect();
        assert_eq!(firsts.len(), 3, "each has its turn");
        servers.failed("c", at);
        servers.renew(vec!["c".to_owned(), "d".to_owned()]);
        assert_eq!(servers.order(at), ["d", "c"], "what is known of c is kept");
    }
}
