use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use super::*;
use crate::base::clock::Fixed;

/// Gives `life` seconds, or fails, each time after it was let go.
#[derive(Clone)]
struct Double {
    clock: Fixed,
    asked: Arc<AtomicUsize>,
    life: Arc<Mutex<Option<u64>>>,
    fault: Arc<Mutex<Fault>>,
    go: watch::Sender<bool>,
}

impl Exchanger for Double {
    fn exchange<'a>(&'a self, ask: &'a Ask, _: &'a Notes) -> BoxFuture<'a, Result<Access, Fault>> {
        Box::pin(async move {
            let nth = self.asked.fetch_add(1, SeqCst) + 1;
            self.go.subscribe().wait_for(|go| *go).await.unwrap();
            let life = (*lock(&self.life)).ok_or_else(|| lock(&self.fault).clone())?;
            Ok(Access {
                token: Zeroizing::new(format!("{}-{nth}", ask.subject.as_str())),
                ends: Until::new(self.clock.now() + Duration::from_secs(life), self.clock.now()),
                issued_type: String::new(),
                token_type: String::new(),
                scope: String::new(),
            })
        })
    }
}

fn rig(life: u64) -> (Double, Arc<Broker>) {
    rig_with(life, Reporter::default())
}

fn rig_with(life: u64, trouble: Reporter) -> (Double, Arc<Broker>) {
    let clock = Fixed::at(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000));
    let double = Double {
        clock: clock.clone(),
        asked: Arc::default(),
        life: Arc::new(Mutex::new(Some(life))),
        fault: Arc::new(Mutex::new(Fault::new("no"))),
        go: watch::channel(true).0,
    };
    let handle = Handle::new(1, "test", trouble);
    let broker =
        Broker::new(Box::new(double.clone()), Arc::new(clock), Group::new(), &Metrics::new(), handle);
    (double, broker)
}

async fn get(broker: &Arc<Broker>, subject: &str) -> Result<String, Fault> {
    broker.get(Ask::own(subject, "")).await.map(|access| access.token.to_string())
}

#[test]
fn what_this_machine_lacks_is_no_fault_of_the_endpoint() {
    let troubles = crate::trouble::Troubles::default();
    let handle = Handle::new(1, "test", troubles.reporter("sts"));
    for (number, kind) in [(24, Kind::OpenFiles), (111, Kind::TokensNotExchanged)] {
        let why = std::io::Error::from_raw_os_error(number);
        handle.note(Some(&Fault::new(format!("cannot connect: {why}"))), true);
        assert_eq!(troubles.verdict().unwrap().kind, kind);
    }
}

#[tokio::test]
async fn a_thousand_callers_cause_one_exchange_and_who_leaves_does_not_end_it() {
    let (double, broker) = rig(3600);
    double.go.send_replace(false);
    let mut callers: Vec<_> = (0..1000).map(|_| Box::pin(get(&broker, "a"))).collect();
    for caller in &mut callers {
        assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none());
    }
    let first = callers.remove(0);
    drop(first);
    double.go.send_replace(true);
    for caller in callers {
        assert_eq!(caller.await.unwrap(), "a-1");
    }
    assert_eq!(double.asked.load(SeqCst), 1);
}

