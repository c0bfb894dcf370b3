//! Messages off a request's body, for servers that decode them.
//!
//! A stream that waits holds nothing: what has arrived of a message is held until the rest does, and given back with
//! the message. What all streams of the process hold so is bounded, since each message alone may be large and each
//! connection may have thousands of streams: at the bound a stream that would add to it ends. What else a stream holds of
//! what its client has sent ([`Counted`]) counts as well. Each client process has a [`Share`], so one that fills it keeps
//! nobody else out; a little is every client's in spite of all others, and the agent's own Envoy has its share whatever
//! others hold.
//!
//! Why not tonic's reader: its buffer stays as long as the stream, and nothing bounds all of them together.

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use prost::Message;
use tonic::Status;

use super::FRAME;
use crate::base::heap;
use crate::base::wire::has_few_fields;

/// Largest message, in bytes: gRPC's default, which is Go's and tonic's too.
const LARGEST: usize = 4 * 1024 * 1024;
/// Most fields at the top of a message: twice as many as a client may name files.
const FIELDS: usize = 16_384;
/// Bytes of unfinished messages of one client: the largest one, and the beginnings of some more.
const SHARE: usize = LARGEST + 64 * 1024;
/// ... and of all clients but the own Envoy.
const UNFINISHED: usize = 2 * SHARE;
/// What a client may hold in spite of [`UNFINISHED`]: the beginnings of a few usual requests. A socket has 512 clients
/// at most.
const LITTLE: usize = 16 * 1024;

static HELD: AtomicUsize = AtomicUsize::new(0);

/// What the streams of one client hold together.
#[derive(Debug)]
pub(crate) struct Share {
    held: AtomicUsize,
    is_own: bool,
}

impl Share {
    /// `is_own`: it is the agent's own Envoy.
    pub(crate) fn new(is_own: bool) -> Self {
        Self { held: AtomicUsize::new(0), is_own }
    }

    /// Counts `now` bytes in place of `before`; whether there may be so many.
    fn change(&self, before: usize, now: usize) -> bool {
        let of = |held: &AtomicUsize| {
            let with = held.fetch_add(now, Relaxed) + now;
            held.fetch_sub(before, Relaxed);
            with - before
        };
        let own = of(&self.held);
        let free = self.is_own || of(&HELD) <= UNFINISHED;
        now <= before || own <= LITTLE || (own <= SHARE && free)
    }
}

/// The messages of one body.
#[derive(Debug)]
pub(crate) struct Messages<T, B> {
    body: B,
    buffer: Held,
    kind: PhantomData<fn() -> T>,
}

impl<T, B> Messages<T, B>
where
    T: Message + Default,
    B: Body<Data = Bytes> + Unpin,
{
    /// Of a client with this share.
    pub(crate) fn new(body: B, share: Arc<Share>) -> Self {
        Self { body, buffer: Held::of(share), kind: PhantomData }
    }

    /// The next message; `None` at the end.
    ///
    /// # Errors
    /// Cancelled when the client is gone; else what it did wrong, in the words of Go's server.
    pub(crate) async fn next(&mut self) -> Result<Option<T>, Status> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// As [`Self::next`].
    pub(crate) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<T>, Status>> {
        loop {
            if let Some(message) = self.buffer.take()? {
                if !has_few_fields(&message, FIELDS) {
                    let text = format!("grpc: received message with more than {FIELDS} fields");
                    return Poll::Ready(Err(Status::resource_exhausted(text)));
                }
                heap::freed(message.len());
                let message = T::decode(message);
                return Poll::Ready(message.map(Some).map_err(|error| {
                    Status::internal(format!("grpc: error unmarshalling request: {error}"))
                }));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.add(&data)?;
                    }
                }
                Some(Err(_)) => return Poll::Ready(Err(Status::cancelled("context canceled"))),
                None if self.buffer.bytes.is_empty() => return Poll::Ready(Ok(None)),
                None => return Poll::Ready(Err(Status::internal("unexpected EOF"))),
            }
        }
    }
}

/// A part of a client's share, until it is dropped.
#[derive(Debug)]
pub(crate) struct Counted {
    counted: usize,
    share: Arc<Share>,
}

impl Counted {
    pub(crate) fn of(share: Arc<Share>) -> Self {
        Self { counted: 0, share }
    }

    /// Counts that `now` bytes are held; whether they may be.
    pub(crate) fn count(&mut self, now: usize) -> bool {
        let before = std::mem::replace(&mut self.counted, now);
        now == before || self.share.change(before, now)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count(0);
    }
}

