//! The keeper and its file.

use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::thread::ThreadId;

use futures_util::future::{BoxFuture, ready};
use tokio::sync::{Mutex as Turn, watch};
use tokio::time::Instant;

use super::*;
use crate::base::clock::System;
use crate::base::metrics::Metrics;
use crate::base::reading::pipe;
use crate::base::tasks::Group;
use crate::istiod::auth::{CallHeaders, Token, TokenSource};
use crate::istiod::{Connection, Error};
use crate::replay::StandIn;
use crate::replay::read::{Request, Response, write_request, write_response};
use crate::trouble::Troubles;
use crate::xds::{Parts, Upstream, types};

const CDS: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
const SOON: Duration = Duration::from_secs(10);

/// The threads for the disk are those of the process: one test at a time.
static TURN: Turn<()> = Turn::const_new(());

/// Nobody is dialled here.
#[derive(Debug)]
struct Nobody;

impl Upstream for Nobody {
    fn connect(&self) -> BoxFuture<'_, Result<Connection, Error>> {
        Box::pin(std::future::pending())
    }

    fn address(&self) -> &str {
        "istiod:15012"
    }
}

impl TokenSource for Nobody {
    fn token(&self) -> BoxFuture<'_, Result<Option<Token>, crate::istiod::auth::Error>> {
        Box::pin(ready(Ok(None)))
    }
}

/// A clock that does not answer the threads that read and write, as a disk that hangs.
#[derive(Debug)]
struct Hangs {
    here: ThreadId,
    asked: AtomicUsize,
    // Until the other end is gone.
    until: Mutex<Receiver<()>>,
}

impl Clock for Hangs {
    fn now(&self) -> SystemTime {
        if std::thread::current().id() != self.here {
            self.asked.fetch_add(1, Relaxed);
            let _ = self.until.lock().map(|until| until.recv());
        }
        SystemTime::now()
    }
}

fn parts(clock: Arc<dyn Clock>, troubles: &Troubles) -> Parts {
    let (news, wake) = watch::channel(0);
    drop(news);
    Parts {
        upstream: Arc::new(Nobody),
        tokens: Arc::new(Nobody),
        headers: CallHeaders::default(),
        taps: Vec::new(),
        convert: None,
        wake,
        metrics: Metrics::new(),
        clock,
        trouble: troubles.reporter("xdsproxy"),
    }
}

fn memory(file: PathBuf, clock: Arc<dyn Clock>, troubles: &Troubles) -> Arc<Memory> {
    let disk = Some(Disk { file, max_age: Duration::from_secs(86_400) });
    let config = Config { after: Duration::ZERO, most: 1 << 20, disk, left: None };
    Arc::new(Memory::new(config, &parts(clock, troubles), Arc::default()))
}

// Istiod brings clusters and listeners on a stream of this number, and Envoy accepts them.
fn brings(memory: &Memory, id: u64) {
    memory.answered();
    for of in [CDS, types::LISTENER] {
        let request = Request { type_url: of.to_owned(), ..Request::default() };
        memory.request(id, Protocol::Delta, write_request(Mode::Delta, &request));
        // A resource with a name.
        let resources = vec![("a".to_owned(), Bytes::from_static(b"\x1a\x01a"))];
        let response =
            Response { type_url: of.to_owned(), nonce: "n".to_owned(), resources, ..Response::default() };
        memory.response(id, Protocol::Delta, write_response(&response));
        let request = Request { nonce: "n".to_owned(), ..request };
        memory.request(id, Protocol::Delta, write_request(Mode::Delta, &request));
    }
}

