//! The status server: readiness, probes of the application, merged metrics, pages, quit and drain.

mod floods;
mod probes;
mod scrape;
mod server;

use std::sync::{Arc, Mutex};

use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::support::agent::Builder;
use crate::support::{LIMIT, MockIstiod, TestAgent};

/// An application: gives the same answer to every request and remembers the heads and where they came from.
struct App {
    port: u16,
    seen: Arc<Mutex<Vec<(String, String)>>>,
    _serving: JoinSet<()>,
}

impl App {
    async fn start(host: &str, answer: impl Into<String>) -> Self {
        let listener = TcpListener::bind((host, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (seen, answer) = (Arc::new(Mutex::new(Vec::new())), answer.into());
        let mut serving = JoinSet::new();
        let notes = seen.clone();
        serving.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let Ok((mut stream, peer)) = listener.accept().await else { return };
                let (notes, answer) = (notes.clone(), answer.clone());
                open.spawn(async move {
                    let Some(head) = crate::support::http::head(&mut stream).await else { return };
                    notes.lock().unwrap().push((peer.ip().to_string(), head));
                    if answer.is_empty() {
                        std::future::pending::<()>().await;
                    }
                    let _ = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        Self { port, seen, _serving: serving }
    }

    fn seen(&self) -> Vec<(String, String)> {
        self.seen.lock().unwrap().clone()
    }
}

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// An agent whose status server answers.
async fn serving(mock: &MockIstiod, builder: Builder) -> TestAgent {
    let mut agent = builder.istiod(mock).start();
    let answers = async {
        while agent.get("/nothing").await.is_err() {
            agent.assert_running();
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, answers).await.expect("the status server answers");
    agent
}
