//! `upgrade`: asks the running agent to give its place to a new version of itself.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{endpoint, request};
use crate::agent::upgrade::Request;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::config::parts::upgrade;

/// Beside the agent's own limits, which are in the configuration and may be longer than this command knows.
const LONGEST: Duration = Duration::from_secs(600);

/// Asks, and prints what the agent says; gives the exit status: 0 the new program serves, 1 the old one goes on.
pub(super) fn run(parsed: &Parsed, env: &Env) -> Result<u8, String> {
    let given = |name: &str| parsed.get(name).filter(|text| !text.is_empty()).map(PathBuf::from);
    let whole = |path: PathBuf| std::path::absolute(&path).map_err(|e| format!("{}: {e}", path.display()));
    let path = |name: &str| given(name).map(whole).transpose();
    let request = Request { binary: path("binary")?, envoy: path("envoy")? };
    if request.binary.is_some() && request.envoy.is_some() {
        return Err("--binary is another agent, --envoy another Envoy: one after the other".to_owned());
    }
    let socket = given("socket").or_else(|| endpoint::config(env).map(|config| upgrade::socket(&config)));
    let socket = socket.unwrap_or_else(|| "./etc/istio/proxy/UPGRADE".into());
    let stream = connect(&socket)?;
    let failed = |e: std::io::Error| format!("{}: {e}", socket.display());
    let mut text = serde_json::to_string(&request).map_err(|e| e.to_string())?;
    text.push('\n');
    (&stream).write_all(text.as_bytes()).map_err(failed)?;
    let until = Instant::now() + LONGEST;
    let mut lines = BufReader::new(&stream);
    loop {
        let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(failed)?;
        let mut line = String::new();
        if lines.read_line(&mut line).map_err(failed)? == 0 {
            return Err("the agent has ended without an answer: its log says why".to_owned());
        }
        request::print(line.as_bytes());
        match line.split_once(": ") {
            Some(("done", _)) => return Ok(0),
            Some(("failed", _)) => return Ok(1),
            _ => {}
        }
    }
}

// The agent's paths hang off its working directory, which is / where nobody has chosen another.
fn connect(socket: &Path) -> Result<UnixStream, String> {
    let first = UnixStream::connect(socket);
    let second = match &first {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && socket.is_relative() => {
            UnixStream::connect(Path::new("/").join(socket)).ok()
        }
        _ => None,
    };
    second.map_or(first, Ok).map_err(|e| {
        format!(
            "{}: {e}: does an agent run here, as root or this user, and with AGENT_UPGRADE=true? --socket names another place",
            socket.display()
        )
    })
}
