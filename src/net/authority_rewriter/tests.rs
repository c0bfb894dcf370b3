use fluke_hpack::Encoder;
use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

const PRI: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

fn fields(authority: &str) -> Vec<(&'static [u8], Vec<u8>)> {
    vec![
        (b":method", b"POST".to_vec()),
        (b":scheme", b"http".to_vec()),
        (b":path", b"/a.B/C".to_vec()),
        (b":authority", authority.into()),
        (b"te", b"trailers".to_vec()),
        (b"content-type", b"application/grpc".to_vec()),
        (b"x-long", vec![b'v'; 300]),
    ]
}

fn block(encoder: &mut Encoder<'_>, authority: &str) -> Vec<u8> {
    let fields = fields(authority);
    encoder.encode(fields.iter().map(|(n, v)| (*n, &v[..])))
}

// Reads everything through a shim that is fed `input` in pieces of the given sizes (then the rest).
async fn through(input: Vec<u8>, pieces: Vec<usize>) -> io::Result<Vec<u8>> {
    let (mut client, server) = tokio::io::duplex(64);
    let writer = async move {
        let mut rest = &input[..];
        for size in pieces {
            let (piece, more) = rest.split_at(size.min(rest.len()));
            if client.write_all(piece).await.is_err() {
                return;
            }
            tokio::task::yield_now().await;
            rest = more;
        }
        let _ = client.write_all(rest).await;
    };
    let reader = async move {
        let mut shim = AuthorityRewriter::new(server);
        let mut out = Vec::new();
        shim.read_to_end(&mut out).await.map(|_| out)
    };
    tokio::join!(writer, reader).1
}

// The header lists in an output, as an HTTP/2 server with a table of its own would decode them.
fn decode(mut bytes: &[u8]) -> Vec<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut decoder = fluke_hpack::Decoder::new();
    let mut lists = Vec::new();
    assert!(bytes.starts_with(PRI));
    bytes = &bytes[PRI.len()..];
    let mut fragment = Vec::new();
    while let Some(head) = Head::of(bytes) {
        let payload = &bytes[HEADER..HEADER + head.length];
        if head.kind == HEADERS {
            let (prefix, padding) = block::surround(head.flags, payload).unwrap();
            fragment = payload[prefix..payload.len() - padding].to_vec();
        } else if head.kind == CONTINUATION {
            fragment.extend_from_slice(payload);
        }
        if matches!(head.kind, HEADERS | CONTINUATION) && head.flags & END_HEADERS != 0 {
            lists.push(decoder.decode(&fragment).unwrap());
        }
        bytes = &bytes[HEADER + head.length..];
    }
    lists
}

fn expected(authority: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    fields(authority).into_iter().map(|(n, v)| (n.to_vec(), v)).collect()
}

#[tokio::test]
async fn what_the_server_takes_passes_byte_for_byte() {
    let mut encoder = Encoder::new();
    for authority in ["xds-grpc", "localhost", "localhost:80", "127.0.0.1:1", "[::1]:5", "sds-grpc"] {
        let mut input = PRI.to_vec();
        input.extend(frame(4, 0, 0, &[]));
        input.extend(frame(HEADERS, END_HEADERS, 1, &block(&mut encoder, authority)));
        input.extend(frame(0, 0, 1, &[1, 2, 3]));
        encoder = Encoder::new();
        assert_eq!(through(input.clone(), vec![]).await.unwrap(), input, "{authority}");
    }
}

#[tokio::test]
async fn every_form_that_it_refuses_becomes_localhost() {
    for authority in
        [".%2Fetc%2Fistio%2Fproxy%2FXDS", "/etc/istio/proxy/XDS", "./etc/istio/proxy/XDS", "", "a b", "%"]
    {
        let mut encoder = Encoder::new();
        let mut input = PRI.to_vec();
        // A good one first, so that the second refers to a table that the server also has.
        input.extend(frame(HEADERS, END_HEADERS, 1, &block(&mut encoder, "good")));
        input.extend(frame(HEADERS, END_HEADERS, 3, &block(&mut encoder, authority)));
        input.extend(frame(0, 0, 1, &[7; 100]));
        input.extend(frame(HEADERS, END_HEADERS, 5, &block(&mut encoder, "good")));
        let output = through(input, vec![]).await.unwrap();
        let lists = decode(&output);
        assert_eq!(lists, [expected("good"), expected("localhost"), expected("good")], "{authority}");
    }
}

