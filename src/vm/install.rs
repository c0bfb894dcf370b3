//! `vm install`: the files of `istioctl x workload entry configure` to their places.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::accounts::Account;
use super::envfile;
use super::links::Folder;
use super::places::{Places, TOKEN};
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
                errors.extend(odd_hosts(&from.display().to_string(), &content));
                match hosts(&item.target, &content) {
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

// A line that would not be one of `/etc/hosts`, where it would spoil what the machine knows.
fn odd_hosts(from: &str, content: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(content);
    let odd = text.lines().enumerate().filter_map(|(at, line)| {
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let address = words.next()?;
        let why = if address.parse::<std::net::IpAddr>().is_err() {
            format!("{address:?} is no IP address")
        } else if words.next().is_none() {
            format!("no name follows {address}")
        } else {
            return None;
        };
        Some(format!("{from}:{}: {why}; a line is an address and names", at + 1))
    });
    odd.collect()
}

// The machine's hosts with those of the folder. Whoever looks a name up takes the first line that has it: an older line loses
// the names, and goes when it has no other.
fn hosts(place: &Path, wanted: &[u8]) -> io::Result<Vec<u8>> {
    let now = match std::fs::read_to_string(place) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let wanted = String::from_utf8_lossy(wanted);
    let names = |line: &str| -> Vec<String> {
        let line = line.split('#').next().unwrap_or_default();
        line.split_whitespace().skip(1).map(str::to_owned).collect()
    };
    let new: Vec<&str> = wanted.lines().map(str::trim).filter(|line| !names(line).is_empty()).collect();
    let taken: Vec<String> = new.iter().flat_map(|line| names(line)).collect();
    let is_taken = |name: &String| taken.iter().any(|other| other.eq_ignore_ascii_case(name));
    let rest = |line: &str| {
        let theirs = names(line);
        if new.contains(&line) || !theirs.iter().any(is_taken) {
            return Some(line.to_owned());
        }
        let left: Vec<String> = theirs.into_iter().filter(|name| !is_taken(name)).collect();
        let address = line.split_whitespace().next().unwrap_or_default();
        let comment = line.split_once('#').map(|(_, comment)| format!(" #{comment}")).unwrap_or_default();
        (!left.is_empty()).then(|| format!("{address} {}{comment}", left.join(" ")))
    };
    let mut lines: Vec<String> = now.lines().filter_map(rest).collect();
    let missing = new.iter().filter(|line| !now.lines().any(|there| there == **line));
    lines.extend(missing.map(|line| (*line).to_owned()));
    let mut text = lines.join("\n");
    text.push('\n');
    Ok(text.into_bytes())
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

    /// What would become of it.
    #[must_use]
    pub(crate) fn step(&self) -> Step {
        if self.masked {
            return Step::Overwrite;
        }
        match std::fs::read(&self.target) {
            Ok(there) if there == self.content => Step::Keep,
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
        let mut make = |above: &Folder, name: &OsStr, last| made(&base, above, name, last, owner);
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

// As the package's own cluster.env is.
fn comments(text: &[u8]) -> bool {
    text.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).all(|line| line.is_empty() || line[0] == b'#')
}

// Each line of the one is in the other.
fn within(small: &[u8], large: &[u8]) -> bool {
    let lines = |text| <[u8]>::split(text, |byte: &u8| *byte == b'\n');
    lines(small).all(|line| lines(large).any(|other| other == line))
}

/// From these names on folders are the proxy's; those above them are the system's.
const OWN: [&str; 3] = ["istio", "secrets", "certs"];

/// The folder at `path`, held open, and those that are missing made. The last one becomes the owner's, and those from [`OWN`]
/// on. Where the proxy owns a folder it may put a link in the place of one that was just made: each is opened by its
/// name in the one above it, and no link of the owner's is followed.
///
/// # Errors
/// The system's, and a link of the owner's on the way.
pub(crate) fn folders(places: &Places, path: &Path, owner: Option<&Account>) -> io::Result<Folder> {
    let base = places.base();
    let mut make = |above: &Folder, name: &OsStr, last| made(&base, above, name, last, owner);
    places.folder(path, owner.map(|account| account.uid), &mut make)
}

// One folder of those that are missing.
fn made(
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
    let is_new = match rustix::fs::mkdirat(above, name, Mode::from_raw_mode(0o777)) {
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
    use std::os::unix::fs::MetadataExt;
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
    use std::os::unix::fs::MetadataExt;

    fn rooted(root: &Path) -> Places {
        Places::new(|flag| (flag == "root").then(|| root.to_owned()), &Default::default())
    }

    #[test]
    fn a_hosts_file_gains_the_new_line_and_loses_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("hosts");
        std::fs::write(&place, "127.0.0.1 localhost\n192.0.2.1 istiod.istio-system.svc\n").unwrap();
        let merged = hosts(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap();
        assert_eq!(merged, b"127.0.0.1 localhost\n192.0.2.9 istiod.istio-system.svc\n");
        std::fs::write(&place, &merged).unwrap();
        assert_eq!(hosts(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap(), merged);
        let old = "192.0.2.1  istiod.istio-system.svc istiod\tIstiod.Istio-System.svc # east\n::1 localhost # istiod\n";
        std::fs::write(&place, old).unwrap();
        assert_eq!(
            String::from_utf8(hosts(&place, b"192.0.2.9 istiod.istio-system.svc\n").unwrap()).unwrap(),
            "192.0.2.1 istiod # east\n::1 localhost # istiod\n192.0.2.9 istiod.istio-system.svc\n"
        );
    }

    #[test]
    fn only_what_would_be_lost_is_asked_about() {
        let dir = tempfile::tempdir().unwrap();
        let step = |there: &str, adds: bool| {
            let place = dir.path().join("file");
            std::fs::write(&place, there).unwrap();
            let content = b"a b\nc d\n".to_vec();
            Item { adds, mode: 0o644, ..Item::secret(&rooted(dir.path()), &place, content) }.step()
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
    fn a_line_that_is_none_of_a_hosts_file_is_named() {
        let told = odd_hosts("d/hosts", b"# by a tool\n192.0.2.9 istiod # up\n\nnot an ip line\nfd00::1\n");
        assert_eq!(
            told,
            [
                "d/hosts:4: \"not\" is no IP address; a line is an address and names",
                "d/hosts:5: no name follows fd00::1; a line is an address and names",
            ]
        );
    }

    #[test]
    fn folders_are_made_one_in_the_other_and_no_link_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path();
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = Account { name: "proxy".to_owned(), uid, gid };
        folders(&rooted(base), Path::new("./a/b/istio/proxy"), Some(&owner)).unwrap();
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
    fn a_log_of_roots_can_be_rotated_by_the_proxys_group() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = folders(&rooted(dir.path()), Path::new("./log"), None).unwrap();
        for (name, uid, expected) in [("root.log", 0, 0o660), ("proxy.log", 1337, 0o640)] {
            let owner = Account { name: "proxy".to_owned(), uid, gid: 1338 };
            log_file(&folder, name, &owner).unwrap();
            let about = dir.path().join("log").join(name).metadata().unwrap();
            let mode = about.permissions().mode() & 0o7777;
            assert_eq!((about.uid(), about.gid(), mode), (uid, 1338, expected), "{name}");
        }
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
