//! Clocks that are wrong, jump, or differ from the CA's.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_certificate_of_a_day_to_come_is_served_and_told() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::Future(Duration::from_secs(7200)), |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    until("it is told", || troubles.verdict().is_some()).await;
    let told = troubles.verdict().unwrap();
    assert_eq!(told.kind, crate::trouble::Kind::CertificateNotYetValid, "{told:?}");
    assert!(told.detail.contains("valid only from"), "{told:?}");
    world.pass(Duration::from_secs(3600)).await;
    assert!(troubles.verdict().is_some());
    world.pass(Duration::from_secs(3700)).await;
    until("its time has come", || troubles.verdict().is_none()).await;
    // Clocks differ by moments.
    let world = World::with(Act::Future(Duration::from_secs(1)), |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    settle().await;
    assert_eq!(troubles.verdict(), None);
}

/// Peers refuse it for hours, and the CA's clock may be set meanwhile.
#[tokio::test(start_paused = true)]
async fn while_one_of_a_day_to_come_is_all_there_is_the_ca_is_asked_again() {
    let hour = Duration::from_secs(3600);
    let world = World::new(Act::Future(hour * 2));
    let (first, _updates) = world.identity().await;
    world.pass(hour).await;
    let calls = world.ca.calls();
    assert!((12..25).contains(&calls), "{calls} requests");
    let asked = tokio::time::Instant::now();
    assert_eq!(world.identity().await.0, first, "none is valid sooner");
    assert_eq!(asked.elapsed(), Duration::ZERO, "nobody waits for a better one");
    world.ca.act(Act::Issue(DAY));
    world.pass(Duration::from_secs(330)).await;
    assert!(world.handle.status().certificate.is_some_and(|c| c.not_before <= world.clock.now()));
    assert_ne!(world.identity().await.0, first);
    let calls = world.ca.calls();
    world.pass(hour).await;
    assert_eq!(world.ca.calls(), calls, "a good one is renewed in its time");
}

#[tokio::test(start_paused = true)]
async fn one_of_a_day_to_come_takes_the_place_of_none_that_is_good_then() {
    let world = World::new(Act::Issue(DAY));
    let (first, _updates) = world.identity().await;
    let hour = Duration::from_secs(3600);
    world.ca.act(Act::Future(hour));
    world.pass(DAY * 5 / 8).await;
    let calls = world.ca.calls();
    assert!((2..150).contains(&calls), "{calls} requests");
    assert_eq!(world.identity().await.0, first);
    assert!(world.handle.status().last_error.contains("valid only from"));
    // By the CA's clock it is about to end.
    world.pass(DAY * 3 / 8 - hour).await;
    assert_ne!(world.identity().await.0, first);
}

/// Nobody can have started this program then.
#[tokio::test(start_paused = true)]
async fn a_clock_that_is_behind_by_years_is_what_is_wrong() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::Issue(DAY), |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    let right = world.clock.now();
    world.clock.set(right - DAY * 3650);
    world.pass(Duration::from_secs(60)).await;
    let told = troubles.verdict().expect("told");
    assert_eq!(told.kind, crate::trouble::Kind::ClockWrong, "{told:?}");
    world.clock.set(right);
    world.pass(Duration::from_secs(60)).await;
    assert_eq!(troubles.verdict(), None);
}

#[tokio::test(start_paused = true)]
async fn of_a_later_certificate_its_own_beginning_is_told() {
    let troubles = Arc::new(crate::trouble::Troubles::default());
    let world = World::with(Act::Issue(DAY), |_, mut config| {
        config.trouble = troubles.reporter("cache").into();
        config
    });
    world.identity().await;
    let begins =
        || world.handle.status().certificate.map(|c| crate::base::clock::rfc3339(c.not_before)).unwrap();
    // This machine's clock is set back by a week, and the CA's is right.
    world.clock.set(world.clock.now() - DAY * 7);
    world.ca.act(Act::Future(DAY * 7));
    let first = begins();
    world.pass(Duration::from_secs(60)).await;
    let told = troubles.verdict().expect("told");
    assert!(told.detail.contains(&first), "{told:?}, not {first}");
    // By the CA's clock it is about to end.
    world.pass(DAY * 15 / 16).await;
    assert_ne!(begins(), first);
    let told = troubles.verdict().expect("told");
    assert!(told.detail.contains(&begins()), "{told:?}, not {}", begins());
    let lines = troubles.events().into_iter().filter(|e| e.what == crate::trouble::What::Trouble).count();
    assert_eq!(lines, 1, "{:?}", troubles.events());
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_a_wrong_clock_has_begun_is_seen_through() {
    let world = World::new(Act::Issue(DAY));
    let (first, _updates) = world.identity().await;
    world.ca.act(Act::Refuse(tonic::Code::Unauthenticated));
    world.clock.advance(DAY * 3);
    world.pass(Duration::from_secs(60)).await;
    assert!(world.handle.status().failures > 0);
    // Somebody sets the clock, and the CA answers again: nothing may be left of it.
    world.clock.set(world.clock.now() - DAY * 3);
    world.ca.act(Act::Issue(DAY));
    world.pass(Duration::from_secs(600)).await;
    assert_ne!(world.identity().await.0, first);
    assert_eq!(world.handle.status().failures, 0);
}

#[tokio::test(start_paused = true)]
async fn clock_jumps() {
    // Forward beyond the end, as after a night of suspension: noticed without the timer of half a day.
    let world = World::new(Act::Issue(DAY));
    let (first, _updates) = world.identity().await;
    world.clock.advance(DAY * 3);
    // A look comes after 30 s, and up to a quarter later, so that it comes with others (`base::slack`).
    tokio::time::advance(Duration::from_secs(38)).await;
    until("a certificate after the night", || world.ca.calls() == 2).await;
    assert_ne!(world.identity().await.0, first);
    // Back by a week: the time that passed counts too.
    world.clock.set(world.clock.now() - DAY * 7);
    for _ in 0..50 {
        tokio::time::advance(DAY / 60).await;
        settle().await;
    }
    assert_eq!(world.ca.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_has_expired_is_not_asked_for_without_pause() {
    let world = World::new(Act::Expired);
    let mut asked = 0;
    let start = tokio::time::Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        // As an impatient Envoy does.
        let _ = world.fetch(ResourceName::Default).await;
        asked += 1;
    }
    assert!(asked >= 10 && world.ca.calls() < 60, "{} requests in a minute", world.ca.calls());
}
