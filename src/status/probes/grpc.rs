//! grpc: the standard health service, asked without TLS.

use std::time::Duration;

use ::http::{HeaderMap, StatusCode, header};
use tokio::time::Instant;

use super::{Prober, Unanswered, no_time};
use crate::base::error::BoxError;
use crate::fetch::health::{self, Call, Failure};
use crate::serve::respond::{Answer, status};

impl Prober {
    pub(super) async fn grpc(
        &self,
        port: i32,
        service: &str,
        seconds: i32,
        headers: &HeaderMap,
    ) -> Result<Answer, Unanswered> {
        let to = self.authority(port);
        let failed = |why: BoxError| Unanswered::At { to: to.clone(), why };
        let Ok(seconds @ 1..) = u64::try_from(seconds) else {
            return Err(failed(no_time(seconds)));
        };
        let port = u16::try_from(port).map_err(|_| failed("no such port".into()))?;
        let until = Instant::now() + Duration::from_secs(seconds);
        let caller = headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).filter(|v| !v.is_empty());
        let (dialer, host) = (&self.dialer, self.destination.as_str());
        let call = Call {
            dialer,
            host,
            port,
            name: self.nameless.then_some("localhost"),
            service,
            user_agent: caller,
        };
        match call.run(until).await {
            Ok(health::SERVING) => Ok(status(StatusCode::OK)),
            Ok(state) => Err(failed(format!("it says {}", health::name(state)).into())),
            Err(late @ (Failure::Unreached(_) | Failure::Silent)) => {
                Err(failed(format!("{late} (within {seconds} s)").into()))
            }
            Err(why) => Err(failed(why.into())),
        }
    }
}
