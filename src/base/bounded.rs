//! Reading a file that may be larger than anybody wants.

use std::io::{self, Read as _};
use std::path::Path;
use std::time::Duration;

use super::reading;

/// Far above any file of certificates or tokens.
const USUAL: u64 = 16 << 20;

/// Far above any file of settings: Kubernetes has none of more than 1 MiB.
const SETTINGS: u64 = 4 << 20;

/// How long a start waits for whoever is to write into a pipe: a program beside it that has just been started, too.
const PATIENCE: Duration = Duration::from_secs(5);

/// The content of a file of at most `most` bytes, in a buffer that did not grow on the way. One whose size is larger is
/// refused before a byte is read; one that has no size (`/proc`), or grows meanwhile, as soon as it is too long.
///
/// # Errors
/// As the file system says; [`io::ErrorKind::FileTooLarge`] for a larger one.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    taken(path, most, None)
}

/// As [`read`], of a file of the usual size.
///
/// # Errors
/// The same.
pub(crate) fn usual(path: &Path) -> io::Result<Vec<u8>> {
    read(path, USUAL)
}

/// As [`read`], of a file that settings name, which is read before there is anything else to do: it may be a pipe, but
/// one into which nobody writes would hold up the start without an end and without a word.
///
/// # Errors
/// The same; [`io::ErrorKind::TimedOut`] for such a pipe.
pub(crate) fn given(path: &Path) -> io::Result<Vec<u8>> {
    taken(path, SETTINGS, Some(PATIENCE))
}

/// As [`given`], as text.
///
/// # Errors
/// The same; [`io::ErrorKind::InvalidData`] where it is none.
pub(crate) fn given_text(path: &Path) -> io::Result<String> {
    String::from_utf8(given(path)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

fn taken(path: &Path, most: u64, patience: Option<Duration>) -> io::Result<Vec<u8>> {
    let too_large = || io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {most} bytes"));
    let file = reading::open(path, patience)?;
    let size = file.metadata()?.len();
    if size > most {
        return Err(too_large());
    }
    // A buffer that grows would leave copies of a key behind.
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

    #[test]
    fn a_pipe_that_nobody_writes_to_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        reading::pipe::make(&path);
        let said = taken(&path, 1000, Some(Duration::ZERO)).unwrap_err();
        assert_eq!(said.kind(), io::ErrorKind::TimedOut);
        // Half of it has come, and its writer stands still.
        let from = path.clone();
        let reads = std::thread::spawn(move || taken(&from, 1000, Some(Duration::from_secs(1))));
        let mut writer = loop {
            match reading::pipe::writer(&path) {
                Some(writer) => break writer,
                None => std::thread::yield_now(),
            }
        };
        std::io::Write::write_all(&mut writer, b"half").unwrap();
        assert_eq!(reads.join().unwrap().unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
