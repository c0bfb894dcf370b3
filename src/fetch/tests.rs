use std::io::Write as _;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::*;
use crate::fetch::fake::{Web, http};

#[test]
fn a_bomb_comes_in_small_pieces_and_members_join() {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    let zeros = vec![0; 1 << 20];
    for _ in 0..4 {
        encoder.write_all(&zeros).unwrap();
    }
    let one = encoder.finish().unwrap();
    let two = [one.clone(), one.clone()].concat();
    for (input, expected) in [(&one, 4usize << 20), (&two, 8 << 20)] {
        let mut gunzip = Gunzip::new();
        let mut total = 0;
        for piece in input.chunks(7001) {
            gunzip.feed(Bytes::copy_from_slice(piece));
            while let Some(out) = gunzip.piece().unwrap() {
                assert!(out.len() <= PIECE && !out.is_empty());
                total += out.len();
            }
        }
        gunzip.end().unwrap();
        assert_eq!(total, expected);
    }
    let mut gunzip = Gunzip::new();
    gunzip.feed(Bytes::copy_from_slice(&one[..one.len() - 3]));
    while gunzip.piece().unwrap().is_some() {}
    assert!(gunzip.end().is_err(), "cut");
    let mut gunzip = Gunzip::new();
    gunzip.feed(Bytes::from_static(b"no gzip at all"));
    assert!(gunzip.piece().is_err());
    assert!(Gunzip::new().end().is_err(), "empty");
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(b"what came").unwrap();
    let mut wrong_sum = encoder.finish().unwrap();
    let at = wrong_sum.len() - 8;
    wrong_sum[at] ^= 1;
    let mut gunzip = Gunzip::new();
    gunzip.feed(wrong_sum.into());
    assert_eq!(gunzip.piece().unwrap().unwrap(), "what came");
    assert!(gunzip.piece().is_err(), "and only then the damage");
}

async fn text(url: &str) -> Result<String, Error> {
    Get::new(url)?.send().await?.text(1000).await
}

#[tokio::test]
async fn a_body_of_which_no_piece_comes_is_not_read_on() {
    for (zeros, is_read) in [(1000, true), (4 << 20, false)] {
        let body = format!("{}1\r\na\r\n0\r\n\r\n", "0".repeat(zeros));
        let answer = format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{body}");
        let web = Web::start(move |_| answer.clone().into_bytes()).await;
        let read = text(&format!("http://{}/", web.addr)).await;
        assert_eq!(read.is_ok(), is_read, "{read:?}");
    }
}

#[tokio::test]
async fn redirects_end() {
    let web = Web::start(|_| http(302, "Location: /\r\n", "")).await;
    let url = format!("http://{}/", web.addr);
    assert!(matches!(text(&url).await, Err(Error::Redirects)));
    assert_eq!(web.heads().len(), REQUESTS);
    assert!(web.heads()[1].contains(&format!("Referer: {url}\r\n")));
    let bare = Web::start(|_| http(302, "", "here")).await;
    assert_eq!(text(&format!("http://{}/", bare.addr)).await.unwrap(), "here");
    let bad = Web::start(|_| http(302, "Location: http://[\r\n", "")).await;
    assert!(matches!(text(&format!("http://{}/", bad.addr)).await, Err(Error::Url(_))));
}

