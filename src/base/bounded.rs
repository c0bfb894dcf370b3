//! Reading a file that may be larger than anybody wants.

use std::io::{self, Read as _};
use std::path::Path;

use super::reading;

/// The content of a file of at most `most` bytes, in a buffer that did not grow on the way. One whose size is larger is
/// refused before a byte is read; one that has no size (`/proc`), or grows meanwhile, as soon as it is too long.
///
/// # Errors
/// As the file system says; [`io::ErrorKind::FileTooLarge`] for a larger one.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {most} bytes"));
    let file = reading::open(path)?;
    let size = file.metadata()?.len();
    if size > most {
        return Err(too_large());
    }
    let mut content = Vec::with_capacity(usize::try_from(size).unwrap_or_default() + 1);
    file.take(most + 1).read_to_end(&mut content)?;
    if content.len() as u64 > most { Err(too_large()) } else { Ok(content) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, "four").unwrap();
        assert_eq!(read(&path, 4).unwrap(), b"four");
        assert_eq!(read(&path, 3).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        // More than can be had: whoever makes room for it first does not come back.
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&path, 1 << 39).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        // Without a size, and without an end.
        assert_eq!(read(Path::new("/dev/zero"), 1000).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        assert!(!read(Path::new("/proc/self/status"), 1 << 20).unwrap().is_empty());
    }
}
