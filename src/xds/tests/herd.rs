//! Many agents whose istiod restarts: they come back spread out.

use rand::Rng;

use super::*;

const AGENTS: usize = 500;
/// After so many failures the delays have their full width.
const FAILURES: u32 = 6;
/// Of anything here, on a machine that does much else.
const LONG: Duration = Duration::from_secs(120);
const SLOT_MS: u128 = 250;

// As Envoy does: open, ask, and after an end back off with jitter.
async fn play_envoy(socket: PathBuf) {
    let mut bound = 500;
    loop {
        // At the test's end the socket goes first.
        let Ok(io) = UnixStream::connect(&socket).await else { return };
        let Ok((mut send, connection)) = h2::client::handshake(io).await else { return };
        let stream = async {
            let request = Request::post(format!("http://xds-grpc{}", Protocol::Sotw.path()))
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let (response, mut sink) = send.send_request(request, false).unwrap();
            write(&mut sink, Protocol::Sotw.initial(CDS)).await;
            let Ok(response) = response.await else { return false };
            let mut body = response.into_body();
            let mut served = false;
            while let Some(Ok(data)) = body.data().await {
                let _ = body.flow_control().release_capacity(data.len());
                served = true;
            }
            served
        };
        let served = tokio::select! {
            served = stream => served,
            _ = connection => false,
        };
        bound = if served { 500 } else { (bound * 2).min(30_000) };
        let pause = rand::rng().random_range(0..bound);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}

#[tokio::test]
async fn five_hundred_agents_come_back_spread_out() {
    let dir = tempfile::tempdir().unwrap();
    let group = Group::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, mut streams) = mpsc::unbounded_channel();
    group.run("istiod", accept(listener, sender, group.clone(), Arc::default()));
    let way = Arc::new(Way { address, open: AtomicBool::new(true), away: Arc::default() });
    let (_news, wake) = watch::channel(0);
    let mut handles = Vec::new();
    for n in 0..AGENTS {
        let socket = dir.path().join(n.to_string());
        let parts = Parts {
            upstream: way.clone(),
            tokens: Arc::new(Tokens),
            headers: CallHeaders::default(),
            taps: Vec::new(),
            convert: None,
            wake: wake.clone(),
            metrics: Metrics::new(),
            clock: Arc::new(clock::System),
            trouble: Default::default(),
        };
        let server = Server::new(Config::new(socket.clone()), parts);
        handles.push(server.handle());
        let bound = server.bind().unwrap();
        group.run("xds", server.serve(bound, group.token()));
        group.run("envoy", play_envoy(socket));
    }
    let mut first = Vec::new();
    while first.len() < AGENTS {
        let mut stream = streams.recv().await.unwrap();
        stream.push(&response(CDS, "1", &[1])).await;
        first.push(stream);
    }
    way.open.store(false, Ordering::SeqCst);
    first.iter().for_each(|s| s.cut.cancel());
    drop(first);
    let away = |handle: &Handle| {
        let upstream = handle.snapshot().upstream;
        upstream.next_attempt_ms.filter(|_| upstream.failures >= FAILURES)
    };
    let chosen = async {
        let mut chosen = Vec::new();
        for handle in &handles {
            while away(handle).is_none() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            chosen.extend(away(handle));
        }
        chosen
    };
    let mut chosen = tokio::time::timeout(LONG, chosen).await.expect("all agents go on trying");
    let back = tokio::time::Instant::now();
    way.open.store(true, Ordering::SeqCst);
    let mut arrivals = Vec::new();
    let mut open = Vec::new();
    while arrivals.len() < AGENTS {
        let mut stream = tokio::time::timeout(LONG, streams.recv()).await.expect("all come back").unwrap();
        arrivals.push(back.elapsed().as_millis());
        stream.push(&response(CDS, "1", &[1])).await;
        open.push(stream);
    }
    for slot in 0..=arrivals.iter().max().unwrap() / SLOT_MS {
        let count = arrivals.iter().filter(|a| **a / SLOT_MS == slot).count();
        println!("{:5} ms {count:4} {}", slot * SLOT_MS, "#".repeat(count / 2));
    }
    // Judged by the delays that the agents chose: when they arrive is also the machine's doing.
    chosen.sort_unstable();
    let middle = chosen[chosen.len() * 9 / 10] - chosen[chosen.len() / 10];
    assert!(middle >= 2000, "eight tenths of {AGENTS} agents would try again within {middle} ms");
    drop(open);
    group.stop(Duration::from_secs(5)).await;
}
