//! What a machine lacks for a target stands in one line, before anything is fetched or built.

use std::process::Command;

use crate::copied::{ROOT, Scripts, text};

const BASE: &[&str] = &["sh", "bash", "dirname", "sed", "head", "sort", "awk", "cut", "grep", "id"];

fn rust(scripts: Scripts) -> Scripts {
    scripts.program("cargo", "echo cargo 1.95.0").program("rustc", "echo rustc 1.95.0")
}

fn linux(machine: &str) -> String {
    format!("case $1 in -s) echo Linux ;; *) echo {machine} ;; esac")
}

/// A machine that has what most targets need.
fn ordinary() -> Scripts {
    rust(Scripts::new().only(BASE))
        .program("uname", &linux("x86_64"))
        .program("cc", "")
        .program("python3", "")
        .program("id", "echo 0")
}

fn has_all(scripts: &Scripts, target: &str) {
    let output = scripts.run("check-machine", &[target]);
    assert!(output.status.success(), "{target}: {}", text(&output.stderr));
}

#[test]
fn what_is_missing_stands_in_one_line() {
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
fn a_compiler_without_its_library_is_none() {
    // gcc of a Debian without libc6-dev: it starts, and finds no header.
    let compiler =
        "grep -q '#include <stdlib.h>' && { echo 'fatal error: stdlib.h: No such file' >&2; exit 1; }";
    ordinary().program("cc", compiler).fails(
        "check-machine",
        &["lint"],
        "the C compiler's library (stdlib.h); Debian: apt-get install gcc libc6-dev; Fedora: dnf install gcc; Alpine: apk add gcc musl-dev",
    );
}

#[test]
fn the_shell_of_the_scripts_and_git_are_asked_for_where_they_are_used() {
    let names: Vec<&str> = BASE.iter().copied().filter(|name| *name != "bash").collect();
    let alpine = || {
        rust(Scripts::new().only(&names))
            .program("uname", &linux("x86_64"))
            .program("cc", "")
            .program("python3", "")
            .program("id", "echo 0")
    };
    alpine().fails("check-machine", &["demo"], "missing for `make demo`: bash;");
    has_all(&alpine(), "docs");
    for target in ["reproducible", "record"] {
        ordinary().fails("check-machine", &[target], &format!("missing for `make {target}`: git;"));
        has_all(&ordinary().program("git", ""), target);
    }
    for target in ["bare-machine", "release"] {
        let said = text(&ordinary().run("check-machine", &[target]).stderr);
        assert!(said.contains("git, ") && said.contains("mmdebstrap"), "{said}");
    }
}

#[test]
fn an_envoy_that_the_wheel_is_not_for_is_asked_for_before_the_build() {
    let python = |libc: &str| format!("case \"$2\" in *CS_GNU_LIBC_VERSION*) echo {libc} ;; esac");
    for (libc, named) in
        [("not glibc", "(not glibc)"), ("glibc 2.28", "(glibc 2.28)"), ("glibc 2.9", "(glibc 2.9)")]
    {
        let old = || ordinary().program("python3", &python(libc));
        for target in ["demo", "test", "seccomp", "image"] {
            let said = text(&old().run("check-machine", &[target]).stderr);
            assert!(
                said.contains(&format!("an Envoy for this C library {named}"))
                    && said.contains("set ENVOY_BIN"),
                "{target}: {said}"
            );
        }
        for target in ["demo", "seccomp"] {
            has_all(&old().env("ENVOY_BIN", "/an/envoy"), target);
            has_all(&old().program("envoy", ""), target);
            has_all(&old().executable(".envoy/envoy-1.40.0", ""), target);
        }
        has_all(&old(), "lint");
        // Packages are made of the pinned one alone.
        old().env("ENVOY_BIN", "/an/envoy").fails(
            "check-machine",
            &["packages"],
            "make it on another machine",
        );
    }
    for libc in ["glibc 2.31", "glibc 2.40", "glibc 3.1"] {
        has_all(&ordinary().program("python3", &python(libc)), "demo");
    }
}

#[test]
fn rights_and_tools_of_the_rarer_targets_are_named() {
    let user = || ordinary().program("id", "echo 1000").program("ip", "").program("openssl", "");
    for target in ["soak", "attack", "conformance"] {
        user().fails(
            "check-machine",
            &[target],
            &format!("missing for `make {target}`: root; it makes network namespaces"),
        );
    }
    has_all(&user(), "faults");
    let bare = "case \"$2\" in *libseccomp*) exit 1 ;; esac";
    ordinary().program("python3", bare).fails(
        "check-machine",
        &["seccomp"],
        "libseccomp; Debian: apt-get install libseccomp2;",
    );
    let release = |without: &str| {
        let scripts = ordinary()
            .program("git", "")
            .program("dpkg-deb", "")
            .program("systemd-nspawn", "")
            .program("mmdebstrap", "");
        scripts.env("RELEASE_WITHOUT", without)
    };
    release("").fails("check-machine", &["release"], "lintian, rpm; Debian");
    release("rpm").fails("check-machine", &["release"], "missing for `make release`: lintian; Debian");
    has_all(&release("rpm lintian"), "release");
    ordinary().fails("check-machine", &["nonsense"], "there is no target nonsense");
}

#[test]
fn room_is_looked_for_where_the_build_will_be() {
    // Full where the clone is, and empty elsewhere; or the other way round.
    let df = |full: &str| {
        format!(
            "case \"$2\" in */elsewhere) free={full} ;; *) free=$((9300 - {full})) ;; esac; printf \"head\\n/dev/x 1 2 $free 4%% /\\n\""
        )
    };
    let machine = |full: &str| {
        let scripts = ordinary().program("df", &df(full));
        std::fs::create_dir(scripts.path("elsewhere")).unwrap();
        let build = scripts.path("elsewhere/a/b").to_string_lossy().into_owned();
        scripts.env("CARGO_TARGET_DIR", build)
    };
    for target in ["demo", "bench"] {
        machine("300").fails("check-machine", &[target], "300 MB free in ");
        has_all(&machine("9000"), target);
    }
    // Made and empty is not yet built.
    let made = machine("300");
    std::fs::create_dir_all(made.path("elsewhere/a/b")).unwrap();
    has_all(&made, "demo");
    let made = made.program("df", "printf 'head\\n/dev/x 1 2 300 4%% /\\n'");
    made.fails("check-machine", &["demo"], "300 MB free");
    std::fs::create_dir_all(made.path("elsewhere/a/b/release")).unwrap();
    has_all(&made, "demo");
}

/// `core.autocrlf`, as on a clone that a Windows made: a script whose first line ends with CR is not found.
#[test]
fn a_clone_has_the_bytes_that_were_committed() {
    let rules = std::fs::read_to_string(format!("{ROOT}/.gitattributes")).expect(".gitattributes");
    assert!(rules.lines().any(|line| line == "* -text"), "{rules}");
    let scratch = tempfile::tempdir().unwrap();
    let git = |words: &[&str]| {
        Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "core.autocrlf=true"])
            .args(words)
            .current_dir(scratch.path())
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .output()
            .map(|output| assert!(output.status.success(), "{words:?}: {}", text(&output.stderr)))
    };
    // A machine without git has no clone either.
    if git(&["init", "--quiet", "here"]).is_err() {
        return;
    }
    let unix = "#!/bin/sh\n:\n";
    for (name, content) in
        [(".gitattributes", rules.as_str()), ("script", unix), ("seed", "GET / HTTP/1.1\r\n")]
    {
        std::fs::write(scratch.path().join("here").join(name), content).unwrap();
    }
    for words in [
        &["-C", "here", "add", "."][..],
        &["-C", "here", "commit", "--quiet", "--message", "first"],
        &["clone", "--quiet", "here", "there"],
    ] {
        git(words).unwrap();
    }
    let cloned = |name: &str| std::fs::read_to_string(scratch.path().join("there").join(name)).unwrap();
    assert_eq!((cloned("script").as_str(), cloned("seed").as_str()), (unix, "GET / HTTP/1.1\r\n"));
}

