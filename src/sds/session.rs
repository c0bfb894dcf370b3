//! What a request on a stream means; no IO.
//!
//! State of the world follows the Go agent's small state machine: one subscription for the stream,
//! nonces checked, an added name answered alone. Delta is the protocol's own.

use std::collections::BTreeSet;

use super::encode::SECRET_TYPE;

/// Types whose request without names means "nothing any more"; all others mean "everything".
const NAMED_TYPES: &[&str] = &[
    SECRET_TYPE,
    "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
    "type.googleapis.com/envoy.config.route.v3.RouteConfiguration",
    "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
];

/// Health reports travel on the same kind of stream and are not for us.
const HEALTH_TYPE: &str = "type.googleapis.com/istio.v1.HealthInformation";

/// What a name takes beside its text: a name that is followed takes several times its bytes.
const NAME: usize = 128;

/// What a name takes, in bytes, as its client is charged.
pub(super) fn cost(name: &str) -> usize {
    name.len() + NAME
}

/// The parts of a request that matter here, of either protocol.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Names asked for (delta: to subscribe to).
    pub names: Vec<String>,
    /// Delta: names to leave.
    pub leave: Vec<String>,
    /// Type URL.
    pub type_url: String,
    /// Nonce of the response this refers to, or empty.
    pub nonce: String,
    /// The node's id, if a node was sent.
    pub node: Option<String>,
    /// Why the client refused the response.
    pub error: Option<String>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    Nothing,
    /// The client refused our last response; count and log.
    Refused(String),
    /// It refers to a response that is not the last; count.
    Stale,
    /// Answer with these names, each once, in this order.
    Respond(Vec<String>),
    /// End the stream: its first request must carry a node.
    NodeMissing,
}

/// One stream's subscription.
#[derive(Debug, Default)]
pub struct Session {
    greeted: bool,
    /// `None`: not subscribed.
    names: Option<BTreeSet<String>>,
    /// What they take; see [`cost`].
    size: usize,
    /// What was left and is not told yet.
    left: BTreeSet<String>,
    nonce: String,
}

impl Session {
    /// A request of a state-of-the-world stream.
    pub fn request(&mut self, request: &Request) -> Action {
        if let Some(action) = self.greet(request) {
            return action;
        }
        if let Some(error) = &request.error {
            return Action::Refused(error.clone());
        }
        if request.names.is_empty() && NAMED_TYPES.contains(&request.type_url.as_str()) {
            self.subscribe(None);
            return Action::Nothing;
        }
        let wanted: BTreeSet<String> = request.names.iter().cloned().collect();
        let Some(held) = self.names.as_ref().filter(|_| !request.nonce.is_empty()) else {
            self.subscribe(Some(wanted));
            return Action::Respond(once(&request.names));
        };
        if request.nonce != self.nonce {
            return Action::Stale;
        }
        let added: Vec<String> = once(&request.names).into_iter().filter(|n| !held.contains(n)).collect();
        // Of the other types the Go agent tells also that there is less: with all that is left.
        let less = !NAMED_TYPES.contains(&request.type_url.as_str()) && !held.is_subset(&wanted);
        self.subscribe(Some(wanted));
        match (added.is_empty(), less) {
            (false, _) => Action::Respond(added),
            (true, true) => Action::Respond(once(&request.names)),
            (true, false) => Action::Nothing,
        }
    }

    /// A request of a delta stream. Names asked for again are sent again, as the protocol wants.
    pub fn delta(&mut self, request: &Request) -> Action {
        if let Some(action) = self.greet(request) {
            return action;
        }
        let names = self.names.get_or_insert_default();
        for name in request.leave.iter().filter_map(|name| names.take(name)) {
            self.size -= cost(&name);
            self.left.insert(name);
        }
        for name in &request.names {
            if names.insert(name.clone()) {
                self.size += cost(name);
            }
            self.left.remove(name);
        }
        if !request.names.is_empty() {
            return Action::Respond(once(&request.names));
        }
        match &request.error {
            Some(error) => Action::Refused(error.clone()),
            None => Action::Nothing,
        }
    }

    /// A response went out.
    pub fn sent(&mut self, nonce: &str) {
        self.nonce.clear();
        self.nonce.push_str(nonce);
    }

    /// What the client no longer wants to hear of since this was asked last.
    pub(super) fn left(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.left)
    }

    /// What the names take that it wants to hear of; see [`cost`].
    pub(super) fn size(&self) -> usize {
        self.size
    }

    fn subscribe(&mut self, names: Option<BTreeSet<String>>) {
        let held = std::mem::replace(&mut self.names, names).unwrap_or_default();
        self.size = self.names.iter().flatten().map(|name| cost(name)).sum();
        self.left
            .extend(held.into_iter().filter(|name| !self.names.as_ref().is_some_and(|n| n.contains(name))));
    }

    /// Whether the client wants to hear of this name.
    #[cfg(debug_assertions)]
    #[must_use]
    pub fn follows(&self, name: &str) -> bool {
        self.names.as_ref().is_some_and(|n| n.contains(name))
    }

    fn greet(&mut self, request: &Request) -> Option<Action> {
        if self.greeted {
            return None;
        }
        if request.type_url == HEALTH_TYPE {
            return Some(Action::Nothing);
        }
        if request.node.as_deref().is_none_or(str::is_empty) {
            return Some(Action::NodeMissing);
        }
        self.greeted = true;
        None
    }
}

