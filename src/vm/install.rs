//! `vm install`: the files of `istioctl x workload entry configure` to their places.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::accounts::Account;
use super::links::Folder;
use super::places::{Places, TOKEN};
use super::{envfile, folders, hosts};
use crate::base::error::AtPath;
use crate::base::place;
use crate::tls::cert;

/// The package's unit, for machines without the package.
const UNIT: &str = include_str!("../../packaging/systemd/istio.service");
/// Where the package has the binary.
const BINARY: &str = "/usr/bin/pilot-agent";
/// Where packages keep theirs.
const PACKAGED: [&str; 2] = ["./lib/systemd/system/istio.service", "./usr/lib/systemd/system/istio.service"];

/// One file to be put in place.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    /// Its place, as people know it.
    pub place: PathBuf,
    /// The same as it was named.
    path: PathBuf,
    /// Where that leads, when it was looked at.
    target: PathBuf,
    /// What it is to hold.
    pub content: Vec<u8>,
    mode: u32,
    ours: bool,
    /// Lines are added to what is there, and an older one for the same name may go.
    adds: bool,
    /// A link to `/dev/null` is there, as `systemctl mask` makes it: it is replaced, not written to.
    masked: bool,
}

/// What becomes of an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing is there yet, or nothing that would be lost: comments alone, or a file that lines are added to.
    Create,
    /// It is as it should be.
    Keep,
    /// Something else is there.
    Overwrite,
}

/// Reads the folder.
///
/// # Errors
/// Every file that is missing, cannot be read or cannot be what its name says, a line for each fault.
pub(crate) fn items(dir: &Path, places: &Places) -> Result<Vec<Item>, Vec<String>> {
    let mut errors = Vec::new();
    let mut items = Vec::new();
    let certs = places.certs.clone().unwrap_or_else(|| PathBuf::from("./etc/certs"));
    let (root, token) = (certs.join("root-cert.pem"), PathBuf::from(TOKEN));
    let files = [
        ("cluster.env", &places.cluster_env.0, 0o644, true),
        ("mesh.yaml", &places.mesh, 0o644, true),
        ("root-cert.pem", &root, 0o644, true),
        ("istio-token", &token, 0o600, true),
        ("hosts", &places.hosts, 0o644, false),
    ];
    for (name, place, mode, ours) in files {
        let from = dir.join(name);
        let mut item = match Item::at(places, place, mode, ours) {
            Ok(item) => item,
            Err(why) => {
                errors.push(why.to_string());
                continue;
            }
        };
        match std::fs::read(&from) {
            Ok(content) if name == "hosts" => {
                errors.extend(hosts::odd(&from.display().to_string(), &content));
                match hosts::merged(&item.target, &content) {
                    Ok(content) => items.push(Item { content, adds: true, ..item }),
                    Err(e) => errors.push(format!("{}: {e}", item.place.display())),
                }
            }
            Ok(content) if content.trim_ascii().is_empty() => {
                errors.push(format!("{}: the file is empty", from.display()));
            }
            Ok(content) => {
                errors.extend(faults(name, &from.display().to_string(), &content));
                item.content = content;
                items.push(item);
            }
            Err(e) => errors
                .push(format!("{}: {e}; \"istioctl x workload entry configure\" writes it", from.display())),
        }
    }
    if !PACKAGED.iter().any(|place| places.at(Path::new(place)).exists()) {
        let content = UNIT.replace(BINARY, &program(places)).into_bytes();
        match Item::at(places, &places.unit, 0o644, false) {
            Ok(item) => items.push(Item { content, ..item }),
            Err(why) => errors.push(why.to_string()),
        }
    }
    if errors.is_empty() { Ok(items) } else { Err(errors) }
}