#[tokio::test]
async fn bodies_are_bounded_and_must_be_whole() {
    let web = Web::start(|head| match head.split(' ').nth(1).unwrap() {
        "/long" => http(200, "", &"x".repeat(1001)),
        "/cut" => b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc".to_vec(),
        "/chunk" => b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n".to_vec(),
        "/old" => b"HTTP/1.0 200 OK\r\n\r\nold".to_vec(),
        "/fold" => b"HTTP/1.1 200 OK\r\nX-A: b\r\n c\r\nContent-Length: 4\r\n\r\nfold".to_vec(),
        "/spaced" => b"HTTP/1.1 200 OK\r\nX-A : b\r\nContent-Length: 6\r\n\r\nspaced".to_vec(),
        "/blank" => b"HTTP/1.1 200 OK\r\nX A: b\r\nContent-Length: 5\r\n\r\nblank".to_vec(),
        "/nothing" => http(200, "Content-Encoding: gzip\r\n", ""),
        "/early" => b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec(),
        _ => b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n\xff".to_vec(),
    })
    .await;
    let at = |path: &str| format!("http://{}{path}", web.addr);
    assert!(matches!(text(&at("/long")).await, Err(Error::TooLong(1000))));
    assert!(matches!(text(&at("/cut")).await, Err(Error::Http(_))));
    assert!(matches!(text(&at("/chunk")).await, Err(Error::Http(_))));
    assert_eq!(text(&at("/old")).await.unwrap(), "old");
    assert_eq!(text(&at("/fold")).await.unwrap(), "fold");
    assert_eq!(text(&at("/early")).await.unwrap(), "ok");
    assert_eq!(text(&at("/spaced")).await.unwrap(), "spaced");
    assert_eq!(text(&at("/blank")).await.unwrap(), "blank");
    assert_eq!(text(&at("/nothing")).await.unwrap(), "", "nothing is no gzip, and not broken");
    assert_eq!(text(&at("/other")).await.unwrap(), "\u{fffd}");
    assert!(matches!(text("http://127.0.0.1:1/").await, Err(Error::Connect { .. })));
    assert!(matches!(text("https://127.0.0.1:1/").await, Err(Error::Connect { .. })));
    assert!(matches!(text(&format!("https://{}/", web.addr)).await, Err(Error::NoTls)));
}

#[tokio::test]
async fn a_coding_is_passed_over_in_an_old_answer_and_refused_where_it_is_not_chunked() {
    let web = Web::start(|head| {
        let (version, fields) = match head.split(' ').nth(1).unwrap() {
            "/old" => ("1.0", "Transfer-Encoding: chunked\r\n"),
            "/old-length" => ("1.0", "Content-Length: 8\r\nTransfer-Encoding: gzip\r\n"),
            "/upper" => ("1.1", "Transfer-Encoding: CHUNKED\r\n"),
            "/identity" => ("1.1", "Transfer-Encoding: identity\r\n"),
            "/lengths" => ("1.1", "Content-Length: 3, 3\r\n"),
            "/gzip" => ("1.1", "Transfer-Encoding: gzip, chunked\r\n"),
            _ => ("1.1", "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n"),
        };
        format!("HTTP/{version} 200 OK\r\n{fields}\r\n3\r\nabc\r\n0\r\n\r\n").into_bytes()
    })
    .await;
    let at = |path: &str| format!("http://{}{path}", web.addr);
    assert_eq!(text(&at("/old")).await.unwrap(), "3\r\nabc\r\n0\r\n\r\n");
    assert_eq!(text(&at("/old-length")).await.unwrap(), "3\r\nabc\r\n");
    assert_eq!(text(&at("/upper")).await.unwrap(), "abc");
    for refused in ["/identity", "/gzip", "/both", "/lengths"] {
        assert!(matches!(text(&at(refused)).await, Err(Error::Framing(_))), "{refused}");
    }
}

