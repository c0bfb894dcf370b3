//! `/debug/` in a real browser: Chromium without a window. `make test-page` runs this where there is one and fails where
//! there is none; elsewhere a line that nobody can overlook says that it did not run.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::process::Command;

use crate::support::agent::TOKEN;
use crate::support::client::secret_request;
use crate::support::{LIMIT, MockIstiod, TestAgent, eventually};

#[expect(clippy::disallowed_methods, reason = "a switch of the test run, not of the product")]
fn browser() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("BROWSER_BIN").filter(|name| !name.is_empty()) {
        return Some(named.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let found =
        std::env::split_paths(&path).flat_map(|dir| names.map(|name| dir.join(name))).find(|p| p.is_file());
    let required = std::env::var_os("BROWSER").is_some_and(|v| v == "required");
    assert!(
        found.is_some() || !required,
        "no Chromium: install the package chromium, or name one by BROWSER_BIN"
    );
    if found.is_none() {
        eprintln!("\n*** THE PAGE WAS NOT LOOKED AT: no chromium on PATH (make test-page) ***\n");
    }
    found
}

/// Loads an address as whatever name, and gives the document as the browser has built it, and a picture.
async fn load(browser: &Path, url: &str) -> (String, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let picture = dir.path().join("picture.png");
    let run = async |what: &str| {
        let mut command = Command::new(browser);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1500"]);
        // Other names lead here too, as after a rebinding of DNS.
        command.arg("--host-resolver-rules=MAP evil.example 127.0.0.1");
        command.arg(format!("--user-data-dir={}", dir.path().join("profile").display()));
        command.args([what, url]).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let output = tokio::time::timeout(LIMIT, command.kill_on_drop(true).output()).await;
        let output = output.expect("it ends").expect("it can be run");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let document = run("--dump-dom").await;
    run(&format!("--screenshot={}", picture.display())).await;
    let picture = std::fs::read(&picture).expect("a picture was taken");
    #[expect(clippy::disallowed_methods, reason = "for whoever wants to look at the picture")]
    if let Some(folder) = std::env::var_os("PICTURES") {
        let name: String = url.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect();
        std::fs::write(PathBuf::from(folder).join(format!("{name}.png")), &picture).unwrap();
    }
    (document, picture)
}

#[tokio::test]
async fn a_browser_shows_the_verdict_and_follows_it() {
    let Some(browser) = browser() else { return };
    let mock = MockIstiod::start().await;
    let mut agent = TestAgent::with().istiod(&mock).without_file(TOKEN).start();
    let client = agent.sds().await;
    let stream = client.stream_secrets();
    stream.send(&secret_request("default"));
    agent.wait_log("there is no token in").await;
    let url = format!("http://localhost:{}/debug/", agent.ports().status);
    let (broken, picture) = load(&browser, &url).await;
    assert!(broken.contains("<h1>TokenMissing</h1>"), "{broken}");
    assert!(broken.contains("What to do:") && broken.contains("istio-token"), "{broken}");
    assert!(broken.contains("<svg") && broken.contains("<circle"), "the timeline: {broken}");
    for foreign in ["<script", "<iframe", "src=", "href=\"http", "<form", "<img"] {
        assert!(!broken.contains(foreign), "{foreign} in {broken}");
    }
    assert!(picture.starts_with(b"\x89PNG") && picture.len() > 10_000, "{} bytes", picture.len());
    agent.put(TOKEN, mock.mint("ns", "sa"));
    agent.wait_log("over: TokenMissing").await;
    agent.wait_ready().await;
    let healthy = eventually("healthy", || async {
        Some(load(&browser, &url).await.0).filter(|text| text.contains("<h1>Healthy</h1>"))
    })
    .await;
    assert!(healthy.contains("spiffe://cluster.local/ns/ns/sa/sa"), "{healthy}");
    // A page of somebody else's, whose name leads here.
    let foreign = format!("http://evil.example:{}/debug/", agent.ports().status);
    let (refused, _) = load(&browser, &foreign).await;
    assert!(!refused.contains("spiffe://") && !refused.contains("Healthy"), "{refused}");
    agent.stop().await;
}
