//! Random valid options: the kernel takes their rules, twice is once, and a clean-up leaves nothing.
//!
//! A gate draws the same cases each time; `PRIVILEGED_SEED=<number>` draws others and `PRIVILEGED_CASES=<number>`
//! more.

use proptest::collection::vec;
use proptest::option::weighted;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, RngSeed, TestRunner};

use crate::world::{Backend, World};

/// One run: words of the command line, variables, resolvers, whether the pod has IPv6.
#[derive(Debug, Clone)]
struct Asked {
    words: Vec<String>,
    owners: Option<(bool, String)>,
    loopback: Option<String>,
    resolvers: Vec<&'static str>,
    v6: bool,
}

fn list(element: impl Strategy<Value = String>, most: usize) -> impl Strategy<Value = String> {
    vec(element, 1..=most).prop_map(|elements| elements.join(","))
}

fn number(range: std::ops::Range<u32>) -> impl Strategy<Value = String> {
    range.prop_map(|n| n.to_string())
}

fn port() -> impl Strategy<Value = String> {
    number(1..65536)
}

// A port or a range, in the spelling of the back end.
fn ports(sign: &'static str) -> impl Strategy<Value = String> {
    let range =
        (1..60000_u32, 1..5000_u32).prop_map(move |(from, more)| format!("{from}{sign}{}", from + more));
    prop_oneof![3 => port(), 1 => range]
}

fn cidr() -> impl Strategy<Value = String> {
    let v4 =
        (any::<[u8; 4]>(), 1..=32_u8).prop_map(|(a, len)| format!("{}/{len}", std::net::Ipv4Addr::from(a)));
    let v6 =
        (any::<[u16; 8]>(), 1..=128_u8).prop_map(|(a, len)| format!("{}/{len}", std::net::Ipv6Addr::from(a)));
    let everything = select(vec!["0.0.0.0/0".to_owned(), "::/0".to_owned(), "10.1.2.3/0".to_owned()]);
    prop_oneof![8 => v4, 6 => v6, 1 => everything]
}

fn wild(list: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    prop_oneof![Just("*".to_owned()), list]
}

fn interface() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9.-]{0,13}[a-z0-9]"
}

fn flag(name: &'static str, value: impl Strategy<Value = String> + 'static) -> BoxedStrategy<Vec<String>> {
    weighted(0.5, value).prop_map(|v| v.map_or_else(Vec::new, |v| vec![name.to_owned(), v])).boxed()
}

fn switch(name: &'static str) -> BoxedStrategy<Vec<String>> {
    any::<bool>().prop_map(|on| if on { vec![name.to_owned()] } else { Vec::new() }).boxed()
}

fn asked(native: bool) -> BoxedStrategy<Asked> {
    let sign = if native { "-" } else { ":" };
    let who = || number(0..u32::MAX - 1);
    let words = vec![
        flag("-p", port()),
        flag("-z", port()),
        flag("-e", port()),
        flag("-u", list(who(), 3)),
        flag("-g", list(who(), 3)),
        flag("-m", select(vec!["REDIRECT".to_owned(), "TPROXY".to_owned(), "NONE".to_owned()])),
        flag("-b", wild(list(ports(sign), 6))),
        flag("-d", list(ports(sign), 6)),
        flag("-c", list(interface(), 3)),
        flag("-i", wild(list(cidr(), 6))),
        flag("-x", list(cidr(), 6)),
        flag("-q", list(ports(sign), 4)),
        flag("-o", list(ports(sign), 4)),
        flag("-k", list(interface(), 3)),
        flag("-t", number(1..u32::MAX)),
        switch("--redirect-dns"),
        switch("--capture-all-dns"),
        switch("--drop-invalid"),
        switch("--dual-stack"),
    ];
    let owners = (any::<bool>(), list(who(), 60));
    let loopback = (8..=32_u8).prop_map(|len| format!("127.0.0.1/{len}"));
    let resolver = select(vec!["10.96.0.10", "127.0.0.53", "fd00::10", "fe80::1%eth0"]);
    (words, weighted(0.3, owners), weighted(0.3, loopback), vec(resolver, 0..4), any::<bool>())
        .prop_map(|(words, owners, loopback, resolvers, v6)| Asked {
            words: words.into_iter().flatten().collect(),
            owners,
            loopback,
            resolvers,
            v6,
        })
        .boxed()
}

fn variable(name: &str) -> Option<u64> {
    #[expect(clippy::disallowed_methods, reason = "a setting of the test run, not of the product")]
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|e| panic!("{name}={text}: {e}")))
}

