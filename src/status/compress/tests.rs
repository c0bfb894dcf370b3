use std::io::Read;

use futures_util::StreamExt;
use http::{Response, StatusCode};
use http_body_util::BodyExt;
use proptest::prelude::*;

use super::*;
use crate::serve::respond::{TEXT, page};

fn choose(value: &str) -> Coding {
    let mut headers = HeaderMap::new();
    if !value.is_empty() {
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_str(value).unwrap());
    }
    Coding::choose(&headers, &Method::GET)
}

#[test]
fn the_choice() {
    for (value, coding) in [
        ("", Coding::None),
        ("gzip", Coding::Gzip),
        ("GZIP", Coding::Gzip),
        ("zstd", Coding::Zstd),
        ("gzip, zstd", Coding::Zstd),
        ("deflate, gzip;q=1.0, zstd;q=0.5", Coding::Gzip),
        ("gzip;q=0", Coding::None),
        ("gzip;Q=0", Coding::None),
        ("gzip;q=7, zstd;q=1", Coding::Zstd),
        ("gzip;q=-1", Coding::None),
        ("gzip;q=x", Coding::None),
        ("gzip;q=0, gzip", Coding::None),
        ("gzip;q=0;level=1", Coding::Gzip),
        (" , zstd ; q=0.1 ,gzip; q=0.05", Coding::Zstd),
        ("*", Coding::None),
        ("br, lz4", Coding::None),
    ] {
        assert_eq!(choose(value), coding, "{value}");
    }
    let mut headers = HeaderMap::new();
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
    assert_eq!(Coding::choose(&headers, &Method::HEAD), Coding::None);
}

#[test]
fn what_is_packed_already_stays() {
    let kind = |kind: &'static str| {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        worth_it(&headers)
    };
    assert!(kind("text/plain") && kind("image/png") && kind("application/json"));
    for packed in [
        "application/x-gzip",
        "application/zstd",
        "video/mp4",
        "audio/ogg",
        "image/jpeg",
        "application/X-Compress",
    ] {
        assert!(!kind(packed), "{packed}");
    }
}

async fn packed(body: &[u8], coding: Coding) -> (Option<String>, Vec<u8>) {
    let answer = apply(page(StatusCode::OK, TEXT, body.to_vec()), coding).await;
    let name = answer.headers().get(header::CONTENT_ENCODING).map(|v| v.to_str().unwrap().to_owned());
    (name, answer.into_body().collect().await.unwrap().to_bytes().to_vec())
}

fn unpack(name: Option<&str>, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    match name {
        Some("gzip") => drop(flate2::read::GzDecoder::new(body).read_to_end(&mut out).unwrap()),
        Some("zstd") => out = zstd::decode_all(body).unwrap(),
        _ => out = body.to_vec(),
    }
    out
}

#[tokio::test]
async fn short_bodies_go_out_plain_and_long_ones_come_back_whole() {
    for coding in [Coding::Gzip, Coding::Zstd] {
        for size in [0, 1, 1023] {
            let body = vec![b'x'; size];
            assert_eq!(packed(&body, coding).await, (None, body));
        }
        for size in [1024, 16 * 1024, 1_000_000] {
            let body: Vec<u8> = (0..size as u64).map(|n| (n * n / 7) as u8).collect();
            let (name, out) = packed(&body, coding).await;
            assert_eq!(name.as_deref(), Some(if coding == Coding::Gzip { "gzip" } else { "zstd" }));
            assert!(unpack(name.as_deref(), &out) == body);
        }
    }
}

#[tokio::test]
async fn streams_are_packed_as_they_come() {
    for coding in [Coding::Gzip, Coding::Zstd] {
        let pieces: Vec<Bytes> = (0..300).map(|n| Bytes::from(format!("metric_{n} {n}\n"))).collect();
        let whole: Vec<u8> = pieces.concat();
        let answer = apply(Response::new(Body::stream(stream::iter(pieces))), coding).await;
        let name = answer.headers()[header::CONTENT_ENCODING].to_str().unwrap().to_owned();
        let out: Vec<u8> = answer.into_body().into_data_stream().map(|b| b.unwrap().to_vec()).concat().await;
        assert!(unpack(Some(&name), &out) == whole);
        let short =
            apply(Response::new(Body::stream(stream::iter([Bytes::from_static(b"a")]))), coding).await;
        assert_eq!(short.into_body().collect().await.unwrap().to_bytes(), "a");
    }
}

proptest! {
    #[test]
    fn any_body_comes_back(body in proptest::collection::vec(any::<u8>(), 1024..5000), zstd in any::<bool>()) {
        let coding = if zstd { Coding::Zstd } else { Coding::Gzip };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let (name, out) = runtime.block_on(packed(&body, coding));
        prop_assert_eq!(unpack(name.as_deref(), &out), body);
    }
}
