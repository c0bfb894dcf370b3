//! One program, and how it ended.

/// One program to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Program {
    /// Name, found on the `PATH`.
    pub name: String,
    /// Arguments.
    pub args: Vec<String>,
    /// Fed to its standard input.
    pub stdin: Option<String>,
    /// Takes the lock of an iptables older than 1.8.6, which cannot be told another lock file.
    pub old_lock: bool,
}

impl Program {
    /// A program with arguments.
    #[must_use]
    pub(crate) fn new(name: &str, args: &[&str]) -> Self {
        let args = args.iter().map(|a| (*a).to_owned()).collect();
        Self { name: name.to_owned(), args, ..Self::default() }
    }
}

/// How it ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Output {
    /// Exit status; 128 + signal when it was killed.
    pub status: i32,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
}

impl Output {
    /// Ended with 0.
    #[must_use]
    pub(crate) fn ok(&self) -> bool {
        self.status == 0
    }

    /// The complaint in one line, labelled the way the xtables programs number their failures.
    #[must_use]
    pub(crate) fn complaint(&self) -> String {
        let label = match self.status {
            1 => "xtables other problem",
            2 => "xtables parameter problem",
            3 => "xtables version problem",
            4 => "xtables resource problem",
            status => return format!("exit status {status}: {}", self.stderr.trim()),
        };
        let reason = self.stderr.split_once(':').map_or(self.stderr.as_str(), |(_, rest)| rest);
        format!("{label}: {}", reason.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}
