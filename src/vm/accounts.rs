//! Users and groups of the machine, from `/etc/passwd` and `/etc/group` (a user of the mesh's proxy is a local one).

use std::path::Path;

/// A user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Its name.
    pub name: String,
    /// Its number.
    pub uid: u32,
    /// The number of its first group.
    pub gid: u32,
}

/// Everybody the machine knows.
#[derive(Debug, Clone, Default)]
pub struct Accounts {
    users: Vec<Account>,
    groups: Vec<(String, u32)>,
}

impl Accounts {
    /// Those of the root file system at `root`; a file that cannot be read holds nobody.
    #[must_use]
    pub fn of(root: &Path) -> Self {
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        Self::parse(&read("etc/passwd"), &read("etc/group"))
    }

    /// From the two files' texts.
    #[must_use]
    pub fn parse(passwd: &str, group: &str) -> Self {
        let users = passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, uid, gid) =
                (fields.next()?, fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
            Some(Account { name: name.to_owned(), uid, gid })
        });
        let groups = group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            Some((fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?))
        });
        Self { users: users.collect(), groups: groups.collect() }
    }

    /// By name, or by number.
    #[must_use]
    pub fn user(&self, name: &str) -> Option<Account> {
        self.users.iter().find(|user| user.name == name || user.uid.to_string() == name).cloned()
    }

    /// A group's number.
    #[must_use]
    pub fn group(&self, name: &str) -> Option<u32> {
        self.groups.iter().find(|(group, _)| group == name).map(|(_, gid)| *gid)
    }
}