#[tokio::test]
async fn a_proxy_is_told_the_whole_address_and_neighbours_are_reached_directly() {
    let proxy = Web::start(|head| match head.starts_with("CONNECT") {
        true => http(403, "", ""),
        false => http(200, "", "from the proxy"),
    })
    .await;
    let url = Some((format!("http://us:er@{}", proxy.addr), "direct.example".to_owned()));
    let proxies = Proxies { http: url.clone(), https: url };
    assert!(!format!("{proxies:?}").contains("us:er"));
    let dialer = Dialer { proxies, ..Dialer::default() };
    let get = async |url: &str| Get::new(url)?.dialer(&dialer).send().await?.text(1000).await;
    assert_eq!(get("http://far.example:81/a?b").await.unwrap(), "from the proxy");
    let head = proxy.heads().remove(0);
    assert!(head.starts_with("GET http://far.example:81/a?b HTTP/1.1\r\n"), "{head}");
    assert!(head.contains("Host: far.example:81\r\n"), "{head}");
    assert!(head.contains("Proxy-Authorization: Basic dXM6ZXI=\r\n"), "{head}");
    assert!(
        matches!(get("https://far.example/").await, Err(Error::Proxy(why)) if why.to_string().contains("403"))
    );
    assert!(proxy.heads()[1].starts_with("CONNECT far.example:443 HTTP/1.1\r\n"));
    let near = Web::start(|_| http(200, "", "near")).await;
    assert_eq!(get(&format!("http://{}/", near.addr)).await.unwrap(), "near");
    assert_eq!(proxy.heads().len(), 2);
}

#[tokio::test]
async fn a_kept_connection_closed_by_the_other_side_costs_nothing() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let kept = Kept::default();
    let ask = async || {
        let mut reply = Get::new(&url)?.keep(Some(&kept)).send().await?;
        let text = reply.text(1000).await?;
        reply.finish(Some(&kept)).await;
        Ok::<_, Error>(text)
    };
    let serve = async |answer: &str| {
        let (mut io, _) = listener.accept().await.unwrap();
        crate::net::http::head(&mut io).await.unwrap();
        io.write_all(&http(200, "", answer)).await.unwrap();
        io
    };
    let (first, open) = tokio::join!(ask(), serve("first"));
    assert_eq!(first.unwrap(), "first");
    // Its end has arrived, and the runtime knows, before the next request is handed to it.
    drop(open);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let both = async { tokio::join!(ask(), serve("second")) };
    let (second, _open) =
        tokio::time::timeout(Duration::from_secs(20), both).await.expect("it is not waited for");
    assert_eq!(second.unwrap(), "second");
}

fn crypto() -> std::sync::Arc<rustls::crypto::CryptoProvider> {
    std::sync::Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn acceptor(alpn: &[&str]) -> tokio_rustls::TlsAcceptor {
    let made = rcgen::generate_simple_self_signed(vec!["nobody.example".to_owned()]).unwrap();
    let key = rustls_pki_types::PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
    let mut config = rustls::ServerConfig::builder_with_provider(crypto())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key.into())
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    std::sync::Arc::new(config).into()
}

fn any_server(http2: bool) -> Dialer {
    let tls = Some(std::sync::Arc::new(Tls::new(crypto(), http2, Trust::Anybody)));
    Dialer { tls, ..Dialer::default() }
}

#[tokio::test]
async fn a_redirect_tells_plain_http_no_referer_and_a_host_of_its_own_stays() {
    let plain = Web::start(|_| http(200, "", "plain")).await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = listener.local_addr().unwrap();
    let to = plain.addr;
    let secure = fake::spawn(async move {
        let mut tls = acceptor(&[]).accept(listener.accept().await.unwrap().0).await.unwrap();
        let head = crate::net::http::head(&mut tls).await.unwrap();
        tls.write_all(&http(302, &format!("Location: http://{to}/\r\n"), "")).await.unwrap();
        tls.shutdown().await.unwrap();
        head
    });
    let first = Web::start(move |_| http(302, &format!("Location: https://{own}/\r\n"), "")).await;
    let url = format!("http://{}/", first.addr);
    let dialer = any_server(false);
    let mut got = Get::new(&url).unwrap().dialer(&dialer).send().await.unwrap();
    assert_eq!(got.text(1000).await.unwrap(), "plain");
    let (between, last) = (secure.await.unwrap(), plain.heads().remove(0));
    assert!(between.contains(&format!("Referer: {url}\r\n")), "{between}");
    assert!(!last.contains("Referer"), "{last}");

    let away = Web::start(move |_| http(302, &format!("Location: //{to}/\r\n"), "")).await;
    let url = format!("http://{}/", away.addr);
    for (host, then) in [(away.addr.to_string(), to.to_string()), ("a.b".to_owned(), "a.b".to_owned())] {
        let get = Get::new(&url).unwrap().host(Some(HeaderValue::from_str(&host).unwrap()));
        get.send().await.unwrap();
        let head = plain.heads().pop().unwrap();
        assert!(head.contains(&format!("Host: {then}\r\n")), "{host}: {head}");
    }
}