// Where the unit will find this program. A root file system in the making may have it elsewhere than it lies here, and where
// /proc is not mounted nobody tells where that is.
fn program(places: &Places) -> String {
    let own = std::env::current_exe().ok().and_then(|path| path.to_str().map(str::to_owned));
    let usual = ["/usr/local/bin/pilot-agent", BINARY].map(str::to_owned);
    let is_there = |path: &&String| places.at(Path::new(&format!(".{path}"))).symlink_metadata().is_ok();
    let found = own.iter().chain(&usual).find(is_there).cloned();
    found.or(own).unwrap_or_else(|| BINARY.to_owned())
}

// What would keep the agent from starting; the token is istiod's to judge.
fn faults(name: &str, from: &str, content: &[u8]) -> Vec<String> {
    match name {
        "cluster.env" => envfile::parse(from, &String::from_utf8_lossy(content)).err().unwrap_or_default(),
        "root-cert.pem" => {
            cert::parse_chain(content).err().map(|e| format!("{from}: {e}")).into_iter().collect()
        }
        _ => Vec::new(),
    }
}

impl Item {
    // Nothing yet for this place; a line when no file can be put there.
    fn at(places: &Places, path: &Path, mode: u32, ours: bool) -> Result<Self, AtPath> {
        let place = places.at(path);
        let (target, masked) = places.target(path).map_err(AtPath::at(&place))?;
        if !masked && target.symlink_metadata().is_ok_and(|about| !about.is_file()) {
            let why = io::Error::other("what is there is no file: move it away");
            return Err(AtPath::at(&place)(why));
        }
        let path = path.to_owned();
        Ok(Self { place, path, target, content: Vec::new(), mode, ours, adds: false, masked })
    }

    /// A file that only its owner reads.
    #[must_use]
    pub(crate) fn secret(places: &Places, path: &Path, content: Vec<u8>) -> Self {
        let (place, path) = (places.at(path), path.to_owned());
        let target = place.clone();
        Self { place, path, target, content, mode: 0o600, ours: true, adds: false, masked: false }
    }

    /// What is there when it would be overwritten.
    #[must_use]
    pub(crate) fn other(&self) -> &'static str {
        if self.masked { "is masked (a link to /dev/null)" } else { "is there with other content" }
    }

    /// What would become of it. One that holds the same and that `owner` may not read (root has copied it there) is written anew.
    #[must_use]
    pub(crate) fn step(&self, owner: Option<&Account>) -> Step {
        if self.masked {
            return Step::Overwrite;
        }
        match std::fs::read(&self.target) {
            Ok(there) if there == self.content => match owner.filter(|_| self.ours) {
                Some(account) if shut(&self.target, account) => Step::Create,
                _ => Step::Keep,
            },
            Ok(there) if comments(&there) || (self.adds && within(&there, &self.content)) => Step::Create,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Step::Create,
            _ => Step::Overwrite,
        }
    }

    /// Puts it in place, whole or not at all; `owner` gets it and the folders made for it, where that is whose it is.
    ///
    /// # Errors
    /// The system's, with the place, and a link of the owner's on the way.
    pub(crate) fn put(&self, places: &Places, owner: Option<&Account>) -> Result<(), AtPath> {
        self.write(places, owner).map_err(AtPath::at(&self.place))
    }

    fn write(&self, places: &Places, owner: Option<&Account>) -> io::Result<()> {
        let proxy = owner.map(|account| account.uid);
        let owner = owner.filter(|_| self.ours);
        let base = places.base();
        let mut make = |above: &Folder, name: &OsStr, last| folders::made(&base, above, name, last, owner);
        let (folder, name) = if self.masked {
            let above = self.path.parent().unwrap_or(Path::new(""));
            (places.folder(above, proxy, &mut make)?, self.path.file_name().unwrap_or_default().to_owned())
        } else {
            places.file(&self.path, proxy, &mut make)?
        };
        let folder = folder.handle()?;
        let theirs = |file: &File| {
            if let Some(account) = owner {
                fchown(file, Some(account.uid), Some(account.gid))?;
            }
            file.sync_all()
        };
        // The process's umask does not decide about a token's or a unit's mode.
        match place::replace_in(folder, &name, &self.content, self.mode, theirs) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => over_a_mount(folder, &name, &self.content),
            other => other,
        }
    }
}

