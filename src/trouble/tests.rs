use super::*;

fn kinds(list: &Troubles) -> Vec<Kind> {
    list.snapshot().into_iter().map(|t| t.kind).collect()
}

#[test]
fn the_cause_stands_above_what_follows_from_it() {
    let list = Troubles::default();
    let (envoy, ca, xds) =
        (list.reporter("default"), list.reporter("citadelclient"), list.reporter("xdsproxy"));
    envoy.report((Kind::EnvoyNotInitialised, "INITIALIZING"));
    xds.report((Kind::AdsRefused, "UNAUTHENTICATED"));
    assert_eq!(list.verdict().unwrap().kind, Kind::AdsRefused);
    ca.report((Kind::TokenExpired, "an hour ago"));
    assert_eq!(kinds(&list), [Kind::TokenExpired, Kind::AdsRefused, Kind::EnvoyNotInitialised]);
    ca.end();
    drop(xds);
    assert_eq!(kinds(&list), [Kind::EnvoyNotInitialised]);
}

#[test]
fn the_same_trouble_of_two_parts_is_one_until_both_have_ended_it() {
    let list = Troubles::default();
    let (ca, xds) = (list.reporter("citadelclient"), list.reporter("xdsproxy"));
    let refused = |n| Report::new(Kind::ConnectionRefused, format!("attempt {n}")).about("istiod:15012");
    for n in 0..3 {
        xds.report(refused(n));
    }
    ca.report(refused(9));
    ca.report(Report::new(Kind::ConnectionRefused, "elsewhere").about("ca:15012"));
    ca.report(refused(10));
    let all = list.snapshot();
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!((all[0].count, all[0].part, all[0].detail.as_str()), (4, "xdsproxy", "attempt 2"));
    xds.end();
    assert_eq!(list.verdict().unwrap().detail, "attempt 10");
    ca.end();
    assert!(list.verdict().is_none());
    let told: Vec<What> = list.events().into_iter().map(|e| e.what).collect();
    assert_eq!(told, [What::Trouble, What::Trouble, What::Over], "said once each");
}

#[tokio::test(start_paused = true)]
async fn what_nobody_meets_again_is_over_by_itself() {
    let list = Troubles::default();
    let (caller, ca) = (list.reporter("sds"), list.reporter("citadelclient"));
    let lasts = std::time::Duration::from_secs(60);
    ca.report((Kind::ConnectionRefused, "lasts until it is ended"));
    for _ in 0..3 {
        caller.report_for(lasts, (Kind::CallerNotServed, "a bad token"));
        tokio::time::advance(lasts * 9 / 10).await;
        assert!(list.any(|kind| kind == Kind::CallerNotServed), "met again and again");
    }
    tokio::time::advance(lasts / 10).await;
    assert_eq!(kinds(&list), [Kind::ConnectionRefused]);
    assert_eq!(caller.kind(), None);
    assert_eq!(list.events().last().unwrap().what, What::Over);
    caller.report((Kind::CallerNotServed, "for good"));
    tokio::time::advance(lasts * 100).await;
    assert_eq!(kinds(&list).len(), 2);
}

#[test]
fn json_has_every_documented_field() {
    let list = Troubles::default();
    let ca = list.reporter("citadelclient");
    ca.report(Report::new(Kind::CertificateRefused, "no").code("PERMISSION_DENIED").hint("; ask"));
    let json = serde_json::to_value(list.verdict()).unwrap();
    assert_eq!(json["kind"], "CertificateRefused");
    assert_eq!((json["code"].as_str(), json["hint"].as_str()), (Some("PERMISSION_DENIED"), Some("ask")));
    assert!(json["since"].as_str().unwrap().ends_with('Z'), "{json}");
    for field in ["severity", "summary", "detail", "part", "seconds", "count"] {
        assert!(!json[field].is_null(), "{field} in {json}");
    }
}

#[test]
fn the_history_is_bounded_and_keeps_the_start() {
    let list = Troubles::default();
    list.note(What::Started, "agent");
    for n in 0..1000 {
        list.note(What::Push, format!("CDS: {n}"));
        list.note(What::Lost, format!("{n} {}", "x".repeat(1000)));
    }
    list.note(What::Push, "CDS: last");
    let all = list.events();
    assert_eq!((all.len(), all[0].what), (64, What::Started));
    assert!(all[62].text.starts_with("999 ") && all[62].text.len() == 300);
    let pushes: Vec<&str> = all.iter().filter(|e| e.what == What::Push).map(|e| e.text.as_str()).collect();
    assert_eq!(pushes, ["CDS: 0", "CDS: last"]);
}

#[test]
fn spans_read_as_go_prints_them() {
    let span = |ms| say::span(std::time::Duration::from_millis(ms));
    assert_eq!([span(12), span(1_900), span(90_000), span(3_725_000)], ["12ms", "1s", "1m30s", "1h2m5s"]);
}

#[test]
fn every_kind_says_what_it_is_and_what_to_do() {
    let mut names = std::collections::BTreeSet::new();
    for kind in Kind::ALL {
        let pods_alone = kind.hint().contains("1337") && !kind.hint().contains("VM");
        assert!(!pods_alone, "{kind:?}: a machine has another user");
        assert!(names.insert(kind.name()), "{kind} twice");
        for text in [kind.summary(), kind.hint()] {
            assert!(text.len() > 10 && !text.ends_with('.') && text.is_ascii(), "{kind}: {text}");
        }
        assert_eq!(Kind::from_name(kind.name()), Some(*kind));
    }
}

fn sources(dir: &std::path::Path, into: &mut Vec<std::path::PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true if path.ends_with("doctor") => {}
            true => sources(&path, into),
            false if path.ends_with("tests.rs") => {}
            false if path.extension().is_some_and(|e| e == "rs") => into.push(path),
            false => {}
        }
    }
}