fn once(names: &[String]) -> Vec<String> {
    let mut seen = BTreeSet::new();
    names.iter().filter(|n| seen.insert(n.as_str())).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use Action::{NodeMissing, Nothing, Refused, Stale};

    fn ask(names: &[&str], nonce: &str) -> Request {
        Request {
            names: names.iter().map(|n| (*n).to_owned()).collect(),
            type_url: SECRET_TYPE.to_owned(),
            nonce: nonce.to_owned(),
            node: Some("sidecar~1".to_owned()),
            ..Request::default()
        }
    }

    fn respond(names: &[&str]) -> Action {
        Action::Respond(names.iter().map(|n| (*n).to_owned()).collect())
    }

    // Each step: request, what it means, nonce of the response if one goes out.
    fn walk(steps: Vec<(Request, Action)>) {
        let mut session = Session::default();
        let mut sent = 0;
        for (at, (request, expected)) in steps.into_iter().enumerate() {
            let action = session.request(&request);
            assert_eq!(action, expected, "step {at}: {request:?}");
            if matches!(action, Action::Respond(_)) {
                sent += 1;
                session.sent(&format!("n{sent}"));
            }
        }
    }

    #[test]
    fn subscription_and_change() {
        walk(vec![
            (ask(&["default"], ""), respond(&["default"])),
            (ask(&["default"], "n1"), Nothing),
            (ask(&["default"], "n1"), Nothing),
            (ask(&["default", "ROOTCA"], "n1"), respond(&["ROOTCA"])),
            (ask(&["ROOTCA"], "n2"), Nothing),
            (ask(&["default"], "n1"), Stale),
            (ask(&["default", "ROOTCA"], ""), respond(&["default", "ROOTCA"])),
            (ask(&[], "n3"), Nothing),
            (ask(&["default"], "n3"), respond(&["default"])),
            (ask(&["default"], "n3"), Stale),
        ]);
    }

    #[test]
    fn first_messages() {
        let no_node = Request { node: None, ..ask(&["default"], "") };
        let no_id = Request { node: Some(String::new()), ..ask(&["default"], "") };
        let health = Request { type_url: HEALTH_TYPE.to_owned(), node: None, ..Request::default() };
        walk(vec![(no_node.clone(), NodeMissing)]);
        walk(vec![(no_id, NodeMissing)]);
        walk(vec![
            (health, Nothing),
            (ask(&["default"], ""), respond(&["default"])),
            (no_node, respond(&["default"])),
        ]);
        walk(vec![(ask(&[], ""), Nothing), (ask(&["default"], ""), respond(&["default"]))]);
        walk(vec![(ask(&["default"], "of-another-stream"), respond(&["default"]))]);
        let refusal = Request { error: Some("bad".to_owned()), ..ask(&["default"], "x") };
        walk(vec![(refusal, Refused("bad".to_owned())), (ask(&["default"], ""), respond(&["default"]))]);
    }

    #[test]
    fn other_types_without_names_get_an_empty_answer() {
        let other = Request { type_url: "type.googleapis.com/x".to_owned(), ..ask(&[], "") };
        let ack = Request { nonce: "n1".to_owned(), ..other.clone() };
        walk(vec![(other, respond(&[])), (ack.clone(), Nothing)]);
        let named = Request { type_url: ack.type_url.clone(), ..ask(&["default", "ROOTCA"], "") };
        let of = |names: &[&str], nonce| Request { type_url: ack.type_url.clone(), ..ask(names, nonce) };
        walk(vec![
            (named, respond(&["default", "ROOTCA"])),
            (of(&["default"], "n1"), respond(&["default"])),
            (of(&["default"], "n2"), Nothing),
            (of(&["ROOTCA"], "n2"), respond(&["ROOTCA"])),
            (of(&[], "n3"), respond(&[])),
        ]);
    }

    #[test]
    fn a_refusal_keeps_the_subscription() {
        let mut session = Session::default();
        session.request(&ask(&["default"], ""));
        session.sent("n1");
        let refusal = Request { error: Some("bad".to_owned()), ..ask(&["default"], "n1") };
        assert_eq!(session.request(&refusal), Refused("bad".to_owned()));
        assert!(session.follows("default"));
    }

    #[test]
    fn names_are_answered_once() {
        walk(vec![(ask(&["default", "ROOTCA", "default"], ""), respond(&["default", "ROOTCA"]))]);
    }

    #[test]
    fn delta() {
        let mut session = Session::default();
        assert_eq!(session.delta(&Request { node: None, ..ask(&["default"], "") }), NodeMissing);
        assert_eq!(session.delta(&ask(&["default"], "")), respond(&["default"]));
        session.sent("n1");
        assert_eq!(session.delta(&ask(&[], "n1")), Nothing);
        assert_eq!(session.delta(&ask(&["ROOTCA"], "n1")), respond(&["ROOTCA"]));
        assert_eq!(session.delta(&ask(&["ROOTCA"], "old")), respond(&["ROOTCA"]));
        let leave = Request { leave: vec!["default".to_owned()], ..ask(&[], "") };
        assert_eq!(session.delta(&leave), Nothing);
        assert!(!session.follows("default") && session.follows("ROOTCA"));
        let refusal = Request { error: Some("bad".to_owned()), ..ask(&[], "n2") };
        assert_eq!(session.delta(&refusal), Refused("bad".to_owned()));
    }
}
