//! Files and rights: roots, mounted certificates, what is named in the configuration, and where the agent writes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{Access, AtFlags, CWD};

use super::{Check, Scene};
use crate::base::error::chain;
use crate::base::{bounded, reading};
use crate::config::{Sources, parts};
use crate::istiod::{Roots, Transport};
use crate::tls::cert;
use crate::trouble::Kind;

const NAME: &str = "files";
const CERTIFICATES: &str = "certificates";
/// Longest path of a unix socket, without the zero at its end.
const SOCKET_PATH: usize = 107;

/// All of them; one line when all is well.
pub(super) fn checks(scene: &Scene) -> Vec<Check> {
    let config = &scene.config;
    let mut out = Vec::new();
    out.extend(roots(scene));
    out.extend(mounted(scene));
    out.extend(named(config));
    out.extend(written(config));
    if out.iter().all(|c| c.state == super::Outcome::Ok) {
        let uid = rustix::process::geteuid().as_raw();
        let said = format!("what is named is there, and user {uid} may write where the agent writes");
        out.push(Check::ok(NAME, said));
    }
    out
}

// Those that cannot even be located are told among the configuration's refusals.
fn roots(scene: &Scene) -> Vec<Check> {
    let ca = scene.ca.as_ref().ok().and_then(|ca| ca.as_ref()?.connection());
    let mut seen: Vec<PathBuf> = Vec::new();
    let mut out = Vec::new();
    for (whose, connection) in [("istiod", scene.xds.as_ref()), ("the CA", ca)] {
        let Some(connection) = connection else { continue };
        let Transport::Tls(tls) = &connection.transport else { continue };
        let path = match &tls.roots {
            Roots::System => continue,
            Roots::File(path) => path.clone(),
            Roots::FirstOf(first, other) => {
                if first.is_file() {
                    first.clone()
                } else {
                    other.clone()
                }
            }
        };
        if seen.contains(&path) {
            continue;
        }
        seen.push(path.clone());
        out.push(root_file(whose, &path, scene.now));
    }
    out
}

fn root_file(whose: &str, path: &Path, now: SystemTime) -> Check {
    let shown = path.display();
    let bytes = match bounded::given(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Check::fail(
                "roots",
                Kind::RootMissing,
                format!("{shown}, the root of {whose}, is not there"),
            );
        }
        Err(e) => {
            return Check::fail("roots", Kind::RootBroken, format!("{shown}, the root of {whose}: {e}"));
        }
    };
    let readable = cert::readable_certs(&bytes);
    let certs = cert::parse_chain(readable.pem.as_bytes()).unwrap_or_default();
    if certs.is_empty() {
        let said = format!("{shown}, the root of {whose}, holds no certificate: {}", readable.trouble());
        return Check::fail("roots", Kind::RootBroken, said);
    }
    let valid = certs.iter().filter(|c| c.not_before <= now && now <= c.not_after).count();
    let names: Vec<String> = certs.iter().take(3).map(|c| super::upstream::subject(&c.subject)).collect();
    let said = format!("{shown}, the root of {whose}: {} certificate(s) ({})", certs.len(), names.join("; "));
    if valid == 0 {
        return Check::warn(
            "roots",
            format!("{said}, none of them valid now"),
            "compare their dates with this machine's clock",
        );
    }
    if readable.dropped > 0 {
        let said = format!("{said}; {} more cannot be read: {}", readable.dropped, readable.trouble());
        return Check::warn("roots", said, "write the file anew, whole and in PEM");
    }
    Check::ok("roots", said)
}

fn mounted(scene: &Scene) -> Vec<Check> {
    let Some(plan) = scene.plan.as_ref().filter(|p| p.file_mounted) else { return provided(scene) };
    let Pair { said, state } = pair(&plan.mounted.cert, &plan.mounted.key, scene.now);
    vec![match state {
        State::Good => Check::ok(CERTIFICATES, said),
        State::Missing | State::Expired | State::Bad => {
            Check::fail(CERTIFICATES, Kind::CertificateFiles, said)
        }
    }]
}

// Where there is none, or none that is valid, the agent shows its token instead.
fn provided(scene: &Scene) -> Vec<Check> {
    let Some((cert, key)) = parts::files::provided(&scene.config) else { return Vec::new() };
    let Pair { said, state } = pair(&cert, &key, scene.now);
    vec![match state {
        State::Good => Check::ok(CERTIFICATES, said),
        State::Missing | State::Expired => {
            let hint =
                "istiod is shown the token instead, and asked for a certificate (OUTPUT_CERTS keeps it)";
            Check::warn(CERTIFICATES, said, hint)
        }
        State::Bad => Check::fail(CERTIFICATES, Kind::CertificateFiles, said),
    }]
}

/// Whether istiod can know this workload by a certificate in `PROV_CERT`.
pub(super) fn is_provided(config: &Sources, now: SystemTime) -> bool {
    let files = parts::files::provided(config);
    files.is_some_and(|(cert, key)| pair(&cert, &key, now).state == State::Good)
}

/// A certificate and its key, as they lie there.
struct Pair {
    said: String,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    Good,
    Missing,
    Expired,
    Bad,
}

