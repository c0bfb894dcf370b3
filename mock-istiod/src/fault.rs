//! What goes wrong, when a script says so.
//!
//! A [`Script`] belongs to one service. Each call takes the next step; when the steps are used up, calls get
//! what [`Script::always`] set, or no fault at all. A step is a list of faults: those of the transport apply to
//! both services, those of the signed answer to the certificate service only.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::grpc::Code;

/// One thing that goes wrong.
#[derive(Debug, Clone, PartialEq)]
pub enum Fault {
    /// The call ends with this status.
    Refuse(Code, String),
    /// Nothing happens for so long, then what follows.
    Delay(Duration),
    /// The call is taken and never answered; the connection stays.
    HalfOpen,
    /// The answer stops after so many bytes of its body and the stream is reset.
    Cut(usize),
    /// The connection breaks after the server has written so many more bytes on it, HTTP/2 frames and all.
    Sever(usize),
    /// The answer comes in pieces of so many bytes, with a pause before each.
    Drip(usize, Duration),
    /// The connection is told to go away when the call arrives; the call itself is answered.
    GoAway,
    /// The connection is dropped when the call arrives.
    Drop,
    /// The certificate lives so long, whatever was asked for.
    ShortLife(Duration),
    /// The certificate ended so long ago.
    Expired(Duration),
    /// The certificate begins in so long.
    Future(Duration),
    /// The certificate carries this URI instead of the caller's identity.
    WrongSan(String),
    /// The certificate is for another key.
    WrongKey,
    /// The entries of the chain are in the wrong order: the leaf is not the first.
    WrongOrder,
    /// The chain is not PEM.
    Garbage,
    /// The chain has no entry.
    EmptyChain,
    /// The chain has the leaf only.
    OneCertificate,
    /// The chain is this.
    Chain(Vec<String>),
}

impl Fault {
    /// Too busy: what istiod's rate limit says.
    #[must_use]
    pub fn exhausted() -> Self {
        Self::Refuse(Code::ResourceExhausted, "request rate limit exceeded".to_owned())
    }

    /// Refused with `code`.
    #[must_use]
    pub fn refuse(code: Code) -> Self {
        Self::Refuse(code, format!("refused by the script ({code:?})"))
    }
}

/// How a script's text is not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("fault {text:?}: {reason}")]
pub struct ParseError {
    text: String,
    reason: String,
}

impl FromStr for Fault {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let wrong = |reason: &str| ParseError { text: text.to_owned(), reason: reason.to_owned() };
        let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
        let need = || value.ok_or_else(|| wrong("needs a value"));
        Ok(match name {
            "refuse" => {
                let (code, message) = need()?.split_once('/').map_or((need()?, None), |(c, m)| (c, Some(m)));
                let code = code.parse().map_err(|()| wrong("needs a gRPC code, a number or a name"))?;
                match message {
                    Some(message) => Self::Refuse(code, message.to_owned()),
                    None => Self::refuse(code),
                }
            }
            "exhausted" => Self::exhausted(),
            "delay" => {
                Self::Delay(duration(need()?).ok_or_else(|| wrong("needs a time, as in 500ms or 2s"))?)
            }
            "half-open" => Self::HalfOpen,
            "cut" => Self::Cut(need()?.parse().map_err(|_| wrong("needs a number of bytes"))?),
            "sever" => Self::Sever(need()?.parse().map_err(|_| wrong("needs a number of bytes"))?),
            "drip" => {
                let (bytes, every) = need()?.split_once('/').ok_or_else(|| wrong("needs BYTES/TIME"))?;
                Self::Drip(
                    bytes
                        .parse()
                        .ok()
                        .filter(|n| *n > 0)
                        .ok_or_else(|| wrong("needs a number of bytes above 0"))?,
                    duration(every).ok_or_else(|| wrong("needs a time, as in 500ms or 2s"))?,
                )
            }
            "goaway" => Self::GoAway,
            "drop" => Self::Drop,
            "short-life" => {
                Self::ShortLife(duration(need()?).ok_or_else(|| wrong("needs a time, as in 500ms or 2s"))?)
            }
            "expired" => {
                Self::Expired(duration(need()?).ok_or_else(|| wrong("needs a time, as in 500ms or 2s"))?)
            }
            "future" => {
                Self::Future(duration(need()?).ok_or_else(|| wrong("needs a time, as in 500ms or 2s"))?)
            }
            "wrong-san" => Self::WrongSan(need()?.to_owned()),
            "wrong-key" => Self::WrongKey,
            "wrong-order" => Self::WrongOrder,
            "garbage" => Self::Garbage,
            "empty-chain" => Self::EmptyChain,
            "one-certificate" => Self::OneCertificate,
            _ => return Err(wrong("unknown; the README lists them")),
        })
    }
}

