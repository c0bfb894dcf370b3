//! `upgrade`: asks the running agent to give its place to a new version of itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

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

/// Asks, and prints what the agent says; gives the exit status: 0 the new program serves, 1 the old one goes on.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<u8, BoxError> {
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
    let until = Instant::now() + LONGEST;
    let mut lines = BufReader::new(&stream);
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
        match UnixStream::connect(place) {
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
