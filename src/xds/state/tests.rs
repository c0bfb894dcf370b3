use std::time::Duration;

use super::*;
use crate::base::clock::Fixed;

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";

fn facts(nonce: &str, error: Option<&str>) -> Facts {
    Facts {
        nonce: nonce.to_owned(),
        version: "v".to_owned(),
        rejected: error.is_some(),
        error_message: error.unwrap_or_default().to_owned(),
        ..Facts::default()
    }
}

fn state() -> (RelayState, Fixed) {
    let clock = Fixed::at(UNIX_EPOCH + Duration::from_secs(1000));
    (RelayState::new(Arc::new(clock.clone()), "istiod:15012".to_owned()), clock)
}

fn now(state: &RelayState) -> Freshness {
    state.snapshot().types[0].state
}

#[test]
fn a_type_goes_from_never_over_sent_to_synced_rejected_and_stale() {
    let (state, clock) = state();
    state.upstream_live();
    state.request(CDS, &facts("", None));
    assert_eq!(now(&state), Freshness::Never);
    state.response(CDS, &facts("1", None), 10);
    assert_eq!(now(&state), Freshness::Sent);
    assert_eq!(state.request(CDS, &facts("0", None)), Answer::None, "an answer to an older response");
    assert_eq!(now(&state), Freshness::Sent);
    assert_eq!(state.request(CDS, &facts("1", None)), Answer::Ack);
    assert_eq!(now(&state), Freshness::Synced);
    clock.advance(Duration::from_secs(5));
    state.upstream_down(None);
    assert_eq!(now(&state), Freshness::Stale);
    let view = &state.snapshot().types[0];
    assert_eq!((view.stale_since, view.accepted_age_s), (Some(1005), Some(5)));
    state.upstream_live();
    state.response(CDS, &facts("2", None), 10);
    assert!(matches!(state.request(CDS, &facts("2", Some("no"))), Answer::Nack { fresh: true, .. }));
    assert_eq!(now(&state), Freshness::Rejected);
    state.upstream_down(None);
    assert_eq!(now(&state), Freshness::Rejected, "a rejection stays visible while istiod is away");
}

#[test]
fn what_the_agent_takes_itself_is_in_step_and_what_it_refuses_is_not() {
    let (state, _) = state();
    state.upstream_live();
    state.response("nds", &facts("1", None), 10);
    state.taken("nds", "0", false);
    assert_eq!(now(&state), Freshness::Sent, "an answer to an older response");
    state.taken("nds", "1", false);
    assert_eq!(now(&state), Freshness::Synced);
    state.response("nds", &facts("2", None), 10);
    state.taken("nds", "2", true);
    assert_eq!(now(&state), Freshness::Rejected);
    let view = &state.snapshot().types[0];
    assert_eq!((view.requests, view.rejected), (2, 1));
}

#[test]
fn repeated_rejections_are_folded_and_bounded() {
    let (state, _) = state();
    let fresh = (0..100)
        .filter(|_| matches!(state.request(CDS, &facts("1", Some("same"))), Answer::Nack { fresh: true, .. }))
        .count();
    assert_eq!(fresh, 3, "the first, the tenth, the hundredth");
    for n in 0..100 {
        state.request(CDS, &facts("1", Some(&format!("other {n}"))));
    }
    assert_eq!(state.snapshot().nacks.len(), NACKS);
    // Envoy ends its list with a line break, which no view repeats.
    state.response(CDS, &facts("n", None), 10);
    state.request(CDS, &facts("n", Some("one\ntwo\n")));
    assert_eq!(state.snapshot().nacks.last().map(|nack| nack.message.clone()).as_deref(), Some("one\ntwo"));
    for n in 0..2 * TYPES {
        state.request(&format!("type {n}"), &facts("", None));
    }
    assert_eq!(state.snapshot().types.len(), TYPES);
}

#[test]
fn the_timeline_of_a_stream_keeps_the_first_time_of_each_phase() {
    let (state, clock) = state();
    let second = || clock.advance(Duration::from_secs(1));
    state.stream_opened(1, Protocol::Delta);
    state.show(Some(1));
    second();
    state.upstream_open("peer".to_owned(), None);
    second();
    state.upstream_open("peer".to_owned(), Some(UNIX_EPOCH + Duration::from_secs(7)));
    second();
    for nonce in ["1", "2"] {
        state.upstream_live();
        state.response(CDS, &facts(nonce, None), 10);
        second();
        state.request(CDS, &facts(nonce, None));
    }
    let view = state.snapshot();
    let timeline = view.stream.unwrap().timeline;
    assert_eq!(timeline.upstream_opened, Some(2000), "the last attempt's");
    assert_eq!((timeline.first_response, timeline.first_accepted), (Some(3000), Some(4000)));
    assert_eq!(view.upstream.token_expires, Some(7));
}

#[test]
fn a_hold_shows_where_the_stream_that_is_shown_is_held() {
    let (state, clock) = state();
    let since = || state.snapshot().upstream.held_since;
    state.show(Some(1));
    state.held(1, true);
    clock.advance(Duration::from_secs(5));
    state.held(2, true);
    assert_eq!(since(), Some(1000));
    state.held(1, false);
    assert_eq!(since(), None, "another is held on");
    state.show(Some(2));
    assert_eq!(since(), Some(1005));
    state.held(2, false);
    assert_eq!(since(), None);
}

#[test]
fn a_stream_that_is_shown_again_is_as_old_as_it_was() {
    let (state, clock) = state();
    state.stream_opened(1, Protocol::Delta);
    state.show(Some(1));
    state.upstream_open("peer".to_owned(), None);
    clock.advance(Duration::from_secs(5));
    state.stream_opened(2, Protocol::Sotw);
    state.show(Some(2));
    assert_eq!(state.snapshot().stream.unwrap().timeline.upstream_opened, None);
    state.stream_closed(2);
    assert!(state.snapshot().stream.is_none());
    state.show(Some(1));
    let stream = state.snapshot().stream.unwrap();
    assert_eq!((stream.since, stream.timeline.upstream_opened), (1000, Some(0)));
}
