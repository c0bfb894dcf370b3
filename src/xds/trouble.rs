//! What the relay tells of troubles: the way to istiod, and each type that Envoy rejects.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tonic::{Code, Status};

use super::types;
use crate::base::quote::plain;
use crate::istiod::{auth, code_name, refused_late};
use crate::trouble::{Kind, Report, Reporter, What};

/// An istiod that has taken the stream and says nothing for so long is told of. Its first answer comes when the
/// first push is made, after a second or two in a large mesh.
pub(super) const SILENT: Duration = Duration::from_secs(10);
/// A stream that has lived so long is no longer one that istiod ends again and again.
pub(super) const SETTLED: Duration = Duration::from_secs(15);
/// So many streams that istiod ends within [`WINDOW`] after it has answered are no rolling restart.
const ENDS: usize = 3;
const WINDOW: Duration = Duration::from_secs(120);
/// So many connections that end without a word are still taken for a client certificate that is refused, after one that
/// ended with that word.
const WORDLESS: u32 = 5;
const BROKEN: &str = "error reading from server: ";
/// Letters of a rejection that are told; the whole stands in `/debug/agentz`.
const REASON: usize = 1000;

/// The relay's reporters.
#[derive(Debug)]
pub(super) struct Troubles {
    way: Reporter,
    /// What is wrong with the token while the way is.
    token: Reporter,
    // Bounded as the types of the state are: a name that is not there is not recorded.
    types: Mutex<BTreeMap<String, Reporter>>,
    ends: Mutex<VecDeque<Instant>>,
    wordless: AtomicU32,
}

impl Troubles {
    pub(super) fn new(way: Reporter) -> Self {
        let token = way.sibling();
        Self { way, token, types: Mutex::default(), ends: Mutex::default(), wordless: AtomicU32::new(0) }
    }

    /// An attempt to reach istiod failed; `token`: what is wrong with that besides.
    pub(super) fn failed(&self, report: Report, token: Option<Report>) {
        // Istiod's word comes after the handshake, and is lost where the connection is reset behind it.
        let refused = self.way.kind() == Some(Kind::ClientCertificateRefused);
        if refused && report.kind == Kind::IstiodCloses && report.detail.contains(BROKEN) {
            if self.wordless.fetch_add(1, Ordering::Relaxed) < WORDLESS {
                return;
            }
        } else {
            self.wordless.store(0, Ordering::Relaxed);
        }
        let is_good = token.is_none();
        // In this order what is told already is not told anew.
        token.into_iter().for_each(|token| self.token.report(token));
        self.way.report(report);
        if is_good {
            self.token.end();
        }
    }

    /// There is nothing wrong with the token any more, however the way is.
    pub(super) fn token_is_good(&self) {
        self.token.end();
    }

    /// Istiod has answered on a stream.
    pub(super) fn answered(&self) {
        self.token.end();
        // Where streams ended that had brought something, too, another one that does so mends nothing yet.
        let again = self.ended() + 1 >= ENDS;
        self.way.end_if(|kind| !(again && kind == Kind::IstiodCloses));
    }

    // Streams that had brought something and ended of late.
    fn ended(&self) -> usize {
        let mut ends = self.ends.lock().expect("no panic holds this lock");
        ends.retain(|at| at.elapsed() < WINDOW);
        ends.len()
    }

    /// A stream has lived for [`SETTLED`].
    pub(super) fn settled(&self) {
        self.ends.lock().expect("no panic holds this lock").clear();
        self.way.end_if(|kind| kind == Kind::IstiodCloses);
    }

    /// Istiod has ended a stream on which it had answered.
    pub(super) fn lost(&self, address: &str, status: &Status) {
        let text = said(status);
        self.way.note(What::Lost, format!("{address} ended the stream: {text}"));
        let mut ends = self.ends.lock().expect("no panic holds this lock");
        let now = Instant::now();
        ends.push_back(now);
        ends.retain(|at| now.duration_since(*at) < WINDOW);
        if ends.len() >= ENDS {
            // As many as it takes to tell it anew.
            ends.pop_front();
            drop(ends);
            self.way.report(closes(address, status));
        }
    }

    /// Istiod was connected.
    pub(super) fn connected(&self, text: String) {
        self.way.note(What::Connected, text);
    }

    /// A response came.
    pub(super) fn pushed(&self, type_url: &str, version: &str, count: u64) {
        let name = types::short(type_url);
        self.way.note(What::Push, format!("{name}: {count} resources, version {version}"));
    }

