//! Why an image cannot be pulled. Each shows as one line that holds its cause; a token or password is in none.

use http::StatusCode;

use super::challenge::UnsafeRealm;
use super::credentials::BadConfig;
use super::manifest::BadManifest;
use crate::base::error::chain;
use crate::fetch;
use crate::wasm::download;
use crate::wasm::receive::BadArchive;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(in crate::wasm) enum Error {
    #[error("could not fetch manifest: {0}")]
    Manifest(#[source] Box<Error>),
    #[error("could not fetch image: {0}")]
    Image(#[source] Box<Error>),
    #[error("an index within an index")]
    Nested,
    #[error(transparent)]
    BadManifest(#[from] BadManifest),
    #[error("manifest digest: \"sha256:{found}\" does not match requested digest: \"{wanted}\"")]
    Digest { found: String, wanted: String },
    #[error(
        "the given image is in invalid format as an OCI image: {} errors occurred: {}",
        .0.len(), joined(.0)
    )]
    NoWay(Vec<Error>),
    #[error("layer {layer} has checksum {found}")]
    Checksum { layer: String, found: String },
    #[error("plugin.wasm not found in the archive")]
    NoPlugin,
    #[error("the layer cannot be unpacked: {0}")]
    Packed(#[source] BadArchive),
    #[error(transparent)]
    Download(#[from] download::Error),
    #[error("{0}")]
    Url(#[source] fetch::Error),
    #[error("Get {url:?}: {}", chain(source))]
    Get { url: String, source: fetch::Error },
    #[error("Get {0:?}: context deadline exceeded")]
    Late(String),
    #[error("{}", chain(.0))]
    Body(#[source] fetch::Error),
    #[error("GET {url}: unexpected status code {status}")]
    Status { url: String, status: StatusCode },
    #[error("GET {0}: UNAUTHORIZED: authentication required")]
    Unauthorized(String),
    #[error("the registry asks for authentication of a kind that is not known")]
    Authentication,
    #[error(transparent)]
    Realm(#[from] UnsafeRealm),
    #[error(transparent)]
    Config(#[from] BadConfig),
    #[error("the credentials hold characters that HTTP does not allow")]
    Credentials,
    #[error("token server {realm}: {wrong}")]
    Token { realm: String, wrong: BadToken },
    /// Neither HTTPS nor plain HTTP.
    #[error("{0}; {1}")]
    Neither(Box<Error>, #[source] Box<Error>),
}

/// What is wrong with a token server's answer.
#[derive(Debug, thiserror::Error)]
pub(in crate::wasm) enum BadToken {
    #[error("unexpected status code {0}")]
    Status(StatusCode),
    #[error("context deadline exceeded")]
    Late,
    #[error("its answer is not the JSON of a token")]
    Json,
    #[error("no token in its answer")]
    None,
}

impl Error {
    /// HTTPS has failed, and plain HTTP too.
    pub(super) fn both(secure: Self, plain: Self) -> Self {
        Self::Neither(Box::new(secure), Box::new(plain))
    }

    /// May be different the next time.
    pub(super) fn is_temporary(&self) -> bool {
        matches!(self, Self::Get { source, .. } if source.is_temporary())
    }

    /// The other side answered a TLS greeting with something else.
    pub(super) fn is_plain(&self) -> bool {
        let Self::Get { source, .. } = self else { return false };
        matches!(source, fetch::Error::Tls { .. }) && source.is_plain_answer()
    }
}

fn joined(reasons: &[Error]) -> String {
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
