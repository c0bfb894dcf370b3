//! Where a path leads in a root file system that is not the one that runs: links are read as that system will read them.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// As many links as the kernel follows on one way.
const LINKS: usize = 40;

/// The place of `path` below `root`, which no link leads out of: an absolute one begins at `root` again. What is not there yet is
/// joined as it is named. `openat2` could open such a place, but not make or rename one.
///
/// Only links of root, of who runs this and of who owns `root` are followed: the folders on the way belong to the proxy's
/// user, who must not choose what root writes to.
///
/// # Errors
/// The system's; links in a circle; a link of somebody else.
pub(crate) fn follow(root: &Path, path: &Path) -> io::Result<PathBuf> {
    let mut owners = vec![0, rustix::process::geteuid().as_raw()];
    owners.extend(std::fs::metadata(root).map(|about| about.uid()));
    let mut at = root.to_owned();
    let mut left = names(path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        if name == ".." {
            if at != root {
                at.pop();
            }
            continue;
        }
        let next = at.join(&name);
        match std::fs::symlink_metadata(&next) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => at = next,
            Err(e) => return Err(e),
            Ok(about) if !about.is_symlink() => at = next,
            Ok(about) if !owners.contains(&about.uid()) => {
                return Err(io::Error::other(format!(
                    "{} is a link of user {}, who could choose what is written to: make it a link of root's",
                    next.display(),
                    about.uid()
                )));
            }
            Ok(_) => {
                links += 1;
                if links > LINKS {
                    return Err(io::Error::other("links lead in a circle"));
                }
                let to = std::fs::read_link(&next)?;
                if to.is_absolute() {
                    root.clone_into(&mut at);
                }
                left.extend(names(&to));
            }
        }
    }
    Ok(at)
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
