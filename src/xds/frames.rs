//! gRPC's 5-byte frames over HTTP bodies, and the gate that decides about each message. Pure.
//!
//! A [`Gate`] takes the chunks of one direction as they arrive, walks the frames, feeds the scanner and
//! asks its [`Rules`] what to do with each message: pass it on, keep it back, or collect it for the agent
//! itself. A message is held only while the rules cannot tell, and at most for their look-ahead; then its
//! bytes go on as they come, in slices of the chunks they arrived in: nothing is re-encoded, and copied is only
//! what arrives in tiny pieces and has to be held.

use bytes::{Bytes, BytesMut};

use super::pieces::Pieces;
use super::scan::{Facts, Malformed, Message, Scanner};

/// Bytes of a frame's header: one flag, four of length.
pub(crate) const HEADER: usize = 5;

/// What is to be done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Not to be told yet: hold it.
    Undecided,
    /// Its bytes go on.
    Pass,
    /// Its bytes go nowhere.
    Drop,
    /// It is gathered whole for the agent.
    Collect,
}

/// How much of a message has been seen when the rules are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// Less than the look-ahead.
    Beginning,
    /// More than the look-ahead.
    Lookahead,
    /// More than may be held: a decision is due.
    Cap,
    /// All of it: a decision is due.
    Whole,
}

/// Decides about the messages of one direction.
pub trait Rules {
    /// What kind of message this direction carries.
    fn message(&self) -> Message;
    /// Largest message accepted, in bytes.
    fn limit(&self) -> u64;
    /// Bytes held before the first decision is due.
    fn lookahead(&self) -> usize;
    /// Bytes held of an undecided message at most.
    fn cap(&self) -> usize;
    /// Largest message collected, in bytes; of a larger one nothing is kept.
    fn collect_limit(&self) -> usize;
    /// Whether bytes of neighbouring messages may leave as one slice, which then follows the [`End`]s
    /// of its messages instead of preceding each.
    fn joins(&self) -> bool;
    /// The decision.
    fn judge(&self, facts: &Facts, seen: Seen) -> Verdict;
    /// A message has ended.
    fn ended(&mut self, end: &End);
}

/// A message that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// What was found in it.
    pub facts: Facts,
    /// What was done with it.
    pub verdict: Verdict,
    /// Its size in bytes, without the frame's header.
    pub length: u64,
    /// The whole message, if it was collected and not too large for that.
    pub body: Option<Bytes>,
}

/// What comes out of a gate, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Out {
    /// Bytes to send on: frames, or pieces of one.
    Bytes(Bytes),
    /// A message has ended.
    End(End),
}

/// Why a direction cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A compressed message. We do not announce compression, so none may come.
    #[error("a compressed message came although no compression was agreed")]
    Compressed,
    /// Not gRPC.
    #[error("a message begins with flag {0}, which gRPC does not know")]
    Flag(u8),
    /// Larger than accepted.
    #[error("grpc: received message larger than max ({length} vs. {limit})")]
    TooLarge {
        /// Its size in bytes.
        length: u64,
        /// The limit in bytes.
        limit: u64,
        /// Its type URL, or empty when it could not be found.
        type_url: String,
    },
    /// Not a protobuf message.
    #[error("grpc: failed to unmarshal the received message: {0}")]
    Malformed(#[from] Malformed),
}

#[derive(Debug)]
struct Current {
    scanner: Scanner,
    length: u64,
    left: u64,
    verdict: Verdict,
    // Raw bytes (header included) of a message that is held or collected.
    held: Pieces,
    // Something of it has been passed on.
    passed: bool,
    // It is larger than accepted and read only to learn its type.
    refused: bool,
}

/// The state of one direction.
#[derive(Debug)]
pub struct Gate<R> {
    rules: R,
    header: [u8; HEADER],
    have: usize,
    current: Option<Current>,
}

// The slice of the chunk that is being passed on.
#[derive(Default)]
struct Run {
    from: usize,
    to: usize,
}

