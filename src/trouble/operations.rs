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
| readiness | `pilot-agent request GET 'healthz/ready?verbose' --debug-port 15020`: the reasons; `curl -i localhost:15020/healthz/ready`: header `x-not-ready` |
| `/debug/` | a page for people: `kubectl port-forward POD 15020`, then http://localhost:15020/debug/ |
| `/debug/agentz` | JSON: `verdict`, `troubles`, `events` |
| `pilot-agent status` | the running agent on one screen, the verdict as the last line; `--json`, `--watch` |
| `pilot-agent doctor` | everything a start needs, with or without an agent, the verdict as the last line; `--json`, `--sign`. It goes by its own variables and working directory: in a pod those of the agent, on a virtual machine ask `pilot-agent vm check` |
| `pilot-agent wait` | prints the cause each time it changes, and when it gives up |
| metrics | `istio_agent_trouble{kind,severity}`, with `METRICS_DETAILS=true`; all families stand below, alerts in `deploy/prometheus-rules.yaml` |
| the end | the last line before an exit status other than 0: `...; verdict: KIND: cause; what to do` |

Of several troubles the topmost in the table is the verdict: it explains those below it, so repair it first. `broken` keeps the
proxy from becoming ready or takes its identity or configuration from it in time; with `degraded` it works, but something beside it
does not.

What only Envoy knows (no configuration, not live, a silent admin port) is asked of it by whoever probes, by `status`, `doctor` and the
pages, and by the agent itself 20 s after its start and every 30 s (20 s while something is wrong).

`pilot-agent request` is in every image; `curl` is in none but `-debug`.

Levels of the log can be changed while the agent runs: `pilot-agent request GET logging --debug-port 15020` lists them,
`pilot-agent request POST 'logging?xdsproxy=debug' --debug-port 15020` sets one, `?level=info` all.

## What you see

| you see | | it means | what to do |
|---|---|---|---|
";

const JSON: &str = "
## JSON

Names stay; fields may be added. Times are RFC 3339 in UTC, spans whole seconds, what is unknown is null. No key, token or header value is
in any of it.

A trouble, wherever it stands, has `kind` (a name of the table), `severity`, `summary` (what it means), `detail` (the cause), `hint` (what to
do), `part` (a scope of the log), `subject` (which address, type, path or file, where there may be several), `code` (gRPC status, where there
is one), `since`, `seconds` (how long) and `count`.

`pilot-agent status --json`; exit status 0 healthy, 1 not, 2 not reachable (then: `healthy`, `reachable`, `error`, `hint`):

| field | holds |
|---|---|
| `time` | when it was made |
| `healthy` | whether it is ready and nothing is wrong |
| `ready`, `notReady` | readiness, and its reasons as text |
| `verdict`, `troubles` | the topmost trouble, and all of them |
| `agent` | `version`, `follows` (Istio release), `type` (node type), `startedAt`, `uptimeSeconds` |
| `identity` | `certificate` (`identities`, `serial`, `notBefore`, `notAfter`, `renewal`, `secondsLeft`), `failures` in a row, `lastError`, `files` (pairs of a name and its trouble), `trustBundle` (how many entries istiod sent), `outputError` (OUTPUT_CERTS) |
| `istiod` | `address`, `peer` (address that answered), `connectedSince`, `downSince`, `failures`, `lastError`, `tokenExpires`, and `types` and `rejections` |
| `istiod.types` | of each type: `name`, `typeUrl`, `state`, `version`, `resources` (in the last push: with the delta protocol those that changed), `responses`, `rejected`, `lastPush`, `lastPushAgeSeconds` |
| `istiod.rejections` | what Envoy rejects: `name`, `typeUrl`, `resources` (names), `message`, `version`, `first`, `last`, `count` |
| `envoy` | `process` (what the agent knows), `restarts`, `version`, `build`, `state`, `uptimeSeconds`, or `error` |
| `application` | a VM's health check: `method`, `state`, `since`, `probes`, `lastError`; null without one |
| `probes` | the kubelet's probes that the agent makes: `path`, `healthy`, `probes`, `failuresInARow`, `last` (answer), `lastTime`, `lastAgeSeconds` |
| `dns` | `queries`, `upstreamQueries`, `upstreamFailures` |
| `wasm` | `modules`, `fetches`, `conversions` |
| `events` | the timeline: `time`, `what`, `text` |
| `capture` | a line for each set of capture rules that this user may read |

`pilot-agent doctor --json`; exit status 0 nothing is broken, 1 something is, or a check came to no end:

