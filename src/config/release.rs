//! Which Istio release is followed where two of them exclude each other.
//!
//! The rest of 1.31 is additive and needs no choice. With `ISTIO_COMPAT_VERSION=1.30` what 1.31 refuses
//! at start is taken as 1.30 took it (addresses of the application's metrics, `connectionSettings`,
//! the new fields of a mesh file, `ISTIO_META_ENABLE_SELF_DISCOVERY`), and istiod is told 1.30's version and metadata.

use crate::base::build_info;

/// A release whose behaviour is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Release {
    /// 1.30, and what the releases before it had in common with it.
    V1_30,
    /// 1.31.
    #[default]
    V1_31,
}

/// No release that is known here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("ISTIO_COMPAT_VERSION={0}: not a release that can be followed; write 1.30 or 1.31, or take it away")]
pub struct Unknown(String);

impl Release {
    /// `ISTIO_COMPAT_VERSION`: a release with or without its patch number.
    ///
    /// # Errors
    /// For any other text.
    pub fn of(text: &str) -> Result<Self, Unknown> {
        let minor = text.split('.').take(2).collect::<Vec<_>>().join(".");
        match minor.as_str() {
            "" | "1.31" => Ok(Self::V1_31),
            "1.30" => Ok(Self::V1_30),
            _ => Err(Unknown(text.to_owned())),
        }
    }

    /// The version sent to istiod as `ISTIO_VERSION`.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::V1_30 => "1.30.3",
            Self::V1_31 => build_info::ISTIO_VERSION,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_known_releases() {
        assert_eq!(Release::of("1.30.3"), Ok(Release::V1_30));
        assert_eq!(Release::of(""), Ok(Release::V1_31));
        assert_eq!(Release::V1_31.version(), build_info::ISTIO_VERSION);
        for bad in ["1.3", "1.29", "latest", "1.32.0", "31"] {
            assert!(Release::of(bad).unwrap_err().to_string().contains("1.30 or 1.31"), "{bad}");
        }
    }
}