fn comes_and_goes(backend: Backend, more: &[&str], asked: &Asked) -> Result<(), TestCaseError> {
    let Some(world) = world(backend, asked) else { return Ok(()) };
    let words = |last: &[&str]| asked.words(&[more, last].concat());
    let before = world.everything();
    world.apply_words(&words(&[]), 0);
    let once = world.everything();
    prop_assert!(once.contains("REDIRECT") || once.contains("redirect"), "nothing was applied");
    world.apply_words(&words(&[]), 0);
    prop_assert_eq!(&world.everything(), &once, "a second apply changed something");
    world.apply_words(&words(&["--reconcile"]), 0);
    prop_assert_eq!(&world.everything(), &once, "reconcile over right rules changed something");
    world.apply_words(&words(&["--cleanup-only"]), 0);
    prop_assert_eq!(&world.everything(), &before, "something was left behind");
    Ok(())
}

fn world(backend: Backend, asked: &Asked) -> Option<World> {
    let addresses: &[&str] = if asked.v6 { &["fd00:77:13::2/64"] } else { &["10.77.13.2/24"] };
    let world = World::new(backend, addresses)?;
    asked.tell(&world);
    Some(world)
}

impl Asked {
    /// Variables and resolvers.
    fn tell(&self, world: &World) {
        world.resolvers(&self.resolvers);
        let (include, exclude) = match &self.owners {
            None => ("*", ""),
            Some((true, groups)) => (groups.as_str(), ""),
            Some((false, groups)) => ("*", groups.as_str()),
        };
        world.set("ISTIO_OUTBOUND_OWNER_GROUPS", include);
        world.set("ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", exclude);
        let loopback = self.loopback.as_deref().unwrap_or("127.0.0.1/32");
        world.set("ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", loopback);
    }

    /// The command line with some more words.
    fn words(&self, more: &[&str]) -> Vec<String> {
        self.words.iter().cloned().chain(more.iter().map(|w| (*w).to_owned())).collect()
    }
}

fn becomes(backend: Backend, old: &Asked, new: &Asked) -> Result<(), TestCaseError> {
    let (Some(fresh), Some(changed)) = (world(backend, new), world(backend, new)) else { return Ok(()) };
    fresh.apply_words(&new.words(&[]), 0);
    old.tell(&changed);
    changed.apply_words(&old.words(&[]), 0);
    let before = changed.everything();
    new.tell(&changed);
    if before != fresh.everything() {
        changed.apply_words(&new.words(&[]), 1);
        prop_assert_eq!(&changed.everything(), &before, "changed without --reconcile");
    }
    changed.apply_words(&new.words(&["--reconcile"]), 0);
    prop_assert_eq!(&changed.everything(), &fresh.everything(), "not as if nothing had been before");
    Ok(())
}

fn run<S: Strategy>(what: &str, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let seed = variable("PRIVILEGED_SEED").unwrap_or(20_261_121);
    let cases = variable("PRIVILEGED_CASES").map_or(24, |n| u32::try_from(n).expect("a number of cases"));
    eprintln!("{what}: PRIVILEGED_SEED={seed}, {cases} cases");
    let config = Config {
        cases,
        rng_seed: RngSeed::Fixed(seed),
        max_shrink_iters: 200,
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(e) = TestRunner::new(config).run(&strategy, test) {
        panic!("{what}, PRIVILEGED_SEED={seed}: {e}");
    }
}

#[test]
fn random_options_through_iptables_nft() {
    run("nft", asked(false), |asked| comes_and_goes(Backend::Nft, &[], &asked));
}

#[test]
fn random_options_through_iptables_legacy() {
    run("legacy", asked(false), |asked| comes_and_goes(Backend::Legacy, &[], &asked));
}

#[test]
fn random_options_with_both_back_ends() {
    run("both", asked(false), |asked| comes_and_goes(Backend::Both, &[], &asked));
}

#[test]
fn random_options_through_native_nftables() {
    let native = &["--native-nftables"];
    run("native", asked(true), |asked| comes_and_goes(Backend::Nft, native, &asked));
}

#[test]
fn reconcile_gets_from_any_options_to_any_others() {
    // Rules for interfaces outside our chains look like a user's own and stay, see docs/COMPATIBILITY.md.
    let old = asked(false).prop_map(|mut asked| {
        while let Some(at) = asked.words.iter().position(|word| word == "-c" || word == "-k") {
            asked.words.drain(at..at + 2);
        }
        asked
    });
    for backend in [Backend::Nft, Backend::Legacy] {
        let pair = (old.clone(), asked(false));
        run(&format!("from any to any, {backend:?}"), pair, |(old, mut new)| {
            // The pod keeps its addresses; whether IPv6 is on does not change here.
            new.v6 = old.v6;
            becomes(backend, &old, &new)
        });
    }
}
