//! Files to be read, whose place a named pipe may have taken.
//!
//! To open such a pipe and to read from it means to wait for whoever writes, without an end, and a thread that waits so waits
//! on when the file is back in its place. So a pipe is waited for no longer than the path leads to it, or for a given time.
//! All of this blocks, as any read does: it is for threads ([`super::lane`]), or for those that have nothing else to do yet.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;

/// How often it is looked whether the pipe is still there: a thread that sleeps so costs nothing, and those who wait for the
/// file ask again no sooner.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 250_000_000 };

/// A file that was opened.
#[derive(Debug)]
pub(crate) struct Source {
    file: File,
    /// Where it was found, if it is a pipe.
    pipe: Option<PathBuf>,
    /// How long each of its pieces is waited for then; without it, as long as it stands there.
    patience: Option<Duration>,
}

/// Opens it, at the other end of a pipe when somebody has written or gone.
///
/// # Errors
/// As the file system says; [`io::ErrorKind::TimedOut`] where nobody has written for as long as `patience`.
pub(crate) fn open(path: &Path, patience: Option<Duration>) -> io::Result<Source> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    loop {
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            // Another process holds a lease on it, which the kernel asks for back.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => File::open(path)?,
            opened => opened?,
        };
        let pipe = file.metadata()?.file_type().is_fifo().then(|| path.to_owned());
        let source = Source { file, pipe, patience };
        if source.wait()? {
            return Ok(source);
        }
    }
}

/// Whether it can be opened: a pipe without waiting for whoever writes.
///
/// # Errors
/// As the file system says.
pub(crate) fn opens(path: &Path) -> io::Result<()> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        // A lease on it is somebody's who has opened it.
        Err(error) if error.kind() != io::ErrorKind::WouldBlock => Err(error),
        _ => Ok(()),
    }
}

impl Source {
    /// As [`File::metadata`].
    ///
    /// # Errors
    /// The same.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    // Until there is something to read, or the end. `false`: something else has taken the pipe's place.
    fn wait(&self) -> io::Result<bool> {
        let Some(path) = &self.pipe else { return Ok(true) };
        let own = self.metadata()?;
        let until = self.patience.map(|patience| (patience, Instant::now() + patience));
        loop {
            let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
            if rustix::io::retry_on_intr(|| poll(&mut fds, Some(&LOOK)))? > 0 {
                return Ok(true);
            }
            let same = |there: Metadata| (there.dev(), there.ino()) == (own.dev(), own.ino());
            if !std::fs::metadata(path).is_ok_and(same) {
                return Ok(false);
            }
            if let Some((patience, until)) = until
                && Instant::now() >= until
            {
                let why = format!("it is a pipe, into which nobody has written for {patience:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
        }
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if !self.wait()? {
                let why = "another file has taken its place while it was read";
                return Err(io::Error::new(io::ErrorKind::StaleNetworkFileHandle, why));
            }
            match self.file.read(into) {
                Err(error) if self.pipe.is_some() && error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }
}

/// Named pipes for tests.
#[cfg(test)]
pub(crate) mod pipe {
    use super::*;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    pub(crate) fn make(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap();
    }

    /// The end for writing, which is there as soon as somebody reads.
    pub(crate) fn writer(path: &Path) -> Option<File> {
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        OpenOptions::new().write(true).custom_flags(flags).open(path).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::thread::{JoinHandle, spawn};

    fn read(path: &Path) -> io::Result<Vec<u8>> {
        crate::base::bounded::read(path, 1 << 20)
    }

    // A pipe, who reads from it, and its end for writing.
    fn read_from_a_pipe(path: &Path) -> (JoinHandle<io::Result<Vec<u8>>>, File) {
        pipe::make(path);
        let from = path.to_owned();
        let reads = spawn(move || read(&from));
        loop {
            if let Some(end) = pipe::writer(path) {
                return (reads, end);
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn to_see_whether_a_pipe_opens_is_not_to_wait_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert_eq!(opens(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        pipe::make(&path);
        opens(&path).unwrap();
    }

    #[test]
    fn a_pipe_is_waited_for_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let (reads, mut end) = read_from_a_pipe(&path);
        end.write_all(b"one").unwrap();
        end.write_all(b"two").unwrap();
        drop(end);
        assert_eq!(reads.join().unwrap().unwrap(), b"onetwo");
    }

    #[test]
    fn a_file_in_a_pipes_place_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (path, fresh) = (dir.path().join("file"), dir.path().join("fresh"));
        // It waits at the pipe, whose other end nobody has closed.
        let (reads, _end) = read_from_a_pipe(&path);
        std::fs::write(&fresh, "content").unwrap();
        std::fs::rename(&fresh, &path).unwrap();
        assert_eq!(reads.join().unwrap().unwrap(), b"content");
    }

    #[test]
    fn half_a_message_of_a_pipe_that_has_gone_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let (reads, mut end) = read_from_a_pipe(&path);
        end.write_all(b"half").unwrap();
        std::fs::remove_file(&path).unwrap();
        // It may not even have begun to read.
        let error = reads.join().unwrap().unwrap_err().kind();
        assert!(matches!(error, io::ErrorKind::StaleNetworkFileHandle | io::ErrorKind::NotFound), "{error}");
    }

    #[test]
    fn what_is_no_pipe_is_as_ever() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "content").unwrap();
        assert_eq!(read(&dir.path().join("file")).unwrap(), b"content");
        assert_eq!(read(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(read(dir.path()).unwrap_err().kind(), io::ErrorKind::IsADirectory);
    }
}
