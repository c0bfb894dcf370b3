//! Has Envoy itself judge a bootstrap, and asks it which version it is. Nothing is bound or written.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::process::Command;

use crate::base::handover;
use crate::base::lane::Lane;

/// Of what Envoy complains this many bytes are kept; its reason is in one line.
const KEPT: u64 = 64 * 1024;
/// One word of a command line may have so many bytes (the kernel's MAX_ARG_STRLEN, less room for its end).
const LONGEST: usize = 128 * 1024 - 64;

/// Programs that are asked something: Envoys, and agents that would take over.
static ASKED: Lane = Lane::new("programs asked", 2);

/// What came of a run.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Envoy takes it.
    Accepted,
    /// It does not: how it ended, and the lines it said about it, last first.
    Refused {
        /// Its end.
        status: ExitStatus,
        /// Its reason in one line; empty when it said none.
        reason: String,
    },
    /// Envoy cannot be started.
    NotStarted(io::Error),
    /// No answer within the limit.
    Late,
    /// Nobody can be asked this way: it is longer than a command line may be.
    TooLong,
}

/// What Envoy is asked about.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bootstrap<'a> {
    /// One that lies nowhere yet, and would in a file that Envoy reads as JSON.
    Json(&'a [u8]),
    /// The same of YAML; nothing can be put over it.
    Yaml(&'a [u8]),
    /// A file that Envoy reads by itself, whatever its form is.
    File(&'a Path),
}

impl<'a> Bootstrap<'a> {
    /// `text` as Envoy would read it from a file of this name.
    #[must_use]
    pub(crate) fn named(path: &Path, text: &'a [u8]) -> Self {
        match path.extension().and_then(OsStr::to_str) {
            Some("yaml") => Self::Yaml(text),
            _ => Self::Json(text),
        }
    }
}

/// Asks `envoy` about `bootstrap` with `over` put over it, as at a start.
pub(crate) async fn validate(
    envoy: &str,
    bootstrap: Bootstrap<'_>,
    over: Option<&str>,
    limit: Duration,
) -> Verdict {
    let mut command = Command::new(envoy);
    // What a start tolerates is tolerated.
    command.args(["--mode", "validate", "--log-level", "error", "--allow-unknown-static-fields"]);
    command.stdin(Stdio::null());
    let words = match (bootstrap, over) {
        (Bootstrap::File(path), over) => {
            command.arg("-c").arg(path);
            over.map(str::as_bytes)
        }
        (Bootstrap::Yaml(text), _) => Some(text),
        (Bootstrap::Json(text), over) => {
            // What has no extension is JSON for Envoy.
            match handover::sealed("bootstrap", text) {
                Ok(memory) => command.stdin(Stdio::from(memory)).args(["-c", "/dev/fd/0"]),
                Err(error) => return Verdict::NotStarted(error),
            };
            over.map(str::as_bytes)
        }
    };
    if words.is_some_and(|words| words.len() > LONGEST) {
        return Verdict::TooLong;
    }
    if let Some(words) = words {
        command.arg("--config-yaml").arg(String::from_utf8_lossy(words).as_ref());
    }
    judged(command, limit).await
}

/// Asks `envoy`, under the arguments with which it ended, whether its bootstrap is the reason.
pub(crate) async fn again(
    envoy: &str,
    args: &[OsString],
    env: &[(String, String)],
    user: Option<(u32, u32)>,
    limit: Duration,
) -> Verdict {
    let mut command = Command::new(envoy);
    command.args(args).args(["--mode", "validate"]).envs(env.iter().map(|(name, value)| (name, value)));
    if let Some((uid, gid)) = user {
        command.gid(gid).uid(uid);
    }
    command.stdin(Stdio::null());
    judged(command, limit).await
}

async fn judged(command: Command, limit: Duration) -> Verdict {
    match told(command, limit).await {
        Ok(Some((status, ..))) if status.success() => Verdict::Accepted,
        Ok(Some((status, _, complaint))) => Verdict::Refused { status, reason: reason(&complaint) },
        Ok(None) => Verdict::Late,
        Err(error) => Verdict::NotStarted(error),
    }
}

/// What `envoy --version` says: commit, version and kind of build, as `1b60.../1.36.0/Clean/RELEASE/BoringSSL`.
///
/// # Errors
/// When it cannot be started, or says nothing within `limit`; `InvalidData`: it crashes.
pub(crate) async fn version(envoy: &str, limit: Duration) -> io::Result<String> {
    let mut command = Command::new(envoy);
    command.arg("--version");
    let Some((status, said, complaint)) = ended(command, limit).await? else {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "it does not answer --version"));
    };
    if status.signal().is_some() {
        let why = format!("it crashes when it is asked for its version ({status})");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let line = said.lines().find_map(|line| line.split_once("version: ")).map(|(_, version)| version.trim());
    line.map(str::to_owned).ok_or_else(|| {
        let why = reason(&complaint);
        io::Error::other(if why.is_empty() { "it tells no version: is it an Envoy?".to_owned() } else { why })
    })
}

/// What `envoy --hot-restart-version` says: two that say the same can take over from each other.
///
/// # Errors
/// When it cannot be started, or says nothing within `limit`.
pub(crate) async fn hot_restart_version(envoy: &str, limit: Duration) -> io::Result<String> {
    let mut command = Command::new(envoy);
    command.arg("--hot-restart-version");
    let said = ended(command, limit).await?.filter(|(status, ..)| status.success());
    // On standard error, in the releases there are.
    let both = said.map(|(_, said, complaint)| format!("{said}\n{complaint}"));
    let line = both.and_then(|both| both.lines().map(str::trim).rfind(|l| !l.is_empty()).map(str::to_owned));
    line.ok_or_else(|| io::Error::other("it does not answer --hot-restart-version"))
}

async fn ended(mut command: Command, limit: Duration) -> io::Result<Option<(ExitStatus, String, String)>> {
    command.stdin(Stdio::null());
    told(command, limit).await
}

/// How a command ended, and what it said on standard output and error; `None`: it was killed after `limit`.
///
/// # Errors
/// When it cannot be started.
pub(crate) async fn told(
    mut command: Command,
    limit: Duration,
) -> io::Result<Option<(ExitStatus, String, String)>> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = match ASKED.spawn(limit, command).await {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Ok(None),
        started => started?,
    };
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let finish = async {
        let (out, err, status) = tokio::join!(text(out), text(err), child.wait());
        Ok::<_, io::Error>((status?, out, err))
    };
    tokio::time::timeout(limit, finish).await.ok().transpose()
}

// To the end, so that nobody blocks on a full pipe; the beginning is kept.
async fn text(pipe: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let Some(mut pipe) = pipe else { return String::new() };
    let mut kept = Vec::new();
    let _ = (&mut pipe).take(KEPT).read_to_end(&mut kept).await;
    let _ = tokio::io::copy(&mut pipe, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&kept).into_owned()
}

/// The last line that says something, without Envoy's own prefix of date and thread.
pub(crate) fn reason(complaint: &str) -> String {
    let lines: Vec<&str> = complaint.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let telling = |line: &&&str| line.contains("rror") || line.contains("critical");
    let line = lines.iter().find(telling).or(lines.last()).copied().unwrap_or_default();
    let bare = line.rsplit_once("] ").map_or(line, |(_, rest)| rest);
    bare.chars().take(500).collect()
}
