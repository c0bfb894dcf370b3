use super::*;
use proptest::prelude::*;

fn headers(all: &[(&'static str, &str)]) -> HeaderMap {
    all.iter().map(|(n, v)| (http::HeaderName::from_static(n), HeaderValue::from_str(v).unwrap())).collect()
}

#[test]
fn statuses_are_read_and_bad_details_are_a_status() {
    assert!(status_in(&HeaderMap::new()).is_none());
    let status = status_in(&headers(&[("grpc-status", "16"), ("grpc-message", "no%20token%")])).unwrap();
    assert_eq!((status.code(), status.message()), (Code::Unauthenticated, "no token%"));
    assert_eq!(status_in(&headers(&[("grpc-status", "what")])).unwrap().code(), Code::Unknown);
    for good in ["CAMSAWE", "CAMSAWE=", ""] {
        let status = status_in(&headers(&[("grpc-status", "3"), ("grpc-status-details-bin", good)])).unwrap();
        assert_eq!(status.code(), Code::InvalidArgument, "{good}");
        assert_eq!(status.details().is_empty(), good.is_empty());
    }
    let bad = headers(&[("grpc-status", "0"), ("grpc-status-details-bin", "!!! no base64")]);
    let status = status_in(&bad).unwrap();
    assert_eq!(status.code(), Code::Internal);
    assert_eq!(
        status.message(),
        "transport: malformed grpc-status-details-bin: illegal base64 data at input byte 0"
    );
}

#[test]
fn what_is_no_call_is_refused() {
    let grpc = ("content-type", "application/grpc");
    let http = |method, all: &[_]| match admitted(&method, &headers(all)) {
        Err(Refused::Http(status)) => status.as_u16(),
        Err(Refused::Grpc(status)) => u16::try_from(status.code() as i32).unwrap(),
        Ok(_) => 0,
    };
    assert_eq!(http(Method::GET, &[grpc]), 405);
    assert_eq!(http(Method::POST, &[]), 415);
    assert_eq!(http(Method::POST, &[("content-type", "application/grpc-web")]), 415);
    assert_eq!(http(Method::POST, &[("content-type", "application/grpc+proto")]), 0);
    assert_eq!(http(Method::POST, &[grpc]), 0);
    assert_eq!(http(Method::POST, &[grpc, ("grpc-timeout", "5")]), 13);
    assert_eq!(http(Method::POST, &[grpc, ("x-bin", "%%")]), 13);
    // What is told back is held until it is read.
    let long = "x".repeat(100_000);
    let Err(Refused::Grpc(said)) = admitted(&Method::POST, &headers(&[grpc, ("grpc-timeout", &long)])) else {
        panic!("it is no time");
    };
    assert!(said.message().starts_with("malformed grpc-timeout: \"xxx") && said.message().len() < 400);
}

#[test]
fn timeouts_are_read_as_grpc_writes_them() {
    for (text, expected) in [
        ("1H", Some(Duration::from_secs(3600))),
        ("2M", Some(Duration::from_secs(120))),
        ("99999999S", Some(Duration::from_secs(99_999_999))),
        ("0S", Some(Duration::ZERO)),
        ("5m", Some(Duration::from_millis(5))),
        ("6u", Some(Duration::from_micros(6))),
        ("7n", Some(Duration::from_nanos(7))),
        ("", None),
        ("S", None),
        ("1", None),
        ("1s", None),
        ("-1S", None),
        ("+1S", None),
        ("1.5S", None),
        ("100000000S", None),
        ("1é", None),
    ] {
        assert_eq!(timeout(text), expected, "{text:?}");
    }
}

#[test]
fn nobody_serves_these() {
    let of = |path| unknown(path, |service| service == "a.B").message().to_owned();
    assert_eq!(of("/a.B/C"), "unknown method C for service a.B");
    assert_eq!(of("/x/C"), "unknown service x");
    assert_eq!(of("/a.B/C/D"), "unknown service a.B/C");
    assert_eq!(of("/x"), "malformed method name: \"x\"");
    assert!(of(&format!("/{}/C", "x".repeat(100_000))).len() < 1000);
}

#[test]
fn only_one_whole_message_is_taken() {
    assert_eq!(unframed(framed(&[7, 8]).unwrap()).unwrap(), [7, 8][..]);
    assert_eq!(unframed(Bytes::from_static(&[0, 0, 0, 0, 0])).unwrap(), [][..]);
    for bad in [&[][..], &[0, 0, 0, 0], &[1, 0, 0, 0, 1, 7], &[0, 0, 0, 0, 1, 7, 8], &[0, 255, 255, 255, 255]]
    {
        assert!(unframed(Bytes::copy_from_slice(bad)).is_err());
    }
}

proptest! {
    #[test]
    fn no_bytes_make_the_readers_panic(bytes in any::<Vec<u8>>()) {
        let mut headers = headers(&[("grpc-status", "3")]);
        if let Ok(value) = HeaderValue::from_bytes(&bytes) {
            headers.insert("grpc-message", value.clone());
            headers.insert("grpc-status-details-bin", value);
            prop_assert!(status_in(&headers).is_some());
        }
        let _ = unframed(bytes.into());
    }
}

#[test]
fn of_a_text_only_what_must_be_is_encoded() {
    let text = "no \"token\" for <istiod>: 100% sure\n\u{fc}~";
    let mut headers = HeaderMap::new();
    headers.insert("grpc-message", message(text));
    assert_eq!(headers["grpc-message"], "no \"token\" for <istiod>: 100%25 sure%0A%C3%BC~");
    headers.insert("grpc-status", HeaderValue::from_static("5"));
    assert_eq!(status_in(&headers).unwrap().message(), text);
    let told = trailers(&Status::not_found(text));
    assert_eq!(told["grpc-message"], headers["grpc-message"]);
    assert_eq!(told["grpc-status"], "5");
}

#[test]
fn compression_is_not_offered() {
    for (encoding, good) in [("identity", true), ("gzip", false), ("", false)] {
        assert_eq!(uncompressed(&headers(&[("grpc-encoding", encoding)])).is_ok(), good, "{encoding}");
    }
    assert!(uncompressed(&headers(&[])).is_ok());
}
