//! Parts, one after the other, as one stream of bytes.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::{FutureExt, Stream, stream};

use super::buffers::Buffers;
use super::lines::Lines;
use super::part::{Failure, Part, Reason};
use super::{Merger, is_open_metrics};
use crate::base::quote::{cut, shown};
use crate::fetch::PIECE;

/// Bytes sent at a time, as far as they are available: each piece is a chunk of HTTP, and some readers do work
/// for every chunk. Go's are 32 kB.
const CHUNK: usize = 48 * 1024;

struct Merging {
    /// What is to be sent next, in a buffer of `buffers` unless it has no room at all.
    out: Vec<u8>,
    buffers: Buffers,
    parts: VecDeque<Part>,
    open_metrics: bool,
    /// Several applications: each body is given its last line end, and the whole its one `# EOF`.
    several: bool,
    merger: Arc<Merger>,
}

/// `own`, then the parts. The stream always comes to an end of its own.
pub(super) fn stream(
    own: Vec<u8>,
    parts: Vec<Part>,
    open_metrics: bool,
    several: bool,
    merger: Arc<Merger>,
) -> impl Stream<Item = Bytes> + Send {
    let buffers = Buffers::new(CHUNK + PIECE);
    let merging = Merging { out: own, buffers, parts: parts.into(), open_metrics, several, merger };
    stream::unfold(merging, |mut merging| async move {
        loop {
            if merging.out.capacity() == 0 {
                merging.out = merging.buffers.take().await;
            }
            let there = merging.out.len();
            if there == 0 {
                merging.step().await?;
            } else if there >= CHUNK || !matches!(merging.step().now_or_never(), Some(Some(()))) {
                // Enough, or nothing more at this moment: a slow part holds up nothing that is there.
                let chunk = merging.buffers.lend(std::mem::take(&mut merging.out));
                return Some((chunk, merging));
            }
        }
    })
}

impl Merging {
    /// One piece of the part whose turn it is; `None` when there is none left. Nothing is lost when it is
    /// given up before its end.
    async fn step(&mut self) -> Option<()> {
        let part = self.parts.front_mut()?;
        let limit = self.merger.config.limit;
        match part.piece().await {
            Ok(Some(mut piece)) => {
                let room = limit.map_or(u64::MAX, |limit| limit.saturating_sub(part.bytes));
                let over = piece.len() as u64 > room;
                if over {
                    piece.truncate(usize::try_from(room).unwrap_or(usize::MAX));
                }
                part.bytes += piece.len() as u64;
                let out = &mut self.out;
                part.lines.feed(&piece, |bytes| out.extend_from_slice(bytes));
                if over {
                    let most = limit.unwrap_or_default();
                    self.cut(&Failure::new(
                        Reason::Limit,
                        format!("it is longer than the {most} bytes allowed"),
                    ));
                }
            }
            Ok(None) => {
                let lines = std::mem::take(&mut part.lines);
                // Where there are several, the last one has lost its own end.
                let (application, ended) =
                    (part.kind == "application", is_open_metrics(part) && !self.several);
                self.parts.pop_front();
                let eof = self.open_metrics && self.parts.is_empty() && !ended;
                if let Some(line) = Lines::end(lines) {
                    self.out.extend_from_slice(&line);
                    // A last line without its end: the Go agent joins Envoy's to what follows, and so do
                    // we; it ends an application's where there are several.
                    if application && (self.several || eof || !self.parts.is_empty()) {
                        self.out.push(b'\n');
                    }
                }
                if eof {
                    // Plain text came last, though the whole is OpenMetrics.
                    self.out.extend_from_slice(b"# EOF\n");
                }
            }
            Err(failure) => self.cut(&failure),
        }
        Some(())
    }

    /// The part in turn has broken off.
    fn cut(&mut self, failure: &Failure) {
        let Some(part) = self.parts.pop_front() else { return };
        let merger = &*self.merger;
        let (kind, bytes) = (part.kind, part.bytes);
        let why = failure.to_string();
        let why = cut(&why, super::CAUSE);
        if let Some(more) = super::LOST.may_hold(why.len()) {
            let url = shown(&part.url);
            tracing::warn!("{kind} metrics are cut after {bytes} bytes: {url}: {why}{more}");
        }
        merger.failed(kind, &part.url, failure);
        if self.open_metrics && !self.several && self.parts.is_empty() && part.lines.is_whole() {
            // All that was to come has come, and nothing may follow it. Of several the last one's end is ours.
            return;
        }
        if part.lines.is_inside() {
            // What follows must not become part of it.
            self.out.push(b'\n');
        }
        let half = part.lines.cut();
        // Scripts compare scrapes: without being asked for details, only a loss that the Go agent would
        // have passed on as half a line, or one it does not know, is marked in the text.
        if half || merger.config.details || failure.reason == Reason::Limit {
            let label = failure.reason.label();
            // OpenMetrics knows no comments; a sample is understood in both formats.
            let line = if self.open_metrics {
                format!("istio_agent_scrape_part_cut{{type=\"{kind}\",reason=\"{label}\"}} 1\n")
            } else {
                format!("# istio_agent: {kind} metrics are cut here after {bytes} bytes ({label})\n")
            };
            self.out.extend_from_slice(line.as_bytes());
        }
        if self.open_metrics && self.parts.is_empty() {
            // Without it a strict reader would throw away the other parts as well.
            self.out.extend_from_slice(b"# EOF\n");
        }
    }
}
