//! The command line as scripts use it: exit codes, standard output, and what goes to the port asked.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::JoinHandle;

use crate::support::agent_bin;

fn run(args: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    run_in(dir.path(), args, &[])
}

fn run_in(dir: &Path, args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(agent_bin());
    command.args(args).current_dir(dir).env_clear().envs(env.iter().copied());
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

// Answers the given connections and gives the requests, heads and bodies as they came.
fn serve(listener: TcpListener, answers: Vec<String>) -> JoinHandle<Vec<String>> {
    std::thread::spawn(move || {
        let mut seen = Vec::new();
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut byte = [0];
            while !request.ends_with(b"\r\n\r\n") {
                assert_eq!(stream.read(&mut byte).unwrap(), 1, "the request's head must be whole");
                request.push(byte[0]);
            }
            seen.push(String::from_utf8(request).unwrap());
            stream.write_all(answer.as_bytes()).unwrap();
        }
        seen
    })
}

fn answer(status: &str, body: &str) -> String {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
}

/// What was not written is not taken for written.
#[test]
fn output_that_is_lost_is_an_error_with_its_cause() {
    for args in [&["version"][..], &["--help"], &["completion", "bash"]] {
        let full = std::fs::File::create("/dev/full").unwrap();
        let said = Command::new(agent_bin()).args(args).stdout(full).output().unwrap();
        let told = text(&said.stderr);
        assert!(
            said.status.code() == Some(1) && told.contains("cannot write to standard output"),
            "{args:?}: {told}"
        );
    }
}

/// An agent that has no descriptor left is there all the same: nobody is sent to end it.
#[test]
fn an_agent_without_descriptors_is_named_by_that() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let full = || answer("503 Service Unavailable", "503 the agent has no file descriptor left");
    let server = serve(listener, vec![full(), full()]);
    let said = run(&["status", "--port", &port]);
    let shown = text(&said.stdout);
    assert!(
        said.status.code() == Some(2) && shown.contains("descriptor left") && shown.contains("ulimit -n"),
        "{shown}"
    );
    let said = run(&["doctor", "--port", &port]);
    assert!(text(&said.stdout).contains("verdict: OpenFiles"), "{}", text(&said.stdout));
    server.join().unwrap();
}

/// Output in a file that may not grow: the write fails, as it does in Go, and ends nothing by a signal.
#[test]
fn output_beyond_the_size_that_a_file_may_have_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let shown = std::fs::File::create(dir.path().join("shown")).unwrap();
    let mut command = Command::new("prlimit");
    command.args(["--fsize=8"]).arg(agent_bin()).args(["version", "-o", "json"]);
    let status = command.current_dir(dir.path()).stdout(shown).status().unwrap();
    assert_ne!(status.code(), None, "{status}");
    assert_eq!(std::fs::read(dir.path().join("shown")).unwrap().len(), 8);
}

#[test]
fn version_has_its_four_forms() {
    let plain = run(&["version"]);
    assert!(text(&plain.stdout).starts_with("client version: version.BuildInfo{Version:\""));
    let short = run(&["version", "-s"]);
    assert!(text(&short.stdout).starts_with("client version: ") && short.stdout.ends_with(b"\n"));
    let json: serde_json::Value = serde_json::from_slice(&run(&["version", "-o", "json"]).stdout).unwrap();
    let keys: Vec<&String> = json["clientVersion"].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["version", "revision", "golang_version", "status", "tag"]);
    let yaml = run(&["version", "--output=yaml"]);
    assert!(text(&yaml.stdout).starts_with("clientVersion:\n  golang_version: "));
    assert!(yaml.stdout.ends_with(b"\n\n"));
    assert_eq!(run(&["version", "-o", "xml"]).status.code(), Some(255));
}

#[test]
fn version_names_product_release_crypto_and_platform() {
    let full = run(&["--version"]);
    assert_eq!(full.status.code(), Some(0));
    assert_eq!(run(&["version", "-o", "full"]).stdout, full.stdout);
    let json: serde_json::Value =
        serde_json::from_slice(&run(&["version", "-o", "full-json"]).stdout).unwrap();
    let go: serde_json::Value = serde_json::from_slice(&run(&["version", "-o", "json"]).stdout).unwrap();
    assert_eq!(json["istio"], go["clientVersion"]["version"]);
    for name in ["product", "version", "revision", "istio", "crypto", "target", "libc"] {
        let value = json[name].as_str().unwrap_or_else(|| panic!("{name} is missing: {json}"));
        assert!(!value.is_empty() && !value.contains("unknown version"), "{name}: {value:?}");
        assert!(text(&full.stdout).contains(&format!("{name}: {value}\n")), "{name}");
    }
    let one_value = go["clientVersion"]["golang_version"].as_str().unwrap();
    for name in ["product", "version", "crypto", "target", "libc"] {
        assert!(one_value.contains(json[name].as_str().unwrap()), "{name} is not in {one_value:?}");
    }
}