#[tokio::test]
async fn padding_priority_and_continuation_are_understood() {
    let block = block(&mut Encoder::new(), "/path");
    let (a, rest) = block.split_at(10);
    let (b, c) = rest.split_at(7);
    let mut first = vec![4, 0x80, 0, 0, 9, 42];
    first.extend(a);
    first.extend([0; 4]);
    let mut input = PRI.to_vec();
    input.extend(frame(HEADERS, 0x08 | 0x20 | 1, 1, &first));
    input.extend(frame(CONTINUATION, 0, 1, b));
    input.extend(frame(CONTINUATION, END_HEADERS, 1, c));
    input.extend(frame(0, 1, 1, &[1]));
    let output = through(input, vec![]).await.unwrap();
    assert_eq!(decode(&output), [expected("localhost")]);
    let head = Head::of(&output[PRI.len()..]).unwrap();
    assert_eq!(head.flags, 0x20 | 1 | END_HEADERS, "end of stream and priority stay, padding goes");
    assert_eq!(output[PRI.len() + HEADER..][..5], [0x80, 0, 0, 9, 42]);
}

#[tokio::test]
async fn a_large_block_is_split_again() {
    let mut encoder = Encoder::new();
    let long = vec![0xff; 40_000];
    let list: Vec<(&[u8], &[u8])> = vec![(b":authority", b"/x"), (b"long", &long)];
    let block = encoder.encode(list);
    let mut input = PRI.to_vec();
    let chunks: Vec<&[u8]> = block.chunks(16_384).collect();
    for (i, chunk) in chunks.iter().enumerate() {
        let end = if i + 1 == chunks.len() { END_HEADERS } else { 0 };
        input.extend(frame(if i == 0 { HEADERS } else { CONTINUATION }, end, 1, chunk));
    }
    let output = through(input, vec![]).await.unwrap();
    assert_eq!(decode(&output)[0][1].1, long);
}

#[test]
fn a_block_that_comes_byte_by_byte_is_looked_at_once() {
    let mut all = frame(HEADERS, 0, 1, b"");
    for _ in 0..50 {
        all.extend(frame(CONTINUATION, 0, 1, b"ab"));
    }
    all.extend(frame(CONTINUATION, END_HEADERS, 1, b"c"));
    let mut far = None;
    for end in 0..all.len() {
        assert!(matches!(gather(&all[..end], &mut far), Gathered::More));
        let whole = end.checked_sub(HEADER).map(|more| HEADER + more / 11 * 11);
        assert_eq!(far.map(|far| far.length), whole);
    }
    let Gathered::Block { length, frames, fragment } = gather(&all, &mut far) else { panic!("it has ended") };
    assert_eq!((length, frames, far), (all.len(), 52, None));
    assert_eq!(fragment, ["ab".repeat(50), "c".to_owned()].concat().into_bytes());
}

/// A client that has sent this, and takes what is written to it or does not.
struct Client {
    sent: io::Cursor<Vec<u8>>,
    takes: bool,
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.sent).poll_read(cx, buf)
    }
}