#[tokio::test]
async fn what_tells_of_a_body_is_left_behind_with_it() {
    let last = Web::start(|_| http(200, "", "")).await;
    for (status, kept) in [(301, false), (302, false), (303, false), (307, true), (308, true)] {
        let to = last.addr;
        let first = Web::start(move |_| http(status, &format!("Location: http://{to}/\r\n"), "")).await;
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("a/b"));
        headers.insert(header::RANGE, HeaderValue::from_static("bytes=0-1"));
        Get::new(&format!("http://{}/", first.addr)).unwrap().headers(headers).send().await.unwrap();
        assert!(first.heads()[0].to_lowercase().contains("content-type: a/b\r\n"), "{status}");
        let head = last.heads().pop().unwrap().to_lowercase();
        assert!(head.contains("range: bytes=0-1\r\n"), "{status}: {head}");
        assert_eq!(head.contains("content-type"), kept, "{status}: {head}");
    }
}

#[tokio::test]
async fn what_a_server_refuses_is_asked_anew_and_fields_of_a_connection_are_passed_over() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let server = fake::spawn(async move {
        let acceptor = acceptor(&["h2"]);
        // RST_STREAM with REFUSED_STREAM; HEADERS with 204 and a literal, at the stream's end.
        for answer in [
            &b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\x07"[..],
            b"\0\0\x13\x01\x05\0\0\0\x01\x89\x40\x0aconnection\x05close",
        ] {
            let mut tls = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
            let mut read = Vec::new();
            // HEADERS of stream 1, the request.
            while memchr::memmem::find(&read, b"\x01\x05\0\0\0\x01").is_none() {
                tls.read_buf(&mut read).await.unwrap();
            }
            tls.write_all(b"\0\0\0\x04\0\0\0\0\0").await.unwrap();
            tls.write_all(answer).await.unwrap();
            tls.flush().await.unwrap();
            while tls.read_buf(&mut read).await.is_ok_and(|n| n > 0) {}
        }
    });
    let dialer = any_server(true);
    let got = Get::new(&url).unwrap().dialer(&dialer).send().await.unwrap();
    assert_eq!(got.status(), 204);
    drop(got);
    server.await.unwrap();
}

// Answers one request over TLS, and closes the socket without TLS's own last word, behind `more`.
async fn closed_after(answer: &'static str, more: &'static [u8]) -> Result<String, Error> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://{}/", listener.local_addr().unwrap());
    let server = fake::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let mut tls = acceptor(&[]).accept(stream).await.unwrap();
        crate::net::http::head(&mut tls).await.unwrap();
        tls.write_all(answer.as_bytes()).await.unwrap();
        tls.flush().await.unwrap();
        tls.into_inner().0.write_all(more).await.unwrap();
    });
    let dialer = any_server(false);
    let got = async { Get::new(&url)?.dialer(&dialer).send().await?.text(1000).await }.await;
    server.await.unwrap();
    got
}

#[tokio::test]
async fn a_socket_that_is_closed_between_two_records_of_tls_ends_an_answer() {
    let without_length = "HTTP/1.0 200 OK\r\n\r\nfine";
    assert_eq!(closed_after(without_length, b"").await.unwrap(), "fine");
    assert_eq!(closed_after("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nfine", b"").await.unwrap(), "fine");
    assert!(closed_after(without_length, &[23, 3, 3, 0]).await.is_err(), "cut in the head of a record");
    assert!(closed_after("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfine", b"").await.is_err());
    assert!(closed_after("", b"").await.is_err(), "no answer");
}
