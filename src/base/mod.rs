//! Knows nothing of Istio: tasks, time, back-off, sockets, files, metrics, logging.
//!
//! | file | is about |
//! |---|---|
//! | `tasks`, `both`, `lane` | tasks with names, two things side by side, and blocking calls that may never return |
//! | `backoff`, `slack`, `clock`, `go_duration` | when: the next attempt, timers that fire together, the date, durations in text |
//! | `uds` | unix sockets: their files, modes and owners |
//! | `files`, `disk`, `bounded`, `up_to`, `reading`, `place`, `path` | watching files, reading with a deadline and a bound, replacing a file as a whole, clean paths |
//! | `logging`, `metrics`, `error`, `quote`, `seldom`, `nearest`, `sha256` | what people and programs are told |
//! | `process`, `open_files`, `errno`, `netlink`, `cgroup`, `heap`, `pressure`, `notify`, `handover` | the kernel, the allocator, the service manager, and a program that takes over |
//! | `wire` | reading and editing an encoded message field by field |
//!
//! Uses no other module of this crate.

pub(crate) mod backoff;
#[cfg(test)]
pub(crate) mod beside;
pub(crate) mod both;
pub(crate) mod bounded;
pub(crate) mod build_info;
pub(crate) mod cgroup;
pub(crate) mod clock;
pub(crate) mod disk;
pub(crate) mod errno;
pub(crate) mod error;
#[cfg(test)]
pub(crate) mod eventually;
pub(crate) mod files;
pub(crate) mod go_duration;
pub(crate) mod handover;
pub(crate) mod heap;
mod hosts;
pub(crate) mod lane;
pub(crate) mod logging;
pub(crate) mod metrics;
pub(crate) mod nearest;
pub(crate) mod netlink;
pub(crate) mod notify;
pub(crate) mod on_purpose;
pub(crate) mod open_files;
pub(crate) mod path;
pub(crate) mod place;
pub(crate) mod pressure;
pub(crate) mod process;
pub(crate) mod quote;
pub(crate) mod reading;
#[cfg(test)]
pub(crate) mod recordings;
pub(crate) mod seldom;
pub(crate) mod sha256;
pub(crate) mod slack;
pub(crate) mod spare;
pub(crate) mod tasks;
pub(crate) mod uds;
pub(crate) mod up_to;
pub(crate) mod wire;
