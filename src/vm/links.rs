//! Where a path leads in a root file system that is not the one that runs: links are read as that system will read them.
//!
//! The folders on the way belong to the proxy's user, who must not choose what root writes to, not even between root's look
//! and what it does then. So each folder is opened by its name in the one above it, no link is followed but by its text, and
//! what is made or renamed is so in the folder that is held open. `openat2` could open such a place, but not make one.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// As many links as the kernel follows on one way.
const LINKS: usize = 40;

/// A folder that is held open: what is done in it is done there, whatever is put in the way to it meanwhile.
#[derive(Debug)]
pub(crate) struct Folder {
    /// None where it is not there and nobody makes it.
    handle: Option<File>,
    /// Where it is.
    pub path: PathBuf,
}

impl Folder {
    /// The folder itself.
    ///
    /// # Errors
    /// When it is not there.
    pub(crate) fn handle(&self) -> io::Result<&File> {
        self.handle.as_ref().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

/// Makes the folder of this name in the one that is open; `true` for the last one of the way. `None`: it is left missing.
pub(crate) type Make<'a> = dyn FnMut(&Folder, &OsStr, bool) -> io::Result<Option<File>> + 'a;

/// The place of `path` below `root`, which no link leads out of: an absolute one begins at `root` again. What is not there yet is
/// joined as it is named.
///
/// # Errors
/// The system's; links in a circle; a link of somebody else ([`trusted`]).
pub(crate) fn follow(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let (above, name) = walk(root, path, false, &trusted(root, None), &mut |_, _, _| Ok(None))?;
    Ok(name.map_or_else(|| above.path.clone(), |name| above.path.join(name)))
}

/// Whose links are followed where something is written: root's, those of who runs this and of who owns `root`, and
/// never those of `proxy`, unless it is one of the first two.
pub(crate) fn trusted(root: &Path, proxy: Option<u32>) -> impl Fn(u32) -> bool {
    let mut owners = vec![0, rustix::process::geteuid().as_raw()];
    let theirs = std::fs::metadata(root).ok().map(|about| about.uid());
    owners.extend(theirs.filter(|uid| Some(*uid) != proxy));
    move |uid| owners.contains(&uid)
}

/// The folder above the last name of `path` below `root`, and that name, of a file that may be missing; with `enter` the folder
/// at `path`, and no name. What `trusts` says of a link's owner decides whether it is followed, the last one, too.
///
/// # Errors
/// The system's; links in a circle; a link of somebody who is not trusted; what `make` gives.
pub(crate) fn walk(
    root: &Path,
    path: &Path,
    enter: bool,
    trusts: &dyn Fn(u32) -> bool,
    make: &mut Make<'_>,
) -> io::Result<(Folder, Option<OsString>)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let handle = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut here = Folder { handle: Some(handle.into()), path: root.to_owned() };
    let mut above: Vec<Folder> = Vec::new();
    let mut left = names(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == ".." {
            here = above.pop().unwrap_or(here);
            continue;
        }
        let found = match &here.handle {
            Some(handle) => rustix::fs::openat(handle, &name, flags, Mode::empty()).map(File::from),
            None => Err(Errno::NOENT),
        };
        let ends = left.is_empty() && !enter;
        let handle = match found {
            Err(Errno::NOENT) if ends => return Ok((here, Some(name))),
            Err(Errno::NOENT) => make(&here, &name, left.len() == usize::from(!enter))?,
            found => Some(found?),
        };
        let next = here.path.join(&name);
        let about = handle.as_ref().map(File::metadata).transpose()?;
        let is_folder = about.as_ref().is_some_and(std::fs::Metadata::is_dir);
        let Some((handle, about)) = handle.as_ref().zip(about).filter(|(_, about)| about.is_symlink()) else {
            if ends {
                return Ok((here, Some(name)));
            }
            // Only what is opened as a folder is mounted where it is mounted on demand.
            let handle = match &here.handle {
                Some(inside) if is_folder => {
                    Some(rustix::fs::openat(inside, &name, flags | OFlags::DIRECTORY, Mode::empty())?.into())
                }
                _ => handle,
            };
            above.push(std::mem::replace(&mut here, Folder { handle, path: next }));
            continue;
        };
        if !trusts(about.uid()) {
            return Err(io::Error::other(format!(
                "{0} is a link of user {1}, who could choose what root reads and writes: make it a link of root's (if it leads \
                 where it should: chown -h root {0})",
                next.display(),
                about.uid()
            )));
        }
        links += 1;
        if links > LINKS {
            return Err(io::Error::other("links lead in a circle"));
        }
        let to = rustix::fs::readlinkat(handle, "", Vec::new())?;
        let to = PathBuf::from(OsString::from_vec(to.into_bytes()));
        if to.is_absolute() {
            here = above.drain(..).next().unwrap_or(here);
        }
        left.extend(names(&to));
    }
    let is_folder = |handle: &File| handle.metadata().map(|about| about.is_dir());
    if enter && !here.handle.as_ref().map(is_folder).transpose()?.unwrap_or(true) {
        return Err(Errno::NOTDIR.into());
    }
    Ok((here, None))
}

// The last one first.
fn names(path: &Path) -> Vec<OsString> {
    let mut names: Vec<OsString> = path
        .components()
        .filter_map(|part| match part {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .collect();
    names.reverse();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn no_link_leads_out_of_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for made in ["run", "var", "etc"] {
            std::fs::create_dir(root.join(made)).unwrap();
        }
        symlink("/run", root.join("var/run")).unwrap();
        symlink("../../../../../etc/real", root.join("etc/hosts")).unwrap();
        symlink("circle", root.join("etc/circle")).unwrap();
        for (path, expected) in [
            ("./var/run/secrets/token", "run/secrets/token"),
            ("var/run/../run/x", "run/x"),
            ("./etc/hosts", "etc/real"),
            ("../../etc/new/file", "etc/new/file"),
        ] {
            assert_eq!(follow(root, Path::new(path)).unwrap(), root.join(expected), "{path}");
        }
        assert!(follow(root, Path::new("etc/circle")).unwrap_err().to_string().contains("circle"));
    }

    #[test]
    fn a_link_of_the_proxys_user_is_not_followed() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("root-cert.pem");
        symlink("/etc/shadow", &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(1337), Some(1337)).unwrap();
        let why = follow(dir.path(), Path::new("root-cert.pem")).unwrap_err();
        assert!(why.to_string().contains("is a link of user 1337"), "{why}");
    }
}
