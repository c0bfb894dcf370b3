//! Istiod is asked in Envoy's name, until its answer begins.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{self, Either};
use h2::{Reason, SendStream};
use tokio::sync::mpsc;
use tonic::Status;

use crate::xds::end_status;
use crate::xds::upstream::Link;

/// How long istiod may take from the opened stream to the beginning of its answer. Its first push comes after a
/// second or two in a large mesh.
const ANSWER: Duration = Duration::from_secs(20);

/// A way on which istiod answers, and what it was not told yet: frames, the first of them perhaps a part.
pub(super) type Heard = (Link, VecDeque<Bytes>);

/// Sends the requests and whatever follows, until the answer begins; gives what was not sent until then.
pub(in crate::xds) async fn ask(
    link: Link,
    mut unsent: VecDeque<Bytes>,
    mut more: mpsc::Receiver<Vec<Bytes>>,
) -> Result<Heard, Status> {
    let Link { mut driver, mut sink, mut response, ping, reads, peer, token_expires } = link;
    let answer = {
        let mut sending = pin!(send(&mut sink, &mut unsent, &mut more));
        let mut sends = true;
        let mut late = pin!(tokio::time::sleep(ANSWER));
        let failed = loop {
            tokio::select! {
                biased;
                answer = &mut response => break Err(answer),
                ended = &mut driver => break Ok(match ended {
                    Err(error) => end_status::of_upstream(&error).0,
                    Ok(()) => Status::unavailable("error reading from server: EOF"),
                }),
                // What went wrong is told by the answer or the connection.
                _ = &mut sending, if sends => sends = false,
                () = &mut late => break Ok(Status::unavailable(format!("no answer within {ANSWER:?}"))),
            }
        };
        match failed {
            Err(answer) => answer.map_err(|e| end_status::of_upstream(&e).0)?,
            // What the driver has just read may be the answer.
            Ok(status) => (&mut response).now_or_never().and_then(Result::ok).ok_or(status)?,
        }
    };
    let (parts, mut body) = answer.into_parts();
    if let Some(status) = end_status::of_head(&parts.headers, &mut body) {
        return Err(status);
    }
    if parts.status != http::StatusCode::OK {
        let content_type = parts.headers.get(http::header::CONTENT_TYPE).and_then(|v| v.to_str().ok());
        return Err(end_status::of_http(parts.status, content_type));
    }
    while let Ok(frames) = more.try_recv() {
        unsent.extend(frames);
    }
    let answer = http::Response::from_parts(parts, body);
    let response = Either::Right(future::ready(Ok(answer)));
    Ok((Link { driver, sink, response, ping, reads, peer, token_expires }, unsent))
}

// What was sent of it is gone from `unsent`, wherever this is left off.
async fn send(
    sink: &mut SendStream<Bytes>,
    unsent: &mut VecDeque<Bytes>,
    more: &mut mpsc::Receiver<Vec<Bytes>>,
) -> Result<(), h2::Error> {
    loop {
        while let Some(frame) = unsent.front_mut() {
            sink.reserve_capacity(frame.len());
            let room = match sink.capacity() {
                0 => match poll_fn(|cx| sink.poll_capacity(cx)).await {
                    Some(room) => room?,
                    None => return Err(Reason::CANCEL.into()),
                },
                room => room,
            };
            sink.send_data(frame.split_to(room.min(frame.len())), false)?;
            if frame.is_empty() {
                unsent.pop_front();
            }
        }
        match more.recv().await {
            Some(frames) => unsent.extend(frames),
            None => return Ok(()),
        }
    }
}
