//! grpc: the standard health service, asked without TLS on a connection of its own.

use std::time::Duration;

use tokio::time::Instant;

use super::super::Outcome;
use super::USER_AGENT;
use crate::fetch::Dialer;
use crate::fetch::health::{Call, Failure, SERVING, name};

/// gRPC's codes that get a sentence of their own.
const DEADLINE_EXCEEDED: u32 = 4;
const UNIMPLEMENTED: u32 = 12;

pub(super) async fn probe(dialer: &Dialer, host: &str, port: u32, service: &str, limit: Duration) -> Outcome {
    let unreached = |why: &str| {
        Outcome::Unhealthy(format!("failed to connect health check grpc service on port {port}: {why}"))
    };
    let Ok(number) = u16::try_from(port) else { return unreached("there is no such port") };
    let call = Call { dialer, host, port: number, name: None, service, user_agent: Some(USER_AGENT) };
    let why = match call.run(Instant::now() + limit).await {
        Ok(SERVING) => return Outcome::Healthy,
        // The Go agent has no text for this, and crashes.
        Ok(state) => format!("health rpc status {}", name(state)),
        Err(Failure::Unreached(last)) => return unreached(&format!("context deadline exceeded: {last}")),
        Err(Failure::Status { code, message }) => refusal(code, &message, port, limit),
        Err(why @ Failure::Silent) => format!("health rpc probe timed out after {limit:?}: {why}"),
        Err(Failure::Nonsense(why)) => {
            format!("health rpc probe failed with status Unavailable: {why}")
        }
    };
    Outcome::Unhealthy(why)
}

// What the service says of a call that it does not answer.
fn refusal(code: u32, message: &str, port: u32, limit: Duration) -> String {
    let name = code_name(code);
    let error = format!("rpc error: code = {name} desc = {message}");
    match code {
        UNIMPLEMENTED => format!(
            "service on port {port} doesn't implement the grpc health protocol grpc.health.v1.Health: {error}"
        ),
        DEADLINE_EXCEEDED => format!("health rpc probe timed out after {limit:?}: {error}"),
        _ => format!("health rpc probe failed with status {name}: {error}"),
    }
}

// As Go's library spells them.
fn code_name(code: u32) -> String {
    match i32::try_from(code).map(tonic::Code::from) {
        Ok(tonic::Code::Cancelled) => "Canceled".to_owned(),
        Ok(tonic::Code::Unknown) if code != 2 => format!("Code({code})"),
        Ok(known) => format!("{known:?}"),
        Err(_) => format!("Code({code})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_have_the_words_that_istiod_has_always_shown() {
        let limit = Duration::from_secs(2);
        for (code, words) in [
            (1, "health rpc probe failed with status Canceled: rpc error: code = Canceled desc = why"),
            (4, "health rpc probe timed out after 2s: rpc error: code = DeadlineExceeded desc = why"),
            (5, "health rpc probe failed with status NotFound: rpc error: code = NotFound desc = why"),
            (
                12,
                "service on port 9 doesn't implement the grpc health protocol grpc.health.v1.Health: rpc error: code = Unimplemented desc = why",
            ),
            (99, "health rpc probe failed with status Code(99): rpc error: code = Code(99) desc = why"),
        ] {
            assert_eq!(refusal(code, "why", 9, limit), words);
        }
    }
}
