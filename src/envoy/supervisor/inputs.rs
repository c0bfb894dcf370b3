//! What Envoy would be started with now: the bootstrap, rendered anew, and the watched files' contents as one number.
//!
//! All of it may lie on a disk that does not answer, so once the agent serves it is looked at on a thread, one look at
//! a time; meanwhile the agent goes on, and what it knows already stays.

use std::hash::{DefaultHasher, Hasher};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::base::bounded;
use crate::base::lane::Lane;
use crate::envoy::guard::Program;
use crate::envoy::process::Written;
use crate::envoy::{Bootstrap, Config, ConfigFile, Error, restart};

static LOOKS: Lane = Lane::new("Envoy's inputs", 1);
static WRITES: Lane = Lane::new("Envoy's bootstrap", 1);

/// After this the log says that a look takes long, and a start goes on without it.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// What is looked at.
pub(super) struct Inputs {
    bootstrap: Box<dyn Bootstrap>,
    /// Whether the bootstrap is rendered, and not the user's.
    rendered: bool,
    custom: Option<PathBuf>,
    files: Vec<PathBuf>,
    /// What is put over it; at the first look as it was read at the start.
    over: Option<String>,
    looked: bool,
}

/// What was found.
pub(super) struct Found {
    /// The bootstrap, where it is rendered.
    pub(super) text: Option<Vec<u8>>,
    /// What is put over it.
    pub(super) over: Option<String>,
    pub(super) id: restart::Id,
}

/// The inputs come back with what they were found to be.
pub(super) type Looked = (Inputs, Result<Found, Error>);

impl Inputs {
    pub(super) fn new(config: &Config, bootstrap: Box<dyn Bootstrap>) -> Self {
        let custom = match &config.file {
            ConfigFile::Custom(path) => Some(path.clone()),
            ConfigFile::Generated(_) => None,
        };
        let again = config.restart.hot_restart || config.restart.recovery;
        let rendered = custom.is_none();
        let custom = custom.filter(|_| again);
        let files = config.restart.watched.clone();
        let over = config.arguments.override_json.clone();
        Self { bootstrap, rendered, custom, files, over, looked: false }
    }

    /// Looks, here and now.
    pub(super) fn look(&mut self) -> Result<Found, Error> {
        let text = self.rendered.then(|| self.bootstrap.render().map_err(Error::Render)).transpose()?;
        let again = std::mem::replace(&mut self.looked, true);
        if again {
            self.over = self.bootstrap.over(self.over.take());
        }
        let mut hash = DefaultHasher::new();
        hash.write(text.as_deref().unwrap_or_default());
        if let Some(over) = &self.over {
            hash.write(over.as_bytes());
        }
        if let Some(file) = &self.custom {
            match bounded::usual(file) {
                Ok(text) => hash.write(&text),
                // No Envoy would start with it; the one that runs has read it. At the start it is for Envoy to say so.
                Err(why) if again => {
                    return Err(Error::Render(format!("customConfigFile {}: {why}", file.display()).into()));
                }
                Err(_) => {}
            }
            hash.write_u8(0);
        }
        for file in &self.files {
            // Missing or unreadable files are skipped, as the historic agents did.
            hash.write(&bounded::usual(file).unwrap_or_default());
            hash.write_u8(0);
        }
        Ok(Found { text, over: self.over.clone(), id: hash.finish() })
    }

    /// Looks on a thread, for as long as that takes. `None`: it panicked, and the inputs are lost.
    pub(super) async fn look_beside(self) -> Option<Looked> {
        let left = Arc::new(Mutex::new(Some(self)));
        let take = |left: &Mutex<Option<Self>>| left.lock().unwrap_or_else(PoisonError::into_inner).take();
        let theirs = left.clone();
        let looking = LOOKS.run(move || {
            let mut inputs = take(&theirs)?;
            let found = inputs.look();
            Some((inputs, found))
        });
        tokio::pin!(looking);
        let looked = match tokio::time::timeout(PATIENCE, &mut looking).await {
            Ok(looked) => looked,
            Err(_) => {
                tracing::warn!(
                    "the files of Envoy's configuration could not be read within {PATIENCE:?} (does a disk hang?): the known configuration stays in use"
                );
                looking.await
            }
        };
        looked.unwrap_or_else(|error| match take(&left) {
            // There was no thread; there may be one at the next look.
            Some(inputs) => Some((inputs, Err(Error::Render(error.into())))),
            None => {
                tracing::error!("changes of Envoy's configuration are no longer noticed: {error}");
                None
            }
        })
    }
}

/// What an epoch is started with: its file, which is removed with this, and the base id that the first one chose.
pub(super) struct Ready {
    pub(super) file: Option<Written>,
    pub(super) base_id: Option<u32>,
    pub(super) program: Option<Program>,
}

/// Puts `text`, where there is one, at `path` on a thread, reads the base id there, and has the binary looked at.
pub(super) async fn write_beside(
    path: PathBuf,
    text: Option<Vec<u8>>,
    base_id: PathBuf,
    binary: String,
) -> Result<Ready, Error> {
    let to = path.clone();
    let job = move || {
        let file = text.map(|text| Written::new(&to, &text)).transpose()?;
        let base_id = std::fs::read_to_string(&base_id).ok().and_then(|text| text.trim().parse().ok());
        Ok((file, base_id))
    };
    let written = WRITES.within(PATIENCE, job).await.unwrap_or_else(|error| Err((path, error)));
    let (file, base_id) = written.map_err(|(path, source)| Error::Write { path, source })?;
    Ok(Ready { file, base_id, program: Some(Program::look_beside(&binary).await) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn inputs_that_no_thread_could_look_at_are_looked_at_later() {
        let render = || -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> { Ok(b"text".to_vec()) };
        let (bootstrap, files) = (Box::new(render), Vec::new());
        let inputs = Inputs { bootstrap, rendered: true, custom: None, files, over: None, looked: false };
        let none = crate::base::lane::scarce::NoThreads::from_now_on();
        let (inputs, found) = inputs.look_beside().await.expect("they are not lost");
        assert!(found.is_err());
        drop(none);
        let (_, found) = inputs.look_beside().await.unwrap();
        assert_eq!(found.unwrap().text.unwrap(), b"text");
    }
}
