//! Envoy is answered from what is kept: whether it can be, with what, and what is told of it.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::oneshot;

use super::{Event, Glance, Memory, NONE};
use crate::base::lane::Lane;
use crate::replay::StandIn;
use crate::trouble::{Kind, Report, Reporter};
use crate::xds::protocol::Protocol;
use crate::xds::types;

/// One Envoy is answered at a time, and one that was replaced may have left an answer behind.
static ANSWERS: Lane = Lane::new("answer from memory", 2);
/// How long a stream waits for what was before it, a slow disk included.
const CATCH_UP: Duration = Duration::from_secs(2);

impl Memory {
    /// Whether a stream of this form could be answered, everything before it taken into account.
    pub(in crate::xds) async fn can_serve(&self, protocol: Protocol) -> bool {
        if self.refused.load(Relaxed) {
            return false;
        }
        let (done, flushed) = oneshot::channel();
        let caught_up = async { self.events.send(Event::Flush(done)).is_ok() && flushed.await.is_ok() };
        tokio::time::timeout(CATCH_UP, caught_up).await == Ok(true) && self.serves(protocol)
    }

    // As far as it is known now.
    fn serves(&self, protocol: Protocol) -> bool {
        self.is_whole() && self.glance().mode == Some(protocol.mode())
    }

    /// Waits until a stream of this form could be answered that could not when it came, and istiod has had its time: a disk may
    /// be slow, and the machine's clock wrong.
    pub(in crate::xds) async fn comes_to_serve(self: Arc<Self>, protocol: Protocol) {
        let mut news = self.news.subscribe();
        loop {
            while !self.serves(protocol) {
                if news.changed().await.is_err() {
                    return std::future::pending().await;
                }
            }
            tokio::time::sleep(self.after()).await;
            if self.serves(protocol) {
                return;
            }
        }
    }

    /// Whether there is anything to stand in with.
    pub(in crate::xds) fn is_whole(&self) -> bool {
        !self.refused.load(Relaxed) && self.left() != Some(Duration::ZERO) && self.glance().whole
    }

    /// Whether [`Self::answer`] would have anything to say.
    pub(in crate::xds) fn has_answer(&self, envoy: &StandIn) -> bool {
        envoy.is_due() && self.glance().whole
    }

    /// The next answer of the stand-in, which is given back with it; none any more where what it answers from was lost
    /// meanwhile. A thread unpacks it; where the system gives none it is done here, and Envoy has its answer.
    pub(in crate::xds) async fn answer(
        self: &Arc<Self>,
        envoy: StandIn,
    ) -> std::io::Result<(StandIn, Option<Bytes>)> {
        let envoy = Arc::new(Mutex::new(Some(envoy)));
        let (memory, of) = (self.clone(), envoy.clone());
        match ANSWERS.run(move || memory.answer_now(&of)).await {
            Ok(Some(answered)) => answered,
            Ok(None) => Err(std::io::Error::other("it was answered already")),
            Err(error) => self.answer_now(&envoy).unwrap_or(Err(error)),
        }
    }

    /// The extension configs that are kept, each as it came in a response; also those that only the file has, which may be
    /// what the next agent begins with.
    ///
    /// # Errors
    /// When it cannot be told which there are.
    pub(in crate::xds) async fn extensions(self: Arc<Self>) -> std::io::Result<Vec<Bytes>> {
        let memory = self.clone();
        let read = move || {
            let store = memory.store().shared();
            store.all(types::ECDS)
        };
        let mut kept = ANSWERS.run(read).await??;
        if !self.glance().whole || self.is_behind() {
            kept.extend(self.in_file().await?);
        }
        Ok(kept)
    }

    // `None`: another thread has begun to, and not ended.
    fn answer_now(
        &self,
        envoy: &Mutex<Option<StandIn>>,
    ) -> Option<std::io::Result<(StandIn, Option<Bytes>)>> {
        let mut envoy = envoy.lock().expect("no panic holds this lock").take()?;
        let answer = self.whole().map_or(Ok(None), |store| envoy.answer(&store));
        Some(answer.map(|answer| (envoy, answer)))
    }

    /// Envoy is answered from memory from now on.
    pub(in crate::xds) fn serve(self: &Arc<Self>, address: &str) -> Serving {
        let Glance { resources, .. } = self.glance();
        let since = crate::base::clock::rfc3339(self.clock.now());
        let text = format!(
            "Envoy is served from memory since {since} ({resources} resources), because {address} cannot be reached"
        );
        let trouble = self.trouble.lock().expect("no panic holds this lock").sibling();
        trouble.report(Report::new(Kind::ServingFromMemory, text));
        self.meters.serving.with_label_values(&NONE).inc();
        Serving { memory: self.clone(), trouble, result: "ended" }
    }
}

/// A stream that is answered from memory.
pub(in crate::xds) struct Serving {
    memory: Arc<Memory>,
    trouble: Reporter,
    result: &'static str,
}

impl Serving {
    /// Istiod has it now.
    pub(in crate::xds) fn handed_over(mut self) {
        self.result = "handed over";
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.trouble.end();
        self.memory.meters.serving.with_label_values(&NONE).dec();
        self.memory.meters.streams.with_label_values(&[self.result]).inc();
    }
}
