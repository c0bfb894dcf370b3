//! When the next attempt is due, and what brings it forward.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Mutex;

use futures_util::future::BoxFuture;

use super::*;
use crate::istiod::{Connection, Error};

// A name that resolves to one thing after the other; the last one stays.
#[derive(Debug)]
struct Name(Option<Mutex<Vec<BTreeSet<SocketAddr>>>>);

impl Name {
    fn of(addresses: &[&[u8]]) -> Self {
        let set = |last: &&[u8]| last.iter().map(|n| SocketAddr::from(([10, 0, 0, *n], 1))).collect();
        Self(Some(Mutex::new(addresses.iter().rev().map(set).collect())))
    }
}

impl Upstream for Name {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        unreachable!("only its name is looked up")
    }

    fn address(&self) -> &str {
        "istiod:15012"
    }

    fn resolves(&self) -> bool {
        self.0.is_some()
    }

    fn look_up(&self) -> BoxFuture<'_, BTreeSet<SocketAddr>> {
        let mut left = self.0.as_ref().expect("it resolves").lock().unwrap();
        let now = if left.len() > 1 { left.pop() } else { left.first().cloned() };
        Box::pin(std::future::ready(now.unwrap_or_default()))
    }
}

#[test]
fn only_what_can_heal_is_held() {
    for code in 0..17 {
        let held = holdable(&Status::new(Code::from(code), ""));
        assert_eq!(held, [7, 8, 14, 16].contains(&code), "code {code}");
    }
}

#[tokio::test(start_paused = true)]
async fn delays_stay_in_their_bounds_and_overload_is_waited_out() {
    let mut hold = Hold::default();
    for _ in 0..50 {
        assert!(hold.failed(&Status::unavailable("")) <= MAX);
        assert!(hold.due().unwrap().hurry);
    }
    for (mut hold, first) in [(Hold::default(), CROWDED), (herd(), HERD)] {
        let mut bound = first;
        for _ in 0..50 {
            let delay = hold.failed(&Status::resource_exhausted(""));
            assert!(delay <= bound, "{delay:?} is above {bound:?}");
            assert!(!hold.due().unwrap().hurry);
            bound = (bound * 2).min(CROWDED_MAX);
        }
    }
    let mut hold = Hold::default();
    hold.failed(&Status::unavailable("away"));
    let delays = std::iter::repeat_with(|| hold.clone().failed(&Status::resource_exhausted("")));
    assert!(delays.take(1000).any(|delay| delay > CROWDED), "istiod was away for others too");
    hold.reset();
    assert_eq!((hold.failures(), hold.due()), (0, None));
}

// Of an agent that had a configuration.
fn herd() -> Hold {
    let mut hold = Hold::default();
    hold.reset();
    hold
}

#[test]
fn a_delay_that_istiod_names_is_kept() {
    let crowded = |text: &'static str| {
        let mut status = Status::resource_exhausted("");
        status.metadata_mut().insert(PUSHBACK, text.parse().unwrap());
        status
    };
    let mut hold = Hold::default();
    for (text, ms) in [("20000", 20_000), ("0", 0), ("99999999999", 300_000)] {
        let delay = hold.failed(&crowded(text)).as_millis();
        assert!((ms..=ms + ms / 10).contains(&delay), "{text}: {delay} ms");
    }
    assert!(hold.failed(&crowded("soon")) <= CROWDED_MAX, "no number: as without it");
    assert!(holdable(&crowded("20000")) && holdable(&crowded("soon")));
    assert!(!holdable(&crowded("-1")), "not to be tried again: Envoy is told");
}

