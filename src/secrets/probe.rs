//! Is there another SDS server on this socket?
//!
//! A SPIRE agent (or any third party) may own the workload socket; then this agent keeps away from it
//! and serves file resources elsewhere. The look happens once, at start: a server counts as live when it
//! speaks HTTP/2 within a second, the same test a gRPC client makes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;

use crate::net::kept::live;

/// The file name of the workload socket unless `WORKLOAD_IDENTITY_SOCKET_FILE` says otherwise.
pub(crate) const DEFAULT_SOCKET: &str = "socket";

/// How often a late socket is looked for.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What to look at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// Folder of the workload socket.
    pub dir: PathBuf,
    /// `WORKLOAD_IDENTITY_SOCKET_FILE`, default [`DEFAULT_SOCKET`].
    pub file: String,
    /// How long to wait for a foreign server, which may start after us (`WORKLOAD_SOCKET_WAIT`). One of another name
    /// is demanded; on the default name this agent serves when the time is over. Zero: do not wait, like the Go
    /// agents up to 1.31.
    pub wait: Duration,
}

/// Who serves the workload's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// This agent, on the workload socket.
    Own,
    /// Somebody else; this agent serves files only, on a socket of its own.
    External,
}

/// Why the agent cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The name is not a plain file name.
    #[error(
        "workload identity socket file override must be a filename, not a path: {0:?}: set WORKLOAD_IDENTITY_SOCKET_FILE to a name without /"
    )]
    Name(String),
    /// A dead socket is in the way.
    #[error("failed to check SDS socket: existing SDS socket could not be removed: {path}")]
    Remove {
        /// The socket.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something that is no live credential socket is in the way.
    #[error("failed to check credential SDS socket: existing SDS socket could not be removed: {path}")]
    RemoveCredential {
        /// The socket, or what is in its place.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another server was demanded by name and is not there.
    #[error(
        "agent configured for non-default SDS socket path: {path} but no socket found (waited {waited:?}): is the identity provider running and its folder mounted?"
    )]
    Absent {
        /// The socket.
        path: PathBuf,
        /// How long it was waited for.
        waited: Duration,
    },
}