/// check-machine takes 3.9, which Debian 11 has.
#[test]
fn the_oldest_python_that_is_taken_reads_every_program() {
    let check = r#"
import ast, sys
from pathlib import Path
NEWER = {"pairwise", "batched", "file_digest", "TaskGroup", "add_note", "anext", "aiter"}
read = 0
for path in (p for top in ("benches", "conformance", "examples", "scripts", "tests") for p in Path(sys.argv[1], top).rglob("*")):
    if not path.is_file() or (path.suffix != ".py" and not path.read_bytes().startswith(b'#!/usr/bin/env python3')):
        continue
    read += 1
    try:
        tree = ast.parse(path.read_bytes(), feature_version=(3, 9))
    except SyntaxError as error:
        print(f"{path}:{error.lineno}: {error.msg}")
        continue
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            named = {word.arg for word in node.keywords}
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            alone = called == "format_exception_only" and len(node.args) == 1
            if alone or "process_group" in named or called == "zip" and "strict" in named or called in NEWER:
                print(f"{path}:{node.lineno}: this call of {called} is not in 3.9")
print(f"{read} programs" if read < 50 else "read")
"#;
    let output = Command::new("python3").args(["-c", check, ROOT]).output().expect("python3");
    assert_eq!(text(&output.stdout), "read\n", "{}", text(&output.stderr));
}