| field | holds |
|---|---|
| `version`, `time`, `seconds` | of the agent's binary, when, how long it took (with fractions) |
| `healthy`, `warnings` | whether nothing is broken and every check came to its end, and how many checks are odd |
| `unfinished` | names of checks that came to no end: nothing is known of what they look at |
| `verdict` | `kind`, `summary`, `detail`, `hint`, `part` (`doctor/CHECK` or `agent/SCOPE`); null: none. With degraded kinds only `healthy` is true beside it |
| `checks` | in the order of a start: `check` (a name), `state` (`ok`, `warn`, `fail`, `skip`, `late`), `detail`, `hint`, `kind` |
| `troubles` | what a running agent reports |
";

// Those of the Go agent are listed in `status/own.rs`; tests/documents.rs finds a family that stands in no row.
const METRICS: &str = "
## Metrics

The status port's `/stats/prometheus` has the Go agent's families under their names, and `istio_agent_xds_config_state`. The others of this
table are there with `METRICS_DETAILS=true`. A family appears with its first sample. A `timestamp` is in seconds since 1970.

| family | labels | counts or shows |
|---|---|---|
| `istio_agent_trouble` | `kind`, `severity` | what is wrong now (the table above); no sample: nothing |
| `istio_agent_xds_config_state` | `type`, `state` | 1 for the state of each type's configuration: never, sent, synced, stale, rejected |
| `istio_agent_xds_nacks` | `type` | configuration that Envoy rejected |
| `istio_agent_xds_dials` | `result`: opened, failed | attempts to open a stream to istiod |
| `istio_agent_xds_held_streams` | | Envoy's streams that wait now while istiod is dialled |
| `istio_agent_xds_holds` | `result` | Envoy's streams that were held, by how it ended |
| `istio_agent_xds_stalls` | `leg`: Envoy, istiod | times that bytes waited for ten seconds and a leg of the relay did not move |
| `istio_agent_xds_aged_streams` | | streams to istiod that `XDS_STREAM_MAX_AGE` ended |
| `istio_agent_xds_replay_serving` | | Envoy's streams that are answered from memory now (`XDS_REPLAY`); one that has all it asks for is not |
| `istio_agent_xds_replay_streams` | `result`: ended, handed over | Envoy's streams that were answered from memory |
| `istio_agent_xds_replay_bytes` | `of`: config, memory | the last good configuration: its own size, and what it takes |
| `istio_agent_xds_replay_resources` | | resources of the last good configuration |
| `istio_agent_cert_expiry_timestamp_seconds` | `resource_name` | end of the workload certificate's validity |
| `istio_agent_cert_last_success_timestamp_seconds` | `resource_name` | when the CA has last issued one |
| `istio_agent_cert_renewal_failures_total` | `reason` | attempts to get one that failed, by gRPC code or cause |
| `istio_agent_cert_early_renewals_total` | `result`: issued, failed | asked for before they were due (`RENEWAL_EARLY`) |
| `istio_agent_sds_streams` | | open streams on the SDS sockets |
| `istio_agent_sds_refused_peers_total` | | clients that `SDS_ALLOWED_UIDS` does not name |
| `istio_agent_sts_token_exchanges_total` | `result`: ok, failed | token exchanges of `--stsPort` |
| `istio_agent_dns_kept_answers_total` | `kind`: fresh, stale | queries answered from what was kept (`DNS_CACHE_MAX_TTL`, `DNS_SERVE_STALE`) |
| `istio_agent_app_healthy` | | 1 while istiod was last told that the application is healthy (VMs) |
| `istio_agent_app_health_probes_total` | `result`: healthy, unhealthy, unknown | health probes of the application |
| `istio_agent_envoy_restarts_total` | `cause`: recovery, hot_restart | Envoys started after the first |
| `istio_agent_envoy_hot_restart_waiting` | | 1 while a hot restart that was asked for waits: for more changes of files (10 s), for istiod, or for the Envoy before it |
| `istio_agent_envoy_drain_open_connections` | | connections at the last look of a drain that waits for none |
| `istio_agent_envoy_drain_open_requests` | | requests under way then (`DRAIN_COUNT_REQUESTS`) |
| `istio_agent_upgrades_total` | `result`: done, refused, fell back | attempts to replace the agent in its process (`AGENT_UPGRADE`) |
| `istio_agent_scrape_failure_reasons_total` | `type`, `reason` | parts of a scrape that failed or were cut |
| `istio_agent_accept_failures_total` | `listener` | connections that could not be accepted |
| `istio_agent_socket_turns_total` | `listener`: sds, xds | pieces of work of a unix socket's clients, not of Envoy, that waited for their turn because they left no pause: some client floods the socket |
| `istio_agent_memory_shortages_total` | | times in which connections were closed for want of memory (`GOMEMLIMIT`, or the control group's limit) |
| `istio_agent_log_lines_lost_total` | | lines of the log that nobody read in time |
| `istio_agent_task_panics_total` | `task` | defects of the agent that ended the work for one connection or stream: report them |
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
    out.push_str(METRICS);
    out.push_str(JSON);
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
