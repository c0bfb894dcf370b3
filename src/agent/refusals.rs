//! What kind of trouble a start that is refused is, by the error behind it.

use std::error::Error;
use std::io;

use crate::base::uds;
use crate::secrets::probe;
use crate::trouble::Kind;
use crate::{envoy, istiod};

/// A value of the configuration, unless the error tells of something else.
pub(super) fn kind_of(error: &(dyn Error + 'static)) -> Kind {
    if let Some(error) = error.downcast_ref::<istiod::Error>() {
        return error.report().kind;
    }
    if let Some(envoy::Error::NoBinary) = error.downcast_ref() {
        return Kind::EnvoyNotStarted;
    }
    if let Some(kind) = Kind::of_chain(error) {
        return kind;
    }
    let mut next = Some(error);
    while let Some(cause) = next {
        if cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::AddrInUse) {
            return Kind::PortTaken;
        }
        next = cause.source();
    }
    if let Some(probe::Error::Name(_)) = error.downcast_ref() {
        return Kind::ConfigInvalid;
    }
    // What is left of these are folders that are missing, no folders, or somebody else's.
    let writes = matches!(error.downcast_ref(), Some(envoy::Error::Write { .. }));
    if writes || error.is::<uds::Error>() || error.is::<probe::Error>() {
        return Kind::SocketFolder;
    }
    Kind::ConfigInvalid
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_of_the_kind_of_its_cause() {
        let write = |kind: io::ErrorKind| envoy::Error::Write { path: "x".into(), source: kind.into() };
        assert_eq!(kind_of(&write(io::ErrorKind::StorageFull)), Kind::DiskFull);
        assert_eq!(kind_of(&write(io::ErrorKind::PermissionDenied)), Kind::SocketFolder);
        // As libraries say it that add a path.
        for (number, kind) in [(27, Kind::DiskFull), (24, Kind::OpenFiles)] {
            let said = format!("{} at path \"/x\"", io::Error::from_raw_os_error(number));
            let write = envoy::Error::Write { path: "x".into(), source: io::Error::other(said) };
            assert_eq!(kind_of(&write), kind);
        }
        let bind = |kind: io::ErrorKind| uds::Error::Bind { path: "x".into(), source: kind.into() };
        assert_eq!(kind_of(&bind(io::ErrorKind::ReadOnlyFilesystem)), Kind::DiskReadOnly);
        assert_eq!(kind_of(&bind(io::ErrorKind::NotFound)), Kind::SocketFolder);
        assert_eq!(kind_of(&envoy::Error::NoBinary), Kind::EnvoyNotStarted);
        assert_eq!(kind_of(&io::Error::from(io::ErrorKind::AddrInUse)), Kind::PortTaken);
        assert_eq!(kind_of(&std::fmt::Error), Kind::ConfigInvalid);
        assert_eq!(kind_of(&probe::Error::Name("a/b".into())), Kind::ConfigInvalid);
        let reason = io::Error::from_raw_os_error(2).to_string();
        let roots = istiod::Error::Roots { path: "/no/such".into(), reason };
        assert_eq!(kind_of(&roots), Kind::RootMissing);
    }
}
