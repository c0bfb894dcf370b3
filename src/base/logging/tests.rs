use super::*;

fn logged(options: Options, events: impl FnOnce()) -> Vec<String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.log");
    let options = Options { targets: vec![path.display().to_string()], ..options };
    tracing::subscriber::with_default(Lines::new(&options).unwrap(), events);
    std::fs::read_to_string(path).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn text_lines_have_tabs_and_leave_the_default_scope_out() {
    let lines = logged(Options::default(), || {
        tracing::info!("ready");
        tracing::warn!(target: "xdsproxy", id = 1, peer = "istiod", ok = true, "connected to {}", "istiod");
        tracing::debug!("not shown");
        tracing::error!(target: "h2::codec", "not shown either");
    });
    assert_eq!(lines.len(), 2, "{lines:?}");
    let fields: Vec<&str> = lines[0].split('\t').collect();
    assert_eq!(fields[1..], ["info", "ready"]);
    assert_eq!((fields[0].len(), &fields[0][10..11], &fields[0][26..]), (27, "T", "Z"));
    let fields: Vec<&str> = lines[1].split('\t').collect();
    assert_eq!(fields[1..], ["warn", "xdsproxy", "connected to istiod", "id=1 peer=istiod ok=true"]);
}

#[test]
fn json_lines_keep_order_and_types() {
    let lines = logged(Options { as_json: true, ..Options::default() }, || {
        tracing::info!(target: "sds", count = 2, name = %"a\"b", "pushed\n{}", "now");
    });
    let (head, rest) = lines[0].split_once("\"time\":\"").unwrap();
    assert_eq!(head, "{\"level\":\"info\",");
    assert_eq!(&rest[27..], "\",\"scope\":\"sds\",\"msg\":\"pushed\\nnow\",\"count\":2,\"name\":\"a\\\"b\"}");
}

#[test]
fn callers_are_shown_where_asked() {
    for (caller, shown) in [("sds", [false, true]), ("all", [true, true]), ("nope", [false, false])] {
        let lines = logged(Options { caller: caller.to_owned(), ..Options::default() }, || {
            tracing::info!("a");
            tracing::info!(target: "sds", "b");
        });
        let has: Vec<bool> = lines.iter().map(|l| l.contains("logging/tests.rs:")).collect();
        assert_eq!(has, shown, "{caller}: {lines:?}");
    }
}

#[test]
fn lists_of_levels_extend_the_built_in_one() {
    let levels = Levels::parse("xdsproxy:debug,nope:debug").unwrap();
    assert!(levels.shows("xdsproxy", Level::Debug) && levels.shows("default", Level::Info));
    assert!(!levels.shows("default", Level::Debug) && !levels.shows("grpc", Level::Error));
    assert!(Levels::parse("all:debug").unwrap().shows("grpc", Level::Debug));
    assert!(!Levels::parse("none").unwrap().shows("default", Level::Error));
    assert!(Levels::parse("debug,warn").unwrap().shows("default", Level::Warn));
    assert!(!Levels::parse("debug,warn").unwrap().shows("default", Level::Info));
    for (bad, why) in [
        ("INFO", "invalid output level 'INFO'"),
        ("default:info,", "invalid output level ''"),
        ("a:b:c", "invalid output level format 'a:b:c'"),
        ("sds:", "invalid output level ''"),
    ] {
        assert!(Levels::parse(bad).unwrap_err().to_string().starts_with(why), "{bad}");
    }
}

#[test]
fn a_target_that_cannot_be_opened_is_an_error() {
    let options = Options { targets: vec!["/nope/nope/log".to_owned()], ..Options::default() };
    assert!(matches!(Lines::new(&options), Err(Error::Target { path, .. }) if path == "/nope/nope/log"));
    let options = Options { stacktrace_level: "x".to_owned(), ..Options::default() };
    assert!(matches!(Lines::new(&options), Err(Error::Level(_))));
}

