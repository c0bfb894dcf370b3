//! Builds, images and releases: whole, of what was pinned, or not there.

use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use crate::copied::{ROOT, Scripts, sorted, text, with_wheel};
use crate::support::{SmallDisk, root_for};

#[test]
fn what_is_made_of_dist_asks_for_it() {
    let scripts = Scripts::new();
    scripts.fails("packages", &[], "make dist first");
    scripts.fails("image", &[], "make dist first");
    scripts.fails("check-reproducible", &[], "make dist first");
}

#[test]
fn a_tree_of_which_nobody_can_tell_is_not_a_clean_one() {
    let version = env!("CARGO_PKG_VERSION");
    let binary = format!("dist/pilot-agent-{version}-linux-{}", std::env::consts::ARCH);
    let scripts =
        Scripts::new().executable(&binary, "").program("git", "echo 'git: not found' >&2; exit 127");
    scripts.fails("check-reproducible", &[], "git cannot tell whether the tree has changes: git: not found");
    let scripts = scripts.program("git", "echo ' M src/main.rs'");
    scripts.fails("check-reproducible", &[], "changes that are not committed");
}

#[test]
fn an_archive_inside_of_another_project_is_not_of_that_ones_commit() {
    let scripts = Scripts::new().program("git", "[ $1 = status ] || echo 0123abcd");
    let told = |scripts: &Scripts| text(&scripts.run("revision", &[]).stdout);
    assert_eq!(told(&scripts), "PILOT_AGENT_REVISION=unknown\nPILOT_AGENT_BUILD_STATUS=unknown\n");
    // A folder in a clone, a file in a further working tree.
    std::fs::write(scripts.path(".git"), "gitdir: elsewhere").unwrap();
    assert_eq!(told(&scripts), "PILOT_AGENT_REVISION=0123abcd\nPILOT_AGENT_BUILD_STATUS=Clean\n");
}

/// Else its packages, man pages and images would be of another project's day, or of 1970, which lintian takes for an error.
#[test]
fn an_archive_has_the_date_of_its_own_commit() {
    let scripts = Scripts::new().program("git", "echo 4711");
    let cargo = std::fs::File::options().append(true).open(scripts.path("Cargo.toml")).unwrap();
    cargo.set_modified(UNIX_EPOCH + Duration::from_secs(1_700_000_000)).unwrap();
    let told = |scripts: &Scripts| text(&scripts.run("epoch", &[]).stdout);
    assert_eq!(told(&scripts), "1700000000\n");
    std::fs::write(scripts.path(".git"), "gitdir: elsewhere").unwrap();
    assert_eq!(told(&scripts), "4711\n");
    let scripts = scripts.program("git", "exit 128");
    assert_eq!(told(&scripts), "1700000000\n");
    assert_eq!(told(&scripts.env("SOURCE_DATE_EPOCH", "1")), "1\n");
}

