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
        Err(Failure::Status { code: UNIMPLEMENTED, message }) => format!(
            "service on port {port} doesn't implement the grpc health protocol grpc.health.v1.Health: {message}"
        ),
        Err(Failure::Status { code: DEADLINE_EXCEEDED, message }) => {
            format!("health rpc probe timed out after {limit:?}: {message}")
        }
        Err(why @ Failure::Silent) => format!("health rpc probe timed out after {limit:?}: {why}"),
        Err(Failure::Status { code, message }) => {
            let code = code_name(code);
            format!("health rpc probe failed with status {code}: rpc error: code = {code} desc = {message}")
        }
        Err(Failure::Nonsense(why)) => {
            format!("health rpc probe failed with status Unavailable: {why}")
        }
    };
    Outcome::Unhealthy(why)
}

fn code_name(code: u32) -> String {
    i32::try_from(code)
        .map_or_else(|_| format!("Code({code})"), |code| format!("{:?}", tonic::Code::from(code)))
}
