//! Credentials of the machine: what `docker login` left on its disk.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use zeroize::Zeroizing;

use super::credentials::{Credentials, find};
use crate::base::bounded;
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
    let (file, text) = match FILES.within(READ, || read(files)).await {
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

fn read(files: Vec<PathBuf>) -> Option<(PathBuf, io::Result<Zeroizing<String>>)> {
    let file = files.into_iter().find(|file| file.is_file())?;
    let text = bounded::given_text(&file).map(Zeroizing::new);
    Some((file, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_file_counts_as_far_as_it_may_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let all = vec![path("none"), path("one"), path("two")];
        assert!(read(all.clone()).is_none());
        std::fs::write(path("two"), "{}").unwrap();
        let (file, text) = read(all.clone()).unwrap();
        assert_eq!((file, text.unwrap().as_str()), (path("two"), "{}"));
        std::fs::write(path("one"), "{}".to_owned() + &" ".repeat(4 << 20)).unwrap();
        let (file, text) = read(all).unwrap();
        assert_eq!((file, text.unwrap_err().kind()), (path("one"), io::ErrorKind::FileTooLarge));
    }
}