#[tokio::test(start_paused = true)]
async fn news_brings_the_attempt_forward_unless_istiod_is_overloaded() {
    let (news, mut wake) = watch::channel(0);
    let start = Instant::now();
    let due = |hurry| Due { at: start + Duration::from_secs(4), hurry, spread: false };
    news.send(1).unwrap();
    wait(due(true), &mut wake, &Name(None)).await;
    assert_eq!(start.elapsed(), Duration::ZERO);
    news.send(2).unwrap();
    wait(due(false), &mut wake, &Name(None)).await;
    assert!(start.elapsed() >= Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn a_name_that_resolves_anew_brings_the_attempt_forward() {
    let (_news, mut wake) = watch::channel(0);
    for (addresses, seconds) in [
        (Name::of(&[&[1], &[2]]), 1),
        (Name::of(&[&[1], &[1], &[1, 2]]), 2),
        // It did not resolve, and now it does.
        (Name::of(&[&[], &[1]]), 1),
        // It does not resolve for a moment, and then to the same as before.
        (Name::of(&[&[1], &[], &[1]]), 4),
        (Name::of(&[&[1, 2]]), 4),
        (Name(None), 4),
    ] {
        let start = Instant::now();
        let due = Due { at: start + Duration::from_secs(4), hurry: true, spread: false };
        wait(due, &mut wake, &addresses).await;
        assert_eq!(start.elapsed().as_secs(), seconds, "{addresses:?}");
    }
}

const SPREAD: Duration = Duration::from_secs(100);

// Of an agent whose Envoy has a configuration.
fn spread() -> Hold {
    let mut hold = Hold::new(Some(SPREAD));
    hold.reset();
    hold.configured(true);
    hold
}

#[tokio::test(start_paused = true)]
async fn the_first_dial_after_a_broken_stream_is_put_off_over_the_whole_spread() {
    let delays: Vec<Duration> = (0..1000).map(|_| spread().broke().unwrap()).collect();
    assert!(delays.iter().all(|delay| *delay <= SPREAD));
    for part in 0..4 {
        let of = SPREAD / 4 * part..SPREAD / 4 * (part + 1);
        let count = delays.iter().filter(|delay| of.contains(*delay)).count();
        assert!((150..350).contains(&count), "{count} of 1000 within {of:?}");
    }
    let mut hold = spread();
    let delay = hold.broke().unwrap();
    let due = hold.due().unwrap();
    assert_eq!((due.at, due.hurry, hold.failures()), (Instant::now() + delay, true, 0));
    assert_eq!(hold.put_off(), Some(delay));
    tokio::time::advance(delay + Duration::from_millis(1)).await;
    assert_eq!(hold.put_off(), None, "its time has come");
    hold.broke();
    hold.reset();
    assert_eq!((hold.put_off(), hold.due()), (None, None), "istiod has answered");
}

#[tokio::test(start_paused = true)]
async fn without_a_spread_nothing_is_put_off() {
    let mut hold = herd();
    hold.configured(true);
    assert_eq!((hold.broke(), hold.due(), hold.starts()), (None, None, false));
}

#[tokio::test(start_paused = true)]
async fn a_first_start_is_not_put_off_and_dials_soon_after_a_failure() {
    let mut hold = Hold::new(Some(SPREAD));
    assert_eq!(hold.due(), None);
    assert!(hold.failed(&Status::unavailable("")) <= FIRST);
    assert!(hold.clone().failed(&Status::resource_exhausted("")) <= HERD);
    hold.reset();
    assert_eq!(hold.broke(), None, "istiod has answered, but Envoy has no listeners yet");
}

#[tokio::test(start_paused = true)]
async fn a_new_envoy_is_dialled_for_at_once_unless_istiod_is_overloaded() {
    let mut hold = spread();
    hold.broke();
    assert!(hold.starts());
    assert_eq!((hold.due(), hold.put_off()), (None, None));
    let mut hold = spread();
    hold.broke();
    hold.failed(&Status::resource_exhausted(""));
    assert!(!hold.starts() && hold.due().is_some());
}

#[tokio::test(start_paused = true)]
async fn refusals_are_waited_out_over_the_spread_and_a_delay_that_istiod_names_is_kept() {
    let mut hold = spread();
    hold.broke();
    for _ in 0..20 {
        let delay = hold.failed(&Status::resource_exhausted(""));
        assert!((SPREAD..=SPREAD.mul_f64(1.1)).contains(&delay), "{delay:?}");
        assert!(!hold.due().unwrap().hurry);
    }
    let mut asked = Status::resource_exhausted("");
    asked.metadata_mut().insert(PUSHBACK, "20000".parse().unwrap());
    let delay = hold.failed(&asked).as_millis();
    assert!((20_000..=22_000).contains(&delay), "{delay} ms");
}

#[tokio::test(start_paused = true)]
async fn with_a_spread_a_changed_file_hurries_and_a_name_does_not() {
    let (news, mut wake) = watch::channel(0);
    let mut hold = spread();
    let start = Instant::now();
    let delay = hold.broke().unwrap();
    wait(hold.due().unwrap(), &mut wake, &Name::of(&[&[1], &[2]])).await;
    assert!(start.elapsed() >= delay, "all agents see the new name in the same second");
    hold.broke();
    let start = Instant::now();
    news.send(1).unwrap();
    wait(hold.due().unwrap(), &mut wake, &Name(None)).await;
    assert_eq!(start.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn who_does_not_wait_long_is_dialled_for_as_without_a_spread() {
    for _ in 0..100 {
        let mut hold = spread();
        hold.broke();
        hold.failed(&Status::unavailable(""));
        assert!(hold.due().unwrap().soon().at <= Instant::now() + MAX);
        hold.failed(&Status::resource_exhausted(""));
        let due = hold.due().unwrap();
        assert_eq!(due.soon(), due, "what istiod asks for counts for everybody");
        let mut plain = herd();
        plain.failed(&Status::unavailable(""));
        assert_eq!(plain.due().unwrap().soon(), plain.due().unwrap());
    }
}
