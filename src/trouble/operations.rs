//! docs/OPERATIONS.md, made from the kinds; the test fails when the file is not what they say.

use std::fmt::Write as _;
use std::path::Path;

use super::{Kind, Severity};

const HEAD: &str = "# Operations

What you see, what it means, what to do. Generated from `src/trouble/kind.rs` (`make docs`); a test fails when it is not current.

Wherever you look first, the cause stands there under the same name:

| where | how |
|---|---|
| log | a line when a trouble begins (cause; what to do), `still: ...` every 30 s, `over: ...` when it ends |
| readiness | `curl -i localhost:15020/healthz/ready`: header `x-not-ready`; `?verbose`: also in the body |
| `/debug/` | a page for people: `kubectl port-forward POD 15020`, then http://localhost:15020/debug/ |
| `/debug/agentz` | JSON: `verdict`, `troubles`, `events` |
| `pilot-agent wait` | prints the cause each time it changes, and when it gives up |
| metrics | `istio_agent_trouble{kind,severity}`; alerts: `deploy/prometheus-rules.yaml` |
| the end | the last line before an exit status other than 0 |

Of several troubles the topmost in the table is the verdict: it explains those below it, so repair it first. `broken` keeps the
proxy from becoming ready or takes its identity or configuration from it in time; with `degraded` it works, but something beside it
does not.

In JSON a trouble has `kind`, `severity`, `summary`, `detail`, `hint`, `part` (a scope of the log), `subject` (which address, type or
file, where there may be several), `code` (gRPC status), `since` (RFC 3339), `seconds` and `count`.

Levels of the log can be changed while the agent runs: `curl localhost:15020/logging` lists them,
`curl -X POST 'localhost:15020/logging?xdsproxy=debug'` sets one, `?level=info` all.

| you see | | it means | what to do |
|---|---|---|---|
";

fn page() -> String {
    let mut out = HEAD.to_owned();
    let cell = |text: &str| text.replace('|', "\\|").replace('<', "&lt;");
    for kind in Kind::ALL {
        let severity = match kind.severity() {
            Severity::Broken => "broken",
            Severity::Degraded => "degraded",
        };
        let _ = writeln!(out, "| `{kind}` | {severity} | {} | {} |", cell(kind.summary()), cell(kind.hint()));
    }
    out
}

#[test]
#[expect(clippy::disallowed_methods, reason = "asked for by whoever runs the tests")]
fn operations_md_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/OPERATIONS.md");
    let wanted = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "docs/OPERATIONS.md is not current: run `make docs`");
}
