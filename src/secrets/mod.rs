//! Where a workload's secrets come from, and how they stay fresh.
//!
//! One task, the [`Manager`], owns the certificate, its renewal, the mounted files and `OUTPUT_CERTS`;
//! a [`Handle`] asks it. What it promises:
//!
//! * the last good secret stays: no failed renewal, reload or refused answer takes it away;
//! * equal requests share one certificate request, and there is a floor between two of them;
//! * `ROOTCA` and file resources never wait for a CA that hangs;
//! * a new root is published before the certificate that needs it;
//! * keys are zeroized, and nothing here prints one.
//!
//! | file | is about |
//! |---|---|
//! | `manager` | the task: requests, renewal, mounted files, troubles |
//! | `rotation`, `early`, `near` | pure: when to renew, earlier during trouble, and what happens shortly before the end |
//! | `request`, `workload` | one attempt to get a certificate, and the certificate that is in use |
//! | `files`, `bundle` | secrets from files, and trust anchors |
//! | `board`, `slot`, `name` | published resources and their subscribers |
//! | `output`, `persist`, `seal`, `kept` | copies: `OUTPUT_CERTS`, over a reboot, over a change of program |
//!
//! Uses `ca` (only the [`CaClient`](crate::ca::CaClient) trait and the making of requests), and `tls` to
//! read certificates. `sds` sees only [`SecretSource`].

mod board;
pub(crate) mod bundle;
mod early;
#[cfg(test)]
mod fake;
pub(crate) mod files;
mod identity_status;
mod kept;
pub(crate) mod manager;
mod metrics;
pub(crate) mod name;
mod near;
pub(crate) mod output;
pub(crate) mod persist;
pub(crate) mod probe;
mod request;
pub(crate) mod rotation;
mod seal;
pub(crate) mod slot;
mod workload;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use zeroize::Zeroizing;

use crate::base::files::Watches;
use crate::base::quote::{cut, shown};
pub(crate) use crate::ca::csr::KeyOptions;
use crate::trouble::Reporter;
pub(crate) use kept::Kept;
pub(crate) use manager::{Handle, Manager};
pub use name::ResourceName;
pub(crate) use near::{Action as NearExpiryAction, Config as NearExpiry};
pub(crate) use request::BadAnswer;
pub use request::FirstKey;
pub(crate) use seal::Seal;
pub(crate) use slot::{Change, Updates};

/// What the manager is told.
#[derive(Debug)]
pub(crate) struct Config {
    /// The identity to ask for: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.
    pub identity: String,
    /// Kind of key, and how it is printed.
    pub key: KeyOptions,
    /// Validity asked for (`SECRET_TTL`, 24 h).
    pub ttl: Duration,
    /// Share of the life that is left at renewal (`SECRET_GRACE_PERIOD_RATIO`, 0.5).
    pub grace_ratio: f64,
    /// Greatest random change of that share (`SECRET_GRACE_PERIOD_RATIO_JITTER`, 0.01).
    pub grace_jitter: f64,
    /// Ask before it is due while the way to istiod is in trouble (`RENEWAL_EARLY`).
    pub early: bool,
    /// What becomes of the proxy when the certificate is about to expire (`IDENTITY_NEAR_EXPIRY`).
    pub near_expiry: NearExpiry,
    /// The configured certificate files: they come before the CA when they are there.
    pub mounted: Mounted,
    /// `OUTPUT_CERTS`.
    pub output: Option<output::Config>,
    /// `IDENTITY_PERSIST`: where key and certificate outlive the machine's restart.
    pub persist: Option<persist::Config>,
    /// First delay of a new try when certificate and key do not match yet (`FILE_DEBOUNCE_DURATION`,
    /// 100 ms).
    pub file_debounce: Duration,
    /// The operating system's bundle, found at start ([`files::system_bundle`]).
    pub system_bundle: Option<PathBuf>,
    /// No Envoy (`DISABLE_ENVOY`): both files of the certificate and of the root are written at each
    /// renewal, in the merged form.
    pub proxyless: bool,
    /// The net under the CA client's own deadlines: a call that overruns even this is given up.
    pub call_bound: Duration,
    /// Begin to make the first key at once, on all processors; else when it is needed, on one.
    pub eager: bool,
    /// A key whose making was begun earlier, beside the rest of the start.
    pub first_key: Option<FirstKey>,
    /// What the program before us in this process has handed over.
    pub kept: Option<Kept>,
    /// The mesh's trust bundle, as far as it is known.
    pub bundle: Vec<String>,
    /// The agent's list of watched files.
    pub watches: Watches,
    /// Who is told why there is no certificate; the CA client tells it of refusals.
    pub trouble: Arc<Reporter>,
}