/// A kind that no part of a running agent reports promises what nobody keeps.
#[test]
fn every_kind_is_reported_by_a_part() {
    let mut files = Vec::new();
    sources(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let mut text = String::new();
    for file in files {
        let source = std::fs::read_to_string(file).unwrap();
        text.push_str(source.split("#[cfg(test)]\nmod tests {").next().unwrap());
    }
    let word = |c: char| c.is_alphanumeric() || c == '_';
    let made = |of: &str, kind: &Kind| {
        let name = format!("{of}::{kind}");
        text.match_indices(&name).any(|(at, _)| !text[at + name.len()..].starts_with(word))
    };
    let never: Vec<&Kind> =
        Kind::ALL.iter().filter(|kind| !made("Kind", kind) && !made("Self", kind)).collect();
    assert!(never.is_empty(), "never reported: {never:?}");
}

#[test]
fn what_tokens_come_from_is_not_this_proxys_and_is_on_the_way_to_istiod() {
    let kind = Kind::TokenNotHad;
    assert_eq!([kind.is_own(), kind.is_token(), kind.is_upstream()], [false, false, true]);
    assert!(Kind::TokenExpired.is_own() && !Kind::TokenExpired.is_upstream());
}

#[test]
fn what_keeps_envoy_from_its_files_is_the_disk() {
    let said = |number: i32| {
        format!("failed to write the Envoy bootstrap x: {}", std::io::Error::from_raw_os_error(number))
    };
    assert_eq!(Kind::of_start(&said(28)), Some(Kind::DiskFull));
    assert_eq!(Kind::of_start(&said(122)), Some(Kind::DiskFull));
    assert_eq!(Kind::of_start(&said(30)), Some(Kind::DiskReadOnly));
    assert_eq!(Kind::of_start(&said(2)), None);
}

#[test]
fn the_last_line_says_the_cause_once() {
    let report = Report::new(Kind::TokenExpired, "the token is old").hint("write one");
    for (reason, line) in [
        ("Envoy ended", "Envoy ended; verdict: TokenExpired: the token is old; write one"),
        ("end: the token is old", "end: the token is old; verdict: TokenExpired; write one"),
        ("token", "token; verdict: TokenExpired; write one"),
        ("one\ntwo", "one\ntwo\nverdict: TokenExpired: the token is old; write one"),
    ] {
        assert_eq!(report.last_line(reason), line);
    }
}

#[test]
fn an_agent_that_ends_does_not_say_that_it_tries_again() {
    for kind in [Kind::Processes, Kind::DiskFull, Kind::StatusPortTaken] {
        let report = Report::new(kind, "why");
        assert!(report.line().ends_with("; the agent tries again by itself"), "{kind}");
        let last = report.last_line("Envoy was not started");
        assert!(last.ends_with(", and start the agent again") && !last.contains("by itself"), "{last}");
        assert_eq!(report.clone().ending().about("x").last_line("why"), report.last_line("why"));
    }
    let other = Report::new(Kind::RootMissing, "why").ending();
    assert_eq!(other.hint, None, "what says nothing of it stays as it is");
}

#[test]
fn what_the_system_says_decides_what_to_do() {
    for (kind, detail, word) in [
        (Kind::RootBroken, "root.pem: Permission denied (os error 13)", "right to read"),
        (Kind::RootBroken, "root.pem: it holds no readable certificate", "in PEM"),
        (Kind::RootMissing, "root.pem: Is a directory (os error 21)", "a folder is in the file's place"),
        (
            Kind::TokenUnreadable,
            "token: Is a directory (os error 21); istiod answers: no",
            "a folder is in the file's place",
        ),
        (Kind::TokenUnreadable, "token: Permission denied (os error 13)", "fsGroup"),
        (
            Kind::TokenUnreadable,
            "token: its disk does not answer within 2s; istiod answers: no",
            "named pipe",
        ),
        (Kind::TokenUnreadable, "token: Too many levels of symbolic links (os error 40)", "in a circle"),
        (Kind::RootBroken, "root.pem: Too many levels of symbolic links (os error 40)", "in a circle"),
        (Kind::EnvoyNotStarted, "/usr/bin: it is a directory", "names a folder"),
        (Kind::EnvoyNotStarted, "envoy: permission denied", "make it executable"),
        (Kind::EnvoyNotStarted, "envoy: no such file or directory", "loader"),
        (Kind::EnvoyNotStarted, "envoy: exec format error", "for this processor"),
        (Kind::CertificateFiles, "cert.pem with key.pem: it expired 1h0m0s ago", "has to renew it"),
        (Kind::SocketFolder, "failed to write x: Operation not permitted (os error 1)", "immutable"),
        (Kind::OutputCertsFailed, "cannot write x: Operation not permitted (os error 1)", "immutable"),
        (Kind::OutputCertsFailed, "cannot write x: Permission denied (os error 13)", "writable"),
        (Kind::OutputCertsFailed, "k (IDENTITY_PERSIST_KEY): it has 5 bytes", "32 bytes"),
    ] {
        let report = Report::new(kind, detail);
        assert!(report.hint_text().contains(word), "{detail}: {}", report.hint_text());
    }
}

#[test]
fn a_detail_is_kept_to_a_bound() {
    let list = Troubles::default();
    let reporter = list.reporter("xdsproxy");
    for _ in 0..2 {
        reporter.report(Report::new(Kind::IstiodCloses, "\u{fffd}".repeat(80_000)));
        let detail = list.verdict().unwrap().detail;
        assert!(
            detail.ends_with("... (240000 bytes)") && detail.len() < DETAIL + 30,
            "{} bytes",
            detail.len()
        );
    }
}
