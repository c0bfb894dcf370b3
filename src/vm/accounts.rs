//! Users of the machine, from `/etc/passwd` (a user of the mesh's proxy is a local one).

use std::path::{Path, PathBuf};

/// A user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    /// Its name.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// The number of its first group.
    pub gid: u32,
}

/// Everybody the machine knows.
#[derive(Debug, Clone, Default)]
pub(crate) struct Accounts {
    users: Vec<Account>,
    /// The root file system whose users they are, where that is not this machine's.
    of: Option<PathBuf>,
}

impl Accounts {
    /// Those of the root file system at `root`, where it has users of its own, else this machine's; a file that cannot be
    /// read holds nobody.
    #[must_use]
    pub(crate) fn of(root: &Path) -> Self {
        let (own, machines) = (root.join("etc/passwd"), Path::new("/etc/passwd"));
        let foreign = own.exists() && !std::fs::canonicalize(&own).is_ok_and(|path| path == machines);
        let file = if foreign { &own } else { machines };
        let parsed = Self::parse(&std::fs::read_to_string(file).unwrap_or_default());
        Self { of: foreign.then(|| std::path::absolute(root).unwrap_or_else(|_| root.to_owned())), ..parsed }
    }

    /// That there is no user `name`, and how one is made; `setting` named it.
    #[must_use]
    pub(crate) fn lack(&self, name: &str, setting: &str) -> String {
        let (place, flag) = match &self.of {
            Some(root) => {
                (format!(" in {}", root.join("etc/passwd").display()), format!("--root {} ", root.display()))
            }
            None => Default::default(),
        };
        format!(
            "the user {name}{setting} does not exist{place}: useradd {flag}--system --home-dir /var/lib/istio {name}"
        )
    }

    /// From the file's text.
    #[must_use]
    pub(crate) fn parse(passwd: &str) -> Self {
        let users = passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, uid, gid) =
                (fields.next()?, fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
            Some(Account { name: name.to_owned(), uid, gid })
        });
        Self { users: users.collect(), of: None }
    }

    /// By name, or by number.
    #[must_use]
    pub(crate) fn user(&self, name: &str) -> Option<Account> {
        self.users.iter().find(|user| user.name == name || user.uid.to_string() == name).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_file_system_has_users_of_its_own_and_a_folder_has_the_machines() {
        let root = tempfile::tempdir().unwrap();
        let machine = Accounts::of(root.path());
        assert!(machine.user("root").is_some());
        assert!(
            machine.lack("x", "").ends_with("does not exist: useradd --system --home-dir /var/lib/istio x")
        );
        std::fs::create_dir(root.path().join("etc")).unwrap();
        std::fs::write(root.path().join("etc/passwd"), "istio-proxy:x:4711:4712::/:\n").unwrap();
        let own = Accounts::of(root.path());
        assert_eq!(own.user("istio-proxy").map(|user| (user.uid, user.gid)), Some((4711, 4712)));
        assert!(own.user("root").is_none());
        let said = own.lack("x", "");
        assert!(said.contains("etc/passwd: useradd --root /"), "{said}");
    }
}
