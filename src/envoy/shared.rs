//! The memory that the epochs of a hot restart share (`/dev/shm`), as far as the agent must put it in order.
//!
//! An epoch that starts sets a flag there and clears it when it is initialised. One that ends before leaves the flag
//! set, and no other can ever start beside the one that still serves: "previous envoy process is still initializing".
//! Envoy itself never clears it, so whoever has seen the end of that epoch must.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// First number of `--hot-restart-version`: the form of this memory, unchanged since Envoy 1.8.
const FORM: u64 = 11;
/// Its size, by the size of two mutexes of the C library (x86-64, arm64); the flags are the last eight bytes.
const SIZES: [u64; 2] = [104, 120];
const INITIALIZING: u64 = 1;
const NOFOLLOW: i32 = OFlags::NOFOLLOW.bits().cast_signed();

/// Where it is.
pub(super) fn path(base_id: u32) -> PathBuf {
    format!("/dev/shm/envoy_shared_memory_{}", u64::from(base_id) * 10).into()
}

/// No epoch is starting any more; gives whether one had left its flag.
///
/// # Errors
/// The system's; nothing is changed then, as where the form is another one.
pub(super) fn clear(path: &Path) -> io::Result<bool> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(NOFOLLOW).open(path)?;
    let number = |at: u64| -> io::Result<u64> {
        let mut bytes = [0; 8];
        File::read_exact_at(&file, &mut bytes, at)?;
        Ok(u64::from_ne_bytes(bytes))
    };
    let size = number(0)?;
    if !SIZES.contains(&size) || number(8)? != FORM {
        return Err(io::Error::other("it has a form that is not known"));
    }
    let flags = number(size - 8)?;
    if flags & INITIALIZING == 0 {
        return Ok(false);
    }
    file.write_all_at(&(flags & !INITIALIZING).to_ne_bytes(), size - 8)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_flag_of_a_known_form_is_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let put = |size: u64, form: u64, flags: u64| {
            let mut bytes = vec![7; usize::try_from(size).unwrap()];
            bytes[..8].copy_from_slice(&size.to_ne_bytes());
            bytes[8..16].copy_from_slice(&form.to_ne_bytes());
            let at = bytes.len() - 8;
            bytes[at..].copy_from_slice(&flags.to_ne_bytes());
            std::fs::write(&path, &bytes).unwrap();
            bytes
        };
        for (size, form, flags, cleared) in [
            (104, 11, 1, Some(true)),
            (120, 11, 3, Some(true)),
            (104, 11, 0, Some(false)),
            (104, 12, 1, None),
            (112, 11, 1, None),
        ] {
            let before = put(size, form, flags);
            assert_eq!(clear(&path).ok(), cleared, "{size} {form} {flags}");
            let cleared = cleared == Some(true);
            let after = std::fs::read(&path).unwrap();
            let same = if cleared { before.len() - 8 } else { before.len() };
            assert_eq!((&after[..same], after.len()), (&before[..same], before.len()));
            if cleared {
                assert_eq!(after[same..], (flags & !1).to_ne_bytes());
            }
        }
        std::fs::write(&path, "short").unwrap();
        assert!(clear(&path).is_err() && clear(&dir.path().join("missing")).is_err());
    }
}