#[test]
fn what_would_be_refused_is_seen_without_opening_it() {
    let dir = tempfile::tempdir().unwrap();
    let with = |target: &str| Options { targets: vec![target.to_owned()], ..Options::default() };
    for target in ["stdout", "stderr", "log"] {
        check(&with(target), dir.path()).unwrap();
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    std::fs::write(dir.path().join("log"), "").unwrap();
    check(&with("log"), dir.path()).unwrap();
    for target in [".", "missing/log", "log/below"] {
        assert!(matches!(check(&with(target), dir.path()), Err(Error::Target { .. })), "{target}");
    }
    let level = Options { output_level: "default:inf".to_owned(), ..Options::default() };
    assert!(matches!(check(&level, dir.path()), Err(Error::Level(_))));
}

#[test]
fn a_reader_that_stands_still_holds_nothing_up_and_loses_whole_lines() {
    use std::io::Read;
    let (mut reader, writer) = std::io::pipe().unwrap();
    let file = std::fs::File::from(std::os::fd::OwnedFd::from(writer));
    let mut target = Target::new(Sink::File(file), false);
    let line = |n: usize| format!("{n} {}\n", "x".repeat(n * 37 % 9000));
    // More than the pipe and the memory together hold.
    let taken: Vec<usize> = (0..500).filter(|n| target.line(line(*n).as_bytes())).collect();
    assert!(taken.len() < 500 && target.stalled());
    let reading = std::thread::spawn(move || {
        let mut all = String::new();
        reader.read_to_string(&mut all).unwrap();
        all
    });
    target.flush(Instant::now() + Duration::from_secs(30));
    assert!(!target.stalled() && target.line(b"at last\n"));
    // The pipe may still be full of what was kept.
    target.flush(Instant::now() + Duration::from_secs(30));
    assert!(!target.stalled());
    drop(target);
    let expected: String = taken.into_iter().map(line).chain(["at last\n".to_owned()]).collect();
    assert!(reading.join().unwrap() == expected, "whole lines, in order, and the last one");
}

#[test]
fn a_command_waits_for_its_reader() {
    use std::io::Read;
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut target = Target::new(Sink::File(std::fs::File::from(std::os::fd::OwnedFd::from(writer))), true);
    let writing = std::thread::spawn(move || (0..500).all(|_| target.line(&[b'y'; 1000])));
    let mut all = Vec::new();
    reader.read_to_end(&mut all).unwrap();
    assert!(writing.join().unwrap() && all.len() == 500_000);
}

#[test]
fn a_reader_that_is_gone_is_not_waited_for() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    for patient in [false, true] {
        let file = std::fs::File::from(std::os::fd::OwnedFd::from(writer.try_clone().unwrap()));
        let mut target = Target::new(Sink::File(file), patient);
        assert!(target.line(b"x\n") && !target.stalled());
    }
}

#[test]
fn lines_that_are_held_are_one_write() {
    // Each read of a datagram socket gives what one write gave it.
    let (reader, writer) = std::os::unix::net::UnixDatagram::pair().unwrap();
    reader.set_nonblocking(true).unwrap();
    let target = Target::new(Sink::File(std::fs::File::from(std::os::fd::OwnedFd::from(writer))), false);
    let out = Arc::new(Out(Mutex::new((Vec::new(), vec![target]))));
    let line = |text: &[u8]| assert!(out.lock().1[0].line(text));
    let mut buffer = [0; 100];
    let mut next = || reader.recv(&mut buffer).ok().map(|n| buffer[..n].to_vec());
    line(b"a\n");
    assert_eq!(next().unwrap(), b"a\n");
    let held = Together::of(out.clone());
    line(b"b\n");
    line(b"c\n");
    assert!(next().is_none() && !out.lock().1[0].stalled());
    drop(held);
    assert_eq!((next().unwrap(), next()), (b"b\nc\n".to_vec(), None));
    line(b"d\n");
    assert_eq!(next().unwrap(), b"d\n");
}