/// Where mounted certificates are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// PEM chain.
    pub cert: PathBuf,
    /// PEM key.
    pub key: PathBuf,
    /// PEM roots.
    pub root: PathBuf,
}

/// A key pair with its chain, or trust anchors; never half of either.
#[derive(Debug, Clone)]
pub enum Secret {
    /// Chain and key.
    Identity(Arc<Identity>),
    /// Trust anchors.
    Roots(Arc<Roots>),
}

impl Secret {
    /// What is no key of it: the chain, or the anchors. It is shared, not copied.
    pub(crate) fn text(&self) -> Bytes {
        struct Text(Secret);
        impl AsRef<[u8]> for Text {
            fn as_ref(&self) -> &[u8] {
                match &self.0 {
                    Secret::Identity(identity) => &identity.chain,
                    Secret::Roots(roots) => &roots.pem,
                }
            }
        }
        Bytes::from_owner(Text(self.clone()))
    }
}

/// Chain and private key, both PEM.
pub struct Identity {
    /// The chain as it is served.
    pub chain: Vec<u8>,
    /// The key; wiped when dropped.
    pub key: Zeroizing<Vec<u8>>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({} bytes of chain, key withheld)", self.chain.len())
    }
}

/// Trust anchors in PEM.
#[derive(Debug, PartialEq, Eq)]
pub struct Roots {
    /// One or more certificates.
    pub pem: Vec<u8>,
}

/// Longest reason of a file that cannot be read, in bytes: any client may name files by paths of 4 kB.
const REASON: usize = 512;

/// Why there is no secret. The text goes into logs and to Envoy, so it never holds one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The name means nothing here.
    #[error("{0}")]
    Name(#[from] name::Error),
    /// No CA is configured (certificates come from files), and the files are not there.
    #[error("no CA is used in this mode, and the certificate files are missing: {cert} and {key}", cert = .0.cert.display(), key = .0.key.display())]
    NoCa(Mounted),
    /// The key or the request could not be made.
    #[error("failed to generate workload certificate")]
    Request(#[source] crate::ca::csr::Error),
    /// The CA did not sign.
    #[error("failed to generate workload certificate")]
    Ca(#[source] crate::ca::Error),
    /// The CA signed something that cannot be served.
    #[error("failed to generate workload certificate: the CA's answer is refused: {0}")]
    Refused(BadAnswer),
    /// The CA call outlived the manager's own bound.
    #[error("failed to generate workload certificate: no end of the CA call within {0:?}")]
    Hung(Duration),
    /// A file resource.
    #[error("failed to load {} from files: {}", shown(.name), cut(.reason, REASON))]
    File {
        /// The resource.
        name: String,
        /// Why.
        reason: String,
    },
    /// More file resources than anybody needs.
    #[error("more than {0} different file resources are in use; refusing another")]
    TooMany(usize),
    /// Their names take more than anybody needs.
    #[error("the names of the file resources in use take more than {0} bytes; refusing another")]
    TooLong(usize),
    /// The agent is stopping.
    #[error("the agent is stopping")]
    Stopped,
}

/// A subscription to a secret: the current value, and the later ones.
#[derive(Debug)]
pub(crate) struct Fetched {
    /// The current value.
    pub secret: Secret,
    /// Later values.
    pub updates: Updates,
}

/// Gives secrets by name; what `sds` asks for.
pub(crate) trait SecretSource: Send + Sync + fmt::Debug + 'static {
    /// What a text names here.
    ///
    /// # Errors
    /// When it names nothing.
    fn name(&self, text: &str) -> Result<ResourceName, name::Error> {
        text.parse()
    }

    /// The secret, waited for where that makes sense: at most until the request to the CA that is under
    /// way ends, or 10 s for files.
    fn fetch(&self, name: ResourceName) -> BoxFuture<'static, Result<Fetched, Arc<Error>>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_by_a_long_path_is_told_in_a_short_line() {
        let long = "a".repeat(4000);
        let told = Error::File { name: long.clone(), reason: long }.to_string();
        assert!(told.len() < 1000, "{} bytes", told.len());
    }
}
