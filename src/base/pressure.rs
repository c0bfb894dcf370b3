//! Short of memory: whoever holds what clients cost is told to give up what is worth least.
//!
//! Each thing that a client can make the agent hold has a bound of its own. All bounds together are more than a small
//! container has, and a kernel that finds no page kills the agent, or Envoy beside it. So while a crowd is there
//! ([`heap::Crowd`]), the memory of the control group is looked at when somebody joins it, at most every [`TICK`]: where
//! little is left, and the agent has much of what is used, free heap is given back; and where that is not enough, whoever
//! has a [`Short`] is told, each [`TICK`] anew until there is room. An agent without a crowd looks at nothing, and so
//! does one whose group has no limit.

use std::fmt;
use std::fs::read_to_string;
use std::sync::{LazyLock, OnceLock};
use std::time::Duration;

use prometheus::{IntCounterVec, Opts};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

use super::cgroup::{Group, Memory};
use super::heap;

/// Between two looks. What floods add in it, some 10 MB, must fit into what is left.
const TICK: Duration = Duration::from_millis(100);
/// After so many words in a row it is not the newest clients that have the memory ...
const OFTEN: u32 = 50;
/// ... and those who are left are asked less often.
const LATER: Duration = Duration::from_secs(1);
/// Without a shortage for so long it is over: a client that comes back at once does not make two lines each time.
const OVER: Duration = Duration::from_secs(30);
/// Bytes of anonymous memory: an agent that has less is not what fills its group, whatever that may have. Without clients it
/// has a fifth.
const SOME: u64 = 12 << 20;

/// The process's own, in bytes.
static LIMIT: OnceLock<u64> = OnceLock::new();
static WORD: LazyLock<watch::Sender<()>> = LazyLock::new(|| watch::Sender::new(()));

static TIMES: LazyLock<IntCounterVec> = LazyLock::new(|| {
    let opts =
        Opts::new("memory_shortages_total", "Looks at which connections were closed for want of memory.");
    IntCounterVec::new(opts, &[]).expect("a constant name")
});

/// What is counted here, for the registry.
pub(crate) fn shortages() -> IntCounterVec {
    TIMES.clone()
}

/// Hears that memory is short.
#[derive(Debug)]
pub(crate) struct Short(watch::Receiver<()>);

impl Short {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self(WORD.subscribe())
    }

    /// Waits for the next word; of several that have come meanwhile, there is one.
    pub(crate) async fn told(&mut self) {
        // Who says it is there as long as the process.
        let _ = self.0.changed().await;
    }
}

/// Bytes below which little is left. Of a small group it is more: what comes in a [`TICK`] does not shrink with it.
fn little(limit: u64) -> u64 {
    (limit / 6).clamp((limit / 4).clamp(6 << 20, 12 << 20), 32 << 20)
}

/// Bytes of which a part is the agent's that has to do with what fills its group.
fn much(limit: u64) -> u64 {
    (limit / 3).clamp(SOME, 2 * SOME)
}

/// What there is, `more` bytes included, where it is too little: of the process's own limit, or of the group's.
fn shortage(
    own: u64,
    more: u64,
    limit: Option<u64>,
    group: impl FnOnce() -> Option<Memory>,
) -> Option<Memory> {
    // What the group has takes longer to read.
    if own + more < SOME {
        return None;
    }
    let is_short =
        |memory: &Memory| memory.left() < little(memory.limit) + more && own + more >= much(memory.limit);
    let alone = limit.map(|limit| Memory { limit, used: own });
    alone.filter(is_short).or_else(|| group().filter(is_short))
}

fn look(more: u64) -> Option<Memory> {
    shortage(own(), more, LIMIT.get().copied(), || Group::own()?.memory())
}

/// Whether so many bytes more leave enough; for them, what is free of the heap is given back. For a thread that others do
/// not wait for: that takes milliseconds.
pub(crate) fn has_room(bytes: u64) -> bool {
    look(bytes).is_none() || (give_back::heap() && look(bytes).is_none())
}

/// This process's anonymous memory, in bytes.
fn own() -> u64 {
    anonymous(&read_to_string("/proc/self/statm").unwrap_or_default())
}

/// That of `/proc/self/statm`, which counts pages: all, those that are resident, and of these the ones of files.
fn anonymous(statm: &str) -> u64 {
    let mut pages = statm.split(' ').skip(1).map(|word| word.parse::<u64>().unwrap_or_default());
    let (resident, of_files) = (pages.next().unwrap_or_default(), pages.next().unwrap_or_default());
    resident.saturating_sub(of_files) * u64::try_from(rustix::param::page_size()).unwrap_or(4096)
}

/// What there is while it is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    memory: Memory,
    /// Bytes of it that are this process's.
    own: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mb = |bytes: u64| bytes / 1_000_000;
        let Self { memory, own } = self;
        write!(
            f,
            "memory is short: {} MB left of {} MB, and the agent has {} MB: connections that are worth least are closed \
             until there is room",
            mb(memory.left()),
            mb(memory.limit),
            mb(*own)
        )
    }
}

/// Watches, for as long as the agent lives; `limit` is its own, in bytes, beside that of its group. `say` is told of each
/// shortage, and, once there was none for a while, of its end.
pub(crate) async fn attend(limit: Option<u64>, say: impl Fn(Option<Shortage>)) {
    if let Some(limit) = limit {
        LIMIT.get_or_init(|| limit);
    }
    watch(heap::joined, || look(0), say).await;
}

