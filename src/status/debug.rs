//! Pages for people, for this pod only.

use bytes::Bytes;
use http::StatusCode;
use serde_json::json;

use super::respond::{Answer, JSON, TEXT, error, page};
use super::routes::Shared;

/// A page that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Page {
    /// The DNS name table.
    Ndsz,
    /// What the agent is and what troubles it.
    Agentz,
    /// The index of profiles.
    Profiles,
    /// The command line, NUL between its words.
    Cmdline,
    /// Profiles of the Go agent that have no counterpart.
    NoProfile,
}

/// The page under `/debug/`; `None`: there is none.
pub(super) fn find(rest: &[&str], profiling: bool) -> Option<Page> {
    match rest {
        ["ndsz"] => Some(Page::Ndsz),
        ["agentz"] => Some(Page::Agentz),
        ["pprof", ""] if profiling => Some(Page::Profiles),
        ["pprof", "cmdline"] if profiling => Some(Page::Cmdline),
        ["pprof", ..] if profiling => Some(Page::NoProfile),
        _ => None,
    }
}

pub(super) fn answer(which: Page, shared: &Shared) -> Answer {
    match which {
        Page::Ndsz => match shared.handles.agent.name_table() {
            None => page(StatusCode::NOT_FOUND, TEXT, "{}"),
            Some(Ok(table)) => page(StatusCode::OK, JSON, table),
            Some(Err(why)) => error(StatusCode::INTERNAL_SERVER_ERROR, &why),
        },
        Page::Agentz => {
            let mut document = shared.handles.agent.agentz();
            if let Some(object) = document.as_object_mut() {
                object.insert("status".to_owned(), status(shared));
            }
            let mut text = serde_json::to_vec_pretty(&document).unwrap_or_default();
            text.push(b'\n');
            page(StatusCode::OK, JSON, text)
        }
        Page::Profiles => page(StatusCode::OK, TEXT, INDEX),
        Page::Cmdline => {
            let line = std::fs::read("/proc/self/cmdline").unwrap_or_default();
            page(StatusCode::OK, TEXT, Bytes::from(line.strip_suffix(b"\0").unwrap_or(&line).to_vec()))
        }
        Page::NoProfile => error(StatusCode::NOT_FOUND, NO_PROFILE),
    }
}

fn status(shared: &Shared) -> serde_json::Value {
    json!({
        "mostConnections": shared.most_connections(),
        "notReady": shared.handles.agent.not_ready(),
        "degraded": shared.handles.agent.degraded(),
        "terminating": shared.handles.agent.terminating(),
        "scrapeFailures": shared.stats.failures(),
    })
}

// The one maintained crate that profiles a Rust process from inside interrupts it with signals, keeps
// its symbol tables and an unwinder, and would be a quarter of this binary; `perf` does the same from
// outside without any of it.
const INDEX: &str = "\
/debug/pprof/cmdline   the command line

This agent is not written in Go: it has no goroutines, garbage collector or Go profiles, and does not
profile itself. From the node or a debug container of the same pod:

  perf record -g -p <pid of pilot-agent> -- sleep 30     where its time goes
  cat /proc/<pid of pilot-agent>/smaps_rollup            where its memory is
  curl localhost:15020/debug/agentz                      what it is doing
";

const NO_PROFILE: &str = "no such profile: this agent does not profile itself, see /debug/pprof/";