/// MIT asks for its words beside the binary, also where the crate does not bring them.
#[test]
fn every_crate_in_the_binary_has_the_text_of_its_licence() {
    let scripts = Scripts::new().program("cargo", "cat metadata.json");
    let made = |license: &str| {
        let of = |name: &str, license: &str| {
            std::fs::create_dir_all(scripts.path(name)).unwrap();
            let manifest = scripts.path(name).join("Cargo.toml");
            serde_json::json!({ "id": name, "name": name, "version": "1.0.0", "license": license, "source": "registry",
                "authors": ["Somebody"], "repository": null, "manifest_path": manifest, "targets": [] })
        };
        let names: Vec<String> = (0..60).map(|n| format!("crate{n}")).collect();
        let mut packages: Vec<_> = names.iter().map(|name| of(name, "MIT OR Apache-2.0")).collect();
        std::fs::write(scripts.path("crate1/LICENSE"), "its own words").unwrap();
        packages.push(of("pilot-agent", "Apache-2.0"));
        packages[0]["license"] = license.into();
        packages[60]["source"] = serde_json::Value::Null;
        let edges: Vec<_> = names
            .iter()
            .map(|name| serde_json::json!({ "pkg": name, "dep_kinds": [{ "kind": null }] }))
            .collect();
        let mut nodes: Vec<_> =
            names.iter().map(|name| serde_json::json!({ "id": name, "deps": [] })).collect();
        nodes.push(serde_json::json!({ "id": "pilot-agent", "deps": edges }));
        let all = serde_json::json!({ "packages": packages, "resolve": { "nodes": nodes } });
        std::fs::write(scripts.path("metadata.json"), all.to_string()).unwrap();
    };
    made("MIT");
    let told = scripts.run("licences", &[]);
    assert!(told.status.success(), "{}", text(&told.stderr));
    let told = text(&told.stdout);
    assert!(told.contains("crate1 1.0.0 (LICENSE)\n") && told.contains("its own words"), "{told}");
    assert!(
        told.contains("crate0 1.0.0, ") && told.contains("Copyright (c) Somebody\n\nPermission is"),
        "{told}"
    );
    for other in ["BSD-3-Clause", "MIT AND BSD-3-Clause"] {
        made(other);
        let told = scripts.run("licences", &[]);
        assert!(!told.status.success());
        let told = text(&told.stderr);
        assert_eq!(told, format!("licences: crate0 1.0.0 ({other}) comes without its licence's text\n"));
    }
}

/// A copy with a `dist/` and programs that make the packages and root file systems.
pub(crate) fn with_dist() -> Scripts {
    let version = env!("CARGO_PKG_VERSION");
    let made = |kind: &str| {
        format!(
            "for last; do :; done; while [ $# -gt 0 ]; do [ $1 != --output ] || out=$2; shift; done; echo new >$out/$PPID.{kind}"
        )
    };
    let scripts = Scripts::new()
        .env("PA_TOOLS", "tools")
        .env("TMPDIR", "scratch")
        .program("git", "exit 1")
        .executable("an/envoy-1.40.0", "")
        .executable("scripts/get-envoy", "echo $PWD/an/envoy-1.40.0")
        .executable("tools/bin/cargo-deb", &made("deb"))
        .executable("tools/bin/cargo-generate-rpm", &made("rpm"))
        .executable(&format!("dist/pilot-agent-{version}-linux-{}", std::env::consts::ARCH), "");
    let names = ["pilot-agent.1", "pilot-agent.bash", "_pilot-agent", "pilot-agent.fish"].map(str::to_owned);
    for name in names.into_iter().chain([format!("pilot-agent-{version}-licences.txt")]) {
        std::fs::write(scripts.path("dist").join(name), "text").unwrap();
    }
    for folder in ["scratch", "packaging"] {
        std::fs::create_dir(scripts.path(folder)).unwrap();
    }
    for name in ["LICENSE", "NOTICE"] {
        std::fs::write(scripts.path(name), "").unwrap();
    }
    for entry in std::fs::read_dir(format!("{ROOT}/packaging")).unwrap().map(Result::unwrap) {
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), scripts.path("packaging").join(entry.file_name())).unwrap();
        }
    }
    scripts
}

