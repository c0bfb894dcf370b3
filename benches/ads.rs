//! An ADS client that costs little, so that what is measured is the way and not its end: one HTTP/2
//! stream over a unix socket or TLS, gRPC frames counted and thrown away.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};

/// Large enough never to be what limits.
const WIDE: u32 = 16 << 20;

/// One open stream.
pub(crate) struct Stream {
    sender: Sender,
    receiver: Receiver,
    connection: Connection,
}

/// Its writing half.
pub(crate) struct Sender(SendStream<Bytes>);

/// Its reading half.
pub(crate) struct Receiver(Receive);

/// What keeps it open.
pub(crate) struct Connection {
    streams: SendRequest<Bytes>,
    /// Of the stream that the connection was opened with.
    driver: Option<tokio::task::JoinHandle<()>>,
}

enum Receive {
    Waiting(h2::client::ResponseFuture),
    Open(RecvStream, BytesMut),
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(driver) = &self.driver {
            driver.abort();
        }
    }
}

impl Stream {
    /// Opens a stream of the method at `path` over `io`.
    pub(crate) async fn open<T>(
        io: T,
        authority: &str,
        path: &str,
        headers: &[(&str, String)],
    ) -> io::Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        Self::open_with(io, WIDE, authority, path, headers).await
    }

    /// As [`Stream::open`], with at most `window` bytes under way to us.
    pub(crate) async fn open_with<T>(
        io: T,
        window: u32,
        authority: &str,
        path: &str,
        headers: &[(&str, String)],
    ) -> io::Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (send, connection) = client::Builder::new()
            .initial_window_size(window)
            .initial_connection_window_size(window)
            .max_frame_size(1 << 20)
            .handshake(io)
            .await
            .map_err(io::Error::other)?;
        #[expect(clippy::disallowed_methods, reason = "aborted when the stream is dropped")]
        let driver = tokio::spawn(async move {
            let _ = connection.await;
        });
        Self::begin(send, Some(driver), authority, path, headers).await
    }

    /// Opens another stream on the same connection, which ends with the first.
    pub(crate) async fn another(&self, authority: &str, path: &str) -> io::Result<Self> {
        Self::begin(self.connection.streams.clone(), None, authority, path, &[]).await
    }

    async fn begin(
        send: SendRequest<Bytes>,
        driver: Option<tokio::task::JoinHandle<()>>,
        authority: &str,
        path: &str,
        headers: &[(&str, String)],
    ) -> io::Result<Self> {
        let mut send = send.ready().await.map_err(io::Error::other)?;
        let uri = format!("http://{authority}/{path}");
        let mut request =
            http::Request::post(uri).header("content-type", "application/grpc").header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(()).map_err(io::Error::other)?;
        let (response, body) = send.send_request(request, false).map_err(io::Error::other)?;
        let connection = Connection { streams: send, driver };
        Ok(Self { sender: Sender(body), receiver: Receiver(Receive::Waiting(response)), connection })
    }

    /// Its halves, for two tasks.
    pub(crate) fn split(self) -> (Sender, Receiver, Connection) {
        (self.sender, self.receiver, self.connection)
    }

    /// Sends one message, whether the other side takes it or not.
    pub(crate) fn send(&mut self, message: &impl prost::Message) -> io::Result<()> {
        self.sender.0.send_data(frame(message)?, false).map_err(io::Error::other)
    }

    /// Receives one message whole.
    pub(crate) async fn message(&mut self) -> io::Result<Bytes> {
        self.receiver.message().await
    }

    /// Receives `count` messages and keeps only their total size.
    pub(crate) async fn count(&mut self, count: usize) -> io::Result<u64> {
        self.receiver.count(count).await
    }
}

fn frame(message: &impl prost::Message) -> io::Result<Bytes> {
    let mut frame = BytesMut::with_capacity(5 + message.encoded_len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.encoded_len()).map_err(io::Error::other)?);
    message.encode(&mut frame).map_err(io::Error::other)?;
    Ok(frame.freeze())
}

impl Sender {
    /// Sends one message as fast as the other side takes it.
    pub(crate) async fn send(&mut self, message: &impl prost::Message) -> io::Result<()> {
        let mut frame = frame(message)?;
        while !frame.is_empty() {
            self.0.reserve_capacity(frame.len());
            let room = match self.0.capacity() {
                0 => std::future::poll_fn(|cx| self.0.poll_capacity(cx)).await,
                room => Some(Ok(room)),
            };
            let room = room.ok_or(io::ErrorKind::BrokenPipe)?.map_err(io::Error::other)?;
            if room > 0 {
                self.0.send_data(frame.split_to(room.min(frame.len())), false).map_err(io::Error::other)?;
            }
        }
        Ok(())
    }
}

impl Receiver {
    async fn body(&mut self) -> io::Result<(&mut RecvStream, &mut BytesMut)> {
        if let Receive::Waiting(response) = &mut self.0 {
            let response = response.await.map_err(io::Error::other)?;
            if let Some(status) = response.headers().get("grpc-status") {
                return Err(io::Error::other(format!("the stream ended at once: grpc-status {status:?}")));
            }
            self.0 = Receive::Open(response.into_body(), BytesMut::new());
        }
        match &mut self.0 {
            Receive::Open(body, rest) => Ok((body, rest)),
            Receive::Waiting(_) => Err(io::Error::other("not open")),
        }
    }

    /// Receives one message whole.
    pub(crate) async fn message(&mut self) -> io::Result<Bytes> {
        let (body, rest) = self.body().await?;
        loop {
            if rest.len() >= 5 {
                let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]) as usize;
                if rest.len() >= 5 + length {
                    rest.advance(5);
                    return Ok(rest.split_to(length).freeze());
                }
            }
            let chunk = next(body).await?;
            rest.extend_from_slice(&chunk);
        }
    }

    /// Receives `count` messages and keeps only their total size.
    pub(crate) async fn count(&mut self, count: usize) -> io::Result<u64> {
        let (body, rest) = self.body().await?;
        let (mut done, mut total) = (0, 0u64);
        let mut skip: usize = 0;
        loop {
            let used = skip.min(rest.len());
            rest.advance(used);
            skip -= used;
            while skip == 0 && rest.len() >= 5 && done < count {
                let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]) as usize;
                rest.advance(5);
                total += length as u64;
                done += 1;
                skip = length;
                let used = skip.min(rest.len());
                rest.advance(used);
                skip -= used;
            }
            if done == count && skip == 0 {
                return Ok(total);
            }
            let chunk = next(body).await?;
            if skip >= chunk.len() {
                skip -= chunk.len();
            } else {
                rest.extend_from_slice(&chunk[skip..]);
                skip = 0;
            }
        }
    }
}

async fn next(body: &mut RecvStream) -> io::Result<Bytes> {
    match body.data().await {
        Some(Ok(chunk)) => {
            let _ = body.flow_control().release_capacity(chunk.len());
            Ok(chunk)
        }
        Some(Err(e)) => Err(io::Error::other(e)),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the stream ended")),
    }
}
