use super::*;

#[test]
fn targets_are_those_of_go() {
    for (typed, sent) in [
        ("/ready", "/ready"),
        ("//ready", "//ready"),
        ("/a/../b/./c", "/a/../b/./c"),
        ("/a#b", "/a"),
        ("/a?x=1&y=%20#f", "/a?x=1&y=%20"),
        ("/a b", "/a%20b"),
        ("/\u{e9}", "/%C3%A9"),
        ("/a%2Fb c", "/a/b%20c"),
        ("/a%2fb", "/a%2fb"),
        ("/a?\u{e9} b", "/a?\u{e9}%20b"),
        ("", "/"),
        ("?q", "/?q"),
        ("/a|b\"", "/a%7Cb%22"),
    ] {
        assert_eq!(target(typed).as_deref(), Ok(sent), "{typed}");
        assert!(Request::builder().uri(sent).body(()).is_ok(), "{sent}");
    }
    for bad in ["/%zz", "/%", "/%2", "/a#%zz"] {
        assert!(target(bad).unwrap_err().to_string().starts_with("invalid URL escape"), "{bad}");
    }
}

#[test]
fn urls_are_taken_apart() {
    let url = Url::parse("http://[::1]:15021/x").unwrap();
    assert_eq!((url.host.as_str(), url.port, url.authority.as_str()), ("::1", 15021, "[::1]:15021"));
    assert_eq!(Url::parse("http://localhost").unwrap().port, 80);
    for bad in [
        "ftp://localhost/x",
        "localhost:1/x",
        "http://",
        "http://a:b/",
        "http://a:+1/",
        "http://a/\n",
        "http://[::1/",
    ] {
        assert!(Url::parse(bad).is_err(), "{bad}");
    }
}

#[test]
fn redirects_lead_where_they_say() {
    let here = Url::parse("http://localhost:15000/a/b?q").unwrap();
    for (location, there) in [
        ("/c", "\"http://localhost:15000/c\""),
        ("c?d", "\"http://localhost:15000/a/c?d\""),
        ("../c", "\"http://localhost:15000/c\""),
        ("http://other:1/x", "\"http://other:1/x\""),
        ("//other/x", "\"http://other/x\""),
        ("?z", "\"http://localhost:15000/a/b?z\""),
    ] {
        assert_eq!(here.join(location).unwrap().to_string(), there, "{location}");
    }
    assert!(here.join("ftp://x/").is_err());
}

#[test]
fn a_user_in_a_url_stays_with_its_server_and_is_shown_nowhere() {
    let here = Url::parse("http://us%40er:p%3Aw@localhost:1/x").unwrap();
    assert_eq!(here.user.as_deref(), Some(&b"us@er:p:w"[..]));
    assert_eq!(Url::parse("http://u@h/").unwrap().user.as_deref(), Some(&b"u:"[..]));
    assert_eq!(here.join("y").unwrap().user, here.user);
    for elsewhere in ["http://localhost:1/y", "//localhost:1/y"] {
        assert_eq!(here.join(elsewhere).unwrap().user, None, "{elsewhere}");
    }
    for text in [here.to_string(), format!("{here:?}"), shown("http://us%40er:p%3Aw@localhost:1/x")] {
        assert_eq!(text, "\"http://localhost:1/x\"");
    }
    assert!(Url::parse("http://%zz@h/").is_err());
    for bad in
        ["https://u:hunter2@h/", "http://u:hunter2%zz@h/", "http://u:hunter2@h:port/", "http://u:hunter2@/"]
    {
        let error = Url::parse(bad).unwrap_err().to_string();
        assert!(!error.contains("hunter2") && error.contains("://<redacted>@"), "{error}");
    }
}

#[tokio::test]
async fn a_status_below_100_is_no_answer_and_that_to_connect_has_no_body() {
    use tokio::io::AsyncWriteExt as _;
    let ask = async |method: &str, status: &str| {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 3\r\n\r\nabc");
        let serve = async {
            let (mut io, _) = listener.accept().await.unwrap();
            let _ = crate::net::http::head(&mut io).await;
            let _ = io.write_all(answer.as_bytes()).await;
        };
        tokio::join!(exchange(method, &url, ""), serve).0.map(|reply| reply.body)
    };
    assert_eq!(ask("GET", "200").await.unwrap(), b"abc");
    assert_eq!(ask("CONNECT", "200").await.unwrap(), b"");
    for status in ["099", "000"] {
        assert!(ask("GET", status).await.is_err(), "{status}");
    }
}