// A file that is itself a mount, as /etc/hosts is in every container, cannot be renamed over: it is written to, which
// cannot be done whole or not at all.
fn over_a_mount(folder: &File, name: &OsStr, content: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    file.write_all(content)?;
    file.set_len(content.len() as u64)?;
    file.sync_all()
}

// By its mode alone: a folder on the way that is shut is not opened by writing the file anew.
fn shut(place: &Path, account: &Account) -> bool {
    place.metadata().is_ok_and(|about| {
        let theirs = match (about.uid() == account.uid, about.gid() == account.gid) {
            (true, _) => 0o400,
            (false, true) => 0o040,
            (false, false) => 0o004,
        };
        about.mode() & theirs == 0
    })
}

// As the package's own cluster.env is.
fn comments(text: &[u8]) -> bool {
    text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).all(|line| line.is_empty() || line[0] == b'#')
}

// Each line of the one is in the other.
fn within(small: &[u8], large: &[u8]) -> bool {
    let lines = |text| <[u8]>::split(text, |byte: &u8| *byte == b'\n');
    lines(small).all(|line| lines(large).any(|other| other == line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rooted(root: &Path) -> Places {
        Places::new(|flag| (flag == "root").then(|| root.to_owned()), &Default::default())
    }

    #[test]
    fn only_what_would_be_lost_is_asked_about() {
        let dir = tempfile::tempdir().unwrap();
        let step = |there: &str, adds: bool| {
            let place = dir.path().join("file");
            std::fs::write(&place, there).unwrap();
            let content = b"a b\nc d\n".to_vec();
            Item { adds, mode: 0o644, ..Item::secret(&rooted(dir.path()), &place, content) }.step(None)
        };
        for (there, adds, expected) in [
            ("a b\nc d\n", false, Step::Keep),
            ("", false, Step::Create),
            ("# put it here\n\n  # or there\n", false, Step::Create),
            ("# put it here\nx\n", false, Step::Overwrite),
            ("a b\n", false, Step::Overwrite),
            ("a b\n", true, Step::Create),
            ("c d\na b", true, Step::Create),
            ("a b\n# mine\n", true, Step::Overwrite),
        ] {
            assert_eq!(step(there, adds), expected, "{there:?} {adds}");
        }
    }

    #[test]
    fn a_link_put_there_after_the_look_leads_nowhere() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (root, victim) = (dir.path().join("root"), dir.path().join("root/victim"));
        std::fs::create_dir_all(root.join("var/run/secrets/tokens")).unwrap();
        std::fs::create_dir(&victim).unwrap();
        let places = rooted(&root);
        let owner = Account { name: "proxy".to_owned(), uid: 1337, gid: 1337 };
        let item = Item::at(&places, Path::new(TOKEN), 0o600, true).unwrap();
        let item = Item { content: b"a.b.c".to_vec(), ..item };
        let tokens = root.join("var/run/secrets/tokens");
        std::fs::remove_dir(&tokens).unwrap();
        std::os::unix::fs::symlink("/victim", &tokens).unwrap();
        std::os::unix::fs::lchown(&tokens, Some(1337), Some(1337)).unwrap();
        let told = item.put(&places, Some(&owner)).unwrap_err().to_string();
        assert!(told.contains("tokens is a link of user 1337"), "{told}");
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0, "root wrote through the link");
        // One of root's may lead elsewhere.
        std::os::unix::fs::lchown(&tokens, Some(0), Some(0)).unwrap();
        item.put(&places, Some(&owner)).unwrap();
        assert_eq!(std::fs::read(victim.join("istio-token")).unwrap(), b"a.b.c");
        assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 1, "something is left beside it");
    }

    #[test]
    fn a_mount_is_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("hosts");
        std::fs::write(&place, "a longer text than the new one\n").unwrap();
        over_a_mount(&File::open(dir.path()).unwrap(), OsStr::new("hosts"), b"new\n").unwrap();
        assert_eq!(std::fs::read(&place).unwrap(), b"new\n");
    }
}
