use super::*;
use proptest::prelude::*;

const SHORT: Duration = Duration::from_secs(1);

fn core(hot_restart: bool, recovery: bool) -> Core {
    let mut core = Core::new(Config { hot_restart, recovery, ..Config::default() }, 1);
    assert_eq!(core.begin(), Action::Start(0));
    core
}

#[test]
fn by_default_envoys_end_is_the_end() {
    for kind in [Kind::Orderly, Kind::Abnormal, Kind::Memory] {
        let mut core = core(false, false);
        assert_eq!(core.desire(2), Action::None, "no hot restart unless it is on");
        assert_eq!(core.ended(0, kind, SHORT), Action::End);
    }
}

#[test]
fn the_same_configuration_changes_nothing() {
    let mut core = core(true, false);
    assert_eq!(core.desire(1), Action::None);
    assert_eq!(core.desire(2), Action::Start(1));
    assert_eq!(core.desire(2), Action::None);
}

#[test]
fn one_that_runs_already_has_its_number_and_the_first_configuration() {
    let mut core = Core::new(Config { hot_restart: true, ..Config::default() }, 1);
    core.adopt(3);
    assert_eq!(core.active(), [3]);
    assert_eq!(core.desire(1), Action::None);
    assert_eq!(core.desire(2), Action::Start(4));
}

#[test]
fn what_was_given_up_is_begun_again_when_it_is_desired_again() {
    let mut core = core(true, false);
    assert_eq!(core.desire(2), Action::Start(1));
    assert_eq!(core.ended(1, Kind::Abnormal, SHORT), Action::None);
    core.settle();
    assert_eq!(core.desire(1), Action::None, "it runs");
    assert_eq!(core.desire(2), Action::Start(1));
}

#[test]
fn one_that_is_about_to_start_has_the_newest_configuration() {
    let mut core = core(true, true);
    assert!(matches!(core.ended(0, Kind::Abnormal, SHORT), Action::RetryIn(_)));
    let left = core.left();
    assert_eq!(core.retry(), Action::Start(0));
    core.renew(0, 1);
    assert_eq!(core.left(), left, "it is the same");
    core.renew(0, 2);
    assert_eq!(core.desire(2), Action::None, "it runs");
    assert_ne!(core.left(), left, "another one has all its tries");
    core.renew(7, 3);
    assert_eq!(core.desire(2), Action::None, "there is no such epoch");
    assert_eq!(core.desire(1), Action::Start(1));
}

#[test]
fn numbers_follow_the_highest_that_runs() {
    let mut core = core(true, false);
    assert_eq!(core.desire(2), Action::Start(1));
    assert_eq!(core.ended(0, Kind::Orderly, SHORT), Action::None);
    assert_eq!(core.desire(3), Action::Start(2));
    assert_eq!(core.ended(2, Kind::Abnormal, SHORT), Action::None, "the others live on");
    assert_eq!(core.desire(4), Action::Start(2), "a failed number is used again");
    assert_eq!(core.ended(1, Kind::Orderly, SHORT), Action::None);
    assert_eq!(core.ended(2, Kind::Orderly, SHORT), Action::End);
}

#[test]
fn recovery_kills_the_others_and_starts_anew() {
    let mut core = core(true, true);
    assert_eq!(core.desire(2), Action::Start(1));
    assert_eq!(core.desire(3), Action::Start(2));
    assert_eq!(core.ended(2, Kind::Abnormal, SHORT), Action::KillAll);
    assert_eq!(core.desire(4), Action::None, "the fresh start takes it");
    assert_eq!(core.ended(1, Kind::Aborted, SHORT), Action::None);
    assert_eq!(core.ended(0, Kind::Aborted, SHORT), Action::RetryIn(FIRST_DELAY));
    assert_eq!(core.retry(), Action::Start(0));
    assert_eq!(core.desire(4), Action::None);
}

#[test]
fn one_that_was_never_executed_leaves_the_others_and_is_tried_again() {
    for recovery in [false, true] {
        let mut core = core(true, recovery);
        assert_eq!(core.desire(2), Action::Start(1));
        assert_eq!(core.ended(1, Kind::NotStarted, SHORT), Action::AgainIn(FIRST_DELAY));
        for doubled in [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8] {
            assert_eq!(core.desire(2), Action::Start(1));
            let delay = FIRST_DELAY * 2u32.pow(doubled);
            assert_eq!(core.ended(1, Kind::NotStarted, SHORT), Action::AgainIn(delay));
        }
        assert_eq!(core.desire(2), Action::Start(1));
        assert_eq!(core.ended(0, Kind::Orderly, SHORT), Action::None);
        assert_eq!(core.desire(3), Action::Start(2));
        assert_eq!(core.ended(2, Kind::NotStarted, SHORT), Action::AgainIn(FIRST_DELAY));
        let end = if recovery { Action::RetryIn(FIRST_DELAY) } else { Action::End };
        assert_eq!(core.ended(1, Kind::NotStarted, SHORT), end, "nothing serves");
    }
}

