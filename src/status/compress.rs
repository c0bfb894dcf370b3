//! Compression of answers, by the rules of the handler the Go agent wraps around all of its pages.

use bytes::Bytes;
use flate2::{Compress, Compression, FlushCompress, Status};
use futures_util::{Stream, StreamExt, stream};
use http::{HeaderMap, HeaderValue, Method, header};
use zstd::stream::raw::{CParameter, Encoder, Operation, OutBuffer};

use crate::serve::respond::{Answer, Body, Content};

/// Smaller bodies go out plain.
const MINIMUM: usize = 1024;
/// One write's worth.
const PIECE: usize = 16 * 1024;
/// Metrics repeat whole lines, so that looking longer for repetitions finds few more: 6, the library's usual level, takes 1.8 to
/// 4 times as much of the one thread (benches/README.md).
const GZIP_LEVEL: u32 = 2;
/// zstd's fastest level. Its window is made smaller (128 kB, not 512 kB): what is gained beyond does not
/// pay for the memory, which a scrape would leave behind.
const ZSTD_LEVEL: i32 = 1;
const ZSTD_WINDOW_LOG: u32 = 17;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Coding {
    None,
    Gzip,
    Zstd,
}

impl Coding {
    /// What the caller takes: the one with the higher `q`, zstd when equal; `*` is not understood. As in
    /// Go's handler the first `Accept-Encoding` counts, and in it the first mention of a coding.
    pub(super) fn choose(headers: &HeaderMap, method: &Method) -> Self {
        let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|v| v.to_str().ok());
        let Some(accepted) = accepted.filter(|_| method != Method::HEAD) else { return Self::None };
        let (gzip, zstd) = (quality(accepted, "gzip"), quality(accepted, "zstd"));
        if zstd > 0.0 && zstd >= gzip {
            Self::Zstd
        } else if gzip > 0.0 {
            Self::Gzip
        } else {
            Self::None
        }
    }
}

/// The `q` of a coding, 0..=1; 0 where it is not mentioned or its `q` is no number. Another parameter after
/// the `q` hides it.
fn quality(accepted: &str, coding: &str) -> f64 {
    let items = accepted.split(',').map(|item| item.split_once(';').unwrap_or((item, "")));
    let Some((_, params)) = { items }.find(|(name, _)| name.trim().eq_ignore_ascii_case(coding)) else {
        return 0.0;
    };
    let last = params.rsplit(';').next().unwrap_or("").trim();
    let q = last.strip_prefix(['q', 'Q']).and_then(|rest| rest.strip_prefix('='));
    let q = q.map_or(1.0, |q| q.parse::<f64>().unwrap_or(0.0));
    if q.is_nan() { 0.0 } else { q.clamp(0.0, 1.0) }
}

fn worth_it(headers: &HeaderMap) -> bool {
    if headers.contains_key(header::CONTENT_ENCODING) || headers.contains_key(header::CONTENT_RANGE) {
        return false;
    }
    let kind =
        headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("").to_ascii_lowercase();
    let packed = ["compress", "zip", "snappy", "lzma", "xz", "zstd", "brotli", "stuffit"];
    let media = ["video/", "audio/", "image/jp"];
    !packed.iter().any(|p| kind.contains(p)) && !media.iter().any(|m| kind.starts_with(m))
}

