//! Completion in a real bash, and man pages.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::support::agent_bin;

// Each line with all its completions in place, as readline inserts them.
fn complete(lines: &[&str]) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("mesh.yaml"), "").unwrap();
    std::fs::create_dir(dir.path().join("folder")).unwrap();
    let script = Command::new(agent_bin()).args(["completion", "bash"]).output().unwrap();
    std::fs::write(dir.path().join("completions"), script.stdout).unwrap();
    let mut child = Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/complete.py"))
        .args([agent_bin().as_os_str(), "./completions".as_ref()])
        .current_dir(dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all((lines.join("\n") + "\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stdout).unwrap().lines().map(|l| l.trim().to_owned()).collect()
}

#[test]
fn bash_completes_commands_flags_values_and_files() {
    let cases = [
        ("pilot-agent pro", "pilot-agent proxy"),
        ("pilot-agent istio-ip", "pilot-agent istio-iptables"),
        // Hidden ones stay hidden.
        ("pilot-agent coll", "pilot-agent coll"),
        ("pilot-agent proxy --discoveryA", "pilot-agent proxy --discoveryA"),
        ("pilot-agent proxy side", "pilot-agent proxy sidecar"),
        ("pilot-agent proxy --dom", "pilot-agent proxy --domain"),
        ("pilot-agent proxy sidecar --templ", "pilot-agent proxy sidecar --templateFile"),
        ("pilot-agent proxy --proxyLogLevel warn", "pilot-agent proxy --proxyLogLevel warning"),
        ("pilot-agent proxy --proxyLogLevel=cri", "pilot-agent proxy --proxyLogLevel=critical"),
        ("pilot-agent proxy --log_output_level deb", "pilot-agent proxy --log_output_level debug"),
        (
            "pilot-agent proxy --log_output_level=xdsproxy:e",
            "pilot-agent proxy --log_output_level=xdsproxy:error",
        ),
        (
            "pilot-agent proxy --log_output_level sds:info,dns:deb",
            "pilot-agent proxy --log_output_level sds:info,dns:debug",
        ),
        ("pilot-agent proxy --log_caller xds", "pilot-agent proxy --log_caller xdsproxy"),
        ("pilot-agent proxy --meshConfig mes", "pilot-agent proxy --meshConfig mesh.yaml"),
        ("pilot-agent proxy --meshConfig=mes", "pilot-agent proxy --meshConfig=mesh.yaml"),
        ("pilot-agent vm che", "pilot-agent vm check"),
        ("pilot-agent vm install --dir fol", "pilot-agent vm install --dir folder"),
        ("pilot-agent request PO", "pilot-agent request POST"),
        ("pilot-agent request GET server", "pilot-agent request GET server_info"),
        ("pilot-agent request --debug-port 1502", "pilot-agent request --debug-port 15020 15021"),
        ("pilot-agent version -o full", "pilot-agent version -o full full-json"),
        (
            "pilot-agent istio-iptables --force-iptables-binary le",
            "pilot-agent istio-iptables --force-iptables-binary legacy",
        ),
        ("pilot-agent completion z", "pilot-agent completion zsh"),
        ("pilot-agent --log_as", "pilot-agent --log_as_json"),
    ];
    let typed: Vec<&str> = cases.iter().map(|(typed, _)| *typed).collect();
    let got = complete(&typed);
    let wrong: Vec<String> = cases
        .iter()
        .zip(got.iter().map(String::as_str).chain(std::iter::repeat("nothing")))
        .filter(|((_, want), got)| got.trim_end_matches('/') != *want)
        .map(|((typed, want), got)| format!("{typed:?}\n  want {want:?}\n  got  {got:?}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn other_shells_and_pages_know_every_command_and_no_hidden_one() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = Command::new(agent_bin()).args(args).current_dir(dir.path()).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    run(&["completion", "man", "."]);
    let lost = Command::new(agent_bin())
        .args(["completion", "man", "none"])
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&lost.stderr).into_owned();
    assert!(said.contains("man pages into none: No such file") && said.contains("name a folder"), "{said}");
    let help = run(&["--help"]);
    let commands: Vec<&str> = help
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"))
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(commands.contains(&"vm") && commands.contains(&"proxy"), "{help}");
    let scripts = ["bash", "zsh", "fish"].map(|shell| run(&["completion", shell]));
    for command in commands {
        let page = std::fs::read_to_string(dir.path().join(format!("pilot-agent-{command}.1"))).unwrap();
        assert!(
            !page.contains(r"\-\-version") && !page.contains(r"\-V"),
            "no command has that flag: {command}"
        );
        assert!(page.contains(".SH SYNOPSIS") && page.contains(".SH OPTIONS"), "{command}: {page}");
        assert!(scripts.iter().all(|script| script.contains(command)), "{command}");
    }
    // What stands behind a command: Clap's generator for fish leaves that out.
    for (command, words) in [("vm", ["run\\t'", "install\\t'"]), ("proxy", ["sidecar\\t'", "router\\t'"])] {
        let start =
            format!("complete -c pilot-agent -n \"__fish_pilot_agent_using_subcommand {command}; and not ");
        let behind = scripts[2].split_once(&start).unwrap_or_else(|| panic!("fish: {command}")).1;
        assert!(words.iter().all(|word| behind.contains(word)), "{command}: {behind}");
    }
    let main = std::fs::read_to_string(dir.path().join("pilot-agent.1")).unwrap();
    assert!(main.contains(r"\-\-version") && !main.contains(r"\-V"), "the program has it, by its long name");
    for hidden in ["collateral", "discoveryRefreshDelay"] {
        assert!(!main.contains(hidden) && scripts.iter().all(|script| !script.contains(hidden)), "{hidden}");
    }
    assert!(!dir.path().join("pilot-agent-collateral.1").exists());
}