/// What has arrived and is not decoded; counted while it is here.
#[derive(Debug)]
struct Held {
    bytes: BytesMut,
    /// The allocation that `bytes` is a part of, in bytes.
    room: usize,
    counted: Counted,
}

impl Held {
    fn of(share: Arc<Share>) -> Self {
        Self { bytes: BytesMut::new(), room: 0, counted: Counted::of(share) }
    }

    fn add(&mut self, data: &[u8]) -> Result<(), Status> {
        self.bytes.extend_from_slice(data);
        self.room = self.room.max(self.bytes.capacity());
        let whole = self.length()?.is_some_and(|length| self.bytes.len() >= FRAME + length);
        if whole { Ok(()) } else { self.hold() }
    }

    /// The first message, if it is there.
    fn take(&mut self) -> Result<Option<Bytes>, Status> {
        let Some(length) = self.length()? else { return Ok(None) };
        if self.bytes.len() < FRAME + length {
            return Ok(None);
        }
        self.bytes.advance(FRAME);
        let message = self.bytes.split_to(length).freeze();
        // What came in one piece with its end gets room of its own: else the message's stays as long as the stream does.
        // Where it is more than half of that it stays, or each message of a frame of small ones would copy the rest.
        if self.bytes.len() <= self.room / 2 {
            self.bytes = BytesMut::from(&self.bytes[..]);
            self.room = self.bytes.capacity();
        }
        self.hold()?;
        Ok(Some(message))
    }

    /// Counts what is here.
    fn hold(&mut self) -> Result<(), Status> {
        if self.counted.count(self.bytes.len()) {
            return Ok(());
        }
        Err(Status::resource_exhausted("the agent holds too many bytes of requests that are not complete"))
    }

    fn length(&self) -> Result<Option<usize>, Status> {
        let Some(mut head) = self.bytes.get(..FRAME) else { return Ok(None) };
        match head.get_u8() {
            0 => {}
            1 => return Err(Status::internal("grpc: compressed flag set with identity or empty encoding")),
            flag => return Err(Status::internal(format!("grpc: received unexpected payload format {flag}"))),
        }
        let length = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
        if length > LARGEST {
            let text = format!("grpc: received message larger than max ({length} vs. {LARGEST})");
            return Err(Status::resource_exhausted(text));
        }
        Ok(Some(length))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;

    use http_body::Frame;
    use tonic::Code;

    use super::*;
    use crate::net::grpc::framed;

    /// A body in these pieces that then waits for ever.
    struct Pieces(VecDeque<Bytes>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.pop_front().map_or(Poll::Pending, |piece| Poll::Ready(Some(Ok(Frame::data(piece)))))
        }
    }

    fn reading(pieces: impl IntoIterator<Item = Bytes>) -> Messages<String, Pieces> {
        of(&stranger(), pieces)
    }

    fn of(client: &Arc<Share>, pieces: impl IntoIterator<Item = Bytes>) -> Messages<String, Pieces> {
        Messages::new(Pieces(pieces.into_iter().collect()), client.clone())
    }

    fn stranger() -> Arc<Share> {
        Arc::new(Share::new(false))
    }

    fn poll(messages: &mut Messages<String, Pieces>) -> Poll<Result<Option<String>, Status>> {
        messages.poll_next(&mut Context::from_waker(std::task::Waker::noop()))
    }

    fn message(text: &str) -> Bytes {
        framed(&text.to_owned().encode_to_vec()).unwrap()
    }

    #[test]
    fn pieces_are_put_together_and_nothing_stays() {
        let both: Vec<u8> = [message("one"), message("two")].concat();
        for size in 1..=both.len() {
            let mut messages = reading(both.chunks(size).map(Bytes::copy_from_slice));
            for expected in ["one", "two"] {
                let Poll::Ready(Ok(Some(text))) = poll(&mut messages) else { panic!("pieces of {size}") };
                assert_eq!(text, expected);
            }
            assert!(poll(&mut messages).is_pending());
            assert_eq!((messages.buffer.bytes.capacity(), messages.buffer.counted.counted), (0, 0));
        }
    }

    #[test]
    fn what_is_left_after_a_message_is_counted_and_pins_nothing() {
        let long = message(&"a".repeat(3_000_000));
        let client = stranger();
        let mut messages = of(&client, [[&long[..], &[0, 0, 0]].concat().into()]);
        assert!(poll(&mut messages).is_ready());
        assert!(poll(&mut messages).is_pending());
        assert!(messages.buffer.bytes.capacity() < 1000, "{}", messages.buffer.bytes.capacity());
        assert_eq!((messages.buffer.counted.counted, client.held.load(Relaxed)), (3, 3));
    }