impl Run {
    fn flush(&mut self, chunk: &Bytes, out: &mut Vec<Out>) {
        if self.to > self.from {
            out.push(Out::Bytes(chunk.slice(self.from..self.to)));
        }
        self.from = self.to;
    }

    fn extend(&mut self, from: usize, to: usize, chunk: &Bytes, out: &mut Vec<Out>) {
        if self.to != from {
            self.flush(chunk, out);
            self.from = from;
        }
        self.to = to;
    }
}

impl<R: Rules> Gate<R> {
    /// At the beginning of a stream.
    pub fn new(rules: R) -> Self {
        Self { rules, header: [0; HEADER], have: 0, current: None }
    }

    /// The rules.
    pub fn rules(&self) -> &R {
        &self.rules
    }

    /// The rules, to change what they know.
    pub(crate) fn rules_mut(&mut self) -> &mut R {
        &mut self.rules
    }

    /// Whether another message may be put in now: nothing of the current one has been passed on.
    pub fn between(&self) -> bool {
        self.current.as_ref().is_none_or(|c| !c.passed)
    }

    /// Whether the stream ends cleanly if it ends here.
    pub fn whole(&self) -> bool {
        self.have == 0 && self.current.is_none()
    }

    /// Takes back what is here of a message that has not ended and was not passed on, and stands at the beginning of a
    /// message again. Of what was passed on of it nothing is here: that and this are the message's beginning.
    ///
    /// # Errors
    /// When it is larger than accepted, and so is not here.
    pub(crate) fn take_back(&mut self) -> Result<Vec<Bytes>, Error> {
        let head = Bytes::copy_from_slice(&self.header[..std::mem::take(&mut self.have)]);
        match self.current.take() {
            None => Ok(vec![head]),
            Some(current) if current.refused => Err(too_large(&current, self.rules.limit())),
            Some(mut current) => Ok(current.held.take().collect()),
        }
    }

    /// Takes the next chunk and appends what comes out of it.
    ///
    /// # Errors
    /// When the stream cannot go on; what was appended before is still good.
    pub fn push(&mut self, chunk: &Bytes, out: &mut Vec<Out>) -> Result<(), Error> {
        let mut run = Run::default();
        let result = self.walk(chunk, &mut run, out);
        run.flush(chunk, out);
        result
    }

    fn walk(&mut self, chunk: &Bytes, run: &mut Run, out: &mut Vec<Out>) -> Result<(), Error> {
        let mut at = 0;
        // Where the current message's bytes in this chunk begin.
        let mut from = 0;
        loop {
            if self.current.is_none() {
                if at == chunk.len() {
                    return Ok(());
                }
                let start = at;
                let n = (HEADER - self.have).min(chunk.len() - at);
                self.header[self.have..self.have + n].copy_from_slice(&chunk[at..at + n]);
                self.have += n;
                at += n;
                if self.have < HEADER {
                    return Ok(());
                }
                let mut current = self.begin()?;
                if n == HEADER {
                    from = start;
                } else {
                    current.held.push(Bytes::copy_from_slice(&self.header));
                    from = at;
                }
                self.current = Some(current);
            } else if at == chunk.len() {
                return Ok(());
            }
            let current = self.current.as_mut().expect("set above");
            let n = usize::try_from(current.left).unwrap_or(usize::MAX).min(chunk.len() - at);
            current.scanner.push(&chunk[at..at + n])?;
            current.left -= n as u64;
            at += n;
            if current.refused {
                refuse(current, self.rules.limit())?;
                continue;
            }
            if current.left == 0 {
                // Before it goes on: whoever reads it could not make anything of it either.
                current.scanner.check()?;
            }
            step(current, &self.rules);
            match current.verdict {
                Verdict::Pass => {
                    if !current.held.is_empty() {
                        run.flush(chunk, out);
                        out.extend(current.held.take().map(Out::Bytes));
                    }
                    run.extend(from, at, chunk, out);
                    current.passed = true;
                }
                Verdict::Collect if current.length > self.rules.collect_limit() as u64 => {
                    current.held = Pieces::default();
                }
                Verdict::Undecided | Verdict::Collect => {
                    if current.verdict == Verdict::Collect {
                        current.held.gather();
                    }
                    if at > from {
                        current.held.push(chunk.slice(from..at));
                    }
                }
                Verdict::Drop => current.held = Pieces::default(),
            }
            from = at;
            if current.left == 0 {
                let end = self.end()?;
                if !self.rules.joins() {
                    run.flush(chunk, out);
                }
                out.push(Out::End(end));
            }
        }
    }

