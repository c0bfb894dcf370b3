//! The examples of docs/IDENTITY.md: each is started as it stands with `--dry-run`, which refuses what cannot work,
//! and is where some test of its provider begins, with addresses and paths changed to those of doubles.

use std::path::Path;

use crate::support::agent::Envoy;
use crate::support::{MockIstiod, TestAgent, eventually};

#[tokio::test]
async fn every_example_of_an_identity_is_accepted() {
    let mock = MockIstiod::start().await;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/identity");
    let page = include_str!("../../docs/IDENTITY.md");
    let tests = concat!(
        include_str!("callers/mod.rs"),
        include_str!("exchange.rs"),
        include_str!("gateway/mod.rs"),
        include_str!("sts.rs"),
        include_str!("vault.rs"),
    );
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "env") {
            continue;
        }
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&name), "{name} is not told of in docs/IDENTITY.md");
        assert!(tests.contains(&format!("example(\"{name}\")")), "no test runs {name} against a double");
        let builder = TestAgent::with().istiod(&mock).envoy(Envoy::Binary("/nonexistent".into()));
        let builder = builder.example(&name).arg("--dry-run");
        let credentials = "var/run/secrets/workload-spiffe-credentials";
        let builder = ["certificates.pem", "private_key.pem", "ca_certificates.pem"]
            .iter()
            .fold(builder, |builder, file| builder.file(&format!("{credentials}/{file}"), ""));
        let mut agent = builder.file("etc/one/tls.crt", "").start();
        let status = agent.wait_exit().await;
        assert_eq!(status.code(), Some(0), "{name}: {}", agent.log().text());
        eventually("a bootstrap", async || agent.log().contains("static_resources").then_some(())).await;
        seen += 1;
    }
    assert!(seen >= 11, "{seen} examples");
}
