//! What an epoch needs from the disk before it can be started, and what a changed configuration is compared with.
//! Nothing here waits: a disk that does not answer delays what needs it, and nothing else.

use tokio::time::Instant;

use super::{Boxed, Run};
use crate::base::error::chain;
use crate::envoy::supervisor::handle::Replace;
use crate::envoy::supervisor::inputs::{Looked, PATIENCE, Ready, write_beside};
use crate::envoy::{ConfigFile, Error};

/// What a look is for, beside an epoch that waits for it.
#[derive(Debug)]
pub(super) enum For {
    Nothing,
    Reload(bool),
    Replace(Replace),
}

/// An epoch that is about to be started.
pub(super) struct Starting {
    pub(super) epoch: u32,
    /// Until when its inputs are waited for; they are known when this is over.
    pub(super) until: Option<Instant>,
    writing: Option<Boxed<Result<Ready, Error>>>,
}

impl Starting {
    /// Its file, when it is written.
    pub(super) async fn written(slot: &mut Option<Self>) -> Result<Ready, Error> {
        match slot.as_mut().and_then(|s| s.writing.as_mut()) {
            Some(writing) => writing.await,
            None => std::future::pending().await,
        }
    }
}

impl Run {
    /// Begins a look, unless one is under way.
    pub(super) fn look(&mut self, purpose: For) {
        if let Some(inputs) = self.envoy.inputs.take() {
            self.looking = Some(Box::pin(inputs.look_beside()));
            self.look_for = purpose;
        }
    }

    pub(super) fn looked(&mut self, looked: Option<Looked>) {
        let found = looked.and_then(|(inputs, found)| {
            self.envoy.inputs = Some(inputs);
            found.map_err(|error| self.unusable(&error)).ok()
        });
        let is_good = found.is_some();
        if let Some(found) = found {
            self.envoy.know(found);
        }
        match std::mem::replace(&mut self.look_for, For::Nothing) {
            For::Nothing => {}
            For::Reload(force) if is_good => self.changed(force),
            For::Reload(_) => {}
            For::Replace(replace) => self.replace_with(replace, is_good),
        }
        if self.starting.as_ref().is_some_and(|s| s.until.is_some()) {
            self.write();
        }
        if !self.is_replacing() {
            self.reload_now();
        }
    }

    fn unusable(&self, error: &Error) {
        if self.starting.is_some() {
            tracing::warn!("Envoy is started with its last configuration: {}", chain(error));
        } else {
            tracing::warn!(
                "the changed configuration is not applied, Envoy goes on with the last one: {}",
                chain(error)
            );
        }
    }

    pub(super) fn prepare(&mut self, epoch: u32) {
        self.starting = Some(Starting { epoch, until: Some(Instant::now() + PATIENCE), writing: None });
        self.look(For::Nothing);
        if self.looking.is_none() {
            // They were lost with their thread.
            self.write();
        }
    }

    /// Writes the epoch's file from what is known.
    pub(super) fn write(&mut self) {
        let Some(starting) = &mut self.starting else { return };
        starting.until = None;
        self.core.renew(starting.epoch, self.envoy.id.wrapping_add(self.forced));
        let path = self.envoy.path(starting.epoch);
        let text = match self.envoy.config.file {
            ConfigFile::Generated(_) => Some(self.envoy.text.clone()),
            ConfigFile::Custom(_) => None,
        };
        let binary = self.envoy.config.binary.clone();
        starting.writing = Some(Box::pin(write_beside(path, text, self.envoy.base_id_path(), binary)));
    }

    pub(super) fn written(&mut self, ready: Result<Ready, Error>) {
        let Some(starting) = self.starting.take() else { return };
        match ready {
            Ok(ready) => self.launch(starting.epoch, ready),
            Err(error) => self.not_started(starting.epoch, chain(&error)),
        }
        self.reload_now();
    }
}
