//! What a debug page may show; no secret is in it.

use std::sync::PoisonError;
use std::time::SystemTime;

use super::files::Overview;

/// The state of the workload's identity.
#[derive(Debug, Clone, Default)]
pub(crate) struct IdentityStatus {
    /// The certificate the CA issued last, if any.
    pub certificate: Option<Certificate>,
    /// Somebody uses the CA's certificate, so it is renewed: an expired one is missed.
    pub asked: bool,
    /// Why the proxy should get no more traffic (`IDENTITY_NEAR_EXPIRY=unready`).
    pub unfit: Option<String>,
    /// Attempts that failed since the last success.
    pub failures: u32,
    /// Why the last attempt failed; empty after a success.
    pub last_error: String,
    /// Resources that are served from files, as of now.
    pub files: Overview,
    /// Certificates in the trust bundle that came over xDS.
    pub trust_bundle: usize,
    /// Why `OUTPUT_CERTS` could not be written last; empty when it was.
    pub output_error: String,
}

impl IdentityStatus {
    /// Resources that are served from files, with what is wrong with each (empty: nothing).
    pub(crate) fn files(&self) -> Vec<(String, String)> {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter().map(|(name, wrong)| (name.clone(), wrong.clone())).collect()
    }
}

/// One issued certificate.
#[derive(Debug, Clone)]
pub(crate) struct Certificate {
    /// Serial number in hexadecimal.
    pub serial: String,
    /// URI names, as they are told.
    pub identities: Vec<String>,
    /// Start of validity.
    pub not_before: SystemTime,
    /// End of validity.
    pub not_after: SystemTime,
    /// When it will be renewed.
    pub renewal: SystemTime,
}
