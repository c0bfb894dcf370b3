//! Descriptors by name, through a socket that is the receiver's standard input.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FileType, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, send, sendmsg, socketpair,
};
use zeroize::Zeroizing;

/// The first message; its number changes with the format of the others.
const MAGIC: &[u8] = b"pilot-agent hand-over 1";
/// Longest key with its detail, in bytes: paths have 4096 at most.
const LONGEST: usize = 8 * 1024;
/// A parcel of ours never holds more.
const MOST: usize = 1024;
/// Where the receiver's own standard input is.
const STDIN: &str = "standard input";

/// Key, then detail and descriptor.
pub(crate) type Parcel = BTreeMap<String, (String, OwnedFd)>;

/// Puts a parcel into a socket, to be the standard input of the next program.
///
/// # Errors
/// The system's.
pub(crate) fn pack(parcel: &Parcel) -> io::Result<OwnedFd> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    send(&ours, MAGIC, flags)?;
    for (key, (detail, fd)) in parcel {
        put(&ours, format!("{key}\0{detail}").as_bytes(), fd.as_fd(), flags)?;
    }
    // A program that is started with none has none afterwards.
    let stdin = io::stdin();
    if rustix::io::fcntl_getfd(&stdin).is_ok() {
        put(&ours, format!("{STDIN}\0").as_bytes(), stdin.as_fd(), flags)?;
    }
    Ok(theirs)
}

fn put(to: &OwnedFd, text: &[u8], fd: BorrowedFd<'_>, flags: SendFlags) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut with = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !with.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for a descriptor"));
    }
    sendmsg(to, &[IoSlice::new(text)], &mut with, flags)?;
    Ok(())
}

/// Whether a predecessor has left a parcel on standard input.
pub(crate) fn is_left() -> bool {
    let stdin = io::stdin();
    let mut first = [0; MAGIC.len()];
    rustix::fs::fstat(&stdin).is_ok_and(|of| FileType::from_raw_mode(of.st_mode) == FileType::Socket)
        && recv(&stdin, &mut first, RecvFlags::PEEK | RecvFlags::DONTWAIT)
            .is_ok_and(|(n, _)| n == MAGIC.len() && first == MAGIC)
}

/// The parcel that a predecessor has left on standard input, which is afterwards what it was before; `None`: there
/// is no predecessor.
///
/// # Errors
/// What comes is no parcel, or not whole.
pub(crate) fn receive() -> Option<io::Result<Parcel>> {
    if !is_left() {
        return None;
    }
    let stdin = io::stdin();
    Some(unpack(stdin.as_fd()).and_then(|mut parcel| {
        let before = match parcel.remove(STDIN) {
            Some((_, fd)) => fd,
            None => File::open("/dev/null")?.into(),
        };
        rustix::stdio::dup2_stdin(&before)?;
        Ok(parcel)
    }))
}

fn unpack(from: BorrowedFd<'_>) -> io::Result<Parcel> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("what is handed over {what}"));
    let mut parcel = Parcel::new();
    let mut text = vec![0; LONGEST];
    recv(from, &mut text[..], RecvFlags::DONTWAIT)?;
    loop {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut with = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = recvmsg(from, &mut [IoSliceMut::new(&mut text)], &mut with, flags)?;
        if got.bytes == 0 {
            return Ok(parcel);
        }
        let fd = with.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        let named = std::str::from_utf8(&text[..got.bytes]).ok().and_then(|text| text.split_once('\0'));
        let (Some(fd), Some((key, detail))) = (fd, named) else {
            return Err(bad("has no name or no content"));
        };
        parcel.insert(key.to_owned(), (detail.to_owned(), fd));
        if parcel.len() > MOST {
            return Err(bad("has too many parts"));
        }
    }
}

/// Seals that make a memory file unchangeable.
const SEALS: SealFlags =
    SealFlags::SEAL.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::WRITE);

/// Memory with these bytes that nobody can change and that has no name in any file system.
///
/// # Errors
/// The system's.
pub(crate) fn sealed(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // A machine may refuse memory that could be executed (`vm.memfd_noexec=2`); kernels before 6.3 do not know the flag.
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags)?,
        made => made?,
    };
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    Ok(file.into())
}

/// The bytes of sealed memory.
///
/// # Errors
/// When it is not sealed, or cannot be read.
pub(crate) fn read_sealed(fd: &OwnedFd) -> io::Result<Zeroizing<Vec<u8>>> {
    if !rustix::fs::fcntl_get_seals(fd)?.contains(SEALS) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not sealed"));
    }
    let mut file = File::from(fd.try_clone()?);
    file.rewind()?;
    let length = usize::try_from(file.metadata()?.len()).unwrap_or_default();
    // As long as it will be: a vector that grows leaves copies behind.
    let mut bytes = Zeroizing::new(Vec::with_capacity(length + 1));
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_and_sealed_memory_arrive() {
        let mut parcel = Parcel::new();
        parcel.insert("a secret".into(), (String::new(), sealed("test", b"hush").unwrap()));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        parcel.insert("tcp".into(), ("1 2".into(), listener.into()));
        let socket = pack(&parcel).unwrap();
        drop(parcel);
        let mut got = unpack(socket.as_fd()).unwrap();
        assert!(got.remove(STDIN).is_some());
        let (detail, fd) = got.remove("tcp").unwrap();
        assert_eq!(detail, "1 2");
        assert_eq!(std::net::TcpListener::from(fd).local_addr().unwrap(), address);
        let (_, secret) = got.remove("a secret").unwrap();
        for _ in 0..2 {
            assert_eq!(*read_sealed(&secret).unwrap(), b"hush");
        }
        let mode = rustix::fs::fstat(&secret).unwrap().st_mode;
        // Where the kernel knows of that.
        if rustix::fs::memfd_create("known", MemfdFlags::NOEXEC_SEAL).is_ok() {
            assert_eq!(mode & 0o111, 0, "nobody executes it");
        }
        assert!(File::from(secret).write_all(b"x").is_err());
        assert!(got.is_empty());
    }

    #[test]
    fn what_is_no_parcel_is_refused() {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        send(&a, MAGIC, SendFlags::empty()).unwrap();
        send(&a, b"a name without a descriptor\0", SendFlags::empty()).unwrap();
        assert_eq!(unpack(b.as_fd()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let open = rustix::fs::memfd_create("open", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert!(read_sealed(&open).is_err());
    }
}