async fn watch(joined: impl AsyncFn(), look: impl Fn() -> Option<Memory>, say: impl Fn(Option<Shortage>)) {
    let mut ends: Option<Instant> = None;
    loop {
        let came = match ends {
            None => {
                joined().await;
                true
            }
            Some(at) => timeout_at(at, joined()).await.is_ok(),
        };
        let mut rounds = 0;
        while came && look().is_some() {
            heap::trim().await;
            let Some(memory) = look() else { break };
            TIMES.with_label_values(&[] as &[&str]).inc();
            say(Some(Shortage { memory, own: own() }));
            WORD.send_replace(());
            rounds += 1;
            sleep(if rounds < OFTEN { TICK } else { LATER }).await;
            ends = Some(Instant::now() + OVER);
        }
        if ends.is_some_and(|at| at <= Instant::now()) {
            say(None);
            ends = None;
        }
        sleep(TICK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::future::pending;
    use std::pin::pin;

    use tokio::time::timeout;

    use super::*;

    const GROUP: u64 = 64 << 20;

    #[test]
    fn little_left_is_short_where_much_is_the_agents() {
        let memory = |left: u64| Memory { limit: GROUP, used: GROUP - left };
        let of_group = |own, more, left| shortage(own, more, None, || Some(memory(left)));
        let (enough, much) = (little(GROUP), much(GROUP));
        assert_eq!(of_group(much, 0, enough - 1), Some(memory(enough - 1)));
        assert_eq!(of_group(much, 0, enough), None);
        assert_eq!(of_group(much - 1, 0, 0), None, "others have it");
        assert_eq!(shortage(1 << 40, 0, None, || None), None, "there is no limit");
        // What is about to be read.
        assert_eq!(of_group(0, much, enough + much), None);
        assert_eq!(of_group(0, much, enough + much - 1), Some(memory(enough + much - 1)));
        assert_eq!(of_group(0, much - 1, 0), None, "an agent that has little may read what it likes");
    }

    #[test]
    fn a_small_group_needs_more_of_it_left() {
        const MB: u64 = 1 << 20;
        for (limit, left, own) in [
            (16, 6, 12),
            (32, 8, 12),
            (40, 10, 13),
            (64, 12, 21),
            (96, 16, 24),
            (128, 21, 24),
            (4096, 32, 24),
        ] {
            assert_eq!((little(limit * MB) / MB, much(limit * MB) / MB), (left, own), "{limit} MB");
        }
        // A flood adds some 10 MB in a tick, beside what the kernel needs for it and Envoy has.
        let memory = Memory { limit: 40 * MB, used: 31 * MB };
        assert_eq!(shortage(15 * MB, 0, None, || Some(memory)), Some(memory));
    }

    #[test]
    fn its_own_limit_counts_beside_the_groups() {
        let group = Memory { limit: 1 << 30, used: 0 };
        let of_own = |own| shortage(own, 0, Some(48 << 20), || Some(group));
        assert_eq!(of_own(36 << 20), None);
        assert_eq!(of_own((36 << 20) + 1).map(|memory| memory.limit), Some(48 << 20));
        let full = Memory { limit: GROUP, used: GROUP };
        assert_eq!(shortage(2 * SOME, 0, Some(1 << 30), || Some(full)), Some(full));
    }

    #[tokio::test(start_paused = true)]
    async fn a_shortage_is_told_while_it_lasts_and_its_end_once_nothing_came_for_a_while() {
        let memory = Memory { limit: GROUP, used: GROUP };
        let (short, told) = (Cell::new(true), RefCell::new(Vec::new()));
        let look = || short.get().then_some(memory);
        let say = |shortage: Option<Shortage>| told.borrow_mut().push(shortage.map(|it| it.memory));
        let mut heard = Short::new();
        // A crowd that never stops coming.
        let mut watched = pin!(watch(async || sleep(TICK).await, look, say));
        let mut for_a_while = async |time| timeout(time, &mut watched).await.expect_err("it never ends");
        for_a_while(TICK * 10).await;
        assert!(told.borrow().len() > 1 && told.take().iter().all(|it| *it == Some(memory)), "each time");
        timeout(TICK, heard.told()).await.expect("who has a word is told");
        short.set(false);
        for_a_while(OVER / 2).await;
        assert_eq!(told.take(), [], "it may come back");
        for_a_while(OVER).await;
        assert_eq!(told.take(), [None], "once");
        short.set(true);
        for_a_while(TICK * 4).await;
        assert_eq!(told.take().first(), Some(&Some(memory)), "again");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_is_told_where_nobody_comes_any_more() {
        let (short, told) = (Cell::new(true), RefCell::new(Vec::new()));
        let came = Cell::new(false);
        let joined = async || {
            if came.replace(true) {
                pending().await
            }
        };
        let look = || short.replace(false).then_some(Memory { limit: GROUP, used: GROUP });
        let say = |shortage: Option<Shortage>| told.borrow_mut().push(shortage.is_some());
        // The second look is after what is free was given back.
        assert!(timeout(OVER * 2, watch(joined, look, say)).await.is_err());
        assert_eq!(told.take(), [] as [bool; 0], "what was free was enough");

        let left = Cell::new(2_u32);
        let look = || {
            left.replace(left.get().saturating_sub(1)).gt(&0).then_some(Memory { limit: GROUP, used: GROUP })
        };
        came.set(false);
        assert!(timeout(OVER * 2, watch(joined, look, say)).await.is_err());
        assert_eq!(told.take(), [true, false]);
    }

    #[test]
    fn what_is_not_of_files_is_its_own() {
        let page = u64::try_from(rustix::param::page_size()).unwrap();
        assert_eq!(anonymous("90000 3000 1200 5 0 700 0\n"), 1800 * page);
        assert_eq!(anonymous(""), 0);
        assert!(own() > 0);
    }
}
