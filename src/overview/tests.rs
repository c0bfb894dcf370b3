use super::*;

fn answers(verdict: Value, ready: Result<(), ask::Error>) -> Answers {
    let troubles = if verdict.is_null() { json!([]) } else { json!([verdict]) };
    Answers {
        agentz: json!({
            "version": "0.1.0", "follows": "1.30.3", "type": "sidecar", "startedAt": 1_000,
            "verdict": verdict, "troubles": troubles, "events": [],
            "envoy": "Running { epoch: 0 }",
            "identity": {
                "certificate": {"serial": "ab", "identities": ["spiffe://t/ns/n/sa/s"], "notBefore": 900,
                    "notAfter": 4600, "renewal": 2800},
                "failures": 0, "lastError": "", "files": [], "trustBundle": 0, "outputError": "",
            },
            "application": null,
            "config": {
                "upstream": {"address": "istiod:15012", "connectedSince": 1_000, "failures": 0},
                "types": [{"name": "CDS", "typeUrl": "t", "state": "synced", "resources": 3, "rejected": 0,
                    "responseAgeSeconds": 40}],
                "nacks": [{"name": "LDS", "resources": ["a"], "message": "no", "first": 1050, "last": 1060, "count": 2}],
            },
            "status": {"counters": {"envoy_restarts_total": 2}},
        }),
        ready,
        envoy: Ok(
            json!({"version": "c0/1.36.0/Clean/RELEASE/BoringSSL", "state": "LIVE", "uptime_current_epoch": "90s"}),
        ),
        capture: vec!["iptables-nft-save: 9 rules".to_owned()],
    }
}

#[test]
fn a_certificate_without_an_end_has_a_date() {
    let mut given = answers(Value::Null, Ok(()));
    let certificate = &mut given.agentz["identity"]["certificate"];
    assert_eq!(certificate["notAfter"], 4600);
    // 99991231235959Z, as RFC 5280 writes that there is none.
    certificate["notAfter"] = json!(253_402_300_799_u64);
    certificate["renewal"] = json!(253_402_300_799_u64);
    let d = document(&given, UNIX_EPOCH);
    assert_eq!(d["identity"]["certificate"]["notAfter"], "9999-12-30T22:00:00Z");
    assert!(screen(&d).contains("valid until 9999-12-"), "{}", screen(&d));
    assert!(screen(&d).contains(" renewed at 9999-12-"), "{}", screen(&d));
}

#[test]
fn the_documented_form_has_dates_spans_and_a_verdict() {
    let now = UNIX_EPOCH + Duration::from_secs(1100);
    let d = document(&answers(Value::Null, Ok(())), now);
    assert_eq!((d["healthy"].clone(), d["time"].clone()), (json!(true), json!("1970-01-01T00:18:20Z")));
    assert_eq!(d["identity"]["certificate"]["notAfter"], "1970-01-01T01:16:40Z");
    assert_eq!(d["identity"]["certificate"]["secondsLeft"], 3500);
    assert_eq!(d["istiod"]["types"][0]["lastPush"], "1970-01-01T00:17:40Z");
    assert_eq!(d["istiod"]["rejections"][0]["last"], "1970-01-01T00:17:40Z");
    assert_eq!(
        (d["envoy"]["version"].as_str(), d["envoy"]["uptimeSeconds"].as_u64()),
        (Some("1.36.0"), Some(90))
    );
    assert_eq!(d["envoy"]["restarts"], 2);
    let shown = screen(&d);
    for part in
        ["spiffe://t/ns/n/sa/s", "CDS", "40s ago", "LDS a: no (2 times", "1.36.0, LIVE, up 1m30s, 2 restarts"]
    {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert!(shown.contains("was to be renewed at 1970-"), "nobody has renewed it: {shown}");
    assert!(shown.ends_with("verdict: healthy\n"), "{shown}");
}

#[test]
fn whoever_holds_the_port_commands_no_terminal() {
    let trouble =
        json!({"kind": "T\u{1b}[1m", "detail": "\u{1b}[2J", "hint": "\u{9b}", "seconds": 1, "count": 1});
    let mut given = answers(trouble, Ok(()));
    given.agentz["agent"]["version"] = json!("\u{1b}]0;x\u{7}");
    let shown = screen(&document(&given, UNIX_EPOCH));
    assert!(shown.contains("\\u{1b}[2J"), "{shown}");
    assert!(!shown.contains(|c: char| c.is_control() && c != '\n'), "{shown:?}");
}

#[test]
fn a_trouble_is_the_verdict_and_no_readiness_is_no_health() {
    let now = UNIX_EPOCH + Duration::from_secs(1100);
    let trouble = json!({"kind": "TokenExpired", "detail": "an hour ago", "hint": "rotate it", "seconds": 61, "count": 3});
    let d = document(&answers(trouble, Ok(())), now);
    assert_eq!(d["healthy"], false);
    let shown = screen(&d);
    assert!(shown.contains("TokenExpired for 1m1s, 3 times: an hour ago"), "{shown}");
    assert!(shown.ends_with("verdict: TokenExpired: an hour ago; rotate it\n"), "{shown}");
    let d = document(&answers(Value::Null, Err(ask::Error::NotReady("no listeners".to_owned()))), now);
    assert_eq!((d["healthy"].clone(), d["ready"].clone()), (json!(false), json!(false)));
    assert!(screen(&d).ends_with("verdict: not ready: no listeners\n"));
}

#[test]
fn what_began_within_this_second_was_a_moment_ago() {
    let mut given = answers(Value::Null, Ok(()));
    given.agentz["config"]["upstream"]["connectedSince"] = json!(jiff::Timestamp::now().as_second());
    let shown = screen(&document(&given, SystemTime::now()));
    let line = shown.lines().find(|line| line.contains("connected since")).expect("it is connected");
    assert!(line.ends_with(" ago)"), "{line}");
}