#[test]
fn the_budget_is_ten_and_doubles_the_delay() {
    let mut core = core(false, true);
    let mut delays = Vec::new();
    loop {
        match core.ended(0, Kind::Abnormal, SHORT) {
            Action::RetryIn(delay) => delays.push(delay.as_millis()),
            Action::End => break,
            other => panic!("{other:?}"),
        }
        assert_eq!(core.retry(), Action::Start(0));
    }
    assert_eq!(delays, [200, 400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 102_400]);
    assert!(core.exhausted());
}

#[test]
fn the_budget_refills_on_change_and_after_a_stable_run() {
    let mut core = core(false, true);
    for refill in [false, true] {
        for _ in 0..3 {
            assert!(matches!(core.ended(0, Kind::Abnormal, SHORT), Action::RetryIn(_)));
            assert_eq!(core.retry(), Action::Start(0));
        }
        if refill {
            let _ = core.desire(2);
            assert_eq!(core.left(), format!("{BUDGET} more attempts after that"));
        } else {
            assert_eq!(core.ended(0, Kind::Abnormal, STABLE), Action::RetryIn(FIRST_DELAY));
            assert_eq!(core.retry(), Action::Start(0));
        }
    }
}

#[test]
fn out_of_memory_is_answered_once() {
    let mut core = core(false, true);
    assert!(matches!(core.ended(0, Kind::Memory, SHORT), Action::RetryIn(_)));
    assert_eq!(
        core.left(),
        format!("{} more attempts after that, none where memory runs out again", BUDGET - 1)
    );
    assert_eq!(core.retry(), Action::Start(0));
    assert_eq!(core.ended(0, Kind::Memory, SHORT), Action::End);
    assert!(core.exhausted());
}

#[test]
fn a_clean_end_is_not_answered() {
    let mut core = core(true, true);
    assert_eq!(core.ended(0, Kind::Orderly, SHORT), Action::End);
    assert!(!core.exhausted());
}

proptest! {
    // Whatever happens: numbers are unique among the running, retries never exceed the budget between
    // refills, and "end" is said exactly when nothing runs and nothing is due.
    #[test]
    fn any_sequence_stays_consistent(
        hot in any::<bool>(), recovery in any::<bool>(),
        steps in prop::collection::vec((0u8..4, 0u64..5, 0usize..4), 0..60),
    ) {
        let mut core = core(hot, recovery);
        let (mut waiting, mut over) = (false, false);
        for (step, id, which) in steps {
            if over { break }
            let before = core.active();
            let action = match step {
                0 => core.desire(id),
                1 if waiting => { waiting = false; core.retry() }
                1 => Action::None,
                _ if before.is_empty() => Action::None,
                _ => {
                    let epoch = before[which % before.len()];
                    let kinds = [Kind::Orderly, Kind::Abnormal, Kind::Memory, Kind::Aborted, Kind::NotStarted];
                    let kind = kinds[usize::try_from(id).unwrap()];
                    core.ended(epoch, kind, SHORT)
                }
            };
            match action {
                Action::Start(n) => {
                    prop_assert!(!before.contains(&n));
                    prop_assert!(before.iter().all(|b| *b < n));
                    prop_assert!(core.active().contains(&n));
                }
                Action::RetryIn(delay) => {
                    prop_assert!(recovery && core.active().is_empty());
                    prop_assert!(delay <= FIRST_DELAY * 512);
                    waiting = true;
                }
                Action::AgainIn(delay) => {
                    prop_assert!(!core.active().is_empty());
                    prop_assert!(delay <= FIRST_DELAY * 256);
                }
                Action::KillAll => prop_assert!(recovery && !core.active().is_empty()),
                Action::End => { prop_assert!(core.active().is_empty()); over = true }
                Action::None => prop_assert!(!core.active().is_empty() || waiting),
            }
            if !hot { prop_assert!(core.active().len() <= 1) }
        }
    }
}
