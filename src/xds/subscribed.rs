//! How many resources of each type a client has named on its stream, so that it is seen when none is left: nothing of that
//! type comes any more then, no acceptance either, and what was wrong with it is over. Pure.

use std::collections::BTreeMap;

use super::protocol::Protocol;
use super::scan::Facts;

/// Types kept apart; Envoy asks for about ten, and their names, of up to 4 KB, come from outside. Envoy has one stream at a
/// time: 256 KB at most.
const TYPES: usize = 64;

/// What one stream asks for by name.
#[derive(Debug, Default)]
pub(super) struct Subscribed {
    begun: bool,
    named: BTreeMap<String, u64>,
}

impl Subscribed {
    /// Whether this request is the first of the stream, from a client that has nothing.
    pub(super) fn begins(&mut self, facts: &Facts) -> bool {
        !std::mem::replace(&mut self.begun, true) && facts.is_bare()
    }

    /// Counts a request; gives whether it drops the last resource of its type. A type that is asked for without names is
    /// never dropped.
    pub(super) fn drops(&mut self, protocol: Protocol, type_url: &str, facts: &Facts) -> bool {
        let before = self.named.get(type_url).copied().unwrap_or_default();
        let now = match protocol {
            Protocol::Sotw => facts.count,
            Protocol::Delta => before.saturating_add(facts.count).saturating_sub(facts.removed),
        };
        if now == 0 {
            self.named.remove(type_url);
        } else if before > 0 || self.named.len() < TYPES {
            self.named.insert(type_url.to_owned(), now);
        }
        before > 0 && now == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_type_is_dropped_with_its_last_name_and_never_without_one() {
        let asks = |count, removed| Facts { count, removed, ..Facts::default() };
        let mut stream = Subscribed::default();
        let mut delta = |count, removed| stream.drops(Protocol::Delta, "a", &asks(count, removed));
        assert!(!delta(0, 0), "everything is asked for");
        assert!(!delta(2, 0) && !delta(0, 0) && !delta(1, 2) && !delta(0, 0));
        assert!(delta(0, 1));
        assert!(!delta(0, 1), "it is gone already");
        let mut stream = Subscribed::default();
        let mut sotw = |count| stream.drops(Protocol::Sotw, "a", &asks(count, 0));
        assert!(!sotw(0) && !sotw(2) && !sotw(1));
        assert!(sotw(0));
        assert!(!sotw(0));
    }

    #[test]
    fn types_are_bounded_and_only_the_first_request_begins() {
        let mut stream = Subscribed::default();
        for n in 0..2 * TYPES {
            stream.drops(Protocol::Sotw, &n.to_string(), &Facts { count: 1, ..Facts::default() });
        }
        assert_eq!(stream.named.len(), TYPES);
        assert!(stream.begins(&Facts::default()) && !stream.begins(&Facts::default()));
        let mut stream = Subscribed::default();
        assert!(!stream.begins(&Facts { known: 1, ..Facts::default() }), "it has some already");
        assert!(!stream.begins(&Facts::default()));
    }
}
