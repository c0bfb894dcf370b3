//! An ADS client that costs little, so that what is measured is the way and not its end: one HTTP/2
//! stream over a unix socket or TLS, gRPC frames counted and thrown away.

use std::io;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{self, SendRequest};
use h2::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite};

/// Large enough never to be what limits.
const WINDOW: u32 = 16 << 20;

/// One open stream.
pub struct Stream {
    send: SendStream<Bytes>,
    receive: Receive,
    connection: SendRequest<Bytes>,
    /// Of the stream that the connection was opened with.
    driver: Option<tokio::task::JoinHandle<()>>,
}

enum Receive {
    Waiting(h2::client::ResponseFuture),
    Open(RecvStream, BytesMut),
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(driver) = &self.driver {
            driver.abort();
        }
    }
}

impl Stream {
    /// Opens a stream of the method at `path` over `io`.
    pub async fn open<T>(io: T, authority: &str, path: &str, headers: &[(&str, String)]) -> io::Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (send, connection) = client::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
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
    pub async fn another(&self, authority: &str, path: &str) -> io::Result<Self> {
        Self::begin(self.connection.clone(), None, authority, path, &[]).await
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
        Ok(Self { send: body, receive: Receive::Waiting(response), connection: send, driver })
    }

    /// Sends one message.
    pub fn send(&mut self, message: &impl prost::Message) -> io::Result<()> {
        let mut frame = BytesMut::with_capacity(5 + message.encoded_len());
        frame.put_u8(0);
        frame.put_u32(u32::try_from(message.encoded_len()).map_err(io::Error::other)?);
        message.encode(&mut frame).map_err(io::Error::other)?;
        self.send.send_data(frame.freeze(), false).map_err(io::Error::other)
    }

    async fn body(&mut self) -> io::Result<(&mut RecvStream, &mut BytesMut)> {
        if let Receive::Waiting(response) = &mut self.receive {
            let response = response.await.map_err(io::Error::other)?;
            if let Some(status) = response.headers().get("grpc-status") {
                return Err(io::Error::other(format!("the stream ended at once: grpc-status {status:?}")));
            }
            self.receive = Receive::Open(response.into_body(), BytesMut::new());
        }
        match &mut self.receive {
            Receive::Open(body, rest) => Ok((body, rest)),
            Receive::Waiting(_) => Err(io::Error::other("not open")),
        }
    }

    /// Receives one message whole.
    pub async fn message(&mut self) -> io::Result<Bytes> {
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
    pub async fn count(&mut self, count: usize) -> io::Result<u64> {
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
