//! Packages: whole, and beside those of others.

use std::process::Command;

use crate::copied::{ROOT, Scripts, sorted, text};
use crate::releasing::with_dist;
use crate::support::root_for;

#[test]
fn packages_are_made_where_there_is_no_dpkg() {
    let scripts = with_dist().only(&[
        "bash",
        "env",
        "dirname",
        "sed",
        "ls",
        "mktemp",
        "rm",
        "mkdir",
        "cp",
        "date",
        "cat",
        "install",
        "gzip",
        "du",
        "cut",
        "find",
        "md5sum",
        "sort",
        "touch",
        "chmod",
        "realpath",
        "mv",
        "grep",
        "tail",
        "xargs",
        "sha256sum",
        "uname",
    ]);
    let output = scripts.run("packages", &[]);
    let said = text(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert_eq!(said, "packages: the deb with Envoy is left out: no dpkg-deb here\n");
    let left = scripts.files("dist");
    let of = |kind: &str| left.iter().filter(|name| name.ends_with(kind)).count();
    assert_eq!(
        (of(".rpm"), of(".deb"), of("SHA256SUMS")),
        (2, 1, 1),
        "of the agent both, of Envoy an rpm: {left:?}"
    );
}

#[test]
fn an_rpm_that_goes_leaves_no_folder_with_nothing_in_it() {
    let scripts = with_dist().program("dpkg-deb", "for last; do :; done; echo new >$last");
    let output = scripts.run("packages", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let setup = std::fs::read_to_string(format!("{ROOT}/packaging/setup.sh")).unwrap();
    let list = setup.split("for dir in ").nth(1).unwrap().split(';').next().unwrap();
    let mut folders: Vec<&str> = list.split_whitespace().filter(|word| word.starts_with('/')).collect();
    assert!(folders.len() > 7, "{folders:?}");
    // Of the package's own files, those that no other package has.
    folders.extend(["/etc/istio/envoy", "/usr/share/pilot-agent"]);
    folders.extend(["/usr/share/licenses/pilot-agent", "/usr/share/doc/pilot-agent"]);
    let root = scripts.path("root");
    let at = |folder: &str| root.join(folder.trim_start_matches('/'));
    let postun = std::fs::read_to_string(scripts.path("target/package/rpm/postun")).unwrap();
    let inside = postun.replace(" /", &format!(" {}/", root.display()));
    let goes = |how: &str| {
        folders.iter().for_each(|folder| std::fs::create_dir_all(at(folder)).unwrap());
        let done = Command::new("sh").args(["-ec", &inside, "postun", how]).output().unwrap();
        assert!(done.status.success() && done.stderr.is_empty(), "{}", text(&done.stderr));
    };
    goes("1");
    assert!(folders.iter().all(|folder| at(folder).exists()), "an upgrade takes nothing");
    std::fs::write(at("/var/lib/istio/data").join("kept"), "").unwrap();
    goes("0");
    let left: Vec<&&str> = folders.iter().filter(|folder| at(folder).exists()).collect();
    assert_eq!(left, [&"/var/lib/istio", &"/var/lib/istio/data"]);
    // Istio's own package, which took over, has some of the same.
    std::fs::create_dir_all(at("/usr/local/bin")).unwrap();
    std::fs::write(at("/usr/local/bin/istio-start.sh"), "").unwrap();
    goes("0");
    assert!(folders.iter().all(|folder| at(folder).exists()));
}

#[test]
fn an_rpm_restarts_at_an_upgrade_and_is_disabled_when_it_goes() {
    let scripts = with_dist().program("dpkg-deb", "for last; do :; done; echo new >$last");
    let output = scripts.run("packages", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let root = scripts.path("root");
    for folder in ["run/systemd/system", "etc/istio", "usr/lib/systemd/system", "usr/share/pilot-agent"] {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    std::fs::write(root.join("usr/share/pilot-agent/istio.service"), "").unwrap();
    let called = scripts.path("called");
    let notes = format!("echo ${{0##*/}} $* >>'{}'", called.display());
    let programs =
        ["systemctl", "chown", "getent"].into_iter().fold(scripts, |s, name| s.program(name, &notes));
    let path = format!("{}:/usr/bin:/bin", programs.path("bin").display());
    let run = |script: &str, how: &str| {
        let content = std::fs::read_to_string(programs.path("target/package/rpm").join(script)).unwrap();
        // Absolute paths are those of the machine.
        let inside = [" /", "=/"].iter().fold(content, |text, before| {
            text.replace(before, &format!("{}{}/", &before[..1], root.display()))
        });
        let done =
            Command::new("sh").args(["-ec", &inside, script, how]).env("PATH", &path).output().unwrap();
        assert!(done.status.success(), "{script}: {}", text(&done.stderr));
    };
    let calls = || {
        let said = std::fs::read_to_string(&called).unwrap();
        std::fs::remove_file(&called).unwrap();
        said
    };
    run("pre", "1");
    run("posttrans", "0");
    let first = calls();
    assert!(first.contains("systemctl daemon-reload") && !first.contains("try-restart"), "{first}");
    for _ in 0..2 {
        run("pre", "2");
        run("posttrans", "0");
        assert!(calls().contains("systemctl try-restart istio.service"));
    }
    // A first installation that was given up leaves nothing for a later upgrade.
    run("pre", "1");
    run("pre", "2");
    run("posttrans", "0");
    assert!(calls().contains("try-restart"));
    // And what goes is enabled no longer, where systemd does not run (an image) either.
    run("preun", "1");
    run("preun", "0");
    assert_eq!(calls(), "systemctl --no-reload disable --now istio.service\n");
    std::fs::remove_dir(root.join("run/systemd/system")).unwrap();
    run("preun", "0");
    assert_eq!(calls(), "systemctl --no-reload disable istio.service\n");
}

/// `run(&[script, arguments ...])` runs a script of the deb in a root of its own, and gives what Debian's helper is told there.
fn deb(scripts: Scripts) -> (Scripts, impl Fn(&[&str]) -> String) {
    let scripts = scripts.program("dpkg-deb", "for last; do :; done; echo new >$last");
    let output = scripts.run("packages", &[]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let root = scripts.path("root");
    for folder in ["run", "usr/bin", "usr/local/bin", "usr/lib/systemd/system", "var/lib/istio/envoy"] {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    std::fs::write(root.join("usr/lib/systemd/system/istio.service"), "").unwrap();
    let scripts = ["chown", "getent", "dpkg-query"].into_iter().fold(scripts, |s, name| s.program(name, ""));
    let path = format!("{}:/usr/bin:/bin", scripts.path("bin").display());
    let folder = scripts.path("target/package/deb");
    let run = move |words: &[&str]| {
        let content = std::fs::read_to_string(folder.join(words[0])).unwrap();
        // Absolute paths are those of the machine.
        let inside = [" /", "=/", ">/"].iter().fold(content, |text, before| {
            text.replace(before, &format!("{}{}/", &before[..1], root.display()))
        });
        let inside = inside.replace("#DEBHELPER#", "echo \"$1 $2\"");
        let inside = inside.replace(&format!("{}/dev/null", root.display()), "/dev/null");
        let done = Command::new("sh").args(["-ec", &inside]).args(words).env("PATH", &path).output().unwrap();
        assert!(done.status.success(), "{words:?}: {}", text(&done.stderr));
        text(&done.stdout)
    };
    (scripts, run)
}

/// `dpkg -i` unpacks a package of which something is missing that it needs, and it may be removed as it is.
#[test]
fn a_deb_that_was_never_configured_leaves_istios_settings_in_their_place() {
    let (scripts, run) = deb(with_dist());
    for name in ["sidecar.env", "cluster.env"] {
        std::fs::write(scripts.path("root/var/lib/istio/envoy").join(name), "theirs").unwrap();
    }
    let names = || sorted(scripts.files("root/var/lib/istio/envoy"));
    run(&["preinst", "install"]);
    assert_eq!(names(), ["cluster.env.before-pilot-agent", "sidecar.env.before-pilot-agent"]);
    run(&["postrm", "remove"]);
    assert_eq!(names(), ["cluster.env", "sidecar.env"]);
}

/// A folder that is a mount of its own can be emptied only.
#[test]
fn a_purge_takes_the_key_and_ends_where_a_folder_stays() {
    let (scripts, run) = deb(with_dist());
    let busy = "case \"$*\" in -rf*/log/istio*) exec >&2; echo Device or resource busy; exit 1 ;; esac
        exec /bin/rm \"$@\"";
    let scripts = scripts.program("rm", busy);
    let at = |name: &str| scripts.path("root").join(name);
    for folder in ["var/log/istio", "etc/certs", "etc/istio/proxy"] {
        std::fs::create_dir_all(at(folder)).unwrap();
    }
    std::fs::write(at("etc/certs/key.pem"), "").unwrap();
    assert_eq!(run(&["postrm", "purge"]), "purge \n");
    assert!(!at("etc/certs").exists() && !at("etc/istio").exists());
}

/// The helper restarts what it is told the version of.
#[test]
fn a_deb_restarts_at_an_upgrade_and_not_in_the_place_of_istios() {
    let (_scripts, run) = deb(with_dist());
    run(&["preinst", "install"]);
    assert_eq!(run(&["postinst", "configure", ""]), "configure \n");
    // Removed, Istio's installed, and this one again: its settings were left.
    run(&["preinst", "install", "1"]);
    assert_eq!(run(&["postinst", "configure", "1"]), "configure \n");
    // One that was given up leaves nothing for a later upgrade.
    run(&["preinst", "install", "1"]);
    for _ in 0..2 {
        run(&["preinst", "upgrade", "1"]);
        assert_eq!(run(&["postinst", "configure", "1"]), "configure 1\n");
    }
}

#[test]
fn an_envoy_of_any_package_is_where_the_agent_looks_as_long_as_the_agent_is_there() {
    let (mut scripts, run) = deb(with_dist());
    let (link, envoy) = (scripts.path("root/usr/local/bin/envoy"), scripts.path("root/usr/bin/envoy"));
    run(&["postinst", "configure"]);
    assert!(!link.is_symlink(), "there is none");
    for (gone, how) in [(false, "remove"), (false, "purge"), (true, "purge")] {
        scripts = scripts.executable("root/usr/bin/envoy", "");
        run(&["postinst", "configure"]);
        assert_eq!(std::fs::canonicalize(&link).unwrap(), std::fs::canonicalize(&envoy).unwrap());
        if gone {
            std::fs::remove_file(&envoy).unwrap();
        }
        run(&["postrm", how]);
        assert!(!link.is_symlink(), "{how}: the link stays");
    }
    // The package with Envoy comes after the agent's, and stays when that one goes.
    let scripts = scripts.executable("root/usr/bin/envoy", "");
    run(&["postinst", "configure"]);
    let own = std::fs::read_to_string(format!("{ROOT}/packaging/envoy-link.sh")).unwrap();
    let root = format!("{}/", scripts.path("root").display());
    let own = [" /", "=/"].iter().fold(own, |text, at| text.replace(at, &format!("{}{root}", &at[..1])));
    assert!(Command::new("sh").args(["-ec", &own]).status().unwrap().success());
    run(&["postrm", "purge"]);
    assert_eq!(std::fs::canonicalize(&link).unwrap(), std::fs::canonicalize(&envoy).unwrap());
    std::fs::remove_file(&link).unwrap();
    // One that somebody has made by hand; and Istio's Envoy.
    std::os::unix::fs::symlink(&envoy, &link).unwrap();
    run(&["postrm", "purge"]);
    assert!(link.is_symlink(), "another's link was taken");
    std::fs::remove_file(&link).unwrap();
    std::fs::write(&link, "").unwrap();
    run(&["postrm", "purge"]);
    assert!(link.exists(), "a file was taken");
}

// Runs what both packages run, in a root of its own.
fn set_up(scripts: &Scripts, root: &std::path::Path) {
    let setup = std::fs::read_to_string(format!("{ROOT}/packaging/setup.sh")).unwrap();
    let inside = [" /", "=/"]
        .iter()
        .fold(setup, |text, before| text.replace(before, &format!("{}{}/", &before[..1], root.display())));
    // The proxy's user is one that every machine has.
    let inside = inside.replace("istio-proxy:istio-proxy", "65534:65534");
    let path = format!("{}:/usr/bin:/bin", scripts.path("bin").display());
    let done = Command::new("sh").args(["-ec", &inside]).env("PATH", path).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
}

#[test]
fn no_link_to_settings_leads_to_itself() {
    if !root_for("the owners of folders") {
        return;
    }
    use std::os::unix::fs::symlink;
    for linked in [true, false] {
        let scripts = Scripts::new().program("getent", "");
        let root = scripts.path("root");
        for folder in ["var/lib/istio/envoy", "usr/lib/systemd/system", "usr/local/bin", "usr/bin"] {
            std::fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["usr/lib/systemd/system/istio.service", "usr/local/bin/envoy"] {
            std::fs::write(root.join(file), "").unwrap();
        }
        let settings = |name: &str| root.join("var/lib/istio/envoy").join(name);
        if linked {
            // Istio's own layout. The operator has deleted both files, and an earlier version has made a link for one.
            std::fs::create_dir(root.join("etc")).unwrap();
            symlink(root.join("var/lib/istio"), root.join("etc/istio")).unwrap();
            symlink(root.join("etc/istio/envoy/cluster.env"), settings("cluster.env")).unwrap();
        } else {
            std::fs::create_dir_all(root.join("etc/istio/envoy")).unwrap();
        }
        set_up(&scripts, &root);
        for name in ["sidecar.env", "cluster.env"] {
            let there = std::fs::symlink_metadata(settings(name)).is_ok();
            assert_eq!(there, !linked, "{name}, /etc/istio a link: {linked}");
        }
    }
}

#[test]
fn a_package_gives_away_no_folder_that_a_link_of_the_proxys_leads_to() {
    if !root_for("the owners of folders") {
        return;
    }
    let scripts = Scripts::new().program("getent", "");
    let root = scripts.path("root");
    for folder in
        ["secret", "var/lib/istio", "etc/istio", "usr/lib/systemd/system", "usr/local/bin", "usr/bin"]
    {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    for file in ["usr/lib/systemd/system/istio.service", "usr/local/bin/envoy"] {
        std::fs::write(root.join(file), "").unwrap();
    }
    let secret = root.join("secret");
    std::os::unix::fs::symlink(&secret, root.join("var/lib/istio/data")).unwrap();
    set_up(&scripts, &root);
    let owner =
        |path: &std::path::Path| std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(path).unwrap());
    assert_eq!(owner(&secret), 0, "the proxy's user was given a folder of root's");
    for folder in ["var/lib/istio", "var/lib/istio/envoy", "etc/istio/proxy", "etc/certs", "var/log/istio"] {
        assert_eq!(owner(&root.join(folder)), 65534, "{folder}");
    }
}

#[test]
fn a_package_leaves_folders_to_whom_the_agent_runs_as() {
    if !root_for("the owners of folders") {
        return;
    }
    let scripts = Scripts::new().program("getent", "");
    let root = scripts.path("root");
    for folder in ["usr/lib/systemd/system", "usr/local/bin", "usr/bin"] {
        std::fs::create_dir_all(root.join(folder)).unwrap();
    }
    for file in ["usr/lib/systemd/system/istio.service", "usr/local/bin/envoy"] {
        std::fs::write(root.join(file), "").unwrap();
    }
    set_up(&scripts, &root);
    // Of another user, of nobody who is known, of root.
    let given = [("etc/certs", 1, 1), ("var/lib/istio/proxy", 1, 1), ("var/log/istio", 54_321, 65_534)];
    for (folder, owner, _) in given.into_iter().chain([("var/lib/istio", 0, 0)]) {
        std::os::unix::fs::chown(root.join(folder), Some(owner), Some(owner)).unwrap();
    }
    set_up(&scripts, &root);
    for (folder, _, owner) in given.into_iter().chain([("var/lib/istio", 0, 65_534)]) {
        let kept = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(root.join(folder)).unwrap());
        assert_eq!(kept, owner, "{folder}");
    }
}
