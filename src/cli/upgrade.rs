//! `upgrade`: asks the running agent to give its place to a new version of itself.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, Socket, Type};

use super::{endpoint, request};
use crate::agent::upgrade::Request;
use crate::base::error::BoxError;
use crate::config::Sources;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::parts::upgrade;
use crate::vm::places::Places;

/// Beside the agent's own limits, which are in the configuration and may be longer than this command knows.
const LONGEST: Duration = Duration::from_secs(600);
/// An agent that lives takes a connection within milliseconds; one that stands still has a full queue of them.
const CONNECT: Duration = Duration::from_secs(5);

/// Asks, and prints what the agent says; gives the exit status: 0 the new program serves, 1 the old one goes on.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<u8, BoxError> {
    // The binary that lies in the usual place would be taken, and success be told.
    if let Some(more) = parsed.positional.first() {
        return Err(format!(
            "upgrade takes flags only, and {more:?} is none; a program is named by --binary or --envoy"
        )
        .into());
    }
    let given = |name: &str| parsed.get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let whole = |path: PathBuf| std::path::absolute(&path).map_err(|e| format!("{}: {e}", path.display()));
    let path = |name: &str| given(name).map(whole).transpose();
    let request = Request { binary: path("binary")?, envoy: path("envoy")? };
    if request.binary.is_some() && request.envoy.is_some() {
        return Err("--binary is another agent, --envoy another Envoy: one after the other".into());
    }
    let places = given("socket").map_or_else(|| places(env), |socket| vec![socket]);
    let (socket, stream) = connect(&places)?;
    let failed = |e: std::io::Error| format!("{}: {e}", socket.display());
    let mut text = serde_json::to_string(&request)?;
    text.push('\n');
    (&stream).write_all(text.as_bytes()).map_err(failed)?;
    answered(&stream, &socket, LONGEST)
}

// Prints what the agent says until it is the last word.
fn answered(stream: &UnixStream, socket: &Path, longest: Duration) -> Result<u8, BoxError> {
    let failed = |e: io::Error| match e.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
            "{}: the agent has not answered within {} s; its log says whether it goes on",
            socket.display(),
            longest.as_secs()
        ),
        _ => format!("{}: {e}", socket.display()),
    };
    let until = Instant::now() + longest;
    let mut lines = BufReader::new(stream);
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(failed)?;
        let mut line = String::new();
        if lines.read_line(&mut line).map_err(failed)? == 0 {
            return Err("the agent has ended without an answer: its log says why".into());
        }
        request::print(line.as_bytes());
        match line.split_once(": ") {
            Some(("done", _)) => return Ok(0),
            Some(("failed", _)) => return Ok(1),
            _ => {}
        }
    }
}

// Where the socket is by this command's environment, and by the files of a virtual machine, whose agent has another
// one. The agent's paths hang off its working directory, which is / where nobody has chosen another.
fn places(env: &Env) -> Vec<PathBuf> {
    let root = Path::new("/");
    let of = |config: Arc<Sources>| upgrade::socket(&config);
    let ours = endpoint::config(env).map_or_else(|| "./etc/istio/proxy/UPGRADE".into(), of);
    let vm = Places::new(|flag| (flag == "root").then(|| root.to_owned()), env.map());
    let theirs = vm.environment(env.map()).ok().and_then(|(vm, _)| {
        let env = Env::from_os(vm.into_iter().map(|(name, value)| (name.into(), value.into())));
        endpoint::config_in(root, &env).map(of)
    });
    let above = Some(root.join(&ours)).filter(|_| ours.is_relative());
    [Some(ours), above, theirs.map(|place| root.join(place))].into_iter().flatten().collect()
}

/// Nobody takes a request there.
#[derive(Debug, thiserror::Error)]
#[error(
    "{}: {source}: does an agent run here, as root or this user, and with AGENT_UPGRADE=true? --socket names another \
     place",
    place.display()
)]
struct NoAgent {
    place: PathBuf,
    source: std::io::Error,
}

// The first that is there; the first of all is what is told of.
fn connect(places: &[PathBuf]) -> Result<(PathBuf, UnixStream), BoxError> {
    let mut first = None;
    for place in places {
        match within(place, CONNECT) {
            Ok(stream) => return Ok((place.clone(), stream)),
            Err(error) => {
                let missing = error.kind() == std::io::ErrorKind::NotFound;
                let said = NoAgent { place: place.clone(), source: error };
                if !missing {
                    return Err(said.into());
                }
                first = first.or(Some(said));
            }
        }
    }
    Err(first
        .map_or_else(|| "no place of the agent's socket is known: --socket names one".into(), Into::into))
}

// A connection waits for a place in the queue, without an end unless it is told one.
fn within(place: &Path, limit: Duration) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.set_write_timeout(Some(limit))?;
    socket.connect(&SockAddr::unix(place)?).map_err(|e| match e.kind() {
        ErrorKind::WouldBlock => io::Error::new(
            ErrorKind::TimedOut,
            format!("nobody takes a connection within {} s", limit.as_secs()),
        ),
        _ => e,
    })?;
    socket.set_write_timeout(None)?;
    Ok(OwnedFd::from(socket).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_stands_still_is_told_of() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("UPGRADE");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        listener.bind(&SockAddr::unix(&place).unwrap()).unwrap();
        listener.listen(0).unwrap();
        let limit = Duration::from_millis(20);
        let first = within(&place, limit).unwrap();
        let why = within(&place, limit).unwrap_err();
        assert!(why.to_string().contains("nobody takes a connection"), "{why}");
        let why = answered(&first, &place, limit).unwrap_err().to_string();
        assert!(why.contains("the agent has not answered within 0 s; its log says"), "{why}");
    }
}