// Within less than the file is confirmed by itself, an hour here.
async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(3000);
    while !holds() {
        assert!(Instant::now() < until, "{what} did not come to be");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

// An agent before has left what istiod brought it.
async fn written(file: &Path) {
    let (memory, group) = (memory(file.to_owned(), Arc::new(System), &Troubles::default()), Group::new());
    brings(&memory, 1);
    group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
    eventually("the file", || file.exists()).await;
    group.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn the_last_of_a_burst_is_in_the_file() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let (file, group) = (dir.path().join("kept"), Group::new());
    let memory = memory(file.clone(), Arc::new(System), &Troubles::default());
    // All of it is there before anything is looked at.
    brings(&memory, 1);
    group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
    eventually("the file", || file.exists()).await;
    let now = unix(SystemTime::now());
    let (store, _) = disk::read(&std::fs::read(&file).unwrap(), "me", now, 86_400, 1 << 20).unwrap();
    assert!(store.is_whole());
    group.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn a_file_that_could_not_be_written_is_tried_again_within_minutes() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let (folder, group, troubles) = (dir.path().join("folder"), Group::new(), Troubles::default());
    std::fs::write(&folder, "in its way").unwrap();
    let file = folder.join("kept");
    let memory = memory(file.clone(), Arc::new(System), &troubles);
    group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
    brings(&memory, 1);
    let told = || troubles.verdict().is_some_and(|trouble| trouble.kind == Kind::ReplayNotWritten);
    memory.can_serve(Protocol::Delta).await;
    brings(&memory, 2);
    eventually("it is told", told).await;
    std::fs::remove_file(&folder).unwrap();
    eventually("the file", || file.exists()).await;
    eventually("all is well", || !told()).await;
    group.stop(SOON).await;
}

#[tokio::test]
async fn a_disk_that_hangs_stops_neither_the_memory_nor_its_end() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let (held, until) = channel::<()>();
    let (here, until) = (std::thread::current().id(), Mutex::new(until));
    let clock = Arc::new(Hangs { here, asked: AtomicUsize::new(0), until });
    let troubles = Troubles::default();
    for (reads, name) in [(true, "there"), (false, "not there")] {
        let file = dir.path().join(name);
        if reads {
            std::fs::write(&file, "something").unwrap();
        }
        let (memory, group) = (memory(file, clock.clone(), &troubles), Group::new());
        group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
        brings(&memory, 1);
        let asked = usize::from(!reads) + 1;
        eventually("a thread hangs", || clock.asked.load(Relaxed) == asked).await;
        if !reads {
            brings(&memory, 2);
            assert!(memory.can_serve(Protocol::Delta).await, "what comes is noted all the same");
        }
        assert_eq!(group.stop(SOON).await, [""; 0], "it ends");
    }
    drop(held);
}

#[test]
fn it_is_alive_while_one_of_its_streams_is() {
    let memory = memory(PathBuf::new(), Arc::new(System), &Troubles::default());
    memory.answered();
    memory.answered();
    memory.ended();
    assert!(memory.left().is_none());
    memory.ended();
    assert!(memory.left().is_some());
}

#[test]
fn what_is_dropped_before_it_is_noted_waits_no_longer() {
    let memory = memory(PathBuf::new(), Arc::new(System), &Troubles::default());
    brings(&memory, 1);
    assert_ne!(memory.queued.load(Relaxed), 0);
    // As with the thread that was to note it.
    drop(memory.inbox.lock().unwrap().take());
    assert_eq!(memory.queued.load(Relaxed), 0);
}

#[test]
fn whoever_holds_the_store_holds_up_no_stream() {
    let memory = memory(PathBuf::new(), Arc::new(System), &Troubles::default());
    brings(&memory, 1);
    let mut inbox = memory.inbox.lock().unwrap().take().unwrap();
    memory.apply(std::iter::from_fn(|| inbox.try_recv().ok()).collect());
    let mut envoy = StandIn::new(Mode::Delta, "memory-".to_owned());
    let request = Request { type_url: CDS.to_owned(), ..Request::default() };
    envoy.request(&write_request(Mode::Delta, &request)).unwrap();
    // As a thread does that compresses.
    let held = memory.store();
    let (asked, has_asked) = channel();
    let streams = {
        let memory = memory.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                assert!(memory.is_whole() && memory.has_answer(&envoy));
                File::new(memory.clone(), "me".into()).changed();
                drop(memory.serve("istiod:15012"));
                let goes_on = async { asked.send(()).unwrap() };
                tokio::join!(memory.answer(envoy), goes_on).0.unwrap().1
            })
        })
    };
    has_asked.recv_timeout(SOON).expect("nobody waits for the store");
    drop(held);
    assert!(streams.join().unwrap().is_some());
}

