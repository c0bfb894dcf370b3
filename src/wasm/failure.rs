//! Why a filter is replaced, or its response refused. Each shows as one line that holds its cause.

use std::io;

use prost::DecodeError;

use super::filter::Unreadable;
use super::receive::BadArchive;
use super::source::BadUrl;
use super::{download, oci};

/// Why a module cannot be had: for the log and the metrics.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(
        "cannot fetch Wasm module {0}: missing image pulling secret (istiod gives none when the Secret is missing \
         or may not be read)"
    )]
    NoSecret(String),
    #[error("the code's remote source has no http_uri")]
    NoUri,
    #[error(transparent)]
    Url(#[from] BadUrl),
    #[error(transparent)]
    Secret(#[from] oci::BadConfig),
    #[error(transparent)]
    Download(#[from] download::Error),
    #[error("could not fetch Wasm OCI image: {0}")]
    Manifest(#[source] oci::Error),
    #[error("could not fetch Wasm binary: {0}")]
    Image(#[source] oci::Error),
    /// Hexadecimal SHA-256; the URL without user and query.
    #[error("module downloaded from {url} has checksum {found}, which does not match: {wanted}")]
    Checksum { url: String, found: String, wanted: String },
    #[error("fetched Wasm binary from {url} is invalid{}", .source.as_ref().map(|e| format!(": {e}")).unwrap_or_default())]
    NoModule { url: String, source: Option<BadArchive> },
    #[error(
        "module downloaded from {url} cannot be stored below {dir}, which must exist and be writable: {source}"
    )]
    Store { url: String, dir: String, source: io::Error },
}

impl Failure {
    /// Value of the label of `wasm_config_conversion_count`.
    pub(super) fn conversion(&self) -> &'static str {
        match self {
            Self::NoUri => "miss_remote_fetch_hint",
            _ => "fetch_failure",
        }
    }

    /// Value of the label of `wasm_remote_fetch_count`; `None` when nothing was to be fetched.
    pub(super) fn label(&self) -> Option<&'static str> {
        match self {
            Self::Download(_) | Self::Image(_) => Some("download_failure"),
            // Credentials and the image's name are read on the way to the manifest.
            Self::Manifest(_) | Self::Secret(_) | Self::Url(BadUrl::Image(_)) => Some("manifest_failure"),
            Self::Checksum { .. } => Some("checksum_mismatched"),
            Self::NoModule { .. } => Some("fetch_failure"),
            _ => None,
        }
    }
}

/// Why a response is refused: what istiod is told.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error("extension config {0:?}: {1}")]
    Rewrite(String, #[source] DecodeError),
}

/// Refusals of a response that are told.
const TOLD: usize = 32;

/// The refusals of one response.
#[derive(Debug, Default, thiserror::Error)]
#[error(
    "{}{}",
    .told.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    if .count > &.told.len() { format!("; and {} more", .count - .told.len()) } else { String::new() }
)]
pub(crate) struct Refused {
    told: Vec<Refusal>,
    pub(super) count: usize,
}

impl Refused {
    /// One more.
    pub(super) fn add(&mut self, why: Refusal) {
        self.count += 1;
        if self.told.len() < TOLD {
            self.told.push(why);
        }
    }
}