#[test]
fn errors_end_with_255_and_stand_on_standard_error() {
    for (args, error) in [
        (&["nope"][..], "Error: unknown command \"nope\" for \"pilot-agent\""),
        (&["version", "--remote"], "Error: unknown flag: --remote"),
        (&["wait", "-x"], "Error: unknown shorthand flag: 'x' in -x"),
        (&["wait", "--timeoutSeconds", "5s"], "Error: invalid argument \"5s\" for \"--timeoutSeconds\" flag"),
        (&["request", "GET"], "Error: requires at least 2 arg(s), only received 1"),
        (&["request", "GET", "/", "--debug-port=1234"], "Error: debug port 1234 is not in allowed list"),
        (&["proxy", "gateway"], "Error: invalid proxy Type: gateway"),
        (&["proxy", "--concurrency=two"], "Error: invalid argument \"two\" for \"--concurrency\" flag"),
        (&["proxy", "--log_output_level=INFO"], "Error: invalid output level 'INFO'"),
        (&["proxy", "--log_stacktrace_level="], "Error: invalid output level ''"),
        (&["--unknown", "proxy", "sidecar"], "Error: unknown command \"sidecar\""),
        (&["collateral"], "Error: this build is not compiled with collateral support"),
        (&["completion", "bash", "x"], "Error: unknown command \"x\" for \"pilot-agent completion bash\""),
        (&["completion", "--no-descriptions"], "Error: unknown flag: --no-descriptions"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(255), "{args:?}");
        assert!(text(&output.stderr).contains(error), "{args:?}: {}", text(&output.stderr));
    }
}

#[test]
fn help_is_no_error() {
    for args in [
        &[][..],
        &["--help"],
        &["wait", "-h"],
        &["help", "request"],
        &["request", "--help"],
        &["completion"],
        &["completion", "tcsh"],
        &["completion", "zsh", "--no-descriptions"],
        &["--nope", "version"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(!output.stdout.is_empty(), "{args:?}");
    }
    for shell in ["bash", "zsh", "fish", "powershell"] {
        assert!(text(&run(&["completion", shell]).stdout).contains("pilot-agent"), "{shell}");
    }
}

#[test]
fn wait_follows_a_redirect_and_then_ends() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/a", listener.local_addr().unwrap());
    let redirect =
        "HTTP/1.1 302 Found\r\nLocation: /b\u{e9}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            .to_owned();
    let server = serve(listener, vec![answer("503 no", "later"), redirect, answer("200 OK", "")]);
    let args = ["wait", "--periodMillis=10", "--requestTimeoutMillis=10000", "--timeoutSeconds=30", "--url"];
    let output = run(&[&args[..], &[url.as_str()]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let seen = server.join().unwrap();
    let lines: Vec<&str> = seen.iter().map(|r| r.lines().next().unwrap()).collect();
    assert_eq!(lines, ["GET /a HTTP/1.1", "GET /a HTTP/1.1", "GET /b%C3%A9 HTTP/1.1"]);
}

#[test]
fn a_bad_configuration_names_every_problem_and_binds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = r#"{"statusPort": 0, "drainDuration": "45", "concurrency": [1]}"#;
    let output = run_in(dir.path(), &["proxy", "sidecar"], &[("PROXY_CONFIG", config)]);
    assert_eq!(output.status.code(), Some(255));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("drainDuration"), "{stderr}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing may be written before that");
}

#[test]
fn log_lines_have_the_form_that_parsers_read() {
    let output = run(&["proxy", "gateway", "--log_as_json"]);
    let lines: Vec<serde_json::Value> = text(&output.stdout)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{l}: {e}")))
        .collect();
    assert!(lines.iter().all(|l| l["time"].as_str().is_some_and(|t| t.len() == 27 && t.ends_with('Z'))));
    assert!(lines.iter().any(|l| l["level"] == "error"));
    let output = run(&["proxy", "gateway"]);
    let last = text(&output.stdout).lines().last().unwrap().to_owned();
    assert!(last.split('\t').nth(1) == Some("error"), "{last}");
}