// What Envoy would be answered with is the extension config of this content.
fn names(memory: &Memory, id: u64, content: &'static [u8]) {
    let request =
        Request { type_url: types::ECDS.to_owned(), names: vec!["a".to_owned()], ..Request::default() };
    memory.request(id, Protocol::Delta, write_request(Mode::Delta, &request));
    let resources = vec![("a".to_owned(), Bytes::from_static(content))];
    let response = Response {
        type_url: types::ECDS.to_owned(),
        nonce: "n".to_owned(),
        resources,
        ..Response::default()
    };
    memory.response(id, Protocol::Delta, write_response(&response));
    let request = Request { nonce: "n".to_owned(), names: Vec::new(), ..request };
    memory.request(id, Protocol::Delta, write_request(Mode::Delta, &request));
}

#[tokio::test(start_paused = true)]
async fn what_only_the_file_has_is_in_use_too() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let (file, group) = (dir.path().join("kept"), Group::new());
    let memory = memory(file.clone(), Arc::new(System), &Troubles::default());
    assert!(memory.clone().extensions().await.is_err(), "nobody has looked at the file yet");
    group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
    brings(&memory, 1);
    names(&memory, 1, b"\x1a\x01a\x12\x03one");
    memory.can_serve(Protocol::Delta).await;
    eventually("the file", || file.exists() && !memory.is_behind()).await;
    let kept = async || memory.clone().extensions().await.unwrap();
    assert_eq!(kept().await.len(), 1);
    memory.too_large(1, 1 << 40);
    memory.can_serve(Protocol::Delta).await;
    assert!(!memory.is_whole());
    assert_eq!(kept().await.len(), 1, "an agent that is started now begins with it");
    std::fs::write(&file, "damaged").unwrap();
    assert!(kept().await.is_empty(), "nobody will begin with that");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(memory.clone().extensions().await.is_err());
    group.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_handed_over_is_in_the_file_too() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let (file, group) = (dir.path().join("kept"), Group::new());
    let left = {
        let memory = memory(file.clone(), Arc::new(System), &Troubles::default());
        brings(&memory, 1);
        let mut inbox = memory.inbox.lock().unwrap().take().unwrap();
        memory.apply(std::iter::from_fn(|| inbox.try_recv().ok()).collect());
        memory.owner.set("me".into()).unwrap();
        memory.kept().unwrap()
    };
    let disk = Some(Disk { file: file.clone(), max_age: Duration::from_secs(86_400) });
    let config = Config { after: Duration::ZERO, most: 1 << 20, disk, left: Some(left.into()) };
    let memory =
        Arc::new(Memory::new(config, &parts(Arc::new(System), &Troubles::default()), Arc::default()));
    group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
    // The disk was full when the program before would have written it.
    eventually("the file", || file.exists()).await;
    group.stop(SOON).await;
}

#[tokio::test]
async fn what_is_handed_over_is_taken_whatever_the_clock_was_set_to() {
    let ahead = crate::base::clock::Fixed::at(SystemTime::now() + Duration::from_secs(3600));
    let memory = memory(PathBuf::new(), Arc::new(ahead), &Troubles::default());
    brings(&memory, 1);
    memory.ended();
    let mut inbox = memory.inbox.lock().unwrap().take().unwrap();
    memory.apply(std::iter::from_fn(|| inbox.try_recv().ok()).collect());
    memory.owner.set("me".into()).unwrap();
    let left = Some(memory.kept().unwrap().into());
    let config = Config { after: Duration::ZERO, most: 1 << 20, disk: None, left };
    let next = Memory::new(config, &parts(Arc::new(System), &Troubles::default()), Arc::default());
    assert!(next.take_over(&"me".into()).await && next.is_whole());
}