/// `500ms`, `2s`, `5m`, `1h`; parts may be fractions.
#[must_use]
pub fn duration(text: &str) -> Option<Duration> {
    let (number, scale) = ["ms", "s", "m", "h"]
        .iter()
        .zip([0.001, 1.0, 60.0, 3600.0])
        .find_map(|(unit, scale)| Some((text.strip_suffix(unit)?.parse::<f64>().ok()?, scale)))?;
    Duration::try_from_secs_f64(number * scale).ok()
}

/// A step of a script in text: faults joined with `+`, and before them how often (`3*`) or `always*`.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// How many calls it is for; `None` means every call after the other steps.
    pub times: Option<usize>,
    /// What goes wrong; nothing, if empty (text: `ok`).
    pub faults: Vec<Fault>,
}

impl FromStr for Step {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let (times, rest) = match text.split_once('*') {
            Some(("always", rest)) => (None, rest),
            Some((times, rest)) => {
                let wrong = || ParseError {
                    text: text.to_owned(),
                    reason: "before * stands a number or always".into(),
                };
                (Some(times.parse().map_err(|_| wrong())?), rest)
            }
            None => (Some(1), text),
        };
        let faults = if rest == "ok" {
            Vec::new()
        } else {
            rest.split('+').map(str::parse).collect::<Result<_, _>>()?
        };
        Ok(Self { times, faults })
    }
}

/// What happens to the coming calls of one service. Cheap to clone.
#[derive(Clone, Default)]
pub struct Script(Arc<Mutex<Steps>>);

#[derive(Default)]
struct Steps {
    next: VecDeque<Vec<Fault>>,
    always: Vec<Fault>,
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.0.lock().expect("no panic holds this lock");
        f.debug_struct("Script").field("next", &steps.next).field("always", &steps.always).finish()
    }
}

impl Script {
    /// The next call that has no step yet gets this one fault.
    pub fn next(&self, fault: Fault) {
        self.step(vec![fault]);
    }

    /// The next call that has no step yet gets these faults; none, if empty.
    pub fn step(&self, faults: Vec<Fault>) {
        self.0.lock().expect("no panic holds this lock").next.push_back(faults);
    }

    /// Calls without a step get these.
    pub fn always(&self, faults: Vec<Fault>) {
        self.0.lock().expect("no panic holds this lock").always = faults;
    }

    /// Adds a step from text.
    pub fn add(&self, step: Step) {
        match step.times {
            None => self.always(step.faults),
            Some(times) => (0..times).for_each(|_| self.step(step.faults.clone())),
        }
    }

    /// Nothing goes wrong any more.
    pub fn clear(&self) {
        *self.0.lock().expect("no panic holds this lock") = Steps::default();
    }

    /// The faults for the call that has just arrived.
    pub(crate) fn take(&self) -> Vec<Fault> {
        let mut steps = self.0.lock().expect("no panic holds this lock");
        steps.next.pop_front().unwrap_or_else(|| steps.always.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_come_in_order_and_then_the_rest() {
        let script = Script::default();
        for text in ["2*refuse=14", "ok", "always*delay=10ms+short-life=2s"] {
            script.add(text.parse().unwrap());
        }
        assert_eq!(script.take(), [Fault::refuse(Code::Unavailable)]);
        assert_eq!(script.take(), [Fault::refuse(Code::Unavailable)]);
        assert_eq!(script.take(), []);
        let rest = [Fault::Delay(Duration::from_millis(10)), Fault::ShortLife(Duration::from_secs(2))];
        assert_eq!(script.take(), rest);
        assert_eq!(script.take(), rest);
    }

    #[test]
    fn bad_text_is_named_with_the_reason() {
        for (text, reason) in [
            ("refuse=99", "needs a gRPC code, a number or a name"),
            ("drip=0/1s", "needs a number of bytes above 0"),
            ("delay=soon", "needs a time, as in 500ms or 2s"),
            ("cut", "needs a value"),
            ("explode", "unknown; the README lists them"),
        ] {
            let error = text.parse::<Step>().unwrap_err();
            assert_eq!(error.to_string(), format!("fault {text:?}: {reason}"));
        }
        assert!("x*ok".parse::<Step>().is_err());
    }
}
