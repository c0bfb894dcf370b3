//! grpc: the standard health service, asked without TLS.

use std::time::Duration;

use ::http::{HeaderMap, StatusCode, header};
use tokio::time::Instant;

use super::Prober;
use crate::fetch::health::{self, Call, Failure};
use crate::serve::respond::{Answer, status};

impl Prober {
    pub(super) async fn grpc(
        &self,
        port: i32,
        service: &str,
        seconds: i32,
        headers: &HeaderMap,
    ) -> Result<Answer, String> {
        let to = self.authority(port);
        let Ok(seconds @ 1..) = u64::try_from(seconds) else {
            return Err(format!("{to}: its timeout of {seconds} s is over before it begins"));
        };
        let port = u16::try_from(port).map_err(|_| format!("{to}: no such port"))?;
        let until = Instant::now() + Duration::from_secs(seconds);
        let caller = headers.get(header::USER_AGENT).and_then(|v| v.to_str().ok()).filter(|v| !v.is_empty());
        let (dialer, host) = (&self.dialer, self.destination.as_str());
        let call = Call { dialer, host, port, service, user_agent: caller };
        match call.run(until).await {
            Ok(health::SERVING) => Ok(status(StatusCode::OK)),
            Ok(state) => Err(format!("{to}: it says {}", health::name(state))),
            Err(late @ (Failure::Unreached(_) | Failure::Silent)) => {
                Err(format!("{to}: {late} (within {seconds} s)"))
            }
            Err(why) => Err(format!("{to}: {why}")),
        }
    }
}