fn pair(cert_file: &Path, key_file: &Path, now: SystemTime) -> Pair {
    let fail = |state: State, why: String| Pair {
        said: format!("{} with {}: {why}", cert_file.display(), key_file.display()),
        state,
    };
    let unread = |path: &Path, e: &io::Error| {
        let state = if e.kind() == io::ErrorKind::NotFound { State::Missing } else { State::Bad };
        fail(state, format!("{}: {e}", path.display()))
    };
    let read = |path: &Path| bounded::given(path).map(zeroize::Zeroizing::new);
    let (chain, key) = match (read(cert_file), read(key_file)) {
        (Ok(chain), Ok(key)) => (chain, key),
        (Err(e), _) => return unread(cert_file, &e),
        (_, Err(e)) => return unread(key_file, &e),
    };
    let certs = match cert::check_pair(&chain, &key) {
        Ok(certs) => certs,
        Err(e) => return fail(State::Bad, e.to_string()),
    };
    let Some(leaf) = certs.first() else { return fail(State::Bad, "no certificate".to_owned()) };
    let said = format!("{}: {}", cert_file.display(), leaf.names().join(", "));
    if leaf.not_after < now {
        return fail(State::Expired, format!("it expired {} ago", super::token::ago(now, leaf.not_after)));
    }
    let left = super::token::ago(leaf.not_after, now);
    Pair { said: format!("{said}, valid for {left} more"), state: State::Good }
}

/// Files that flags and variables name.
fn named(config: &Sources) -> Vec<Check> {
    let unreadable = |(what, path): (&str, PathBuf)| {
        let error = reading::opens(&path).err()?;
        let missing = error.kind() == io::ErrorKind::NotFound;
        let said = format!("{what}: {}: {error}", path.display());
        let hint = if missing { "is it mounted?" } else { "make it readable for the agent's user" };
        // A mesh file may be missing.
        if what == "--meshConfig" && missing {
            return Some(Check::warn(NAME, said, hint));
        }
        Some(Check::fail(NAME, Kind::ConfigInvalid, said).hint(hint))
    };
    let mut out: Vec<Check> = parts::files::read(config).into_iter().filter_map(unreadable).collect();
    if let Some(Err(error)) = parts::files::seal(config).map(|seal| seal.check()) {
        out.push(Check::fail(NAME, Kind::OutputCertsFailed, chain(&error)));
    }
    if let Err(why) = parts::envoy::override_json(config) {
        let said = format!("ISTIO_BOOTSTRAP_OVERRIDE={why}; Envoy starts without it");
        let hint = "is it mounted, readable for the agent's user, and JSON or YAML?";
        out.push(Check::warn(NAME, said, hint));
    }
    out
}

/// Folders that the agent writes to, looked at without writing.
fn written(config: &Sources) -> Vec<Check> {
    let mut out = Vec::new();
    for (what, folder, made) in parts::files::written(config) {
        if let Some(check) = writable(what, &folder, made) {
            out.push(check);
        }
    }
    for socket in parts::files::sockets(config) {
        let length = socket.as_os_str().len();
        if length > SOCKET_PATH {
            let said = format!(
                "{}: a socket's path has at most {SOCKET_PATH} bytes, this one {length}",
                socket.display()
            );
            out.push(Check::fail("sockets", Kind::SocketFolder, said));
        }
    }
    out
}

// A missing folder is created below the nearest one that exists; `made`: by the agent itself.
fn writable(what: &str, folder: &Path, made: bool) -> Option<Check> {
    let mut at = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    while !at.exists() {
        if !made {
            let said = format!("{what}: {} is not there", folder.display());
            return Some(
                Check::warn(NAME, said, Kind::OutputCertsFailed.hint()).maybe(Kind::OutputCertsFailed),
            );
        }
        if !at.pop() {
            return None;
        }
    }
    let shown = at.display();
    let uid = rustix::process::geteuid().as_raw();
    let kind_of = |usual: Kind| match what {
        "OUTPUT_CERTS" if usual == Kind::SocketFolder => Kind::OutputCertsFailed,
        parts::files::GRPC if usual == Kind::SocketFolder => Kind::GrpcBootstrapMissing,
        _ => usual,
    };
    if !at.is_dir() {
        let said = format!("{what}: {shown} is no folder");
        return Some(Check::fail(NAME, kind_of(Kind::SocketFolder), said));
    }
    if let Err(e) = rustix::fs::accessat(CWD, &at, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS) {
        let usual = Kind::of_io(&io::Error::from(e)).unwrap_or(Kind::SocketFolder);
        let said = format!("{what}: user {uid} may not write to {shown}: {}", io::Error::from(e));
        return Some(Check::fail(NAME, kind_of(usual), said));
    }
    let disk = rustix::fs::statvfs(&at).ok()?;
    // A file system without a size (overlays of some kinds) says 0 of 0.
    if disk.f_blocks > 0 && disk.f_bavail == 0 {
        return Some(Check::fail(NAME, Kind::DiskFull, format!("{what}: the disk of {shown} is full")));
    }
    if disk.f_files > 0 && disk.f_favail == 0 {
        let said = format!("{what}: the disk of {shown} has no inode left");
        return Some(Check::fail(NAME, Kind::DiskFull, said));
    }
    None
}
