//! What another user may do, asked of the kernel before anything is started as that user.
//!
//! The question is put by a thread that has become the user, without supplementary groups, as the agent will be: so
//! folders on the way, ACLs and read-only mounts count as they will for the agent. The rest of the process stays who it is.

use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::Access;
use rustix::process::{Gid, Uid};

use super::accounts::Account;

/// Does the work as the user, in a thread of its own; `None` is who runs this.
///
/// # Errors
/// The system's, when the thread cannot become the user.
pub(crate) fn become_for<T: Send>(user: Option<&Account>, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let Some(user) = user else { return Ok(work()) };
    let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.gid));
    let changed = move || {
        rustix::thread::set_thread_groups(&[])?;
        rustix::thread::set_thread_gid(gid)?;
        // With the number root's capabilities go.
        rustix::thread::set_thread_uid(uid)?;
        Ok(work())
    };
    thread::scope(|scope| {
        let asked = thread::Builder::new().name("as-user".to_owned()).spawn_scoped(scope, changed)?;
        asked.join().unwrap_or_else(|panicked| std::panic::resume_unwind(panicked))
    })
}

/// Why the user may not do what `wish` says with what is at `path`; `None` where it may.
#[must_use]
pub(crate) fn refusal(user: Option<&Account>, path: &Path, wish: Access) -> Option<String> {
    // Links are read by who may: which folder is shut is asked of each on the real way.
    let real = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = user.map_or("this user", |user| user.name.as_str());
    let asked = become_for(user, || {
        let error = rustix::fs::access(&real, wish).err()?;
        let mut way: Vec<PathBuf> = real.ancestors().skip(1).map(Path::to_owned).collect();
        way.reverse();
        way.retain(|dir| !dir.as_os_str().is_empty());
        let shut = way.into_iter().find(|dir| rustix::fs::access(dir, Access::EXEC_OK).is_err());
        Some((io::Error::from(error), shut))
    });
    match asked {
        Ok(None) => None,
        Ok(Some((e, Some(shut)))) => Some(format!("{name} may not enter {}: {e}", shut.display())),
        Ok(Some((e, None))) => Some(format!("{name} may not {}: {e}", verb(wish))),
        Err(e) => Some(format!("this cannot be looked at as {name}: {e}")),
    }
}

fn verb(wish: Access) -> &'static str {
    match wish {
        Access::READ_OK => "read it",
        Access::EXEC_OK => "execute it",
        _ => "write to it",
    }
}

/// Why the user could not make files in the folder, or the folder itself.
#[must_use]
pub(crate) fn no_room(user: Option<&Account>, dir: &Path) -> Option<String> {
    let there = dir.ancestors().find(|dir| dir.exists()).filter(|dir| !dir.as_os_str().is_empty());
    let there = there.unwrap_or(Path::new("."));
    let shown = there.display();
    if !there.is_dir() {
        return Some(format!("{shown} is no folder"));
    }
    refusal(user, there, Access::WRITE_OK | Access::EXEC_OK).map(|why| format!("{shown}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_the_mode_refuses_is_told_with_the_folder_that_is_shut() {
        let nobody = Account { name: "nobody".to_owned(), uid: 65534, gid: 65534 };
        let user = rustix::process::geteuid().is_root().then_some(&nobody);
        let dir = tempfile::tempdir().unwrap();
        set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
        let inner = dir.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        let file = inner.join("file");
        write(&file, "#!/bin/sh\n").unwrap();
        set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        set_permissions(&inner, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(refusal(user, &file, Access::READ_OK), None);
        assert!(refusal(user, &file, Access::EXEC_OK).unwrap().contains("may not execute it: Permission"));
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        set_permissions(&file, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(refusal(user, &link, Access::EXEC_OK), None);
        if user.is_some() {
            assert!(no_room(user, &inner.join("new/dir")).unwrap().contains("may not write to it"));
            set_permissions(&inner, Permissions::from_mode(0o700)).unwrap();
            let why = refusal(user, &link, Access::EXEC_OK).unwrap();
            let real = std::fs::canonicalize(&inner).unwrap();
            assert!(why.contains(&format!("may not enter {}", real.display())), "{why}");
        }
        assert_eq!(no_room(None, &inner.join("new/dir")), None);
        assert!(no_room(None, &file.join("below")).unwrap().ends_with("is no folder"));
        assert!(!rustix::process::geteuid().is_root() || user.is_some(), "the process stays who it is");
    }
}
