//! The whole of `scripts/release`, with programs in the place of all that it calls.

use crate::copied::{ROOT, Scripts, sorted, text};

/// Everything that `release` calls, put in its place by programs that write down how they were called.
fn rehearsal() -> Scripts {
    let version = env!("CARGO_PKG_VERSION");
    let noted = "echo \"${0##*/} $*\" >>calls";
    let made = format!(
        "{noted}; [ -d dist ] && exit 1; mkdir dist; cd dist; for f in a.deb a.rpm; do echo $f >$f; done; \
         for a in x86_64 aarch64; do for f in linux-$a linux-$a.oci.tar; do f=pilot-agent-{version}-$f; echo $f >$f; done; done"
    );
    let git =
        "case $1 in status) ;; rev-parse) case $* in *refs/tags*) exit 1 ;; *) echo head ;; esac ;; esac";
    let mut scripts = Scripts::new()
        .program("git", git)
        .program("make", &made)
        .program("cargo", noted)
        .program("lintian", "")
        .program("rpm", "")
        .env("TMPDIR", "scratch")
        .executable("scripts/get-envoy", "echo /an/envoy")
        .executable("scripts/pin-images", &format!("{noted}; echo pinned >$1"))
        .executable("target/release/bench", &format!("{noted}; echo numbers"));
    for name in ["check-reproducible", "test-packages", "test-systemd", "test-image"] {
        scripts = scripts.executable(&format!("scripts/{name}"), noted);
    }
    for folder in ["dist", "scratch"] {
        std::fs::create_dir(scripts.path(folder)).unwrap();
    }
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
    assert!(text(&output.stdout).ends_with(&format!("release: {version} is in dist/, 9 files\n")));
    let read = |name: &str| std::fs::read_to_string(scripts.path(name)).unwrap();
    let [one, other] =
        ["aarch64", "x86_64"].map(|arch| format!("pilot-agent-{version}-linux-{arch}.oci.tar"));
    let calls = read("calls");
    let (pinned, calls) = calls.split_once('\n').unwrap();
    assert!(pinned.starts_with("pin-images scratch/") && pinned.ends_with("/Dockerfile"), "{pinned}");
    let expected = [
        "make dist",
        "check-reproducible ",
        "cargo build --release --locked -p mock-istiod",
        "test-packages ",
        "test-systemd target/release/mock-istiod",
        &format!("test-image dist/{one} target/release/mock-istiod"),
        &format!("test-image dist/{other} target/release/mock-istiod"),
        &format!("bench --agent {binary} --envoy /an/envoy"),
    ];
    assert_eq!(read("dist/Dockerfile"), "pinned\n");
    assert!(scripts.files("scratch").is_empty());
    assert_eq!(calls.lines().collect::<Vec<_>>(), expected);
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
fn what_a_machine_cannot_do_is_no_release_unless_it_is_named() {
    let version = env!("CARGO_PKG_VERSION");
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    let half = || {
        rehearsal().executable(
            "scripts/pin-images",
            "echo 'pin-images: r.example/debian: no route to it' >&2; exit 1",
        )
    };
    // What is missing is said before anything is built.
    let scripts = half();
    let output = scripts.run("release", &[version]);
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.ends_with(
        "no Dockerfile with digests: pin-images: r.example/debian: no route to it (RELEASE_WITHOUT=digests releases without)\n"
    ), "{said}");
    assert_eq!(scripts.files("dist"), ["of-the-last-one"]);
    let make = format!(
        "mkdir dist; cd dist; touch a.deb a.rpm; for f in linux-{arch} linux-{arch}.oci.tar linux-{other}; do touch pilot-agent-{version}-$f; done",
        arch = std::env::consts::ARCH
    );
    let output = half().program("make", &make).env("RELEASE_WITHOUT", "digests").run("release", &[version]);
    let said = text(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(
        said.contains("release: WITHOUT digests: ")
            && said.contains(&format!("images for {other} were left out")),
        "{said}"
    );
    // Named, each is said again and left out.
    let scripts = half().program("make", &make).env("RELEASE_WITHOUT", "foreign digests");
    let output = scripts.run("release", &[version]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said.matches("release: WITHOUT ").count(), 2, "{said}");
    assert!(!scripts.path("dist/Dockerfile").exists());
    let scripts = rehearsal().env("RELEASE_WITHOUT", "tests");
    scripts.fails(
        "release",
        &[version],
        "RELEASE_WITHOUT=tests: lintian, rpm, foreign and digests can be left out",
    );
}

#[test]
fn a_release_needs_the_tools_that_look_into_its_packages() {
    let version = env!("CARGO_PKG_VERSION");
    for tool in ["lintian", "rpm"] {
        let scripts = rehearsal().only(&[
            "bash", "env", "dirname", "sed", "head", "wc", "xargs", "grep", "awk", "mktemp", "rm", "tail",
        ]);
        std::fs::remove_file(scripts.path("bin").join(tool)).unwrap();
        let output = scripts.run("release", &[version]);
        let said = text(&output.stderr);
        assert!(!output.status.success(), "{said}");
        let line = format!(
            "there is no {tool} to look into the packages with (RELEASE_WITHOUT={tool} releases without)\n"
        );
        assert!(said.ends_with(&line), "{said}");
        assert_eq!(scripts.files("dist"), ["of-the-last-one"]);
    }
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

/// What bindgen makes it hands to prettyplease: with another `syn` than that one's `make release-fips` does not compile,
/// and no other build has bindgen in it.
#[test]
fn what_writes_the_bindings_of_the_fips_module_fits_together() {
    let lock = std::fs::read_to_string(format!("{ROOT}/Cargo.lock")).unwrap();
    let syn = |name: &str| {
        let package = lock.split("[[package]]").find(|p| p.contains(&format!("\nname = \"{name}\"\n")));
        let package = package.unwrap_or_else(|| panic!("Cargo.lock has no {name}"));
        let of = |line: &str| {
            line.trim().strip_prefix("\"syn ").map(|rest| rest.trim_end_matches(['"', ',']).to_owned())
        };
        package
            .lines()
            .find_map(of)
            .unwrap_or_else(|| panic!("{name} names no version of syn: there is one only?"))
    };
    let (made, taken) = (syn("bindgen"), syn("prettyplease"));
    assert_eq!(made, taken, "in Cargo.lock, give bindgen the syn that prettyplease has");
}
