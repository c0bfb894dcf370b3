//! tcpSocket: whether a connection comes about.

use ::http::StatusCode;

use super::{Prober, Unanswered, limit, no_time};
use crate::base::error::BoxError;
use crate::serve::respond::{Answer, status};

impl Prober {
    pub(super) async fn tcp(&self, port: i32, seconds: i32) -> Result<Answer, Unanswered> {
        let to = self.authority(port);
        let failed = |why: BoxError| Unanswered::At { to: to.clone(), why };
        if seconds < 0 {
            return Err(failed(no_time(seconds)));
        }
        let port = u16::try_from(port).map_err(|_| failed("no such port".into()))?;
        match tokio::time::timeout(limit(seconds), self.dialer.tcp(&self.destination, port)).await {
            Ok(Ok(_connection)) => Ok(status(StatusCode::OK)),
            Ok(Err(error)) => Err(failed(error.into())),
            Err(_) => Err(failed(format!("no connection within {seconds} s").into())),
        }
    }
}
