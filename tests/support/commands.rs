//! The agent's other commands, run where an agent was started: its directory, its environment.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tokio::process::Command;

use super::{LIMIT, TestAgent, agent_bin};

/// What a command said, and how it ended.
#[derive(Debug, Clone)]
pub struct Said {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// Its standard output as one document; null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_default()
    }
}

/// Directory and environment of an agent that is not started.
pub struct Scene {
    pub(super) dir: tempfile::TempDir,
    pub(super) env: BTreeMap<String, String>,
}

/// As another user, from a place that user can reach.
const AS: &str = "touch agent && mount --bind \"$1\" agent && exec setpriv --reuid=$2 --regid=$2 --clear-groups \
                  ./agent \"$@\"";

impl Scene {
    pub fn path(&self, below: &str) -> PathBuf {
        self.dir.path().join(below)
    }

    /// Runs a command there.
    pub async fn run(&self, words: &[&str]) -> Said {
        let mut command = Command::new(agent_bin());
        command.args(words);
        said(command, self.dir.path(), &self.env).await
    }

    /// Runs a command by a program that prepares something and executes the words behind its own.
    pub async fn run_by(&self, program: &[&str], words: &[&str]) -> Said {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(agent_bin()).args(words);
        said(command, self.dir.path(), &self.env).await
    }

    /// Runs a command as this user; the test runs as root.
    pub async fn run_as(&self, uid: u32, words: &[&str]) -> Said {
        let uid = uid.to_string();
        let agent = agent_bin().to_string_lossy().into_owned();
        let script = AS.replace("\"$@\"", &words.join(" "));
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh", &agent, &uid]);
        said(command, self.dir.path(), &self.env).await
    }
}

/// The directory, and all else but what is writable in it, read-only.
const READ_ONLY: &str = "mount --bind . . && cd \"$PWD\" && touch agent && mount --bind \"$1\" agent && \
     for d in $3; do mkdir -p $d && chown $2 $d && mount --bind $d $d || exit 99; done && \
     mount -o remount,bind,ro . && mount -o remount,bind,ro / && \
     exec setpriv --reuid=$2 --regid=$2 --clear-groups --bounding-set=-all --no-new-privs ./agent WORDS";

impl Scene {
    /// Runs a command as this user where only these folders of the directory can be written to.
    pub async fn run_read_only(&self, uid: u32, writable: &[&str], words: &[&str]) -> Said {
        let uid = uid.to_string();
        let agent = agent_bin().to_string_lossy().into_owned();
        let script = READ_ONLY.replace("WORDS", &words.join(" "));
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script, "sh", &agent, &uid, &writable.join(" ")]);
        said(command, self.dir.path(), &self.env).await
    }
}

impl TestAgent {
    /// Starts another command of the agent beside this one; killed when dropped.
    pub fn spawn(&self, words: &[&str]) -> tokio::process::Child {
        let mut command = Command::new(agent_bin());
        command.args(words);
        self.beside(command)
    }

    /// Starts a program beside this agent, whose binary is its last word.
    pub fn spawn_by(&self, program: &[&str]) -> tokio::process::Child {
        let mut command = Command::new(program[0]);
        command.args(&program[1..]).arg(agent_bin());
        self.beside(command)
    }

    fn beside(&self, mut command: Command) -> tokio::process::Child {
        command.env_clear().envs(self.environment()).current_dir(self.path("")).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the command can be run")
    }

    /// Runs another command of the agent beside this one.
    pub async fn run(&self, words: &[&str]) -> Said {
        let mut command = Command::new(agent_bin());
        command.args(words);
        said(command, &self.path(""), self.environment()).await
    }
}

async fn said(mut command: Command, dir: &Path, env: &BTreeMap<String, String>) -> Said {
    command.env_clear().envs(env).current_dir(dir).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = tokio::time::timeout(LIMIT, command.output()).await.expect("the command ends");
    let output = output.expect("the command can be run");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Said { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}
