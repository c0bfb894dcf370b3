use proptest::prelude::*;

use super::*;

const KEY: &str = "/app-health/app/livez";

fn one(probe: &str) -> Result<Probe, Error> {
    parse(&format!("{{\"{KEY}\": {probe}}}")).map(|table| table.get(KEY).unwrap().clone())
}

fn http(path: &str, port: i32, https: bool) -> Action {
    Action::Http { path: path.to_owned(), port, https }
}

#[test]
fn every_action() {
    let probe = one(
        r#"{"httpGet":{"path":"/x?a","port":8080,"scheme":"HTTPS","host":"h","httpHeaders":[{"name":"a","value":"b"}]},"timeoutSeconds":3}"#,
    );
    assert_eq!(probe, Ok(Probe { action: http("/x?a", 8080, true), timeout_seconds: 3 }));
    let action = |text: &str| one(text).unwrap().action;
    assert_eq!(action(r#"{"httpGet":{"scheme":"https"}}"#), http("", 0, false));
    assert_eq!(action(r#"{"HTTPGET":{"Port":null}}"#), http("", 0, false));
    assert_eq!(action(r#"{"tcpSocket":{"port":1}}"#), Action::Tcp { port: 1 });
    assert_eq!(
        action(r#"{"gRPC":{"port":2,"service":null}}"#),
        Action::Grpc { port: 2, service: String::new() }
    );
    assert_eq!(
        action(r#"{"grpc":{"port":2,"service":"s"},"httpGet":null,"exec":{},"initialDelaySeconds":"x"}"#),
        Action::Grpc { port: 2, service: "s".into() }
    );
}

#[test]
fn nothing_is_no_probe() {
    for text in ["", "{}", "null"] {
        assert_eq!(parse(text), Ok(Table::default()), "{text}");
    }
}

#[test]
fn what_does_not_decode_shows_the_text() {
    for text in [
        "x",
        "[]",
        "\"text\"",
        "1",
        r#"{"/app-health/app/livez":"x"}"#,
        r#"{"/app-health/app/livez":{"httpGet":[]}}"#,
        r#"{"/app-health/app/livez":{"httpGet":{"port":1.5}}}"#,
        r#"{"/app-health/app/livez":{"tcpSocket":{"port":2147483648}}}"#,
        r#"{"/app-health/app/livez":{"grpc":{"port":"named"}}}"#,
        r#"{"/app-health/app/livez":{"httpGet":{},"timeoutSeconds":1.5}}"#,
        r#"{"/app-health/app/livez":{"httpGet":{"path":1}}}"#,
        r#"{"/app-health/app/livez":{"httpGet":{"httpHeaders":{}}}}"#,
    ] {
        let error = parse(text).unwrap_err();
        assert!(matches!(error, Error::Unreadable { .. }), "{text}: {error}");
        assert!(
            error.to_string().starts_with("failed to decode app prober err = ")
                && error.to_string().contains(text)
        );
    }
}

#[test]
fn paths_and_actions_are_checked() {
    for path in [
        "/app-health/app/other",
        "/app-health//livez",
        "/app-health/a/b/livez",
        "app-health/a/livez",
        "/x/a/livez",
        "/app-health/a/livez/",
        "",
    ] {
        let text = format!("{{\"{path}\": {{\"tcpSocket\": {{\"port\": 1}}}}}}");
        assert_eq!(parse(&text), Err(Error::Path(path.to_owned())));
    }
    assert!(
        parse(
            r#"{"/app-lifecycle/a b/prestopz":{"tcpSocket":{}}, "/app-health/x/poststartz":{"tcpSocket":{}}}"#
        )
        .is_ok()
    );
    for (probe, found) in [
        ("{}", "none of them"),
        ("null", "null"),
        (r#"{"exec":{}}"#, "none of them"),
        (r#"{"httpGet":{},"tcpSocket":{}}"#, "more than one of them"),
    ] {
        assert_eq!(one(probe), Err(Error::Action { path: KEY.to_owned(), found }), "{probe}");
    }
    for probe in [r#"{"httpGet":{"port":"http"}}"#, r#"{"tcpSocket":{"port":"80"}}"#] {
        assert_eq!(one(probe), Err(Error::Port(KEY.to_owned())));
    }
}

proptest! {
    #[test]
    fn any_text_is_taken_or_refused(text in "\\PC*") {
        let _ = parse(&text);
    }
}