#[tokio::test]
async fn a_kept_token_is_for_its_subject_and_until_five_minutes_before_its_end() {
    let (double, broker) = rig(3600);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1");
    assert_eq!(get(&broker, "b").await.unwrap(), "b-2");
    double.clock.advance(Duration::from_secs(3299));
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1");
    double.clock.advance(Duration::from_secs(1));
    assert_eq!(get(&broker, "a").await.unwrap(), "a-3");
    assert_eq!(get(&broker, "a").await.unwrap(), "a-3");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_was_ahead_and_is_set_right_prolongs_no_token() {
    let (double, broker) = rig(3600);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1");
    let set = double.clock.now() - Duration::from_secs(500_000);
    double.clock.set(set);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1", "it has its hour");
    tokio::time::advance(Duration::from_secs(3299)).await;
    let kept = broker.get(Ask::own("a", "")).await.unwrap();
    assert_eq!(
        (kept.token.as_str(), remaining(kept.ends, set)),
        ("a-1", 301),
        "callers are told what is left"
    );
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(get(&broker, "a").await.unwrap(), "a-2");
}

#[tokio::test]
async fn the_old_token_is_handed_out_while_it_lives_and_failures_are_not_kept() {
    let (double, broker) = rig(200);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1");
    assert_eq!(get(&broker, "a").await.unwrap(), "a-2", "one so short is exchanged each time");
    *lock(&double.life) = None;
    assert_eq!(get(&broker, "a").await.unwrap(), "a-2");
    assert_eq!(broker.handle.trouble().as_deref(), Some("no"));
    double.clock.advance(Duration::from_secs(200));
    assert_eq!(get(&broker, "a").await, Err(Fault::new("no")));
    *lock(&double.life) = Some(3600);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-5");
    assert_eq!(broker.handle.trouble(), None);
}

#[tokio::test]
async fn a_token_is_not_given_up_to_make_room_for_its_successor() {
    let (double, broker) = rig(3600);
    for nth in 0..KEPT {
        get(&broker, &nth.to_string()).await.unwrap();
        double.clock.advance(Duration::from_secs(1));
    }
    double.clock.advance(Duration::from_secs(3300 - 1));
    *lock(&double.life) = None;
    for nth in 0..KEPT {
        assert_eq!(get(&broker, &nth.to_string()).await.unwrap(), format!("{nth}-{}", nth + 1));
    }
    assert_eq!(lock(&broker.slots).len(), KEPT);
}

#[tokio::test]
async fn a_caller_that_is_refused_is_no_trouble_of_a_service_that_works() {
    let troubles = crate::trouble::Troubles::default();
    let (double, broker) = rig_with(200, troubles.reporter("sts"));
    // Whatever looks at it sees the same.
    let trouble = || {
        let (one, other) = (broker.handle.trouble(), troubles.verdict().map(|trouble| trouble.detail));
        assert_eq!(one, other);
        one
    };
    let fails = |fault: &Fault| {
        *lock(&double.life) = None;
        *lock(&double.fault) = fault.clone();
    };
    let (refused, broken) = (Fault::refusal("403"), Fault::new("503"));
    fails(&refused);
    assert_eq!(get(&broker, "junk").await, Err(refused.clone()));
    assert_eq!(trouble().as_deref(), Some("403"), "nobody has got a token");
    *lock(&double.life) = Some(200);
    get(&broker, "a").await.unwrap();
    assert_eq!(trouble(), None);
    fails(&refused);
    assert_eq!(get(&broker, "junk").await, Err(refused.clone()));
    assert_eq!(trouble(), None);
    assert_eq!(broker.handle.status()["failures"], 2);
    assert_eq!(broker.handle.status()["lastError"], "403", "it is told nevertheless");
    fails(&broken);
    assert_eq!(get(&broker, "junk").await, Err(broken));
    assert_eq!(trouble().as_deref(), Some("503"), "that is the service's");
    fails(&refused);
    assert_eq!(get(&broker, "junk").await, Err(refused.clone()));
    assert_eq!(trouble().as_deref(), Some("503"), "and it is not over by a refusal");
    get(&broker, "a").await.unwrap();
    assert_eq!(trouble().as_deref(), Some("403"), "one that it served is refused");
}

/// While it takes readiness away, nobody might ask again.
#[tokio::test(start_paused = true)]
async fn a_failure_after_which_nobody_asks_is_over_by_itself() {
    let troubles = crate::trouble::Troubles::default();
    let (double, broker) = rig_with(200, troubles.reporter("sts"));
    let of_the_service = Fault::new("503");
    *lock(&double.life) = None;
    *lock(&double.fault) = of_the_service.clone();
    for _ in 0..2 {
        assert_eq!(get(&broker, "a").await, Err(of_the_service.clone()));
        tokio::time::advance(LASTS - Duration::from_secs(1)).await;
        assert_eq!(broker.handle.trouble().as_deref(), Some("503"), "somebody has asked lately");
    }
    assert_eq!(troubles.verdict().map(|trouble| trouble.detail).as_deref(), Some("503"));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(broker.handle.trouble(), None);
    assert_eq!(troubles.verdict(), None, "for everybody who looks");
}

#[tokio::test]
async fn what_is_kept_and_what_is_under_way_is_bounded() {
    let (double, broker) = rig(3600);
    for nth in 0..3 * KEPT {
        get(&broker, &nth.to_string()).await.unwrap();
    }
    assert!(lock(&broker.slots).len() <= KEPT);
    double.go.send_replace(false);
    let subjects: Vec<String> = (0..FLIGHTS).map(|n| format!("new {n}")).collect();
    let mut waiting: Vec<_> = subjects.iter().map(|subject| Box::pin(get(&broker, subject))).collect();
    for caller in &mut waiting {
        assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none());
    }
    assert!(get(&broker, "one more").await.unwrap_err().why.contains("too many"));
    double.go.send_replace(true);
    for caller in waiting {
        caller.await.unwrap();
    }
    get(&broker, "one more").await.unwrap();
}

#[tokio::test]
async fn who_was_given_a_token_is_not_held_up_by_a_crowd() {
    let (double, broker) = rig(200);
    assert_eq!(get(&broker, "a").await.unwrap(), "a-1");
    double.go.send_replace(false);
    let subjects: Vec<String> = (0..FLIGHTS).map(|n| format!("junk {n}")).collect();
    let mut crowd: Vec<_> = subjects.iter().map(|subject| Box::pin(get(&broker, subject))).collect();
    for caller in &mut crowd {
        assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none());
    }
    assert!(get(&broker, "junk").await.unwrap_err().why.contains("too many"));
    let mut caller = Box::pin(get(&broker, "a"));
    assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none(), "it is exchanged anew");
    *lock(&double.life) = None;
    double.go.send_replace(true);
    assert_eq!(caller.await.unwrap(), "a-1", "the old one, while it lives");
}

#[tokio::test]
async fn an_exchange_ends_with_the_agent() {
    let (double, broker) = rig(3600);
    double.go.send_replace(false);
    let mut caller = Box::pin(get(&broker, "a"));
    assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none());
    assert!(broker.group.stop(Duration::from_secs(5)).await.is_empty());
    assert!(caller.await.unwrap_err().why.contains("stopping"));
}

#[tokio::test(start_paused = true)]
async fn an_exchange_under_way_at_the_end_is_waited_for_but_not_for_long() {
    for hangs in [false, true] {
        let (double, broker) = rig(3600);
        double.go.send_replace(false);
        let mut caller = Box::pin(get(&broker, "a"));
        assert!(futures_util::FutureExt::now_or_never(caller.as_mut()).is_none());
        let answered = async {
            tokio::time::sleep(LAST / 2).await;
            double.go.send_replace(!hangs);
        };
        let (got, cut, (), ()) =
            tokio::join!(caller, broker.group.stop(LAST * 2), answered, broker.settled());
        assert_eq!(got.is_ok(), !hangs, "{got:?}");
        assert!(cut.is_empty(), "{cut:?}");
        assert!(get(&broker, "b").await.is_err(), "nothing is begun any more");
    }
}