    /// Envoy, or the agent for its own types, rejected the last response of a type.
    pub(super) fn rejected(&self, by: &str, type_url: &str, version: &str, names: &[String], reason: &str) {
        let name = types::short(type_url);
        let reason: String = reason.chars().take(REASON).collect();
        let of = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        let detail = format!("{by} rejected {name}{of} version {version:?}: {reason}");
        let mut types = self.types.lock().expect("no panic holds this lock");
        let reporter = types.entry(type_url.to_owned()).or_insert_with(|| self.way.sibling());
        let report = Report::new(Kind::ConfigRejected, detail).about(name);
        reporter.report(report.hint(hint(&reason)));
    }

    /// A new Envoy has rejected nothing yet. What the agent itself has rejected stays until istiod sends it again.
    pub(super) fn begins_anew(&self) {
        let mut types = self.types.lock().expect("no panic holds this lock");
        types
            .extract_if(.., |type_url, _| types::for_envoy(type_url))
            .for_each(|(_, reporter)| reporter.end());
    }

    /// The last response of a type was taken, or Envoy asks for nothing of it any more.
    pub(super) fn accepted(&self, type_url: &str) {
        let reporter = self.types.lock().expect("no panic holds this lock").remove(type_url);
        if let Some(reporter) = reporter {
            reporter.end();
        }
    }
}

/// For an answer that is no HTTP/2.
const FOREIGN: &str = "what answers speaks no HTTP/2: is this istiod's port, and is there a proxy in between that speaks HTTP/1.1? With \
                       controlPlaneAuthPolicy NONE the port may speak TLS and is called in plain text: write MUTUAL_TLS, or name the \
                       port for plain text (15010)";

/// What usually is behind a rejection of Envoy's; empty: nothing is known.
fn hint(reason: &str) -> &'static str {
    let lower = reason.to_ascii_lowercase();
    let unknown = lower.contains("didn't find a registered implementation")
        || lower.contains("unable to parse")
        || lower.contains("invalid type url")
        || lower.contains("could not find @type");
    if unknown && (lower.contains("istio.") || lower.contains("istio_") || lower.contains("stats_filter")) {
        return "this Envoy is not Istio's own build and lacks its extensions: take Envoy from the image istio/proxyv2 of this \
                release, or have istiod send none: PILOT_ENABLE_METADATA_EXCHANGE=false and PILOT_ENABLE_ALPN_FILTER=false in its \
                environment (istio.metadata_exchange, istio.alpn), telemetry.enabled=false in its chart (istio.stats)";
    }
    if unknown {
        return "this Envoy does not know the extension named: use the Envoy of the image istio/proxyv2 of istiod's release, or \
                remove the EnvoyFilter that adds it";
    }
    if lower.contains("address already in use") || lower.contains("cannot bind") {
        return "another process, or another listener, holds this address: stop it or change the Gateway's or Service's port";
    }
    if lower.contains("duplicate") {
        return "two resources collide: look for two EnvoyFilters, or two Services of one name, that make the same thing";
    }
    ""
}

fn said(status: &Status) -> String {
    let text = plain(status.message(), &[]);
    if text.is_empty() {
        code_name(status.code()).to_owned()
    } else {
        format!("{}: {text}", code_name(status.code()))
    }
}

fn closes(address: &str, status: &Status) -> Report {
    let detail = format!("{address} ends the stream of configuration again and again: {}", said(status));
    let foreign = status.message().contains("frame with invalid size");
    Report::new(Kind::IstiodCloses, detail).about(address).hint(if foreign { FOREIGN } else { "" })
}

/// What to do about a refusal; empty: its kind says it.
pub(super) fn refusal_hint(status: &Status) -> &'static str {
    if let Some(hint) = auth::hint_for(status.message()) {
        return hint;
    }
    match status.code() {
        Code::ResourceExhausted => {
            "istiod is overloaded or limits how many proxies connect at a time (PILOT_MAX_REQUESTS_PER_SECOND); the agent \
             tries again by itself, more slowly"
        }
        Code::Unauthenticated => {
            "istiod accepted neither the token nor a client certificate: is the token of this cluster, and for istiod's audience?"
        }
        _ => "",
    }
}

/// What the end of a stream before istiod's first answer is.
pub(super) fn ended(address: &str, status: &Status) -> Report {
    let code = code_name(status.code());
    let text = status.message();
    if text.contains("does not speak HTTP/2") || text.contains("keepalive ping failed") {
        return Report::new(Kind::IstiodSilent, format!("{address}: {text}")).about(address);
    }
    if refused_late(text) {
        return Report::new(Kind::ClientCertificateRefused, format!("{address}: {text}")).about(address);
    }
    match status.code() {
        Code::Ok | Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable => closes(address, status),
        _ => Report::new(
            Kind::AdsRefused,
            format!("{address} refuses the stream of configuration: {}", said(status)),
        )
        .about(address)
        .code(code)
        .hint(refusal_hint(status)),
    }
}

