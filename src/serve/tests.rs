use super::*;

#[tokio::test(start_paused = true)]
async fn what_stands_still_is_overdue() {
    let state = ConnState::new();
    assert_eq!(state.overdue(None), None);
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(state.overdue(None), None, "an idle connection may stay");
    let ninety = Some(Duration::from_secs(90));
    assert!(state.overdue(ninety).unwrap().contains("idle"));
    state.enter(HEADING);
    tokio::time::advance(HEAD).await;
    assert_eq!(state.overdue(None), None);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(state.overdue(None).unwrap().contains("head"));
    state.busy();
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(state.overdue(None), None, "an answer takes its time");
    let (a, _b) = pair().await;
    let watched = Watched { io: a, state: Arc::new(state) };
    watched.wrote(&Poll::Pending);
    tokio::time::advance(STALLED).await;
    watched.wrote(&Poll::Pending);
    assert_eq!(watched.state.overdue(None), None);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert!(watched.state.overdue(None).unwrap().contains("reading"));
    watched.wrote(&Poll::Ready(Ok(1)));
    assert_eq!(watched.state.overdue(None), None);
}

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    (one, listener.accept().await.unwrap().0)
}
