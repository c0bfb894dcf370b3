//! README's commands run as they stand there, beside an agent: but for its ports, which are its own here, and
//! placeholders. What would change the machine, or takes long, names who runs it instead.

use crate::support::{MockIstiod, TestAgent};

const README: &str = include_str!("../../README.md");

/// How a command begins, the file that runs it, and the words there.
const ELSEWHERE: &[(&str, &str, &str)] = &[
    ("apt-get install gcc", "scripts/bare-machine", "mmdebstrap --variant=minbase --include=\"${packages"),
    ("make demo", "scripts/bare-machine", "targets=${BARE_TARGETS:-demo test}"),
    ("make test", "scripts/bare-machine", "targets=${BARE_TARGETS:-demo test}"),
    ("make lint", ".ci/run", "make lint"),
    ("make bench", "scripts/release", "\"$built\"/bench --agent"),
    ("make numbers", "tests/scripts/reports.rs", "scripts/numbers"),
    ("make dist", "scripts/release", "make dist"),
    ("make release", ".github/workflows/release.yml", "make release VERSION="),
    ("make fuzz-smoke", "Makefile", "scripts/fuzz-smoke"),
    ("make help", "Makefile", "grep -hE"),
    ("make conformance", "Makefile", "conformance/all"),
    ("make image", "Makefile", "\n\tscripts/image\n"),
    ("make packages", "Makefile", "\n\tscripts/packages\n"),
    ("helm upgrade istiod", "tests/deploy.rs", "deploy/values/{name}.yaml"),
    ("kubectl apply -f deploy/proxyless-grpc", "tests/deploy.rs", "deploy/proxyless-grpc"),
    ("examples/own-envoy/run", "tests/examples.rs", "examples/own-envoy/run"),
    ("systemctl enable --now istio", "scripts/test-systemd", "systemctl enable --now istio"),
    ("pilot-agent vm install", "scripts/test-systemd", "pilot-agent vm install --root / --dir ./vm"),
    ("pilot-agent vm check", "scripts/test-systemd", "pilot-agent vm check --root /"),
    // Ports that it may ask are fixed; there, they are the pod's own.
    (
        "pilot-agent request",
        "scripts/test-image",
        "[\"request\", \"--debug-port=15020\", \"GET\", \"healthz/ready\"]",
    ),
    ("pilot-agent vm run", "tests/privileged/vm.rs", "[\"vm\", \"run\","),
    ("pilot-agent upgrade", "tests/conformance/upgrade.rs", "agent.run(&[\"upgrade\"])"),
];

// What is set as code and begins with a program's name.
fn commands() -> Vec<String> {
    let (mut out, mut fenced) = (Vec::new(), false);
    let mut paragraph = String::new();
    for line in README.lines().chain([""]) {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if line.starts_with("    ") {
            out.push(line.split(" # ").next().unwrap_or_default().trim().to_owned());
        } else if line.is_empty() || fenced {
            out.extend(paragraph.split('`').skip(1).step_by(2).map(|code| code.trim().to_owned()));
            paragraph.clear();
        } else {
            paragraph.push_str(line);
            paragraph.push(' ');
        }
    }
    let programs =
        ["pilot-agent ", "make ", "helm ", "kubectl ", "systemctl ", "apt-get ", "examples/own-envoy/run"];
    out.retain(|code| programs.iter().any(|program| code.starts_with(program)));
    out
}

#[tokio::test]
async fn every_command_is_run() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mock = MockIstiod::start().await;
    // This is `pilot-agent proxy sidecar`.
    let mut agent = TestAgent::with().istiod(&mock).env("CLOUD_PLATFORM", "none").start();
    agent.wait_ready().await;
    agent.wait_log("generated new workload certificate").await;
    let (mut here, mut quits) = (0, Vec::new());
    for command in commands() {
        if let Some((_, file, words)) = ELSEWHERE.iter().find(|(start, ..)| command.starts_with(start)) {
            let text =
                std::fs::read_to_string(root.join(file)).unwrap_or_else(|e| panic!("{command}: {file}: {e}"));
            assert!(text.contains(words), "{command}: {file} does not run it any more");
            continue;
        }
        let Some(rest) = command.strip_prefix("pilot-agent ") else {
            panic!(
                "README says `{command}`, and nothing runs it: add it to ELSEWHERE with the test that does"
            )
        };
        let status = agent.ports().status.to_string();
        let mut words: Vec<String> =
            rest.split_whitespace().map(|word| word.replace("15020", &status)).collect();
        if words[..] == ["proxy", "sidecar"] {
            continue;
        }
        if words[0] == "wait" {
            words.push(format!("--url=http://localhost:{status}/healthz/ready"));
        }
        // Optional parts stand in brackets; a job's own command is anything.
        words.iter_mut().for_each(|word| *word = word.trim_matches(['[', ']']).to_owned());
        if words.last().is_some_and(|word| word == "command") {
            *words.last_mut().unwrap() = "true".to_owned();
        }
        if words.iter().any(|word| word == "--quit") {
            quits.push(words);
            continue;
        }
        let said = agent.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await;
        assert_eq!(said.code, Some(0), "{command}: {}{}", said.stdout, said.stderr);
        assert!(words[0] == "wait" || !said.stdout.is_empty(), "{command} says nothing");
        here += 1;
    }
    assert!(here > 6, "only {here} commands were found: is the reader of README broken?");
    // Last, for it ends the agent.
    for words in quits {
        let said = agent.run(&words.iter().map(String::as_str).collect::<Vec<_>>()).await;
        assert_eq!(said.code, Some(0), "{words:?}: {}{}", said.stdout, said.stderr);
        assert!(agent.wait_exit().await.success());
    }
}
