//! Pages for people, for this pod only.

use crate::trouble::Report;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderValue, StatusCode, header};
use serde_json::json;
use tokio::sync::Semaphore;

use super::Making;
use super::page as front;
use super::profile::{self, Profile};
use super::shared::Shared;
use super::stats::Turn;
use crate::base::lane::Lane;
use crate::serve::respond::{Answer, Body, Content, JSON, TEXT, error, page, with};
use crate::serve::{self, ConnState};

/// A page that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Page {
    /// The DNS name table.
    Ndsz,
    /// What the agent is and what troubles it.
    Agentz,
    /// The same for people.
    Front,
    /// The index of profiles.
    Profiles,
    /// The command line, NUL between its words.
    Cmdline,
    /// Names of addresses; there are none to give.
    Symbol,
    /// CPU time over some seconds.
    Cpu,
    /// A profile of this moment.
    Now(&'static str),
    /// Nothing by that name, or nothing that this agent could tell.
    NoProfile,
}

/// The page under `/debug/`; `None`: there is none.
pub(super) fn find(rest: &[&str], profiling: bool) -> Option<Page> {
    match rest {
        ["ndsz"] => Some(Page::Ndsz),
        ["agentz"] => Some(Page::Agentz),
        [""] => Some(Page::Front),
        ["pprof", name] if profiling => Some(match *name {
            "" => Page::Profiles,
            "cmdline" => Page::Cmdline,
            "symbol" => Page::Symbol,
            "profile" => Page::Cpu,
            "heap" => Page::Now("heap"),
            "goroutine" => Page::Now("goroutine"),
            "threadcreate" => Page::Now("threadcreate"),
            "allocs" => Page::Now("allocs"),
            "block" => Page::Now("block"),
            "mutex" => Page::Now("mutex"),
            _ => Page::NoProfile,
        }),
        ["pprof", ..] if profiling => Some(Page::NoProfile),
        _ => None,
    }
}

/// The page. Of those that are not small, few are held at a time until they are read ([`held`]).
pub(super) async fn answer(which: Page, shared: &Shared, query: &str, conn: &ConnState) -> Answer {
    // These have their own turns.
    if matches!(which, Page::Ndsz | Page::Cpu) {
        return made(which, shared, query).await;
    }
    let Some((turn, _)) = shared.pages.take(conn, None).await else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "too many others are reading pages");
    };
    serve::turn(conn).await;
    let mut answer = made(which, shared, query).await;
    answer.extensions_mut().insert(turn);
    answer
}

/// What a page may have for any number of readers to hold it at a time.
const SMALL: usize = 16 * 1024;

/// Keeps the turn of a page until the kernel has all of it.
pub(super) fn held(answer: &mut Answer) {
    let Some(turn) = answer.extensions_mut().remove::<Turn>() else { return };
    let content = &mut answer.body_mut().content;
    match std::mem::replace(content, Content::Whole(Bytes::new())) {
        Content::Whole(bytes) if bytes.len() > SMALL => *content = Content::Whole(with(bytes, turn)),
        Content::Whole(bytes) => *content = Content::Whole(bytes),
        // Compressed.
        Content::Stream(stream) => {
            *content = Content::Stream(Box::pin(stream.map(move |piece| with(piece, turn.clone()))));
        }
    }
}

