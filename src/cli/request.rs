//! `request <method> <path> [<body>]`: one HTTP request to a port of this pod, for scripts.
//!
//! Standard output holds the answer's body and one newline, and nothing else: people parse it.

use std::io::Write as _;
use std::time::Duration;

use super::http;
use crate::base::error::BoxError;
use crate::config::args::Parsed;
use crate::config::go;

/// Ports that may be asked: Envoy's admin, an old port of the agent, its status server, Envoy's readiness.
const ALLOWED: [i64; 4] = [15000, 15004, 15020, 15021];
/// Limit of the whole exchange; the Go agent's.
const LIMIT: Duration = Duration::from_secs(60);

/// Asks and prints.
pub(super) fn run(parsed: &Parsed) -> Result<u8, BoxError> {
    let [method, path, rest @ ..] = parsed.positional.as_slice() else {
        return Err(format!("requires at least 2 arg(s), only received {}", parsed.positional.len()).into());
    };
    let port = go::integer(parsed.or_default(super::REQUEST, "debug-port"), 32)?;
    if !ALLOWED.contains(&port) {
        return Err(format!("debug port {port} is not in allowed list [15000 15004 15020 15021]").into());
    }
    let url = format!("http://localhost:{port}/{}", path.strip_prefix('/').unwrap_or(path));
    let body = rest.first().map(String::as_str).unwrap_or_default();
    let reply = http::block_on(async {
        match tokio::time::timeout(LIMIT, http::exchange(method, &url, body)).await {
            Ok(reply) => reply.map_err(BoxError::from),
            Err(_) => Err(format!("{url} did not answer within {} s", LIMIT.as_secs()).into()),
        }
    })?;
    let status = reply.status;
    if status >= 400 && status != 404 {
        let text = String::from_utf8_lossy(&reply.body);
        return Err(format!("received unsuccessful status code {status}: {text}").into());
    }
    let mut out = reply.body;
    out.push(b'\n');
    Ok(print(&out))
}

/// Writes to standard output; a reader that has gone away is no fault of the command.
pub(super) fn print(bytes: &[u8]) -> u8 {
    let mut stdout = std::io::stdout().lock();
    let Err(error) = stdout.write_all(bytes).and_then(|()| stdout.flush()) else { return 0 };
    if error.kind() != std::io::ErrorKind::BrokenPipe {
        eprintln!(
            "Error: cannot write to standard output: {error}; is the disk of the file that it goes to full?"
        );
    }
    1
}