    #[test]
    fn small_messages_do_not_copy_what_is_left_of_their_frame() {
        let small = message("a");
        let mut held = Held::of(stranger());
        let all = small.repeat(2000);
        held.add(&all).unwrap();
        let (mut copied, mut messages) = (0, 0);
        loop {
            let next = held.bytes.as_ptr().wrapping_add(small.len());
            if held.take().unwrap().is_none() {
                break;
            }
            messages += 1;
            if held.bytes.as_ptr() != next {
                copied += held.bytes.len();
            }
        }
        assert_eq!((messages, held.bytes.capacity()), (2000, 0));
        assert!(copied <= all.len(), "{copied} bytes were copied for a frame of {}", all.len());
    }

    #[test]
    fn what_is_no_message_ends_the_stream() {
        for (bytes, words) in [
            (&[1, 0, 0, 0, 0][..], "compressed flag"),
            (&[7, 0, 0, 0, 0], "payload format 7"),
            (&[0, 0xff, 0, 0, 0], "larger than max (4278190080 vs. 4194304)"),
            (&[0, 0, 0, 0, 1, 0xff], "unmarshalling"),
        ] {
            let Poll::Ready(Err(status)) = poll(&mut reading([Bytes::from_static(bytes)])) else {
                panic!("{words}")
            };
            assert!(status.message().contains(words), "{status:?}");
        }
    }

    #[test]
    fn a_message_has_so_many_fields_and_no_more() {
        let of = |count: usize| poll(&mut reading([framed(&[0x0a, 0].repeat(count)).unwrap()]));
        for good in [0, 1, FIELDS] {
            assert!(matches!(of(good), Poll::Ready(Ok(Some(_)))), "{good}");
        }
        let Poll::Ready(Err(status)) = of(FIELDS + 1) else { panic!("it was taken") };
        assert_eq!(status.code(), Code::ResourceExhausted);
    }

    #[test]
    fn what_a_client_holds_now_counts_and_not_what_it_held() {
        let share = Share::new(true);
        assert!(share.change(0, SHARE - 1) && share.change(SHARE - 1, SHARE));
        assert!(!share.change(SHARE, SHARE + 1));
        assert!(share.change(SHARE + 1, 0) && share.change(0, SHARE));
        assert!(!share.change(0, 100) && share.change(SHARE, SHARE - 1), "who gives back is not refused");
    }

    // The only test that comes near the bound, which is the process's.
    #[test]
    fn unfinished_messages_are_bounded_together() {
        let half = |size: usize| {
            let mut all = BytesMut::from(&[0, 0, 0x3f, 0xff, 0xff][..]);
            all.resize(size, b'a');
            all.freeze()
        };
        let large = 3 * 1024 * 1024;
        let refused = |messages: &mut _| matches!(poll(messages), Poll::Ready(Err(status)) if status.code() == Code::ResourceExhausted);
        let hostile = stranger();
        let mut first = of(&hostile, [half(large)]);
        assert!(poll(&mut first).is_pending());
        assert!(refused(&mut of(&hostile, [half(large)])), "one client has a share, on however many streams");
        assert!(refused(&mut of(&hostile, [half(2 * 1024 * 1024)])), "and nothing is left in it");
        let mut other = reading([half(LARGEST)]);
        assert!(poll(&mut other).is_pending(), "another one can send the largest message meanwhile");
        assert!(refused(&mut reading([half(large)])), "all together have a bound");
        // 8 kB are free now.
        let mut rest = reading([half(UNFINISHED - large - LARGEST - 8000)]);
        assert!(poll(&mut rest).is_pending());
        let beginner = stranger();
        let mut little: Vec<_> = (0..16).map(|_| of(&beginner, [half(1000)])).collect();
        assert!(little.iter_mut().all(|one| poll(one).is_pending()), "a little is everybody's");
        assert!(refused(&mut of(&beginner, [half(1000)])), "once");
        let envoy = Arc::new(Share::new(true));
        let mut own = of(&envoy, [half(large)]);
        assert!(poll(&mut own).is_pending(), "the own Envoy has its share whatever others hold");
        assert!(refused(&mut of(&envoy, [half(large)])));
        let much = half(SHARE - large + 1);
        let mut left = of(&envoy, [[&message("one")[..], &much].concat().into()]);
        assert!(refused(&mut left), "so does what is left after a message");
        let mut whole = reading([message(&"a".repeat(3_000_000))]);
        assert!(poll(&mut whole).is_ready(), "what is whole is not held");
        drop((first, other, rest, own, little, left));
        let mut again = of(&hostile, [half(large)]);
        assert!(poll(&mut again).is_pending());
    }
}
