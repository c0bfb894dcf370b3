//! Credentials of the machine: what `docker login` left on its disk.

use std::time::Duration;

use zeroize::Zeroizing;

use super::credentials::{Credentials, find};
use crate::base::lane::Lane;
use crate::base::seldom::Seldom;
use crate::wasm::download::Web;

static FILES: Lane = Lane::new("registry credentials", 2);
/// How long they may take to be read.
const READ: Duration = Duration::from_secs(5);
/// They are read for each image.
static UNUSABLE: Seldom = Seldom::new(10);

/// Those of the first file that exists, which is the one that counts; none where it cannot be used, which the log says.
pub(super) async fn of_machine(web: &Web, keys: &[String]) -> Credentials {
    let files = web.config().credentials.clone();
    let read = move || {
        let file = files.into_iter().find(|file| file.is_file())?;
        let text = std::fs::read_to_string(&file).map(Zeroizing::new);
        Some((file, text))
    };
    let (file, text) = match FILES.within(READ, read).await {
        Ok(Some(read)) => read,
        Ok(None) => return Credentials::default(),
        Err(error) => {
            if let Some(more) = UNUSABLE.may() {
                tracing::warn!(target: "wasm", "{error}{more}");
            }
            return Credentials::default();
        }
    };
    let unusable = |why: &dyn std::error::Error| {
        if let Some(more) = UNUSABLE.may() {
            tracing::warn!(target: "wasm", "registry credentials in {} cannot be used: {why}{more}", file.display());
        }
        Credentials::default()
    };
    match text.map(|text| find(&text, keys)) {
        Ok(Ok(found)) => found,
        Ok(Err(error)) => unusable(&error),
        Err(error) => unusable(&error),
    }
}