impl AsyncWrite for Client {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.takes { Poll::Ready(Ok(buf.len())) } else { Poll::Pending }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

fn client(sent: Vec<u8>) -> AuthorityRewriter<Client> {
    AuthorityRewriter::new(Client { sent: io::Cursor::new(sent), takes: true })
}

fn calls(count: u32) -> (AuthorityRewriter<Client>, usize) {
    let one = block(&mut Encoder::new(), "a");
    let mut all = PRI.to_vec();
    (0..count).for_each(|n| all.extend(frame(HEADERS, END_HEADERS, 2 * n + 1, &one)));
    (client(all), HEADER + one.len())
}

// As much as there is in one turn, in bytes.
fn turn(shim: &mut AuthorityRewriter<Client>, cx: &mut Context<'_>) -> usize {
    let (mut space, mut bytes) = (vec![0; 4096], 0);
    loop {
        let mut buf = ReadBuf::new(&mut space);
        match Pin::new(&mut *shim).poll_read(cx, &mut buf) {
            Poll::Ready(read) if read.is_ok() && !buf.filled().is_empty() => bytes += buf.filled().len(),
            _ => return bytes,
        }
    }
}

// Bytes in each turn until there were so many.
async fn turns(mut shim: AuthorityRewriter<Client>, all: usize) -> Vec<usize> {
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < all {
        std::future::poll_fn(|cx| {
            turns.push(turn(&mut shim, cx));
            Poll::Ready(())
        })
        .await;
        tokio::task::yield_now().await;
    }
    turns
}

#[tokio::test]
async fn a_turn_brings_few_calls_and_others_are_answered_in_between() {
    let (shim, one) = calls(1000);
    let turns = turns(shim, PRI.len() + 1000 * one).await;
    assert!(turns.iter().all(|bytes| *bytes <= 20 * one), "{turns:?}");
}

// Of a connection with thousands of streams each of these is a look at all of them.
#[tokio::test]
async fn a_turn_brings_few_frames_of_any_kind() {
    let one = frame(4, 0, 0, &[0, 4, 0, 0, 0, 100]);
    let sent = [PRI, &one.repeat(2000)].concat();
    let all = sent.len();
    let turns = turns(client(sent), all).await;
    assert!(turns.iter().all(|bytes| *bytes <= PRI.len() + 160 * one.len()), "{turns:?}");
}

// Behind a block that nobody can read.
#[tokio::test]
async fn a_turn_brings_few_bytes_that_are_not_looked_at() {
    let sent = [PRI, &frame(HEADERS, END_HEADERS, 1, &[0x3f]), &[0; 100_000]].concat();
    let all = sent.len();
    let turns = turns(client(sent), all).await;
    assert!(turns.iter().all(|bytes| *bytes <= 5 * 4096), "{turns:?}");
}

#[test]
fn who_takes_nothing_brings_no_more_calls_until_it_does() {
    struct Woken(std::sync::atomic::AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let woken = std::sync::Arc::new(Woken(false.into()));
    let waker = woken.clone().into();
    let mut cx = Context::from_waker(&waker);
    let (mut shim, one) = calls(3);
    shim.inner.takes = false;
    assert!(Pin::new(&mut shim).poll_write(&mut cx, b"answer").is_pending());
    assert_eq!(turn(&mut shim, &mut cx), PRI.len() + one, "the first was on its way");
    assert!(Pin::new(&mut shim).poll_write(&mut cx, b"answer").is_pending());
    assert_eq!(turn(&mut shim, &mut cx), 0);
    shim.inner.takes = true;
    assert!(!woken.0.load(std::sync::atomic::Ordering::Relaxed));
    assert!(Pin::new(&mut shim).poll_write(&mut cx, b"answer").is_ready());
    assert!(woken.0.load(std::sync::atomic::Ordering::Relaxed));
    assert_eq!(turn(&mut shim, &mut cx), 2 * one);
}

#[test]
fn large_blocks_without_an_end_are_few() {
    static LEAVES: Semaphore = Semaphore::const_new(2);
    let mut cx = Context::from_waker(std::task::Waker::noop());
    let mut begun = |payload: usize| {
        let mut sent = PRI.to_vec();
        sent.extend(frame(HEADERS, 0, 1, &block(&mut Encoder::new(), "a")));
        (0..payload / 1000).for_each(|_| sent.extend(frame(CONTINUATION, 0, 1, &[0; 1000])));
        // Its end has not come.
        sent.extend([0, 0]);
        let (reading, mut writing) = tokio::io::duplex(1 << 20);
        assert!(std::pin::pin!(writing.write_all(&sent)).poll(&mut cx).is_ready());
        let mut shim = AuthorityRewriter::new(reading);
        shim.frames.leaves = &LEAVES;
        let mut space = vec![0; 4096];
        loop {
            let mut buf = ReadBuf::new(&mut space);
            match Pin::new(&mut shim).poll_read(&mut cx, &mut buf) {
                Poll::Ready(Ok(())) => assert!(!buf.filled().is_empty()),
                Poll::Ready(Err(error)) => return Err(error.to_string()),
                Poll::Pending => return Ok((shim, writing)),
            }
        }
    };
    let _little: Vec<_> = (0..9).map(|_| begun(10_000).unwrap()).collect();
    let first = begun(300_000).unwrap();
    let _second = begun(30_000).unwrap();
    assert!(begun(30_000).unwrap_err().contains("too many"));
    drop(first);
    let _third = begun(30_000).unwrap();
}

#[tokio::test]
async fn what_stands_before_nonsense_is_read_first() {
    let (mut client, server) = tokio::io::duplex(1 << 16);
    let mut shim = AuthorityRewriter::new(server);
    let bad = block(&mut Encoder::new(), "a b");
    client.write_all(&[PRI, &frame(HEADERS, END_HEADERS, 1, &bad)].concat()).await.unwrap();
    let mut out = vec![0; 4096];
    let mut read = 0;
    while read <= PRI.len() {
        read += shim.read(&mut out).await.unwrap();
    }
    // A frame that passes, and one that is shorter than its padding, in one piece.
    let ping = frame(6, 0, 0, b"12345678");
    client.write_all(&[&ping[..], &frame(HEADERS, END_HEADERS | 8, 3, &[9, 0])].concat()).await.unwrap();
    let read = shim.read(&mut out).await.unwrap();
    assert_eq!(out[..read], ping);
    assert_eq!(shim.read(&mut out).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn nonsense_is_the_servers_to_refuse_until_something_was_rewritten() {
    let cut_update = [0x3f];
    for nonsense in [
        frame(HEADERS, END_HEADERS, 1, &cut_update),
        frame(HEADERS, END_HEADERS, 1, &[0x3f, 0xff, 0xff, 0x7f, 0x82]),
        frame(HEADERS, END_HEADERS, 1, &[0xff, 0xff, 0xff, 0xff, 0xff]),
        frame(HEADERS, END_HEADERS | 8, 1, &[200, 1]),
        [frame(HEADERS, 0, 1, &[0x82]), frame(0, 0, 1, &[1])].concat(),
        frame(HEADERS, END_HEADERS, 1, &[0x40, 0x05, b'a']),
        frame(HEADERS, 0, 1, &[0x82]),
        vec![0, 0, 9],
    ] {
        let input = [PRI, &nonsense, &frame(0, 0, 1, &[1])].concat();
        assert_eq!(through(input.clone(), vec![]).await.unwrap(), input);
        let input =
            [PRI, &frame(HEADERS, END_HEADERS, 1, &block(&mut Encoder::new(), "/x")), &nonsense].concat();
        let outcome = through(input, vec![]).await;
        if nonsense.len() > 3 && !nonsense.ends_with(&[0x82]) {
            assert!(outcome.is_err(), "{nonsense:?}");
        }
    }
}

#[tokio::test]
async fn an_authority_in_the_huffman_code_is_seen() {
    for (authority, refused) in [("/etc/istio/proxy/XDS", true), ("localhost", false)] {
        let mut coded = Vec::new();
        httlib_huffman::encode(authority.as_bytes(), &mut coded).unwrap();
        let mut block = vec![0x82, 0x41, 0x80 | u8::try_from(coded.len()).unwrap()];
        block.extend(coded);
        let input = [PRI, &frame(HEADERS, END_HEADERS, 1, &block)].concat();
        let output = through(input.clone(), vec![]).await.unwrap();
        let list = [(b":method".to_vec(), b"GET".to_vec()), (b":authority".to_vec(), b"localhost".to_vec())];
        assert_eq!(decode(&output), [list], "{authority}");
        assert_eq!(output != input, refused, "{authority}");
    }
}

proptest! {
    #[test]
    fn any_split_gives_the_same(pieces in prop::collection::vec(0usize..40, 0..60), bad in any::<bool>()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut encoder = Encoder::new();
        let mut input = PRI.to_vec();
        input.extend(frame(4, 0, 0, &[0, 3, 0, 0, 0, 100]));
        for stream in [1, 3, 5] {
            let authority = if bad && stream == 3 { "/path" } else { "xds-grpc" };
            let block = block(&mut encoder, authority);
            let (a, b) = block.split_at(5);
            input.extend(frame(HEADERS, 0, stream, a));
            input.extend(frame(CONTINUATION, END_HEADERS, stream, b));
            input.extend(frame(0, 0, stream, &[stream as u8; 50]));
        }
        let whole = runtime.block_on(through(input.clone(), vec![])).unwrap();
        let split = runtime.block_on(through(input.clone(), pieces)).unwrap();
        prop_assert_eq!(&whole, &split);
        if !bad {
            prop_assert_eq!(whole, input);
        }
    }

    // Name and value in the Huffman code, one or both, with another field before and after.
    #[test]
    fn texts_in_the_huffman_code_are_read_as_if_they_were_not(
        name in prop::collection::vec(any::<u8>(), 0..40),
        value in prop::collection::vec(any::<u8>(), 0..400),
        coded in any::<(bool, bool)>(),
    ) {
        let text = |text: &[u8], coded: bool, block: &mut Vec<u8>| {
            let mut bytes = Vec::new();
            if coded {
                httlib_huffman::encode(text, &mut bytes).unwrap();
            } else {
                bytes = text.to_vec();
            }
            let mut length = fluke_hpack::encoder::encode_integer(bytes.len(), 7);
            length[0] |= if coded { 0x80 } else { 0 };
            block.extend_from_slice(&length);
            block.extend_from_slice(&bytes);
        };
        let built = |coded: (bool, bool)| {
            let mut block = vec![0x82, 0x40];
            text(&name, coded.0, &mut block);
            text(&value, coded.1, &mut block);
            block.push(0x86);
            block
        };
        let block = built(coded);
        prop_assert_eq!(block::plain(&block).unwrap(), built((false, false)));
        let list = |block: &[u8]| fluke_hpack::Decoder::new().decode(block).unwrap();
        prop_assert_eq!(list(&built(coded)), list(&built((false, false))));
    }

    #[test]
    fn bytes_of_any_kind_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), kind in 0u8..10) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let input = [PRI, &frame(kind, END_HEADERS, 1, &bytes), &bytes].concat();
        let _ = runtime.block_on(through(input, vec![]));
    }
}
