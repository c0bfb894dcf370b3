//! The binary's control port: what a test in another language needs while the server runs. Plain HTTP, loopback.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::MockIstiod;
use crate::fault::{Script, Step, duration};
use crate::jwt::{Expiry, Token};

/// Answers on `listener` until dropped.
pub async fn serve(mock: Arc<MockIstiod>, listener: TcpListener) {
    let mut connections = JoinSet::new();
    loop {
        let socket = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => socket,
                Err(error) => {
                    tracing::warn!(%error, "control port");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let mock = mock.clone();
        connections.spawn(async move {
            let service = service_fn(|request| answer(&mock, request));
            if let Err(error) = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(socket), service)
                .await
            {
                tracing::debug!(%error, "control connection");
            }
        });
    }
}

async fn answer(mock: &MockIstiod, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let (status, text) = match route(mock, &head, &String::from_utf8_lossy(&body)).await {
        Ok(text) => (StatusCode::OK, text),
        Err((status, text)) => (status, format!("{text}\n")),
    };
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    Ok(response)
}

async fn route(
    mock: &MockIstiod,
    head: &http::request::Parts,
    body: &str,
) -> Result<String, (StatusCode, String)> {
    let bad = |text: String| (StatusCode::BAD_REQUEST, text);
    let query: Vec<(&str, &str)> =
        head.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('=')).collect();
    let value = |name: &str| query.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
    match (&head.method, head.uri.path()) {
        (&Method::GET, "/root") => Ok(mock.root_pem()),
        (&Method::GET, "/token") => {
            let account = (value("ns").unwrap_or("default"), value("sa").unwrap_or("default"));
            let mut token = Token::of(account.0, account.1);
            if let Some(audience) = value("aud") {
                token.audience = audience.to_owned();
            }
            if let Some(time) = value("expires") {
                let (time, past) = time.strip_prefix('-').map_or((time, false), |rest| (rest, true));
                let time =
                    duration(time).ok_or_else(|| bad("expires needs a time, as in 2s or -5m".into()))?;
                token.expires = if past { Expiry::Ago(time) } else { Expiry::In(time) };
            }
            Ok(token.sign())
        }
        (&Method::GET, "/record") => {
            let from = value("since").and_then(|mark| mark.parse().ok()).unwrap_or(0);
            let lines = mock.record().since(from);
            let lines =
                lines.iter().map(|entry| serde_json::to_string(entry).expect("events are plain JSON") + "\n");
            Ok(lines.collect())
        }
        (&Method::POST, "/faults/ca") => faults(mock.ca(), body).map_err(bad),
        (&Method::POST, "/faults/ads") => faults(mock.ads(), body).map_err(bad),
        (&Method::POST, "/faults/connections") => faults(mock.connections(), body).map_err(bad),
        (&Method::DELETE, "/faults") => {
            [mock.ca(), mock.ads(), mock.connections()].iter().for_each(|script| script.clear());
            Ok("OK\n".to_owned())
        }
        (&Method::POST, "/ttl") => {
            let ttl = match body.trim() {
                "" => None,
                text => Some(duration(text).ok_or_else(|| bad("a time is needed, as in 10s".into()))?),
            };
            mock.set_ttl(ttl);
            Ok("OK\n".to_owned())
        }
        (&Method::POST, "/rotate-root") => {
            mock.rotate_root(value("keep-old") != Some("false"));
            Ok("OK\n".to_owned())
        }
        (&Method::POST, "/down") => {
            mock.down().await;
            Ok("OK\n".to_owned())
        }
        (&Method::POST, "/up") => {
            mock.up().await.map(|()| "OK\n".to_owned()).map_err(|error| bad(error.to_string()))
        }
        (_, path) => Err((
            StatusCode::NOT_FOUND,
            format!("{} {path} is not here; the README lists what is", head.method),
        )),
    }
}

/// One step a line.
fn faults(script: &Script, body: &str) -> Result<String, String> {
    let lines = body.lines().map(str::trim).filter(|line| !line.is_empty());
    let steps: Vec<Step> =
        lines.map(|line| line.parse().map_err(|e| format!("{e}"))).collect::<Result<_, _>>()?;
    steps.into_iter().for_each(|step| script.add(step));
    Ok("OK\n".to_owned())
}
