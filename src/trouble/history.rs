//! The last events, good and bad, for the timeline.

use std::collections::VecDeque;
use std::time::SystemTime;

use serde::Serialize;
use serde::ser::SerializeMap;

use crate::base::clock::rfc3339;

/// So many events are kept; the oldest go, but the first few, which are the start.
const MOST: usize = 64;
/// The events of the start that stay.
const FIRST: usize = 12;
/// Letters of a text.
const TEXT: usize = 300;

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The agent, or Envoy, started or ended.
    Started,
    /// A certificate was issued or loaded.
    Certificate,
    /// Configuration was pushed.
    Push,
    /// Istiod was connected.
    Connected,
    /// Istiod was lost.
    Lost,
    /// The proxy became ready.
    Ready,
    /// A trouble began.
    Trouble,
    /// A trouble ended.
    Over,
}

impl What {
    /// Its stable name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Certificate => "certificate",
            Self::Push => "push",
            Self::Connected => "connected",
            Self::Lost => "lost",
            Self::Ready => "ready",
            Self::Trouble => "trouble",
            Self::Over => "over",
        }
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When.
    pub at: SystemTime,
    /// What.
    pub what: What,
    /// In words.
    pub text: String,
}

impl Serialize for Event {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time", &rfc3339(self.at))?;
        map.serialize_entry("what", self.what.name())?;
        map.serialize_entry("text", &self.text)?;
        map.end()
    }
}

#[derive(Debug, Default)]
pub(super) struct History(VecDeque<Event>);

impl History {
    pub(super) fn add(&mut self, mut event: Event) {
        if let Some((cut, _)) = event.text.char_indices().nth(TEXT) {
            event.text.truncate(cut);
        }
        if event.what == What::Push {
            // Of each type the first and the last: a busy mesh must not push out the rest.
            let name = |e: &Event| e.text.split(':').next().unwrap_or_default().to_owned();
            let of = name(&event);
            let same = |e: &Event| e.what == What::Push && name(e) == of;
            if let Some(at) = self.0.iter().rposition(same)
                && self.0.iter().position(same) != Some(at)
            {
                self.0.remove(at);
            }
        }
        if self.0.len() == MOST {
            self.0.remove(FIRST);
        }
        self.0.push_back(event);
    }

    pub(super) fn all(&self) -> Vec<Event> {
        self.0.iter().cloned().collect()
    }
}
