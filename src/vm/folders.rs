//! Folders and the log file that root makes where the agent's user will write.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};

use super::accounts::Account;
use super::links::Folder;
use super::places::Places;

/// From these names on folders are the proxy's; those above them are the system's.
const OWN: [&str; 3] = ["istio", "secrets", "certs"];

/// Where the agent makes the folders of its sockets. Somebody else may have made it first.
pub(crate) const SOCKETS: &str = "./var/run/secrets";

/// The folder at `path`, held open, and those that are missing made. The last one becomes the owner's, and those from [`OWN`]
/// on. Where the proxy owns a folder it may put a link in the place of one that was just made: each is opened by its
/// name in the one above it, and no link of the owner's is followed.
///
/// # Errors
/// The system's, and a link of the owner's on the way.
pub(crate) fn make(places: &Places, path: &Path, owner: Option<&Account>) -> io::Result<Folder> {
    let base = places.base();
    let mut one = |above: &Folder, name: &OsStr, last| made(&base, above, name, last, owner);
    places.folder(path, owner.map(|account| account.uid), &mut one)
}

/// Gives the folder at `path`, which is there, to the owner; others may enter it.
///
/// # Errors
/// As of [`make`].
pub(crate) fn give(places: &Places, path: &Path, owner: &Account) -> io::Result<()> {
    let folder = make(places, path, Some(owner))?;
    let open = rustix::fs::openat(folder.handle()?, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mode = Mode::from_raw_mode(rustix::fs::fstat(&open)?.st_mode) | Mode::from_raw_mode(0o755);
    rustix::fs::fchmod(&open, mode)?;
    Ok(rustix::fs::fchown(&open, Some(Uid::from_raw(owner.uid)), Some(Gid::from_raw(owner.gid)))?)
}

/// One folder of those that are missing below `base`.
///
/// # Errors
/// The system's.
pub(super) fn made(
    base: &Path,
    above: &Folder,
    name: &OsStr,
    last: bool,
    owner: Option<&Account>,
) -> io::Result<Option<File>> {
    let (folder, is_new) = folder(above.handle()?, name)?;
    let made = above.path.join(name);
    let below = made.strip_prefix(base).unwrap_or(&made);
    let theirs = last || below.iter().any(|name| OWN.iter().any(|own| name == *own));
    match owner.filter(|_| is_new) {
        Some(account) if theirs => fchown(&folder, Some(account.uid), Some(account.gid))?,
        // Whoever is careful with the umask would shut the system's folders to the proxy.
        Some(_) => folder.set_permissions(std::fs::Permissions::from_mode(0o755))?,
        None => {}
    }
    Ok(Some(folder))
}

// The folder of this name, and whether it is new.
fn folder(above: &File, name: &OsStr) -> io::Result<(File, bool)> {
    // With the umask of whoever is not careful everybody could put a root of his own into it.
    let is_new = match rustix::fs::mkdirat(above, name, Mode::from_raw_mode(0o755)) {
        Err(Errno::EXIST) => false,
        made => made.map(|()| true)?,
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok((rustix::fs::openat(above, name, flags, Mode::empty())?.into(), is_new))
}

/// A log file for the agent, as its user would open it: appended to, no link followed.
///
/// # Errors
/// The system's, and when the place is taken by something that is no plain file of one name.
pub(crate) fn log_file(folder: &Folder, name: &str, owner: &Account) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let mode = Mode::from_raw_mode(0o640);
    let file = File::from(rustix::fs::openat(folder.handle()?, name, flags, mode)?);
    let about = file.metadata()?;
    if !about.is_file() || about.nlink() != 1 {
        return Err(io::Error::other("this is no plain file of one name"));
    }
    fchown(&file, Some(owner.uid), Some(owner.gid))?;
    // With TPROXY the agent is root, and what rotates the log is the proxy's user, who is of its group.
    if owner.uid == 0 {
        file.set_permissions(std::fs::Permissions::from_mode(0o660))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooted(root: &Path) -> Places {
        Places::new(|flag| (flag == "root").then(|| root.to_owned()), &Default::default())
    }

    #[test]
    fn folders_are_made_one_in_the_other_and_no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = Account { name: "proxy".to_owned(), uid, gid };
        make(&rooted(base), Path::new("./a/b/istio/proxy"), Some(&owner)).unwrap();
        let mode = |path: &str| base.join(path).metadata().unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode("a"), mode("a/b")), (0o755, 0o755), "whatever the umask is");
        assert!(base.join("a/b/istio/proxy").is_dir());
        // Put in the place of a folder that was just made.
        let theirs = File::open(base.join("a")).unwrap();
        std::os::unix::fs::symlink(base.join("a/b"), base.join("a/link")).unwrap();
        assert!(folder(&theirs, OsStr::new("link")).is_err());
        let (there, is_new) = folder(&theirs, OsStr::new("b")).unwrap();
        assert!(!is_new && there.metadata().unwrap().is_dir());
    }

    #[test]
    fn a_log_of_roots_can_be_rotated_by_the_proxys_group() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = make(&rooted(dir.path()), Path::new("./log"), None).unwrap();
        for (name, uid, expected) in [("root.log", 0, 0o660), ("proxy.log", 1337, 0o640)] {
            let owner = Account { name: "proxy".to_owned(), uid, gid: 1338 };
            log_file(&folder, name, &owner).unwrap();
            let about = dir.path().join("log").join(name).metadata().unwrap();
            let mode = about.permissions().mode() & 0o7777;
            assert_eq!((about.uid(), about.gid(), mode), (uid, 1338, expected), "{name}");
        }
    }
}
