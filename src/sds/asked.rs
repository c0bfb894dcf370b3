//! A request whose secrets are not all there yet.
//!
//! Each of its names is waited for by itself: to leave one costs that one, and what was had of the others is kept.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::{AbortHandle, Abortable, Aborted, BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tonic::Status;

use super::session::cost;
use crate::base::error::chain;
use crate::base::quote::{cut, shown};
use crate::base::seldom::Seldom;
use crate::secrets::{Error, Fetched, ResourceName, SecretSource};

/// Any client can cause these, as often as it likes.
static UNKNOWN: Seldom = Seldom::new(60);
/// Longest text of an error or a refusal that is told or logged.
pub(super) const CAUSE: usize = 2048;

/// A name as it was asked for, and what it names.
pub(super) type Named = (String, ResourceName);

type Outcome = Result<Fetched, Arc<Error>>;

/// See the module.
pub(super) struct Asked {
    /// In the request's order.
    wants: Vec<Want>,
    /// How many of them are waited for.
    open: usize,
    /// What the names take that are not left.
    size: usize,
    fetches: FuturesUnordered<Abortable<BoxFuture<'static, (usize, Outcome)>>>,
}

struct Want {
    name: Named,
    state: State,
}

enum State {
    Open(AbortHandle),
    There(Box<Fetched>),
    Left,
}

impl Asked {
    pub(super) fn of(source: &dyn SecretSource, names: Vec<Named>) -> Self {
        let size = names.iter().map(|(text, _)| cost(text)).sum();
        let fetches = FuturesUnordered::new();
        let want = |(at, name): (usize, Named)| {
            let (handle, registration) = AbortHandle::new_pair();
            let fetch = source.fetch(name.1.clone()).map(move |outcome| (at, outcome)).boxed();
            fetches.push(Abortable::new(fetch, registration));
            Want { name, state: State::Open(handle) }
        };
        let wants: Vec<_> = names.into_iter().enumerate().map(want).collect();
        Self { open: wants.len(), wants, size, fetches }
    }

    /// What its names take; see [`cost`].
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// These are waited for no more, and not answered. Whether anything is left to be answered.
    pub(super) fn leave(&mut self, left: &BTreeSet<String>) -> bool {
        let mut wanted = self.wants.is_empty();
        for want in &mut self.wants {
            if left.contains(&want.name.0) {
                match std::mem::replace(&mut want.state, State::Left) {
                    State::Open(fetch) => {
                        fetch.abort();
                        self.open -= 1;
                    }
                    State::There(_) => {}
                    State::Left => continue,
                }
                self.size -= cost(&want.name.0);
            }
            wanted |= !matches!(want.state, State::Left);
        }
        wanted
    }

    /// What was asked for and is not left, in its order: all of it or nothing, as Envoy would not ask again for a name that
    /// was left out.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<(Named, Fetched)>, Status>> {
        while self.open > 0 {
            match ready!(self.fetches.poll_next_unpin(cx)) {
                Some(Ok((at, Ok(fetched)))) => {
                    self.wants[at].state = State::There(Box::new(fetched));
                    self.open -= 1;
                }
                Some(Ok((at, Err(error)))) => {
                    return Poll::Ready(Err(failed(&self.wants[at].name.0, error.as_ref())));
                }
                Some(Err(Aborted)) => {}
                None => break,
            }
        }
        let there = std::mem::take(&mut self.wants).into_iter().filter_map(|want| match want.state {
            State::There(fetched) => Some((want.name, *fetched)),
            State::Open(_) | State::Left => None,
        });
        Poll::Ready(Ok(there.collect()))
    }
}

/// What all of them name.
pub(super) fn all_named(source: &dyn SecretSource, names: Vec<String>) -> Result<Vec<Named>, Status> {
    names.into_iter().map(|text| named(source, &text).map(|name| (text, name))).collect()
}

/// What a text names.
fn named(source: &dyn SecretSource, text: &str) -> Result<ResourceName, Status> {
    source.name(text).map_err(|e| {
        let error = Error::Name(e);
        let line = chain(&error);
        if let Some(more) = UNKNOWN.may_hold(line.len()) {
            tracing::warn!(target: "sds", "{line}{more}");
        }
        failed(text, &error)
    })
}

/// What a client is told of a name that cannot be given.
pub(super) fn failed(name: &str, error: &Error) -> Status {
    // A cause may name a file by the name's own words.
    let cause = chain(error);
    Status::unknown(format!("failed to generate secret for {}: {}", shown(name), cut(&cause, CAUSE)))
}
