//! The system's errors that more than one room asks about, by their names (`errno(3)`).

use std::io;

use rustix::io::Errno;

/// No descriptor is left: of this process (`EMFILE`), or of the machine (`ENFILE`).
pub(crate) fn no_descriptor(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// The kernel has no addresses of this family (`EAFNOSUPPORT`, `EADDRNOTAVAIL`): it is one without IPv6.
pub(crate) fn no_family(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL))
}
