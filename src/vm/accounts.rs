//! Users of the machine, from `/etc/passwd` (a user of the mesh's proxy is a local one).

use std::path::Path;

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
}

impl Accounts {
    /// Those of the root file system at `root`; a file that cannot be read holds nobody.
    #[must_use]
    pub(crate) fn of(root: &Path) -> Self {
        Self::parse(&std::fs::read_to_string(root.join("etc/passwd")).unwrap_or_default())
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
        Self { users: users.collect() }
    }

    /// By name, or by number.
    #[must_use]
    pub(crate) fn user(&self, name: &str) -> Option<Account> {
        self.users.iter().find(|user| user.name == name || user.uid.to_string() == name).cloned()
    }
}