/// Looks at the workload socket.
///
/// # Errors
/// When the agent cannot start this way.
pub(crate) async fn workload(config: &Config) -> Result<Mode, Error> {
    let name = Path::new(&config.file).file_name();
    if name.is_none_or(|n| n != config.file.as_str()) {
        return Err(Error::Name(config.file.clone()));
    }
    let path = config.dir.join(&config.file);
    let own_name = config.file == DEFAULT_SOCKET;
    let started = Instant::now();
    let mut told = false;
    loop {
        if exists(&path) {
            if live(&path).await {
                tracing::info!(target: "sds", "{} is served by somebody else: certificates for mTLS come from there, this agent serves files only", path.display());
                return Ok(Mode::External);
            }
            if started.elapsed() >= config.wait {
                tracing::info!(target: "sds", "nobody answers on {}: removing it", path.display());
                remove(&path).map_err(|source| Error::Remove { path: path.clone(), source })?;
            }
        }
        if started.elapsed() >= config.wait {
            if own_name {
                return Ok(Mode::Own);
            }
            return Err(Error::Absent { path, waited: config.wait });
        }
        if !told {
            told = true;
            tracing::info!(target: "sds", "waiting up to {:?} for another SDS server on {}", config.wait, path.display());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What [`workload`] would find, without waiting for anybody and without removing a dead socket.
///
/// # Errors
/// When the agent could not start this way.
pub(crate) async fn look(config: &Config) -> Result<Mode, Error> {
    if Path::new(&config.file).file_name().is_none_or(|n| n != config.file.as_str()) {
        return Err(Error::Name(config.file.clone()));
    }
    let path = config.dir.join(&config.file);
    if answers(&path).await {
        Ok(Mode::External)
    } else if config.file == DEFAULT_SOCKET {
        Ok(Mode::Own)
    } else {
        Err(Error::Absent { path, waited: Duration::ZERO })
    }
}

/// Whether a live SDS server is on this socket. Touches nothing.
pub(crate) async fn answers(path: &Path) -> bool {
    exists(path) && live(path).await
}

/// Whether a live SDS server is on the external credential socket. A dead socket is removed.
///
/// # Errors
/// When it cannot be removed: Envoy would be sent to it.
pub(crate) async fn credential(path: &Path) -> Result<bool, Error> {
    if !exists(path) {
        return Ok(false);
    }
    if live(path).await {
        return Ok(true);
    }
    remove(path).map_err(|source| Error::RemoveCredential { path: path.to_owned(), source })?;
    Ok(false)
}

// A regular file is no socket; a folder or a pipe counts, as for the Go agent.
fn exists(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| !m.is_file())
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path)?.is_dir() {
        true => std::fs::remove_dir(path),
        false => std::fs::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixListener;

    fn config(dir: &Path, file: &str) -> Config {
        Config { dir: dir.to_owned(), file: file.to_owned(), wait: Duration::ZERO }
    }

    // Answers one client with `bytes`, then holds the connection.
    fn server(path: &Path, bytes: &'static [u8]) -> impl Future<Output = ()> + use<> {
        let listener = UnixListener::bind(path).unwrap();
        async move {
            let mut held = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.write_all(bytes).await.unwrap();
                held.push(stream);
            }
        }
    }

    const SETTINGS: &[u8] = b"\0\0\x06\x04\0\0\0\0\0\0\x03\0\0\0\x64";

    #[tokio::test]
    async fn only_an_http2_server_counts() {
        let rows: &[(&[u8], Mode)] =
            &[(SETTINGS, Mode::External), (b"HTTP/1.1 400 Bad Request\r\n\r\n", Mode::Own), (b"", Mode::Own)];
        for (bytes, mode) in rows {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("socket");
            let serve = server(&path, bytes);
            let config = config(dir.path(), "socket");
            let seen = tokio::select! { m = workload(&config) => m.unwrap(), () = serve => unreachable!() };
            assert_eq!(seen, *mode);
            assert_eq!(path.exists(), *mode == Mode::External);
        }
    }

    #[tokio::test]
    async fn leftovers_are_removed_and_other_names_demanded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert_eq!(workload(&config(dir.path(), "socket")).await.unwrap(), Mode::Own);
        assert!(!path.exists());
        std::fs::create_dir(&path).unwrap();
        assert_eq!(workload(&config(dir.path(), "socket")).await.unwrap(), Mode::Own);
        assert!(!path.exists());
        std::fs::create_dir_all(path.join("full")).unwrap();
        assert!(matches!(workload(&config(dir.path(), "socket")).await, Err(Error::Remove { .. })));
        assert!(matches!(workload(&config(dir.path(), "spire")).await, Err(Error::Absent { .. })));
        for bad in ["", "a/b", "..", "a/", "/"] {
            assert!(matches!(workload(&config(dir.path(), bad)).await, Err(Error::Name(_))), "{bad}");
        }
    }

    #[tokio::test]
    async fn a_late_socket_is_waited_for() {
        for name in ["spire", DEFAULT_SOCKET] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join(name);
            // What an earlier server has left does not end the wait.
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            let config = Config { wait: Duration::from_secs(20), ..config(dir.path(), name) };
            let late = async {
                tokio::time::sleep(Duration::from_millis(60)).await;
                std::fs::remove_file(&path).unwrap();
                server(&path, SETTINGS).await;
            };
            tokio::select! { m = workload(&config) => assert_eq!(m.unwrap(), Mode::External), () = late => unreachable!() }
        }
    }

    #[tokio::test]
    async fn on_the_default_name_the_agent_serves_when_nobody_came() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { wait: Duration::from_millis(80), ..config(dir.path(), DEFAULT_SOCKET) };
        assert_eq!(workload(&config).await.unwrap(), Mode::Own);
    }
}
