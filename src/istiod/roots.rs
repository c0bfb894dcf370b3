//! Which root certificates a connection trusts, and reading them.
//!
//! The file is read at each dial, so a rotated root counts at the next connection. Where it is missing
//! or holds no certificate at that moment, the roots of the last good reading stay in use.

use std::sync::{Arc, Mutex};

use rustls::RootCertStore;

use super::{Error, Roots};
use crate::tls::client;

/// Above this a root file is refused rather than read: the largest public bundles have 250 KB.
const MAX_FILE: u64 = 16 << 20;

/// Reads roots and remembers the last good ones.
#[derive(Debug)]
pub(super) struct Reader {
    roots: Roots,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    good: Option<Arc<RootCertStore>>,
    warned: Option<String>,
}

impl Reader {
    pub(super) fn new(roots: Roots) -> Self {
        Self { roots, last: Mutex::default() }
    }

    /// What the roots are called in messages.
    pub(super) fn name(&self) -> String {
        match &self.roots {
            Roots::System => "the system's pool".to_owned(),
            Roots::File(path) => path.display().to_string(),
        }
    }

    /// The roots to trust now.
    ///
    /// # Errors
    /// When there are none and never were.
    pub(super) fn read(&self) -> Result<Arc<RootCertStore>, Error> {
        let path = match &self.roots {
            Roots::File(path) => path,
            Roots::System => {
                let store = client::system_roots();
                if store.is_empty() {
                    let reason = "the system's pool holds no certificate".to_owned();
                    return Err(Error::Roots { path: "SYSTEM".into(), reason });
                }
                return Ok(Arc::new(store));
            }
        };
        let read = read_bounded(path).map_err(|e| e.to_string()).and_then(|pem| {
            let store = client::roots_of(&pem);
            if store.is_empty() { Err("it holds no readable certificate".to_owned()) } else { Ok(store) }
        });
        let mut last = self.last.lock().expect("no panic holds this lock");
        match (read, &last.good) {
            (Ok(store), _) => {
                if last.warned.take().is_some() {
                    tracing::info!(target: "security", "root certificates in {} are readable again", path.display());
                }
                let store = Arc::new(store);
                last.good = Some(store.clone());
                Ok(store)
            }
            (Err(reason), Some(good)) => {
                let good = good.clone();
                if last.warned.as_ref() != Some(&reason) {
                    tracing::warn!(target: "security",
                        "cannot read root certificates from {}: {reason}; the last good ones stay in use", path.display());
                    last.warned = Some(reason);
                }
                Ok(good)
            }
            (Err(reason), None) => Err(Error::Roots { path: path.clone(), reason }),
        }
    }
}

fn read_bounded(path: &std::path::Path) -> std::io::Result<Vec<u8>> {
    use std::io::Read;
    let mut pem = Vec::new();
    let file = std::fs::File::open(path)?;
    if file.take(MAX_FILE + 1).read_to_end(&mut pem)? as u64 > MAX_FILE {
        return Err(std::io::Error::other("it is larger than 16 MB"));
    }
    Ok(pem)
}
