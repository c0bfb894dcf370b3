use super::*;
use proptest::prelude::*;

const S: fn(u64) -> Duration = Duration::from_secs;

fn plain(drain: u64) -> Machine {
    Machine::new(Config { termination_drain: S(drain), ..Config::default() }, Duration::ZERO)
}

fn zero(minimum: u64, cap: Option<u64>) -> Machine {
    let exit_on_zero = Some(ExitOnZero { minimum: S(minimum), cap: cap.map(S) });
    Machine::new(Config { exit_on_zero, ..Config::default() }, Duration::ZERO)
}

/// Lets time run to the next deadline.
fn tick(m: &mut Machine) -> (Duration, Option<Action>) {
    let now = m.deadline().expect("a deadline is due");
    (now, m.handle(now, Event::Tick))
}

#[test]
fn a_signal_drains_waits_and_kills() {
    let mut m = plain(5);
    assert_eq!(m.handle(S(10), Event::Stop), Some(Action::Ask));
    assert_eq!(m.handle(S(12), Event::Answered), None);
    assert_eq!(m.handle(S(13), Event::Stop), None, "a second signal changes nothing");
    assert_eq!(m.handle(S(13), Event::Quit), None);
    assert_eq!(tick(&mut m), (S(17), Some(Action::Kill)), "the wait begins with the answer");
    assert_eq!(m.handle(S(17), Event::Gone), Some(Action::End));
}

#[test]
fn envoy_may_end_first() {
    let mut m = plain(5);
    assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Ask));
    assert_eq!(m.handle(S(0), Event::Answered), None);
    assert_eq!(m.handle(S(1), Event::Gone), Some(Action::End));
    assert_eq!(m.deadline(), None);
}

#[test]
fn no_wait_means_kill_after_the_answer() {
    let mut m = plain(0);
    assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Ask));
    assert_eq!(m.handle(S(0), Event::Answered), Some(Action::Kill));
}

#[test]
fn an_envoy_that_never_answers_is_killed_when_the_time_is_over() {
    for (drain, at) in [(5, 5), (60, 60), (1, 3), (0, 3)] {
        let mut m = plain(drain);
        assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Ask));
        assert_eq!(tick(&mut m), (S(at), Some(Action::Kill)));
        assert_eq!(m.handle(S(70), Event::Answered), None, "too late");
    }
}

#[test]
fn quit_and_a_drain_before_lead_straight_to_the_kill() {
    let mut m = plain(5);
    assert_eq!(m.handle(S(0), Event::Quit), Some(Action::Kill));
    let mut m = plain(5);
    assert_eq!(m.handle(S(0), Event::Drained), None);
    assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Kill));
}

#[test]
fn a_process_that_cannot_be_killed_does_not_hold_up_the_end() {
    let mut m = plain(5);
    assert_eq!(m.handle(S(0), Event::Quit), Some(Action::Kill));
    assert_eq!(tick(&mut m), (KILL_LIMIT, Some(Action::End)));
}

#[test]
fn exit_on_zero_counts_down() {
    let mut m = zero(5, None);
    assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Ask));
    assert_eq!(m.handle(S(0), Event::Answered), None);
    assert_eq!(tick(&mut m), (S(5), None));
    assert_eq!(tick(&mut m), (S(6), Some(Action::Count)), "the first poll is a second after the minimum");
    assert_eq!(m.deadline(), None);
    assert_eq!(m.handle(S(6), Event::Counted(Some(3))), None);
    assert_eq!(tick(&mut m), (S(7), Some(Action::Count)));
    assert_eq!(m.handle(S(7), Event::Counted(Some(0))), Some(Action::Kill));
}

