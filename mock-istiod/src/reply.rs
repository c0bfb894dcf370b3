//! One call on the wire: reads its messages, writes its answer, and spoils either as a fault says.
//!
//! Like a server written in Go, headers go out only with the first bytes of the answer (or, when there are
//! none, together with the status); a client that waits for them before it sends waits for ever.

use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderValue, Response, StatusCode};

use crate::fault::Fault;
use crate::grpc::{Deframer, Status, frame};

/// The stream is gone: the client reset it or the connection ended.
#[derive(Debug, thiserror::Error)]
#[error("the client is gone: {0}")]
pub(crate) struct Gone(String);

impl From<h2::Error> for Gone {
    fn from(error: h2::Error) -> Self {
        Self(error.to_string())
    }
}

/// The reading half of a call.
pub(crate) struct Requests {
    body: RecvStream,
    deframer: Deframer,
}

impl Requests {
    pub(crate) fn new(body: RecvStream) -> Self {
        Self { body, deframer: Deframer::default() }
    }

    /// The next message; `None` when the client has finished.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Gone> {
        loop {
            match self.deframer.take() {
                Ok(Some(message)) => return Ok(Some(message)),
                Ok(None) => {}
                Err(status) => return Err(Gone(status.message)),
            }
            let Some(data) = self.body.data().await else {
                return match self.deframer.left_over() {
                    0 => Ok(None),
                    rest => Err(Gone(format!("the stream ended {rest} bytes into a message"))),
                };
            };
            let data = data?;
            self.deframer.push(&data);
            self.body.flow_control().release_capacity(data.len())?;
        }
    }
}

/// How the bytes of an answer are spoiled.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Spoil {
    cut: Option<usize>,
    drip: Option<(usize, Duration)>,
}

impl Spoil {
    pub(crate) fn from(faults: &[Fault]) -> Self {
        faults.iter().fold(Self::default(), |spoil, fault| match fault {
            Fault::Cut(after) => Self { cut: Some(*after), ..spoil },
            Fault::Drip(bytes, every) => Self { drip: Some((*bytes, *every)), ..spoil },
            _ => spoil,
        })
    }
}

/// The writing half of a call.
pub(crate) struct Reply {
    respond: SendResponse<Bytes>,
    body: Option<SendStream<Bytes>>,
    spoil: Spoil,
}

impl Reply {
    pub(crate) fn new(respond: SendResponse<Bytes>) -> Self {
        Self { respond, body: None, spoil: Spoil::default() }
    }

    pub(crate) fn spoil(&mut self, spoil: Spoil) {
        self.spoil = spoil;
    }

    fn head() -> Response<()> {
        let mut head = Response::new(());
        head.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
        head
    }

    /// Sends the headers, if they have not gone yet.
    pub(crate) fn headers(&mut self) -> Result<&mut SendStream<Bytes>, Gone> {
        if self.body.is_none() {
            self.body = Some(self.respond.send_response(Self::head(), false)?);
        }
        Ok(self.body.as_mut().expect("set above"))
    }

    pub(crate) async fn message(&mut self, message: &[u8]) -> Result<(), Gone> {
        self.bytes(frame(message)).await
    }

    /// Bytes as they are: a frame, many, or a part of one.
    pub(crate) async fn bytes(&mut self, mut data: Bytes) -> Result<(), Gone> {
        if let Some(left) = self.spoil.cut {
            if data.len() >= left {
                self.write(data.split_to(left)).await?;
                self.reset(Reason::INTERNAL_ERROR);
                return Err(Gone("cut by the script".to_owned()));
            }
            self.spoil.cut = Some(left - data.len());
        }
        match self.spoil.drip {
            Some((size, every)) => {
                while !data.is_empty() {
                    tokio::time::sleep(every).await;
                    self.write(data.split_to(size.min(data.len()))).await?;
                }
                Ok(())
            }
            None => self.write(data).await,
        }
    }

    async fn write(&mut self, mut data: Bytes) -> Result<(), Gone> {
        let body = self.headers()?;
        while !data.is_empty() {
            body.reserve_capacity(data.len());
            let ready = poll_fn(|cx| body.poll_capacity(cx)).await;
            let room = ready.ok_or_else(|| Gone("stream closed".to_owned()))??;
            body.send_data(data.split_to(room.min(data.len())), false)?;
        }
        Ok(())
    }

    /// Ends the call with a status.
    pub(crate) fn end(mut self, status: &Status) -> Result<(), Gone> {
        match &mut self.body {
            Some(body) => body.send_trailers(status.trailers())?,
            None => {
                let mut head = Self::head();
                head.headers_mut().extend(status.trailers());
                self.respond.send_response(head, true)?;
            }
        }
        Ok(())
    }

    /// Answers with a bare HTTP status, as a proxy in between would.
    pub(crate) fn http(mut self, status: StatusCode) -> Result<(), Gone> {
        let mut head = Response::new(());
        *head.status_mut() = status;
        self.respond.send_response(head, true)?;
        Ok(())
    }

    /// Resets the stream.
    pub(crate) fn reset(&mut self, reason: Reason) {
        match &mut self.body {
            Some(body) => body.send_reset(reason),
            None => self.respond.send_reset(reason),
        }
    }

    /// Waits until the client gives up on the stream.
    pub(crate) async fn closed(&mut self) {
        let _ = match &mut self.body {
            Some(body) => poll_fn(|cx| body.poll_reset(cx)).await,
            None => poll_fn(|cx| self.respond.poll_reset(cx)).await,
        };
    }
}
