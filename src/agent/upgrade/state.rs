//! What is handed over beside descriptors: a document, and secrets as memory of their own, so that no parser copies
//! a key.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::base::handover::{self, Parcel};
use crate::{envoy, secrets};

pub(super) const STATE: &str = "state";
pub(super) const KEY: &str = "key";
pub(super) const CHAIN: &str = "chain";
pub(super) const ROOT: &str = "root";
pub(super) const NAMES: &str = "names";
pub(super) const REPLAY: &str = "replay";
pub(super) const REPLY: &str = "reply";
/// The file of the program that hands over.
pub(super) const PROGRAM: &str = "program";

/// How upgrades of this process have ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub done: u64,
    pub refused: u64,
    pub fell_back: u64,
}

/// The document. Fields may come; none that is there may change its meaning: the other end is another version.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct HandoverState {
    /// Of the program that hands over.
    pub version: String,
    /// How it was called; it is called so again if it must come back.
    pub words: Vec<String>,
    /// When it let go, in milliseconds since 1970.
    pub began: u64,
    /// Envoys that run.
    pub envoys: Option<envoy::Kept>,
    /// A signal that asked for the end meanwhile.
    #[serde(default)]
    pub stop: Option<String>,
    /// Why the new program gave back, if this is the old one.
    #[serde(default)]
    pub failed: Option<String>,
    #[serde(default)]
    pub counts: Counts,
    /// The mesh's trust bundle.
    #[serde(default)]
    pub bundle: Vec<String>,
    /// Of the certificate: issued and to be renewed (milliseconds since 1970), and whether somebody has asked for it.
    #[serde(default)]
    pub identity: Option<(u64, u64, bool)>,
}

pub(super) fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

fn at(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis)
}

pub(super) fn put_bytes(parcel: &mut Parcel, key: &str, bytes: &[u8]) -> std::io::Result<()> {
    parcel.insert(key.to_owned(), (String::new(), handover::sealed(&format!("pilot-agent {key}"), bytes)?));
    Ok(())
}

pub(super) fn bytes(parcel: &Parcel, key: &str) -> std::io::Result<Option<Zeroizing<Vec<u8>>>> {
    parcel.get(key).map(|(_, fd)| handover::read_sealed(fd)).transpose()
}

impl HandoverState {
    /// Into the parcel, with the certificate.
    pub(super) fn put(mut self, secrets: Option<secrets::Kept>, parcel: &mut Parcel) -> std::io::Result<()> {
        if let Some(kept) = secrets {
            self.identity = Some((millis(kept.created), millis(kept.renewal), kept.asked));
            put_bytes(parcel, KEY, &kept.identity.key)?;
            put_bytes(parcel, CHAIN, &kept.identity.chain)?;
            put_bytes(parcel, ROOT, kept.root.as_bytes())?;
        }
        self.put_alone(parcel)
    }

    /// The document alone, in place of the one that is there.
    pub(super) fn put_alone(&self, parcel: &mut Parcel) -> std::io::Result<()> {
        put_bytes(parcel, STATE, &serde_json::to_vec(self).map_err(std::io::Error::other)?)
    }

    pub(super) fn of(parcel: &Parcel) -> std::io::Result<Self> {
        let bytes = bytes(parcel, STATE)?.ok_or_else(|| std::io::Error::other("no state is handed over"))?;
        serde_json::from_slice(&bytes).map_err(std::io::Error::other)
    }

    /// The certificate.
    pub(super) fn secrets(&self, parcel: &Parcel) -> std::io::Result<Option<secrets::Kept>> {
        let (Some((created, renewal, asked)), Some(key), Some(chain), Some(root)) =
            (self.identity, bytes(parcel, KEY)?, bytes(parcel, CHAIN)?, bytes(parcel, ROOT)?)
        else {
            return Ok(None);
        };
        let root = String::from_utf8(root.to_vec()).map_err(std::io::Error::other)?;
        Ok(Some(secrets::Kept {
            identity: Arc::new(secrets::Identity { chain: chain.to_vec(), key }),
            root,
            created: at(created),
            renewal: at(renewal),
            asked,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_certificate_comes_out_as_it_went_in_and_no_key_is_in_the_document() {
        let state = HandoverState {
            version: "1".into(),
            words: Vec::new(),
            began: 7,
            envoys: None,
            stop: None,
            failed: None,
            counts: Counts::default(),
            bundle: vec!["anchor".to_owned()],
            identity: None,
        };
        let kept = secrets::Kept {
            identity: Arc::new(secrets::Identity {
                chain: b"chain".to_vec(),
                key: Zeroizing::new(b"hush".to_vec()),
            }),
            root: "root".to_owned(),
            created: at(1000),
            renewal: at(2000),
            asked: true,
        };
        let mut parcel = Parcel::new();
        state.put(Some(kept), &mut parcel).unwrap();
        let document = bytes(&parcel, STATE).unwrap().unwrap();
        assert!(!String::from_utf8_lossy(&document).contains("hush"));
        let state = HandoverState::of(&parcel).unwrap();
        let back = state.secrets(&parcel).unwrap().unwrap();
        assert_eq!((&back.identity.key[..], &back.identity.chain[..]), (&b"hush"[..], &b"chain"[..]));
        assert_eq!(
            (back.root.as_str(), back.created, back.renewal, back.asked),
            ("root", at(1000), at(2000), true)
        );
        assert_eq!(state.bundle, ["anchor"]);
    }
}
