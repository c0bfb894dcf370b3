//! tcpSocket: whether a connection comes about.

use std::time::Duration;

use super::super::Outcome;
use super::authority;
use crate::base::error::in_words;
use crate::fetch::Dialer;

pub(super) async fn probe(dialer: &Dialer, host: &str, port: u32, limit: Duration) -> Outcome {
    let to = authority(host, port);
    let Ok(port) = u16::try_from(port) else {
        return Outcome::Unhealthy(format!("dial tcp: address {port}: invalid port"));
    };
    match tokio::time::timeout(limit, dialer.tcp(host, port)).await {
        Ok(Ok(_connection)) => Outcome::Healthy,
        Ok(Err(error)) => Outcome::Unhealthy(format!("dial tcp {to}: connect: {}", in_words(&error))),
        Err(_) => Outcome::Unhealthy(format!("dial tcp {to}: i/o timeout after {limit:?}")),
    }
}
