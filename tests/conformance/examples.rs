//! The examples of docs/IDENTITY.md can work: each is started with `--dry-run`, which refuses what cannot.

use std::path::Path;

use crate::support::agent::Envoy;
use crate::support::{MockIstiod, TestAgent, eventually};

#[tokio::test]
async fn every_example_of_an_identity_is_accepted() {
    let mock = MockIstiod::start().await;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/identity");
    let page = include_str!("../../docs/IDENTITY.md");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "env") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&name), "{name} is not told of in docs/IDENTITY.md");
        let text = std::fs::read_to_string(&path).unwrap();
        let mut builder =
            TestAgent::with().istiod(&mock).envoy(Envoy::Binary("/nonexistent".into())).arg("--dry-run");
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("# flags:") {
                builder = flags.split_whitespace().fold(builder, |builder, flag| builder.arg(flag));
            } else if let Some((name, value)) = line.split_once('=').filter(|_| !line.starts_with('#')) {
                builder = builder.env(name, value);
            }
        }
        let mut agent = builder.file("etc/one/tls.crt", "").start();
        let status = agent.wait_exit().await;
        assert_eq!(status.code(), Some(0), "{name}: {}", agent.log().text());
        eventually("a bootstrap", async || agent.log().contains("static_resources").then_some(())).await;
        seen += 1;
    }
    assert!(seen >= 10, "{seen} examples");
}