#[test]
fn the_account_of_an_image_is_whole() {
    if !root_for("the owners in an image") {
        return;
    }
    let root = "for last; do :; done; cd $last; mkdir -p etc/alternatives etc/sudoers.d var; for f in passwd group shadow gshadow; do echo root >etc/$f; done";
    let scripts = with_dist().program("mmdebstrap", root).env("IMAGE_VARIANTS", "debug").executable(
        "scripts/oci",
        "cp $3/etc/passwd $3/etc/group $3/etc/shadow $3/etc/gshadow .; echo image >$1",
    );
    let output = scripts.run("image", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for (name, line) in [
        ("passwd", "istio-proxy:x:1337:1337:Istio sidecar:/home/istio-proxy:/usr/sbin/nologin"),
        ("group", "istio-proxy:x:1337:"),
        // PAM refuses an account that is in passwd alone, and so does sudo. No days: nothing expires.
        ("shadow", "istio-proxy:!:::::::"),
        ("gshadow", "istio-proxy:!::"),
    ] {
        let file = std::fs::read_to_string(scripts.path(name)).unwrap();
        assert_eq!(file.lines().collect::<Vec<_>>(), ["root", line], "{name}");
    }
}

/// `run("strict", &[script, ...])`: as somebody whose files are nobody else's.
fn strict(scripts: Scripts) -> Scripts {
    scripts.executable("scripts/strict", "umask 077; cd \"$(dirname \"$0\")\"; exec \"./$@\"")
}

#[test]
fn the_root_without_a_shell_is_readable_whoever_makes_it() {
    let scripts = strict(Scripts::new());
    let [from, trust, out] = ["from", "trust", "out"].map(|name| scripts.path(name));
    for (top, file) in [
        (&from, "usr/sbin/xtables-nft-multi"),
        (&from, "usr/sbin/xtables-legacy-multi"),
        (&from, "usr/sbin/nft"),
        (&from, "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"),
        (&from, "usr/share/doc/nftables/copyright"),
        (&trust, "usr/share/ca-certificates/mozilla/a.crt"),
        (&trust, "usr/share/doc/ca-certificates/copyright"),
    ] {
        std::fs::create_dir_all(top.join(file).parent().unwrap()).unwrap();
        std::fs::write(top.join(file), "text").unwrap();
    }
    let [from, trust, to] = [&from, &trust, &out].map(|path| path.to_string_lossy());
    let output = scripts.run("strict", &["distroless-root", &from, &trust, &to, "x86_64"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let hidden =
        Command::new("find").arg(&out).args(["!", "-type", "l", "!", "-perm", "-o=r"]).output().unwrap();
    assert_eq!(text(&hidden.stdout), "", "the image's user cannot read these");
    assert!(out.join("etc/passwd").exists() && out.join("etc/ssl/certs/ca-certificates.crt").exists());
}

#[test]
fn modes_in_an_image_are_not_those_of_who_makes_it() {
    if !root_for("the owners in an image") {
        return;
    }
    let root = "for last; do :; done; cd $last; mkdir -p etc/alternatives var; for f in passwd group; do echo root >etc/$f; done";
    let scripts = strict(with_dist())
        .program("mmdebstrap", root)
        .env("IMAGE_VARIANTS", "default")
        .executable("scripts/oci", "find \"$3\" \"$4\" ! -type l ! -perm -o=r >hidden; echo image >$1");
    let output = scripts.run("strict", &["image"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(scripts.path("hidden")).unwrap(), "", "user 1337 cannot read these");
}

/// Said before the minutes that the debs take.
#[test]
fn packages_that_were_made_elsewhere_are_not_half_tried() {
    let scripts =
        Scripts::new().program("dpkg", "echo amd64").program("rpm", "").program("lintian", "exit 1");
    scripts.fails("test-packages", &[], "there are no packages for amd64 in dist/: make packages first");
    std::fs::create_dir(scripts.path("dist")).unwrap();
    for name in [concat!("pilot-agent_", env!("CARGO_PKG_VERSION"), "-1"), "envoy_1"] {
        std::fs::write(scripts.path(&format!("dist/{name}_amd64.deb")), "text").unwrap();
    }
    scripts.fails("test-packages", &[], "target/package: make packages first");
}

/// Debian's `su` without `-` leaves the caller's search path, in which the system's programs are not.
#[test]
fn the_systems_programs_are_found_by_a_root_of_plain_su() {
    let tells = "echo \"E: $PATH\" >&2; exit 1";
    with_dist().program("mmdebstrap", tells).fails("image", &[], ":/usr/sbin:/sbin");
    with_packages().program("mmdebstrap", tells).fails("test-packages", &[], ":/usr/sbin:/sbin");
    let said = on_a_bare_machine(tells);
    assert!(said.contains(":/usr/sbin:/sbin\n") && said.contains("mmdebstrap trixie failed"), "{said}");
}

/// As the real one: `--quiet` keeps what apt said for itself.
#[test]
fn why_a_root_file_system_cannot_be_made_is_told() {
    let why = "E: Failed to fetch http://deb.example.org  Temporary failure resolving 'deb.example.org'";
    let fails = format!(
        "case \"$*\" in *--quiet*) ;; *) echo 'I: running apt-get update...'; echo \"{why}\" ;; esac >&2; echo 'E: apt-get update failed' >&2; exit 1"
    );
    with_dist().program("mmdebstrap", &fails).fails("image", &[], why);
    with_packages().program("mmdebstrap", &fails).fails("test-packages", &[], why);
    let said = on_a_bare_machine(&fails);
    assert!(said.contains(why), "{said}");
}

fn with_packages() -> Scripts {
    let scripts = with_dist()
        .program("lintian", "")
        .program("systemd-analyze", "exit 1")
        .program("dpkg", "echo amd64")
        .program(
            "dpkg-deb",
            "[ $1 != -R ] || { mkdir -p $3/DEBIAN $3/etc/istio/envoy && : >$3/DEBIAN/control; }",
        );
    for name in
        [concat!("dist/pilot-agent_", env!("CARGO_PKG_VERSION"), "-1_amd64.deb"), "dist/envoy_1_amd64.deb"]
    {
        std::fs::write(scripts.path(name), "text").unwrap();
    }
    std::fs::create_dir_all(scripts.path("target/package/rpm")).unwrap();
    std::fs::write(scripts.path("target/package/rpm/posttrans"), "text").unwrap();
    scripts
}

fn on_a_bare_machine(mmdebstrap: &str) -> String {
    let scripts = Scripts::new()
        .program("mmdebstrap", mmdebstrap)
        .program("rustup", "echo $PWD/rust/bin/rustc")
        .executable("rust/bin/cargo", "");
    std::fs::copy(format!("{ROOT}/README.md"), scripts.path("README.md")).unwrap();
    text(&scripts.run("bare-machine", &[]).stderr)
}

/// What others than root are to run or read, and what `dpkg-deb` packs, has the usual modes, whoever makes it.
#[test]
fn who_makes_packages_and_root_file_systems_sets_the_modes() {
    let mut seen = 0;
    for entry in std::fs::read_dir(format!("{ROOT}/scripts")).unwrap().map(Result::unwrap) {
        let Ok(script) = std::fs::read_to_string(entry.path()) else { continue };
        let commands = || script.lines().map(str::trim_start).filter(|line| !line.starts_with('#'));
        let makes = |line: &str| {
            line.starts_with("mmdebstrap ")
                || line.contains(" mmdebstrap --")
                || line.contains("dpkg-deb --root-owner")
                || line.contains("tarfile.open(archive)")
        };
        if commands().any(makes) {
            seen += 1;
            let sets =
                commands().any(|line| line.starts_with("umask 022") || line.starts_with("os.umask(0o022)"));
            assert!(sets, "{}", entry.path().display());
        }
    }
    assert!(seen >= 6, "only {seen} scripts were understood");
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
    for name in [
        "aside.sh",
        "back.sh",
        "setup.sh",
        "takedown.sh",
        "unmask.sh",
        "empty.sh",
        "purge.sh",
        "envoy-copyright",
    ] {
        std::fs::write(scripts.path("packaging").join(name), "").unwrap();
    }
    for name in ["LICENSE", "NOTICE"] {
        std::fs::write(scripts.path(name), "").unwrap();
    }
    let before = sorted(scripts.files("dist"));
    scripts.fails("packages", &[], "packages: cargo-deb for ");
    scripts.fails("packages", &[], "No space left on device");
    scripts.fails("image", &[], "E: write: No space left on device");
    assert_eq!(sorted(scripts.files("dist")), before);
    assert!(scripts.files("small").is_empty());
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
