//! Doubles of Google's token endpoints (`google.py`).

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use serde_json::Value;

/// Both of Google's endpoints with TLS, at an address of their own; `Drop` ends them.
pub struct Google {
    dir: tempfile::TempDir,
    _child: tokio::process::Child,
}

impl Google {
    pub async fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        // Port 443 is fixed by the addresses, so each test has its own loopback address.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (id, nth) = (std::process::id(), COUNT.fetch_add(1, Relaxed));
        let ip = format!("127.{}.{}.{}", 64 + nth % 64, (id >> 8) & 255, id % 254 + 1);
        let child =
            tokio::process::Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/google.py"))
                .arg(&ip)
                .arg(dir.path())
                .kill_on_drop(true)
                .spawn()
                .expect("python3");
        let hosts = format!(
            "127.0.0.1 localhost meshca.googleapis.com\n{ip} sts.googleapis.com iamcredentials.googleapis.com\n"
        );
        std::fs::write(dir.path().join("hosts"), hosts).unwrap();
        let google = Self { dir, _child: child };
        super::eventually("Google's doubles listen", async || google.path("ready").exists().then_some(()))
            .await;
        google
    }

    pub fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    pub fn asked(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path("asked.jsonl")).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// For [`super::builder::Builder::before`]: names lead to the doubles.
    pub fn names(&self) -> Vec<String> {
        let hosts = self.path("hosts").to_string_lossy().into_owned();
        let mount = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
        ["unshare", "--mount", "sh", "-c", mount, "sh", &hosts].map(ToOwned::to_owned).into()
    }
}
