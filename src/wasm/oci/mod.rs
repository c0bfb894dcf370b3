//! Modules in images: the distribution API of OCI, as far as pulling one takes it.
//!
//! ```text
//! ping /v2/ ─► who may pull: nobody asked, a password, a token from a token server
//! manifest  ─► its digest is the checksum; of an index the child for linux/amd64
//! layer     ─► its digest is verified while it is unpacked
//! ```
//!
//! | file | is about |
//! |---|---|
//! | `reference` | names of images; pure |
//! | `manifest` | manifests and which layer holds the module; pure |
//! | `challenge` | what a registry asks for, and which token servers are safe to ask; pure |
//! | `credentials` | Docker config files; pure |
//! | `machine` | those of the machine |
//! | `registry`, `error` | the exchange itself, and why it fails |

mod challenge;
mod credentials;
mod error;
mod machine;
mod manifest;
mod reference;
mod registry;

pub(super) use credentials::BadConfig;
pub(super) use error::Error;
pub(super) use reference::{BadReference, Reference};
pub(super) use registry::Registry;

/// What bytes reach first.
#[cfg(debug_assertions)]
pub mod fuzz {
    /// A manifest, a challenge, credentials, a reference: each is read or refused.
    pub fn read(bytes: &[u8]) {
        let _ = super::manifest::Manifest::parse(bytes, "");
        let text = String::from_utf8_lossy(bytes);
        let _ = super::challenge::Challenge::parse(&text);
        let _ = super::challenge::refuse_unsafe(&text);
        let _ = super::credentials::find(&text, &["registry.example".to_owned()]);
        if let Ok(reference) = super::Reference::parse(&text) {
            // What is read is what it prints, unless `library/`, which is not counted, has made it too long.
            let printed = reference.to_string();
            match super::Reference::parse(&printed) {
                Ok(again) => {
                    assert_eq!(again.name(), reference.name());
                    assert_eq!(again.digest(), reference.digest());
                }
                Err(wrong) => assert!(printed.contains("/library/") && printed.len() > 255, "{wrong}"),
            }
        }
    }
}