    fn begin(&mut self) -> Result<Current, Error> {
        self.have = 0;
        match self.header[0] {
            0 => {}
            1 => return Err(Error::Compressed),
            flag => return Err(Error::Flag(flag)),
        }
        let length =
            u64::from(u32::from_be_bytes([self.header[1], self.header[2], self.header[3], self.header[4]]));
        Ok(Current {
            scanner: Scanner::new(self.rules.message(), length),
            length,
            left: length,
            verdict: Verdict::Undecided,
            held: Pieces::default(),
            passed: false,
            refused: length > self.rules.limit(),
        })
    }

    fn end(&mut self) -> Result<End, Error> {
        let current = self.current.take().expect("a message is ending");
        let facts = current.scanner.finish()?;
        let collected = current.verdict == Verdict::Collect;
        let body = (collected && current.length <= self.rules.collect_limit() as u64)
            .then(|| current.held.into_one().slice(HEADER..));
        let end = End { facts, verdict: current.verdict, length: current.length, body };
        self.rules.ended(&end);
        Ok(end)
    }
}

// Asks the rules as soon as there is something new to ask about.
fn step(current: &mut Current, rules: &impl Rules) {
    let whole = current.left == 0;
    let seen = current.length - current.left;
    let when = if whole {
        Seen::Whole
    } else if seen > rules.cap() as u64 {
        Seen::Cap
    } else if seen > rules.lookahead() as u64 {
        Seen::Lookahead
    } else {
        Seen::Beginning
    };
    let open = match current.verdict {
        Verdict::Undecided => true,
        // What the hint promised is checked against the message's own type, if nothing was lost yet.
        Verdict::Collect => whole && current.length <= rules.collect_limit() as u64,
        Verdict::Pass | Verdict::Drop => false,
    };
    if open {
        current.verdict = rules.judge(current.scanner.facts(), when);
        debug_assert!(
            current.verdict != Verdict::Undecided || matches!(when, Seen::Beginning | Seen::Lookahead)
        );
    }
}

// A message over the limit is read until its type is known, so that the error can name it.
fn refuse(current: &Current, limit: u64) -> Result<(), Error> {
    let facts = current.scanner.facts();
    if facts.type_url.is_none() && facts.hint.is_none() && current.left > 0 {
        return Ok(());
    }
    Err(too_large(current, limit))
}

fn too_large(current: &Current, limit: u64) -> Error {
    let facts = current.scanner.facts();
    let type_url = facts.type_url.as_ref().or(facts.hint.as_ref()).cloned().unwrap_or_default();
    Error::TooLarge { length: current.length, limit, type_url }
}

/// A message in its frame.
#[must_use]
pub fn frame(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = BytesMut::with_capacity(HEADER + length);
    framed.extend_from_slice(&[0]);
    framed.extend_from_slice(&u32::try_from(length).expect("our own messages are small").to_be_bytes());
    message.encode(&mut framed).expect("the buffer has room");
    framed.freeze()
}

/// Bytes of a message in its frame.
#[must_use]
pub fn frame_bytes(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(HEADER + message.len());
    framed.extend_from_slice(&[0]);
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(message);
    framed.freeze()
}

#[cfg(test)]
mod tests;