/// Compresses an answer where that is asked for and worth it.
pub(super) async fn apply(answer: Answer, coding: Coding) -> Answer {
    if coding == Coding::None || !worth_it(answer.headers()) {
        return answer;
    }
    let (mut head, mut body) = answer.into_parts();
    let content = std::mem::replace(&mut body.content, Content::Whole(Bytes::new()));
    let (start, rest) = match content {
        Content::Whole(bytes) => (bytes, None),
        Content::Stream(mut stream) => {
            // Held back until it is sure to be long enough.
            let mut start = Vec::new();
            let mut ended = false;
            while start.len() < MINIMUM && !ended {
                match stream.next().await {
                    Some(piece) => start.extend_from_slice(&piece),
                    None => ended = true,
                }
            }
            (Bytes::from(start), (!ended).then_some(stream))
        }
    };
    if start.len() < MINIMUM && rest.is_none() {
        return Answer::from_parts(head, Body::whole(start));
    }
    let mut encoder = match coding {
        Coding::Gzip => Box::new(Gzip::new()) as Box<dyn Packer>,
        _ => match Zstd::new() {
            Ok(zstd) => Box::new(zstd) as Box<dyn Packer>,
            Err(error) => {
                tracing::warn!("no zstd encoder, the answer goes out plain: {error}");
                let rest = rest.map_or_else(|| stream::empty().boxed(), StreamExt::boxed);
                return Answer::from_parts(head, Body::stream(stream::iter([start]).chain(rest)));
            }
        },
    };
    let name = if coding == Coding::Gzip { "gzip" } else { "zstd" };
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::ACCEPT_RANGES);
    head.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static(name));
    let Some(rest) = rest else {
        // Whoever reads it slowly has no compressor meanwhile.
        let mut out = encoder.pack(&start);
        out.extend(encoder.end());
        return Answer::from_parts(head, Body::stream(stream::iter([Bytes::from(out)])));
    };
    Answer::from_parts(head, Body::stream(packed(encoder, stream::iter([start]).chain(rest))))
}

fn packed(
    encoder: Box<dyn Packer>,
    input: impl Stream<Item = Bytes> + Send + 'static,
) -> impl Stream<Item = Bytes> + Send {
    let state = (encoder, Box::pin(input), false);
    stream::unfold(state, |(mut encoder, mut input, mut ended)| async move {
        while !ended {
            let out = match input.next().await {
                Some(piece) => encoder.pack(&piece),
                None => {
                    ended = true;
                    encoder.end()
                }
            };
            if !out.is_empty() {
                return Some((Bytes::from(out), (encoder, input, ended)));
            }
        }
        None
    })
}

/// A compressor fed piece by piece.
trait Packer: Send {
    fn pack(&mut self, input: &[u8]) -> Vec<u8>;
    fn end(&mut self) -> Vec<u8>;
}

struct Gzip(Compress);

impl Gzip {
    fn new() -> Self {
        Self(Compress::new_gzip(Compression::new(GZIP_LEVEL), 15))
    }

    fn run(&mut self, mut input: &[u8], flush: FlushCompress) -> Vec<u8> {
        let mut out = Vec::new();
        loop {
            out.reserve(PIECE.min(input.len() + 64));
            let before = self.0.total_in();
            let Ok(status) = self.0.compress_vec(input, &mut out, flush) else { return out };
            let used = usize::try_from(self.0.total_in() - before).unwrap_or(input.len());
            input = &input[used.min(input.len())..];
            let full = out.len() == out.capacity();
            if status == Status::StreamEnd || (input.is_empty() && !full && flush == FlushCompress::None) {
                return out;
            }
        }
    }
}

impl Packer for Gzip {
    fn pack(&mut self, input: &[u8]) -> Vec<u8> {
        self.run(input, FlushCompress::None)
    }

    fn end(&mut self) -> Vec<u8> {
        self.run(&[], FlushCompress::Finish)
    }
}

struct Zstd(Encoder<'static>);

impl Zstd {
    fn new() -> std::io::Result<Self> {
        let mut encoder = Encoder::new(ZSTD_LEVEL)?;
        encoder.set_parameter(CParameter::WindowLog(ZSTD_WINDOW_LOG))?;
        Ok(Self(encoder))
    }
}

impl Packer for Zstd {
    fn pack(&mut self, mut input: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut buffer = [0; PIECE];
        while !input.is_empty() {
            // An encoder of valid parameters does not fail.
            let Ok(status) = self.0.run_on_buffers(input, &mut buffer) else { break };
            out.extend_from_slice(&buffer[..status.bytes_written]);
            input = &input[status.bytes_read..];
        }
        out
    }

    fn end(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut buffer = [0; PIECE];
        loop {
            let mut into = OutBuffer::around(&mut buffer[..]);
            let Ok(left) = self.0.finish(&mut into, true) else { break };
            let n = into.pos();
            out.extend_from_slice(&buffer[..n]);
            if left == 0 {
                break;
            }
        }
        out
    }
}

#[cfg(test)]
mod tests;