/// Istiod has taken the stream and says nothing.
pub(super) fn silent(address: &str) -> Report {
    let detail =
        format!("{address} has taken the stream of configuration and sends nothing, for {SILENT:?} by now");
    Report::new(Kind::IstiodSilent, detail).about(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trouble::Troubles as List;

    #[test]
    fn a_refused_certificate_stays_the_cause_where_the_word_is_lost() {
        let list = List::default();
        let troubles = Troubles::new(list.reporter("xdsproxy"));
        let kind = |text: &str| {
            troubles.failed(ended("istiod:15012", &Status::unavailable(text)), None);
            list.verdict().unwrap().kind
        };
        let (word, none) = (
            "error reading from server: received fatal alert: CertificateUnknown",
            "error reading from server: EOF",
        );
        assert_eq!(kind(none), Kind::IstiodCloses);
        for _ in 0..3 {
            assert_eq!(kind(word), Kind::ClientCertificateRefused);
            for _ in 0..WORDLESS {
                assert_eq!(kind(none), Kind::ClientCertificateRefused);
            }
        }
        assert_eq!(kind(none), Kind::IstiodCloses, "by now it is something else");
        assert_eq!(kind(word), Kind::ClientCertificateRefused);
        assert_eq!(kind("overloaded"), Kind::IstiodCloses, "istiod says what it is");
    }

    #[test]
    fn three_ends_in_a_row_are_a_trouble_until_a_stream_lives() {
        let list = List::default();
        let troubles = Troubles::new(list.reporter("xdsproxy"));
        let gone = Status::unavailable("error reading from server: EOF");
        for n in 0..3 {
            assert_eq!(list.verdict(), None, "after {n} ends");
            troubles.answered();
            troubles.lost("istiod:15012", &gone);
        }
        assert_eq!(list.verdict().unwrap().kind, Kind::IstiodCloses);
        troubles.answered();
        assert!(list.verdict().is_some(), "an answer alone was there each time");
        troubles.settled();
        assert_eq!(list.verdict(), None);
        troubles.failed(ended("istiod:15012", &gone), None);
        assert_eq!(list.verdict().unwrap().kind, Kind::IstiodCloses);
        troubles.answered();
        assert_eq!(list.verdict(), None, "no stream had brought anything until now");
    }

    #[test]
    fn what_istiod_says_stays_in_its_line() {
        for status in [Status::unavailable("a\nb\u{1b}[2J"), Status::internal("a\nb\u{1b}[2J")] {
            let report = ended("i:1", &status);
            assert!(report.detail.ends_with(": a\\nb\\u{1b}[2J"), "{}", report.detail);
        }
    }

    #[test]
    fn an_answer_that_is_no_http_2_is_not_always_tls_that_was_called_in_plain_text() {
        let list = List::default();
        let troubles = Troubles::new(list.reporter("xdsproxy"));
        troubles.failed(ended("i:1", &Status::unavailable("error detected: frame with invalid size")), None);
        let hint = list.verdict().unwrap().hint;
        assert!(hint.contains("HTTP/1.1") && hint.contains("plain text"), "{hint}");
    }

    #[test]
    fn a_token_that_cannot_be_had_is_nothing_that_istiod_said() {
        let error = auth::Error::new("metadata server h: Network is unreachable").to_string();
        assert!(refusal_hint(&Status::unauthenticated(error)).starts_with("nothing was sent"));
        assert!(refusal_hint(&Status::unauthenticated("x")).starts_with("istiod accepted neither"));
    }

    #[test]
    fn what_istiod_says_has_a_kind() {
        for (status, kind) in [
            (Status::unauthenticated("x"), Kind::AdsRefused),
            (Status::resource_exhausted("x"), Kind::AdsRefused),
            (Status::internal("x"), Kind::AdsRefused),
            (Status::unavailable("x"), Kind::IstiodCloses),
            (Status::ok(""), Kind::IstiodCloses),
            (
                Status::unavailable("the server accepted the connection but does not speak HTTP/2"),
                Kind::IstiodSilent,
            ),
        ] {
            assert_eq!(ended("i:1", &status).kind, kind, "{status:?}");
        }
    }

    #[test]
    fn a_rejection_lasts_until_the_type_is_accepted_and_hints_at_a_foreign_envoy() {
        let list = List::default();
        let troubles = Troubles::new(list.reporter("xdsproxy"));
        let reason = "Didn't find a registered implementation for 'istio.stats' with type URL: ''";
        troubles.rejected("Envoy", types::LISTENER, "v1", &[], reason);
        let trouble = list.verdict().unwrap();
        assert_eq!(
            (trouble.kind, trouble.subject.as_str()),
            (Kind::ConfigRejected, types::short(types::LISTENER))
        );
        assert!(
            trouble.hint.contains("istio/proxyv2") && trouble.hint.contains("PILOT_ENABLE"),
            "{}",
            trouble.hint
        );
        troubles.accepted(types::LISTENER);
        assert_eq!(list.verdict(), None);
    }
}
