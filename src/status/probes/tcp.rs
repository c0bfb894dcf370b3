//! tcpSocket: whether a connection comes about.

use ::http::StatusCode;

use super::{Prober, limit};
use crate::serve::respond::{Answer, status};

impl Prober {
    pub(super) async fn tcp(&self, port: i32, seconds: i32) -> Result<Answer, String> {
        let to = self.authority(port);
        if seconds < 0 {
            return Err(format!("{to}: its timeout of {seconds} s is over before it begins"));
        }
        let port = u16::try_from(port).map_err(|_| format!("{to}: no such port"))?;
        match tokio::time::timeout(limit(seconds), self.dialer.tcp(&self.destination, port)).await {
            Ok(Ok(_connection)) => Ok(status(StatusCode::OK)),
            Ok(Err(error)) => Err(format!("{to}: {error}")),
            Err(_) => Err(format!("{to}: no connection within {seconds} s")),
        }
    }
}
