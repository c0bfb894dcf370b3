use super::*;

impl Origin for () {}

impl Origin for &'static str {
    fn is_own(&self) -> bool {
        *self == OWN
    }
}

fn one() -> Arc<Progress> {
    Arc::new(Progress::new(Arc::new(Heads::new(100))))
}

fn cut(all: &[&Arc<Progress>]) -> Vec<bool> {
    all.iter().map(|p| p.is_cut()).collect()
}

#[tokio::test(start_paused = true)]
async fn unfinished_heads_go_before_readers_that_stand_and_these_before_answers() {
    let places = Places::new(Bounds { all: 4, share: 4, asking: 4, spare_busy: false });
    let (head, idle, stalled, busy) = (one(), one(), one(), one());
    head.enter(Phase::Head);
    idle.enter(Phase::Idle);
    for p in [&stalled, &busy] {
        p.enter(Phase::Busy);
    }
    stalled.wrote(false);
    let mut held: Vec<_> = [&busy, &stalled, &idle, &head].map(|p| places.take("a", p).unwrap()).into();
    tokio::time::advance(Duration::from_secs(2)).await;
    head.head_bytes(1);
    let fresh: Vec<_> = (0..4).map(|_| one()).collect();
    for (n, expected) in [[true, false, false, false], [true, true, false, false], [true, true, true, false]]
        .into_iter()
        .enumerate()
    {
        held.push(places.take("a", &fresh[n]).unwrap());
        assert_eq!(cut(&[&head, &idle, &stalled, &busy]), expected, "newcomer {n}");
    }
    // Nothing is left but an answer and newcomers: the oldest of these.
    held.push(places.take("a", &fresh[3]).unwrap());
    assert_eq!(cut(&[&busy, &fresh[0], &fresh[1], &fresh[2], &fresh[3]]), [false, true, false, false, false]);
    assert_eq!(places.len(), 4);
    drop(held);
    assert_eq!(places.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn one_origin_has_its_share_and_the_largest_makes_place() {
    let places = Places::new(Bounds { all: 8, share: 6, asking: 8, spare_busy: false });
    let flood: Vec<_> = (0..7).map(|_| one()).collect();
    let mut held: Vec<_> = flood.iter().map(|p| places.take("flood", p).unwrap()).collect();
    assert!(flood[0].is_cut() && !flood[1].is_cut(), "the seventh took the place of the first");
    let others: Vec<_> = (0..3).map(|_| one()).collect();
    for (n, p) in others.iter().enumerate() {
        held.push(places.take(["x", "y", "z"][n], p).unwrap());
    }
    assert!(flood[1].is_cut() && !flood[2].is_cut());
    assert!(others.iter().all(|p| !p.is_cut()));
}

#[tokio::test(start_paused = true)]
async fn those_that_ask_are_bounded_among_themselves() {
    let places = Places::new(Bounds { all: 8, share: 8, asking: 2, spare_busy: false });
    let all: Vec<_> = (0..4).map(|_| one()).collect();
    let held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
    for place in &held[..2] {
        place.asks();
        place.asks();
    }
    all[0].enter(Phase::Busy);
    all[1].enter(Phase::Body);
    tokio::time::advance(Duration::from_millis(5)).await;
    held[2].asks();
    assert_eq!(cut(&[&all[0], &all[1], &all[2], &all[3]]), [false, true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn of_those_that_ask_the_origin_with_most_makes_place() {
    let places = Places::new(Bounds { all: 128, share: 64, asking: 64, spare_busy: false });
    let kubelet = one();
    let mut held = vec![places.take("kubelet", &kubelet).unwrap()];
    held[0].asks();
    kubelet.enter(Phase::Waiting);
    tokio::time::advance(Duration::from_secs(5)).await;
    let flood: Vec<_> = (0..64).map(|_| one()).collect();
    for progress in &flood {
        let place = places.take("flood", progress).unwrap();
        place.asks();
        progress.enter(Phase::Waiting);
        held.push(place);
    }
    assert!(!kubelet.is_cut(), "though it waits longest");
    assert!(flood[0].is_cut() && !flood[1].is_cut());
}

// One origin makes so many answers, and each of others has an idle connection.
fn answers_and_idlers(
    places: &Places<&'static str>,
    answers: usize,
    others: &[&'static str],
) -> ([Vec<Arc<Progress>>; 2], Vec<Place<&'static str>>) {
    let (busy, idle): (Vec<_>, Vec<_>) =
        ((0..answers).map(|_| one()).collect(), others.iter().map(|_| one()).collect());
    let origins = std::iter::repeat_n("scraper", answers).chain(others.iter().copied());
    let held: Vec<_> =
        origins.zip(busy.iter().chain(&idle)).map(|(from, p)| places.take(from, p).unwrap()).collect();
    held.iter().for_each(|place| _ = place.asks());
    busy.iter().for_each(|p| p.enter(Phase::Busy));
    idle.iter().for_each(|p| p.enter(Phase::Idle));
    ([busy, idle], held)
}

#[tokio::test(start_paused = true)]
async fn what_others_do_not_use_goes_before_an_answer_of_the_largest() {
    let others = ["a", "b", "c", "d", "e", "f"];
    for (all, asking) in [(128, 16), (16, 128)] {
        let places = Places::new(Bounds { all, share: 128, asking, spare_busy: false });
        let ([busy, idle], mut held) = answers_and_idlers(&places, 10, &others);
        tokio::time::advance(Duration::from_secs(2)).await;
        for n in 0..8 {
            let newcomer = one();
            held.push(places.take("kubelet", &newcomer).unwrap());
            held.last().unwrap().asks();
            newcomer.enter(Phase::Busy);
            let cut = |of: &[Arc<Progress>]| of.iter().filter(|p| p.is_cut()).count();
            let expected = (n + 1_usize).min(others.len());
            assert_eq!((cut(&idle), cut(&busy)), (expected, n + 1 - expected), "{all} {asking}");
        }
        // What it adds itself costs nobody else anything.
        let places = Places::new(Bounds { all, share: 128, asking, spare_busy: false });
        let ([busy, idle], mut held) = answers_and_idlers(&places, 10, &others);
        tokio::time::advance(Duration::from_secs(2)).await;
        held.push(places.take("scraper", &one()).unwrap());
        held.last().unwrap().asks();
        assert!(idle.iter().all(|p| !p.is_cut()) && busy.iter().filter(|p| p.is_cut()).count() == 1);
    }
}

fn answered(places: &Places<&'static str>, origin: &'static str, times: usize) {
    for _ in 0..times {
        let p = one();
        let place = places.take(origin, &p).unwrap();
        p.enter(Phase::Busy);
        p.enter(Phase::Idle);
        drop(place);
    }
}

#[tokio::test(start_paused = true)]
async fn a_prober_that_has_not_come_to_asking_outlasts_strangers() {
    let places = Places::new(Bounds { all: 4, share: 4, asking: 4, spare_busy: false });
    answered(&places, "kubelet", 1);
    let kubelet = one();
    let mut held = vec![places.take("kubelet", &kubelet).unwrap()];
    let strangers: Vec<_> = (0..100).map(|_| one()).collect();
    for (n, p) in strangers.iter().enumerate() {
        held.push(places.take(["a", "b", "c", "d", "e"][n % 5], p).unwrap());
        if n % 2 == 0 {
            p.enter(Phase::Head);
        }
    }
    assert!(!kubelet.is_cut() && strangers.iter().filter(|p| p.is_cut()).count() == 97);
    // Not for ever.
    tokio::time::advance(GRACE).await;
    held.push(places.take("f", &one()).unwrap());
    assert!(kubelet.is_cut());
}

#[tokio::test(start_paused = true)]
async fn a_prober_whose_request_waits_outlasts_those_of_strangers() {
    let places = Places::new(Bounds { all: 128, share: 128, asking: 4, spare_busy: false });
    answered(&places, "kubelet", 1);
    let (kubelet, mut held) = (one(), Vec::new());
    let mut waits = |origin, progress: &Arc<Progress>| {
        let place = places.take(origin, progress).unwrap();
        place.asks();
        progress.enter(Phase::Waiting);
        held.push(place);
    };
    waits("kubelet", &kubelet);
    tokio::time::advance(Duration::from_millis(5)).await;
    let strangers: Vec<_> = (0..9).map(|_| one()).collect();
    for (origin, progress) in ["a", "b", "c", "d", "e", "f", "g", "h"].iter().zip(&strangers) {
        waits(origin, progress);
    }
    assert!(!kubelet.is_cut() && strangers[..5].iter().all(|p| p.is_cut()));
    // Not for ever.
    tokio::time::advance(GRACE).await;
    waits("i", &strangers[8]);
    assert!(kubelet.is_cut());
}

#[tokio::test(start_paused = true)]
async fn who_asks_and_then_floods_is_a_stranger_again() {
    let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
    answered(&places, "kubelet", 20);
    answered(&places, "flood", 20);
    let kubelet = one();
    let mut held = vec![places.take("kubelet", &kubelet).unwrap()];
    let flood: Vec<_> = (0..100).map(|_| one()).collect();
    held.extend(flood.iter().map(|p| places.take("flood", p).unwrap()));
    assert!(!kubelet.is_cut());
    assert_eq!(places.table().known.keys().collect::<Vec<_>>(), [&"kubelet"]);
}

#[tokio::test(start_paused = true)]
async fn those_that_come_once_do_not_displace_who_comes_often() {
    let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
    answered(&places, "kubelet", 20);
    for n in 0..8 * KNOWN {
        answered(&places, Box::leak(n.to_string().into_boxed_str()), 1);
    }
    let table = places.table();
    assert!(table.known.len() <= KNOWN && table.trusts(&"kubelet"));
}

#[tokio::test(start_paused = true)]
async fn few_connections_are_few_however_few_there_may_be() {
    let places = Places::new(Bounds { all: 128, share: 128, asking: 16, spare_busy: false });
    let others: Vec<&'static str> = "abcdefghijklmn".split_inclusive(|_: char| true).collect();
    let (first, kubelet) = (one(), [one(), one()]);
    let mut held = vec![places.take("first", &first).unwrap()];
    for from in &others[1..] {
        held.push(places.take(from, &one()).unwrap());
    }
    for p in &kubelet {
        held.push(places.take("kubelet", p).unwrap());
    }
    held.iter().for_each(|place| _ = place.asks());
    first.enter(Phase::Waiting);
    kubelet.iter().for_each(|p| p.enter(Phase::Waiting));
    tokio::time::advance(Duration::from_secs(2)).await;
    held.push(places.take("newcomer", &one()).unwrap());
    held.last().unwrap().asks();
    assert!(kubelet.iter().all(|p| !p.is_cut()) && first.is_cut(), "two are no flood");
}

#[tokio::test(start_paused = true)]
async fn half_of_those_that_ask_may_stand_still() {
    let places = Places::new(Bounds { all: 8, share: 8, asking: 4, spare_busy: false });
    let all: Vec<_> = (0..4).map(|_| one()).collect();
    let held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
    all[0].enter(Phase::Busy);
    all[1].enter(Phase::Body);
    held[0].asks();
    held[1].asks();
    tokio::time::advance(Duration::from_secs(2)).await;
    all[2].enter(Phase::Body);
    held[2].asks();
    assert_eq!(cut(&[&all[0], &all[1], &all[2]]), [false, true, false]);
    held[3].asks();
    assert_eq!(cut(&[&all[0], &all[2], &all[3]]), [false; 3], "the others do something");
}

#[tokio::test(start_paused = true)]
async fn streams_make_place_only_where_their_origin_has_most() {
    let places = Places::new(Bounds { all: 4, share: 3, asking: 4, spare_busy: true });
    let streams: Vec<_> = (0..4).map(|_| one()).collect();
    streams.iter().for_each(|p| p.enter(Phase::Busy));
    let mut held: Vec<_> = streams[..3].iter().map(|p| places.take("flood", p).unwrap()).collect();
    assert!(places.take("flood", &one()).is_none(), "its share is used up by its own streams");
    held.push(places.take("envoy", &streams[3]).unwrap());
    held.push(places.take("other", &one()).unwrap());
    assert_eq!(cut(&[&streams[0], &streams[1], &streams[3]]), [true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn the_own_one_is_let_in_by_a_crowd_of_busy_strangers_and_stays() {
    let places = Places::new(Bounds { all: 16, share: 12, asking: 16, spare_busy: true });
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let crowd: Vec<_> = (0..15).map(|_| one()).collect();
    let envoy = [one(), one()];
    envoy[0].enter(Phase::Idle);
    let mut held = vec![places.take(OWN, &envoy[0]).unwrap()];
    held[0].asks();
    for (n, progress) in crowd.iter().enumerate() {
        progress.enter(Phase::Busy);
        held.push(places.take(names[n % 8], progress).unwrap());
    }
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(places.take("i", &one()).is_none(), "strangers do not make place for each other");
    held.push(places.take(OWN, &envoy[1]).unwrap());
    assert_eq!(crowd.iter().filter(|p| p.is_cut()).count(), 1);
    held.iter().for_each(|place| _ = place.asks());
    assert!(!places.evict(), "all others have streams");
    assert_eq!(cut(&[&envoy[0], &envoy[1]]), [false, false], "nor does the own one for them");
}

#[tokio::test(start_paused = true)]
async fn a_reader_of_a_byte_now_and_then_stands_still() {
    let p = one();
    p.enter(Phase::Busy);
    for _ in 0..3 {
        p.wrote(false);
        tokio::time::advance(Duration::from_millis(400)).await;
        p.wrote(true);
    }
    assert_eq!((p.blocked(), p.stood()), (Duration::ZERO, Duration::from_millis(1200)));
    assert_eq!(worth(&p, || false).0, 5);
}

#[tokio::test(start_paused = true)]
async fn moments_of_many_answers_do_not_add_up_to_one_that_stands() {
    let p = one();
    for _ in 0..9 {
        p.enter(Phase::Head);
        p.enter(Phase::Busy);
        p.wrote(false);
        tokio::time::advance(Duration::from_millis(400)).await;
        p.wrote(true);
        assert_eq!((p.stood(), worth(&p, || false).0), (Duration::from_millis(400), 0));
        p.enter(Phase::Idle);
    }
    // What was still on its way when the answer was done does not count for the next one.
    p.wrote(false);
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(worth(&p, || false).0, 6);
    p.wrote(true);
    p.enter(Phase::Head);
    p.enter(Phase::Busy);
    assert_eq!((p.stood(), worth(&p, || false).0), (Duration::ZERO, 0));
}

#[tokio::test(start_paused = true)]
async fn heads_are_bounded_together() {
    let heads = Arc::new(Heads::new(100));
    let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
    let both = [(); 2].map(|()| Arc::new(Progress::new(heads.clone())));
    let mut held = Vec::new();
    for (p, n) in both.iter().zip([40, 50]) {
        p.enter(Phase::Head);
        p.head_bytes(n);
        held.push(places.take((), p).unwrap());
    }
    assert!(futures_util::FutureExt::now_or_never(heads.too_much()).is_none());
    both[0].head_bytes(20);
    heads.too_much().await;
    relieve(&heads, std::slice::from_ref(&places));
    assert!(both[0].is_cut() && !both[1].is_cut());
    drop(both);
    assert!(futures_util::FutureExt::now_or_never(heads.too_much()).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_long_head_counts_until_its_connection_ends() {
    let heads = Arc::new(Heads::new(20_000));
    let places = Places::new(Bounds { all: 8, share: 8, asking: 8, spare_busy: false });
    let all = [(); 4].map(|()| Arc::new(Progress::new(heads.clone())));
    let _held: Vec<_> = all.iter().map(|p| places.take((), p).unwrap()).collect();
    let asked = |p: &Progress, n: usize| {
        p.enter(Phase::Head);
        p.head_bytes(n);
        p.enter(Phase::Busy);
        p.enter(Phase::Idle);
    };
    // Short ones are in a buffer that is there anyway.
    (0..9).for_each(|_| asked(&all[0], 8000));
    assert_eq!(all[0].held(), 0);
    // Several on one connection have one buffer.
    (0..9).for_each(|_| asked(&all[1], 9000));
    asked(&all[1], 100);
    asked(&all[2], 10_000);
    assert_eq!([&all[1], &all[2]].map(|p| p.held()), [9000, 10_000]);
    assert!(!heads.is_too_much());
    asked(&all[3], 9000);
    relieve(&heads, std::slice::from_ref(&places));
    assert_eq!(cut(&all.each_ref()), [false, false, true, false]);
}

#[tokio::test(start_paused = true)]
async fn when_memory_is_short_those_that_stand_or_rest_go_and_then_half_of_who_has_most() {
    let places = Places::new(Bounds { all: 32, share: 32, asking: 32, spare_busy: false });
    let (idle, stalled, envoy, prober) = (one(), one(), one(), one());
    let flood: Vec<_> = (0..8).map(|_| one()).collect();
    let named = [("a", &idle), ("b", &stalled), (OWN, &envoy), ("kubelet", &prober)];
    let all = named.into_iter().chain(flood.iter().map(|p| ("flood", p)));
    let held: Vec<_> = all.map(|(name, p)| places.take(name, p).unwrap()).collect();
    idle.enter(Phase::Idle);
    envoy.enter(Phase::Idle);
    stalled.enter(Phase::Busy);
    stalled.wrote(false);
    tokio::time::advance(GRACE).await;
    // They go on taking what they are given.
    flood.iter().for_each(|p| p.enter(Phase::Idle));
    prober.enter(Phase::Idle);
    assert!(places.shed());
    assert_eq!(cut(&[&idle, &stalled, &envoy, &prober, &flood[0]]), [true, true, false, false, false]);
    let left = || flood.iter().filter(|p| !p.is_cut()).count();
    for few in [4, 4] {
        places.shed();
        assert_eq!((left(), prober.is_cut()), (few, false), "those with few are not to blame");
    }
    drop(held);
    assert!(!places.shed());
}
