//! Names of resources, parsed once at the edge.

use std::fmt;
use std::str::FromStr;

use crate::base::quote::shown;

/// A resource that this agent serves.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ResourceName {
    /// `ROOTCA`: trust anchors for workload mTLS. First in order, so that it is sent first.
    RootCa,
    /// `default`: the workload's key and chain.
    Default,
    /// `file-cert:<cert>~<key>`.
    FileCert {
        /// Path of the chain.
        cert: String,
        /// Path of the key.
        key: String,
    },
    /// `file-root:<path>`; the path `system` stands for the operating system's bundle.
    FileRoot(String),
    /// A gateway's secret; only a source that serves those makes such a name.
    Gateway(String),
}

/// A name that nobody serves.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Neither a workload secret nor a file.
    #[error(
        "unknown resource {0:?}: this agent serves default, ROOTCA, file-cert:<cert>~<key> and file-root:<path>"
    )]
    Unknown(String),
    /// `file-cert:` without exactly two paths.
    #[error("resource {0:?} is not of the form file-cert:<cert>~<key>, with exactly one ~ and no empty part")]
    FileCert(String),
    /// No name of a Kubernetes secret.
    #[error("resource {0:?} is no name of a secret: letters in lower case, digits, - and .")]
    NoSecret(String),
    /// `file-root:` without a path, or with a `~`.
    #[error("resource {0:?} is not of the form file-root:<path>, without ~ and not empty")]
    FileRoot(String),
    /// A path that no file can have.
    #[error("resource {0:?} names a path of more than {LONGEST} bytes, which no file has")]
    TooLong(String),
}

/// Longest path of a file, in bytes: Linux' `PATH_MAX`.
const LONGEST: usize = 4096;

/// The text after `file-root:` that means the operating system's bundle.
pub(crate) const SYSTEM: &str = "system";

impl FromStr for ResourceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        if let Some(rest) = text.strip_prefix("file-cert:") {
            return match rest.split_once('~') {
                Some((cert, key)) if cert.len().max(key.len()) > LONGEST => {
                    Err(Error::TooLong(shown(text).into_owned()))
                }
                Some((cert, key)) if !cert.is_empty() && !key.is_empty() && !key.contains('~') => {
                    Ok(Self::FileCert { cert: cert.to_owned(), key: key.to_owned() })
                }
                _ => Err(Error::FileCert(shown(text).into_owned())),
            };
        }
        if let Some(path) = text.strip_prefix("file-root:") {
            return if path.len() > LONGEST {
                Err(Error::TooLong(shown(text).into_owned()))
            } else if path.is_empty() || path.contains('~') {
                Err(Error::FileRoot(shown(text).into_owned()))
            } else {
                Ok(Self::FileRoot(path.to_owned()))
            };
        }
        match text {
            "default" => Ok(Self::Default),
            "ROOTCA" => Ok(Self::RootCa),
            _ => Err(Error::Unknown(shown(text).into_owned())),
        }
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::RootCa => f.write_str("ROOTCA"),
            Self::FileCert { cert, key } => write!(f, "file-cert:{cert}~{key}"),
            Self::FileRoot(path) => write!(f, "file-root:{path}"),
            Self::Gateway(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_mean_nothing_are_refused() {
        for bad in [
            "",
            "Default",
            "rootca",
            "other",
            "file-cert:",
            "file-cert:a",
            "file-cert:a~",
            "file-cert:~b",
            "file-cert:a~b~c",
            "file-root:",
            "file-root:a~b",
            "kubernetes://x",
            "builtin://",
            "default ",
        ] {
            let error = bad.parse::<ResourceName>().unwrap_err();
            assert!(error.to_string().contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn paths_that_no_file_can_have_are_refused_in_a_short_line() {
        let (fits, long) = ("/".repeat(LONGEST), "/".repeat(LONGEST + 1));
        for name in [format!("file-root:{fits}"), format!("file-cert:{fits}~{fits}")] {
            name.parse::<ResourceName>().unwrap();
        }
        for name in
            [format!("file-root:{long}"), format!("file-cert:a~{long}"), format!("file-cert:{long}~a")]
        {
            let error = name.parse::<ResourceName>().unwrap_err();
            assert!(matches!(error, Error::TooLong(_)) && error.to_string().len() < 500, "{error}");
        }
    }

    #[test]
    fn root_comes_first() {
        assert!(ResourceName::RootCa < ResourceName::Default);
    }

    proptest! {
        #[test]
        fn what_parses_prints_back(text in "(default|ROOTCA|file-cert:[a~/.]{0,6}|file-root:[a~/.]{0,6}|.{0,8})") {
            if let Ok(name) = text.parse::<ResourceName>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