#[test]
fn polls_are_a_second_apart_however_long_their_answers_take() {
    let mut m = zero(5, None);
    let _ = m.handle(S(0), Event::Stop);
    let _ = m.handle(S(0), Event::Answered);
    let _ = tick(&mut m);
    let after = |seconds: f64, event, m: &mut Machine| {
        let (at, action) = tick(m);
        assert_eq!(action, Some(Action::Count));
        assert_eq!(m.handle(at + Duration::from_secs_f64(seconds), event), None);
        m.deadline().unwrap()
    };
    let some = Event::Counted(Some(1));
    assert_eq!(after(0.3, some, &mut m), S(7), "not 7.3");
    assert_eq!(after(0.9, Event::CountFailed, &mut m), S(8));
    assert_eq!(after(2.0, Event::CountFailed, &mut m), S(10), "due when the answer came");
    assert_eq!(after(2.5, some, &mut m), S(12));
    // An Envoy that answers none of five is ended after ten seconds.
    for _ in 0..4 {
        let _ = after(2.0, Event::CountFailed, &mut m);
    }
    let (at, _) = tick(&mut m);
    assert_eq!((at, m.handle(at + S(2), Event::CountFailed)), (S(20), Some(Action::Kill)));
}

#[test]
fn no_statistic_ends_it_and_errors_must_be_in_a_row() {
    let counting = || {
        let mut m = zero(0, None);
        let _ = m.handle(S(0), Event::Stop);
        let _ = m.handle(S(0), Event::Answered);
        let _ = tick(&mut m);
        m
    };
    let mut m = counting();
    let _ = tick(&mut m);
    assert_eq!(m.handle(S(1), Event::Counted(None)), Some(Action::Kill));
    let mut m = counting();
    for _ in 0..4 {
        assert_eq!(tick(&mut m).1, Some(Action::Count));
        assert_eq!(m.handle(S(100), Event::CountFailed), None);
    }
    assert_eq!(m.handle(S(100), Event::Counted(Some(1))), None);
    for _ in 0..4 {
        assert_eq!(tick(&mut m).1, Some(Action::Count));
        assert_eq!(m.handle(S(200), Event::CountFailed), None);
    }
    assert_eq!(tick(&mut m).1, Some(Action::Count));
    assert_eq!(m.handle(S(300), Event::CountFailed), Some(Action::Kill));
}

#[test]
fn that_envoy_is_gone_is_noticed_after_the_next_poll() {
    let minimum = |events: &[Event]| {
        let mut m = zero(5, None);
        assert_eq!(m.handle(S(0), Event::Stop), Some(Action::Ask));
        for event in events {
            assert_eq!(m.handle(S(0), *event), None);
        }
        assert_eq!(tick(&mut m), (S(5), None), "the minimum is waited out");
        assert_eq!(tick(&mut m), (S(6), Some(Action::Count)));
        m
    };
    // Before it has answered, too.
    for events in [[Event::Answered, Event::Gone], [Event::Gone, Event::Answered]] {
        for polled in [Event::CountFailed, Event::Counted(None), Event::Counted(Some(3))] {
            assert_eq!(minimum(&events).handle(S(6), polled), Some(Action::End));
        }
    }
    let mut m = minimum(&[Event::Answered]);
    assert_eq!(m.handle(S(6), Event::Counted(Some(3))), None);
    assert_eq!(m.handle(S(6), Event::Gone), None);
    assert_eq!(tick(&mut m), (S(7), Some(Action::Count)));
    assert_eq!(m.handle(S(7), Event::Counted(Some(3))), Some(Action::End));
}

#[test]
fn the_cap_ends_the_counting_even_during_a_poll() {
    let mut m = zero(1, Some(3));
    let _ = m.handle(S(0), Event::Stop);
    let _ = m.handle(S(0), Event::Answered);
    assert_eq!(tick(&mut m), (S(1), None));
    assert_eq!(tick(&mut m), (S(2), Some(Action::Count)));
    assert_eq!(tick(&mut m), (S(3), Some(Action::Kill)));
}

#[test]
fn the_jitter_puts_off_the_drain() {
    let mut m = Machine::new(Config::default(), S(2));
    assert_eq!(m.handle(S(1), Event::Stop), None);
    assert_eq!(tick(&mut m), (S(3), Some(Action::Ask)));
}

