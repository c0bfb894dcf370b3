//! Carries a stream between the wire and a test's hands.

use std::convert::Infallible;

use bytes::Bytes;
use h2::Reason;
use tokio::sync::mpsc;

use super::request;
use crate::grpc::{Code, Status};
use crate::record::{AdsOpened, AdsRequest, Event};
use crate::reply::{Gone, Reply, Requests};
use crate::shared::{Command, Shared};
use crate::stream::{AdsStream, Out, Responses};

/// Carries a stream between the wire and a test's channels.
pub(super) async fn carry(
    shared: &Shared,
    opened: AdsOpened,
    taker: mpsc::UnboundedSender<AdsStream>,
    mut requests: Requests,
    reply: &mut Reply,
    commands: &mpsc::UnboundedSender<Command>,
) -> Result<Option<Status>, Gone> {
    let (to_test, from_client) = mpsc::channel(1);
    let (responses, mut to_client) = Responses::new();
    let (stream, delta) = (opened.stream, opened.delta);
    if taker.send(AdsStream { opened, requests: from_client, responses }).is_err() {
        return Ok(Some(Status::new(Code::Unavailable, "the test no longer takes streams")));
    }
    let reading = async {
        while let Some(raw) = requests.next().await? {
            let request = read(stream, delta, &raw)?;
            shared.record.add(Event::AdsRequest(request.clone()));
            if to_test.send(request).await.is_err() {
                // The test dropped its receiver; what still comes is only recorded.
                while let Some(raw) = requests.next().await? {
                    shared.record.add(Event::AdsRequest(read(stream, delta, &raw)?));
                }
                break;
            }
        }
        drop(to_test);
        // The client has finished sending; the test decides how the stream ends.
        std::future::pending::<Result<Infallible, Gone>>().await
    };
    let writing = async {
        while let Some(out) = to_client.recv().await {
            match out {
                Out::Headers => {
                    reply.headers()?;
                }
                Out::Bytes(bytes) => reply.bytes(bytes).await?,
                Out::End(status) => return Ok(Some(status)),
                Out::Reset(reason) => {
                    reply.reset(Reason::from(reason));
                    return Ok(None);
                }
                Out::GoAway => drop(commands.send(Command::GoAway)),
                Out::Drop => drop(commands.send(Command::Drop)),
            }
        }
        Ok(Some(Status::ok()))
    };
    tokio::select! {
        read = reading => match read {
            Ok(never) => match never {},
            Err(gone) => Err(gone),
        },
        written = writing => written,
    }
}

fn read(stream: u64, delta: bool, raw: &Bytes) -> Result<AdsRequest, Gone> {
    request::decode(stream, delta, raw).map(|(request, _)| request).map_err(|status| {
        tracing::warn!(?status, "a request that does not decode");
        Gone::from(h2::Error::from(Reason::PROTOCOL_ERROR))
    })
}