async fn made(which: Page, shared: &Shared, query: &str) -> Answer {
    let number = |name: &str| {
        let value = query.split('&').find_map(|p| p.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|v| v.parse::<u64>().ok())
    };
    let as_text = number("debug").is_some_and(|level| level > 0);
    match which {
        Page::Ndsz => match shared.handles.agent.name_table() {
            None => page(StatusCode::NOT_FOUND, TEXT, "{}"),
            Some(making) => long(making).await,
        },
        Page::Agentz => {
            let document = document(shared).await;
            let mut text = serde_json::to_vec_pretty(&document).unwrap_or_default();
            text.push(b'\n');
            page(StatusCode::OK, JSON, text)
        }
        Page::Front => {
            let (document, info) = tokio::join!(document(shared), shared.ready.envoy_info());
            front::answer(&document, &info, &shared.handles.agent.troubles().events())
        }
        Page::Profiles => {
            sure(page(StatusCode::OK, HeaderValue::from_static("text/html; charset=utf-8"), INDEX))
        }
        Page::Cmdline => {
            let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
            sure(page(StatusCode::OK, TEXT, Bytes::from(line.strip_suffix(b"\0").unwrap_or(&line).to_vec())))
        }
        Page::Symbol => sure(page(StatusCode::OK, TEXT, "num_symbols: 0\n")),
        Page::Cpu => {
            let Ok(_one) = PROFILED.try_acquire() else {
                let why = "Could not enable CPU profiling: cpu profiling already in use";
                return error(StatusCode::INTERNAL_SERVER_ERROR, why);
            };
            let seconds = number("seconds").filter(|s| *s > 0).unwrap_or(CPU_SECONDS).min(CPU_LONGEST);
            profiled(&profile::cpu(Duration::from_secs(seconds)).await, "profile", as_text)
        }
        Page::Now(name @ ("heap" | "allocs")) => profiled(&profile::heap(), name, as_text),
        Page::Now(name @ ("block" | "mutex")) => profiled(&profile::contentions(), name, as_text),
        Page::Now("threadcreate") => profiled(&profile::threads(), "threadcreate", as_text),
        Page::Now(name) => profiled(&profile::tasks(&shared.handles.agent.tasks()), name, as_text),
        Page::NoProfile => error(StatusCode::NOT_FOUND, "Unknown profile"),
    }
}