fn events() -> impl Strategy<Value = Vec<(Event, u64)>> {
    let event = prop_oneof![
        Just(Event::Stop),
        Just(Event::Quit),
        Just(Event::Drained),
        Just(Event::Gone),
        Just(Event::Answered),
        (0u64..3).prop_map(|n| Event::Counted(Some(n))),
        Just(Event::Counted(None)),
        Just(Event::CountFailed),
        Just(Event::Tick),
    ];
    prop::collection::vec((event, 0u64..4000), 0..40)
}

fn configs() -> impl Strategy<Value = (Config, Duration)> {
    let zero = prop::option::of((0u64..8, 0u64..20));
    (0u64..8, zero, 0u64..4).prop_map(|(drain, zero, jitter)| {
        let exit_on_zero = zero.map(|(minimum, cap)| ExitOnZero { minimum: S(minimum), cap: Some(S(cap)) });
        let termination_drain = S(drain);
        (Config { termination_drain, exit_on_zero, jitter: S(jitter), ..Config::default() }, S(jitter))
    })
}

proptest! {
    #[test]
    fn every_stop_ends_in_bounded_time_and_nothing_follows_the_end((config, jitter) in configs(), events in events()) {
        let bound = jitter
            + config.termination_drain.max(LEAST_ASK_LIMIT)
            + config.exit_on_zero.as_ref().map_or(config.termination_drain, |z| z.cap.unwrap().max(z.minimum))
            + KILL_LIMIT;
        let mut m = Machine::new(config, jitter);
        let (mut now, mut begun, mut gone) = (Duration::ZERO, None, false);
        let (mut asks, mut kills, mut ends) = (0, 0, 0);
        let mut seen = |action, gone: bool, m: &Machine| match action {
            Some(Action::Ask) => asks += 1,
            Some(Action::Kill) => { assert!(!gone); kills += 1 }
            Some(Action::End) => { assert!(gone || kills > 0, "Envoy is never left alive"); ends += 1 }
            Some(Action::Count) => assert!(matches!(m.phase(), Phase::Counting { .. })),
            None => {}
        };
        for (event, pause) in events {
            // Time may not pass a deadline unseen: the shell sleeps no longer.
            let target = now + Duration::from_millis(pause);
            while let Some(at) = m.deadline().filter(|at| *at <= target) {
                now = at.max(now);
                let action = m.handle(now, Event::Tick);
                seen(action, gone, &m);
            }
            now = target;
            if gone && event == Event::Gone { continue }
            gone |= event == Event::Gone;
            if begun.is_none() && matches!(event, Event::Stop | Event::Quit) && m.phase() == Phase::Running {
                begun = Some(now);
            }
            let action = m.handle(now, event);
            seen(action, gone, &m);
        }
        // From here on nothing answers any more; deadlines alone must bring it to an end.
        if let Some(begun) = begun {
            while m.phase() != Phase::Ended {
                let at = m.deadline().expect("a stop under way always has a deadline");
                now = at.max(now);
                let action = m.handle(now, Event::Tick);
                seen(action, gone, &m);
                prop_assert!(now <= begun + bound, "{:?} after {:?}", m.phase(), now - begun);
            }
        }
        prop_assert!(asks <= 1 && kills <= 1 && ends <= 1);
        prop_assert_eq!(ends == 1, m.phase() == Phase::Ended);
        if begun.is_none() && !gone {
            prop_assert_eq!(m.phase(), Phase::Running);
        }
    }
}

#[test]
fn who_was_drained_and_left_standing_is_killed_where_that_is_asked_for() {
    let mut m = plain(5);
    assert_eq!(m.handle(S(3), Event::Drained), None);
    assert_eq!(m.deadline(), None, "as the Go agent");
    let config = Config { drained_limit: Some(S(60)), ..Config::default() };
    let mut m = Machine::new(config, Duration::ZERO);
    assert_eq!(m.handle(S(3), Event::Drained), None);
    assert_eq!(m.handle(S(9), Event::Drained), None, "the first one counts");
    assert_eq!(m.handle(S(62), Event::Tick), None);
    assert_eq!(tick(&mut m), (S(63), Some(Action::Kill)));
    assert_eq!(m.handle(S(63), Event::Gone), Some(Action::End));
}
