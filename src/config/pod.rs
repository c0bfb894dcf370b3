//! What the kubelet writes into the pod: labels and annotations, one `key="value"` per line, the value
//! quoted by Go's rules.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::base::bounded;
use crate::base::quote::unquote;

/// Labels file, relative to the working directory.
pub(crate) const LABELS: &str = "./etc/istio/pod/labels";
/// Annotations file, relative to the working directory.
pub(crate) const ANNOTATIONS: &str = "./etc/istio/pod/annotations";

/// Why a file gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be read.
    #[error("failed to read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A value is not quoted; the whole file is unusable.
    #[error("failed to unquote {value}: invalid syntax")]
    Unquote {
        /// The value as it stands, cut at 100 characters.
        value: String,
    },
}

/// Reads a file of this form. A missing one is ordinary off Kubernetes and only a debug line; any other
/// trouble is a warning. Either way the file then counts as absent.
#[must_use]
pub(crate) fn read(path: &Path) -> Option<BTreeMap<String, String>> {
    match entries(path) {
        Ok(Some(entries)) => Some(entries),
        Ok(None) => {
            tracing::debug!("no {}: not in a pod, or nothing mounted there", path.display());
            None
        }
        Err(error) => {
            tracing::warn!("{}", ignored(path, &error));
            None
        }
    }
}

/// Why such a file has no effect, if it is there.
#[must_use]
pub(crate) fn fault(path: &Path) -> Option<String> {
    entries(path).err().map(|error| ignored(path, &error))
}

fn ignored(path: &Path, error: &Error) -> String {
    format!("{} is ignored: {}", path.display(), crate::base::error::chain(error))
}

fn entries(path: &Path) -> Result<Option<BTreeMap<String, String>>, Error> {
    let read = bounded::given(path).map_err(|source| Error::Read { path: path.to_owned(), source });
    match read.and_then(|bytes| parse(&String::from_utf8_lossy(&bytes))) {
        Ok(entries) => Ok(Some(entries)),
        Err(Error::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The entries of a file's text; later ones win, lines without `=` are skipped.
///
/// # Errors
/// When one value is not quoted by Go's rules.
pub fn parse(text: &str) -> Result<BTreeMap<String, String>, Error> {
    let mut entries = BTreeMap::new();
    for line in text.split('\n') {
        let Some((key, value)) = line.split_once('=') else { continue };
        let bad = || Error::Unquote { value: value.chars().take(100).collect() };
        entries.insert(key.to_owned(), unquote(value).ok_or_else(bad)?);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_value_spoils_the_file() {
        let entries = parse("a=\"1\"\nnoequals\n\nb=\"x=y\"\na=\"2\"").unwrap();
        assert_eq!(
            entries.into_iter().collect::<Vec<_>>(),
            [("a".into(), "2".into()), ("b".into(), "x=y".into())]
        );
        let error = parse("a=\"1\"\nb=web").unwrap_err();
        assert_eq!(error.to_string(), "failed to unquote web: invalid syntax");
    }

    #[test]
    fn a_file_that_is_missing_bad_or_a_folder_counts_as_absent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("labels");
        assert_eq!(read(&path), None);
        std::fs::write(&path, "a=b").unwrap();
        assert_eq!(read(&path), None);
        std::fs::write(&path, "a=\"b\"").unwrap();
        assert_eq!(read(&path).unwrap()["a"], "b");
        assert_eq!(read(dir.path()), None);
    }

    proptest::proptest! {
        #[test]
        fn reads_what_the_kubelet_writes(text in "\\PC*", junk in "\\PC*") {
            let line = format!("k={}", serde_json::to_string(&text).unwrap());
            proptest::prop_assert_eq!(&parse(&line).unwrap()["k"], &text);
            let _ = parse(&junk);
        }
    }
}
