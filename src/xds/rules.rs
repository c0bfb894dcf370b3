//! Which messages pass: the rules of the two directions.

use super::frames::{End, Rules, Seen, Verdict};
use super::protocol::Protocol;
use super::scan::{Facts, Message};
use super::types;

/// A response up to this size is judged by its own type URL, which comes late in it; a larger one by the
/// type of its first resource. One HTTP/2 frame of istiod's.
const RESPONSE_LOOKAHEAD: usize = 16 * 1024;
/// A response whose first resource is of no type that passes is held up to this size in wait for its own
/// type URL.
const RESPONSE_CAP: usize = 4 << 20;
/// Largest response that the agent handles itself: it is gathered whole. A name table has about 85 bytes a host, so
/// this is one of 290,000. A larger one is refused to istiod, as a rejected type, and the last good one stays in use.
pub(super) const COLLECT: usize = 24 << 20;
/// Requests up to this size are judged whole; the ones that the agent keeps back are far smaller.
const REQUEST_LOOKAHEAD: usize = 64 * 1024;

/// The rules for istiod's responses.
#[derive(Debug)]
pub struct Responses {
    /// SotW or delta.
    pub protocol: Protocol,
    /// Types that the agent handles itself.
    pub own: Vec<&'static str>,
    /// Whether extension configs are converted by the agent.
    pub convert: bool,
}

impl Responses {
    fn class(&self, type_url: &str) -> Verdict {
        if self.own.contains(&type_url) || (self.convert && type_url == types::ECDS) {
            Verdict::Collect
        } else if types::for_envoy(type_url) {
            Verdict::Pass
        } else {
            Verdict::Drop
        }
    }
}

impl Rules for Responses {
    fn message(&self) -> Message {
        self.protocol.response()
    }

    // gRPC's own bound, as the Go agent accepts it; nothing of that size is ever held.
    fn limit(&self) -> u64 {
        i32::MAX as u64
    }

    fn lookahead(&self) -> usize {
        RESPONSE_LOOKAHEAD
    }

    fn cap(&self) -> usize {
        RESPONSE_CAP
    }

    fn collect_limit(&self) -> usize {
        COLLECT
    }

    fn joins(&self) -> bool {
        true
    }

    fn judge(&self, facts: &Facts, seen: Seen) -> Verdict {
        if seen == Seen::Whole {
            return self.class(facts.type_url.as_deref().unwrap_or_default());
        }
        if let Some(own) = &facts.type_url {
            return self.class(own);
        }
        match (seen, facts.hint.as_deref().map(|hint| self.class(hint))) {
            (Seen::Beginning, _) | (Seen::Lookahead, None | Some(Verdict::Drop)) => Verdict::Undecided,
            (Seen::Lookahead | Seen::Cap | Seen::Whole, Some(verdict)) => verdict,
            // Megabytes without a single resource body: nothing that the agent handles looks so.
            (Seen::Cap | Seen::Whole, None) => Verdict::Pass,
        }
    }

    fn ended(&mut self, _: &End) {}
}

/// The rules for Envoy's requests.
#[derive(Debug)]
pub struct Requests {
    /// SotW or delta.
    pub protocol: Protocol,
    /// Largest request accepted, in bytes.
    pub limit: u64,
    /// Whether Envoy has asked for listeners: health reports pass only afterwards, since istiod must
    /// know the workload first.
    pub listeners_asked: bool,
}

impl Rules for Requests {
    fn message(&self) -> Message {
        self.protocol.request()
    }

    fn limit(&self) -> u64 {
        self.limit
    }

    fn lookahead(&self) -> usize {
        REQUEST_LOOKAHEAD
    }

    fn cap(&self) -> usize {
        REQUEST_LOOKAHEAD
    }

    fn collect_limit(&self) -> usize {
        0
    }

    // The agent's own requests must be able to stand between two of Envoy's.
    fn joins(&self) -> bool {
        false
    }

    fn judge(&self, facts: &Facts, seen: Seen) -> Verdict {
        match seen {
            Seen::Whole if facts.type_url.as_deref() == Some(types::HEALTH) && !self.listeners_asked => {
                Verdict::Drop
            }
            Seen::Whole | Seen::Cap => Verdict::Pass,
            Seen::Beginning | Seen::Lookahead => Verdict::Undecided,
        }
    }

    fn ended(&mut self, end: &End) {
        if end.facts.type_url.as_deref() == Some(types::LISTENER) {
            self.listeners_asked = true;
        }
    }
}