/// A page that is long: made on a thread, and sent in pieces.
async fn long(making: Making) -> Answer {
    // It is never closed.
    let Ok(Ok(one)) = tokio::time::timeout(PATIENCE, LONG.acquire()).await else {
        return error(StatusCode::SERVICE_UNAVAILABLE, "others are reading long pages");
    };
    let mut pieces = match MADE.run(making).await {
        Ok(Ok(pieces)) => pieces,
        Ok(Err(why)) => return error(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
        Err(why) => return error(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
    };
    let (first, second) = (pieces.next().unwrap_or_default(), pieces.next());
    let Some(second) = second else { return page(StatusCode::OK, JSON, first) };
    let mut answer = page(StatusCode::OK, JSON, "");
    let rest = stream::unfold((pieces, one), |(mut pieces, one)| async move {
        // A reader that is as fast as the agent holds up nobody else.
        tokio::task::yield_now().await;
        let piece = pieces.next()?;
        Some((piece, (pieces, one)))
    });
    *answer.body_mut() = Body::stream(stream::iter([first, second]).chain(rest));
    answer
}

/// Long pages at a time: of 300,000 hosts each holds 12 MB while it is sent, and 100 MB while it is made.
static LONG: Semaphore = Semaphore::const_new(2);
static MADE: Lane = Lane::new("a long page", 1);
/// How long others are waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// As `go tool pprof` asks when it is told nothing, and the most it gets.
const CPU_SECONDS: u64 = 30;
const CPU_LONGEST: u64 = 300;

/// One profile of the processor at a time, as in Go: each holds its connection for minutes.
static PROFILED: Semaphore = Semaphore::const_new(1);

fn profiled(profile: &Profile, name: &'static str, as_text: bool) -> Answer {
    if as_text {
        return sure(page(StatusCode::OK, TEXT, profile.text()));
    }
    let bytes = HeaderValue::from_static("application/octet-stream");
    let mut answer = sure(page(StatusCode::OK, bytes, profile.pprof()));
    if let Ok(file) = HeaderValue::from_str(&format!("attachment; filename=\"{name}\"")) {
        answer.headers_mut().insert(header::CONTENT_DISPOSITION, file);
    }
    answer
}

/// The type is as told: no guessing.
fn sure(mut answer: Answer) -> Answer {
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

async fn document(shared: &Shared) -> serde_json::Value {
    let mut document = shared.handles.agent.agentz();
    if let Some(object) = document.as_object_mut() {
        object.insert("status".to_owned(), status(shared));
        let all = shared.ready.verdict(&*shared.handles.agent).await;
        object.insert("verdict".to_owned(), json!(all.first()));
        object.insert("troubles".to_owned(), json!(all));
    }
    document
}

fn status(shared: &Shared) -> serde_json::Value {
    json!({
        "mostConnections": shared.most_connections(),
        "notReady": details(shared.handles.agent.not_ready()),
        "degraded": details(shared.handles.agent.degraded()),
        "terminating": shared.handles.agent.terminating(),
        "scrapeFailures": shared.stats.failures(),
        "probes": shared.probes.document(),
        "counters": counters(shared),
    })
}

/// Families whose sums tell a person how much has happened.
const COUNTED: [&str; 7] = [
    "envoy_restarts_total",
    "dns_requests_total",
    "dns_upstream_requests_total",
    "dns_upstream_failures_total",
    "wasm_cache_entries",
    "wasm_remote_fetch_count",
    "wasm_config_conversion_count",
];

fn counters(shared: &Shared) -> serde_json::Value {
    let families = shared.handles.metrics.registry().gather();
    let counted = families.iter().filter(|family| COUNTED.contains(&family.name()));
    let sum = |family: &prometheus::proto::MetricFamily| -> f64 {
        let gauge = family.get_field_type() == prometheus::proto::MetricType::GAUGE;
        let value = |m: &prometheus::proto::Metric| {
            if gauge { m.get_gauge().get_value() } else { m.get_counter().get_value() }
        };
        family.get_metric().iter().map(value).sum()
    };
    // Whole numbers, as counted.
    #[expect(clippy::cast_possible_truncation, reason = "far below what is exact")]
    counted.map(|family| (family.name().to_owned(), serde_json::Value::from(sum(family) as i64))).collect()
}

const INDEX: &str = "<!doctype html>
<title>pilot-agent: profiles</title>
<h1>Profiles</h1>
<p>For <code>go tool pprof</code>; with <code>?debug=1</code> as text.</p>
<ul>
<li><a href=\"heap?debug=1\">heap</a>, allocs: memory by mapping
<li><a href=\"goroutine?debug=1\">goroutine</a>: the agent's tasks by name
<li><a href=\"threadcreate?debug=1\">threadcreate</a>: threads by name
<li><a href=\"profile?seconds=5&amp;debug=1\">profile</a>: CPU time by thread over <code>seconds</code> (30)
<li><a href=\"cmdline\">cmdline</a>: the command line
</ul>
<p>This agent is not written in Go: there are no execution traces and no stacks, and block and mutex are empty. For those, from the node
or a debug container of the pod: <code>perf record -g -p PID -- sleep 30</code>.
What troubles the agent is told at <a href=\"/debug/agentz\">/debug/agentz</a>.</p>
";

fn details(reports: Vec<Report>) -> Vec<String> {
    reports.into_iter().map(|report| report.detail).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures_util::FutureExt;

    use super::*;
    use crate::net::fair::Caller;
    use crate::net::progress::Heads;
    use crate::status::stats::Turns;

    #[tokio::test]
    async fn a_large_page_has_its_turn_until_it_is_read() {
        let turns = Turns::pages();
        let caller = Caller { here: true, origin: std::net::Ipv4Addr::LOCALHOST.into() };
        let conn = ConnState::new(Arc::new(Heads::new(0)), caller);
        let made = |size: usize| {
            let (turn, _) = turns.take(&conn, Some(Duration::ZERO)).now_or_never()??;
            let mut answer = page(StatusCode::OK, TEXT, vec![b'a'; size]);
            answer.extensions_mut().insert(turn);
            held(&mut answer);
            let Content::Whole(bytes) =
                std::mem::replace(&mut answer.body_mut().content, Content::Whole(Bytes::new()))
            else {
                return None;
            };
            assert_eq!(bytes.len(), size);
            Some(bytes)
        };
        let small: Vec<_> = (0..9).map(|_| made(SMALL).unwrap()).collect();
        let mut large: Vec<_> = (0..2).map(|_| made(SMALL + 1).unwrap()).collect();
        assert!(made(1).is_none(), "the address has its half");
        // The kernel has it.
        large.pop();
        assert!(made(SMALL + 1).is_some());
        drop((small, large));
    }
}