#[tokio::test]
async fn where_there_is_no_thread_nothing_is_lost() {
    let memory = memory(PathBuf::new(), Arc::new(System), &Troubles::default());
    brings(&memory, 1);
    let mut inbox = memory.inbox.lock().unwrap().take().unwrap();
    let mut take = || std::iter::from_fn(|| inbox.try_recv().ok()).collect();
    memory.note(take()).await;
    assert!(memory.is_whole());
    brings(&memory, 1);
    let _none = crate::base::lane::scarce::NoThreads::from_now_on();
    memory.note(take()).await;
    assert!(memory.is_whole());
}

#[tokio::test(start_paused = true)]
async fn what_killed_agents_have_left_beside_the_file_is_removed() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let left = dir.path().join("kept.0123456789abcdef.new");
    std::fs::File::create(&left).unwrap().set_modified(UNIX_EPOCH).unwrap();
    let memory = memory(dir.path().join("kept"), Arc::new(System), &Troubles::default());
    memory.load(&"me".into()).await;
    assert!(!left.exists());
}

#[tokio::test(start_paused = true)]
async fn a_file_of_a_moment_to_come_is_used_when_the_clock_was_set() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kept");
    written(&path).await;
    // A machine without a clock of its own begins in the past.
    let clock = crate::base::clock::Fixed::at(SystemTime::now() - Duration::from_secs(86_400 * 365));
    let begin = |group: &Group| {
        let memory = memory(path.clone(), Arc::new(clock.clone()), &Troubles::default());
        group.run("keeper", memory.clone().keep("me".to_owned(), group.token()));
        memory
    };
    let (group, busy) = (Group::new(), Group::new());
    let (second, asked, answered) = (begin(&group), begin(&busy), begin(&busy));
    for memory in [&second, &asked, &answered] {
        assert!(!memory.can_serve(Protocol::Delta).await);
    }
    let request = Request { type_url: CDS.to_owned(), ..Request::default() };
    asked.request(1, Protocol::Delta, write_request(Mode::Delta, &request));
    answered.too_large(1, 1 << 40);
    for memory in [&asked, &answered] {
        assert!(!memory.can_serve(Protocol::Delta).await);
    }
    clock.advance(Duration::from_secs(86_400 * 365 + 60));
    eventually("it is used", || second.is_whole()).await;
    assert!(second.can_serve(Protocol::Delta).await);
    assert!(!asked.is_whole(), "istiod was asked meanwhile");
    assert!(!answered.is_whole(), "istiod has said something newer");
    group.stop(SOON).await;
    busy.stop(SOON).await;
}

#[tokio::test(start_paused = true)]
async fn what_istiod_brings_while_the_file_is_read_again_is_noted() {
    let _turn = TURN.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kept");
    written(&path).await;
    let clock = crate::base::clock::Fixed::at(SystemTime::now() - Duration::from_secs(86_400));
    let (second, group) = (memory(path.clone(), Arc::new(clock.clone()), &Troubles::default()), Group::new());
    group.run("keeper", second.clone().keep("me".to_owned(), group.token()));
    assert!(!second.can_serve(Protocol::Delta).await, "it is of a moment to come");
    // The disk does not answer when it is read again.
    std::fs::remove_file(&path).unwrap();
    pipe::make(&path);
    clock.advance(Duration::from_secs(86_400 + 60));
    tokio::time::advance(Duration::from_secs(2)).await;
    // There is this end once it is read at the other.
    let end = loop {
        if let Some(end) = pipe::writer(&path) {
            break end;
        }
        tokio::task::yield_now().await;
    };
    let (done, told) = channel::<()>();
    let hangs = std::thread::spawn(move || {
        let noted = told.recv_timeout(Duration::from_secs(60)).is_ok();
        drop(end);
        noted
    });
    brings(&second, 1);
    assert!(second.can_serve(Protocol::Delta).await);
    done.send(()).unwrap();
    assert!(hangs.join().unwrap(), "only when the disk had answered");
    group.stop(SOON).await;
}
