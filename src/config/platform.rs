//! Which cloud this machine is part of, and what it says about the machine.
//!
//! Promises: asking never fails, and never holds the start up for long. Where nothing is listening the
//! answer is there at once or, where packets are dropped, after `CONNECT`; where something does listen,
//! after `TOTAL` at the latest. (The Go agent waits for up to 5 s, which `CLOUD_PLATFORM=none` avoids.)
//!
//! Not there: the labels of a Google VM, which need the Compute API and its credentials.

mod aws;
mod azure;
mod gcp;
mod http;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use super::env::{Settings, var};
use super::node::Platform;
use crate::base::handover;

/// How long a connection to a metadata server may take: it is on the same machine or the one below it.
const CONNECT: Duration = Duration::from_millis(250);
/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(1);
/// How long all of it may take.
const TOTAL: Duration = Duration::from_secs(3);

/// Under what the answer is handed over.
const LEFT: &str = "platform";

/// Where metadata servers are; tests put their own there.
#[derive(Debug, Clone)]
struct Servers {
    v4: String,
    v6: String,
    vendor: &'static str,
    resolv: &'static str,
}

impl Default for Servers {
    fn default() -> Self {
        Self {
            v4: "169.254.169.254".to_owned(),
            v6: "[fd00:ec2::254]".to_owned(),
            vendor: "/sys/class/dmi/id/sys_vendor",
            resolv: "/etc/resolv.conf",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cloud {
    Aws,
    Azure,
    Gcp,
}

/// What is known of the platform before anybody is asked.
#[derive(Debug, Clone, Default)]
pub(crate) struct Known {
    /// `CLOUD_PLATFORM`, in lower case.
    cloud: String,
    /// `GCP_METADATA`.
    gcp: String,
    /// `GCP_QUOTA_PROJECT`.
    quota_project: String,
    /// `GCP_ZONE`.
    zone: String,
    /// `GCE_METADATA_HOST`; set but empty means Google, too.
    google_host: Option<String>,
}

impl Known {
    pub(super) fn of(settings: &Settings) -> Self {
        let text = |key| settings.text(key).to_owned();
        Self {
            cloud: settings.text(var::CLOUD_PLATFORM).to_ascii_lowercase(),
            gcp: text(var::GCP_METADATA),
            quota_project: text(var::GCP_QUOTA_PROJECT),
            zone: text(var::GCP_ZONE),
            google_host: settings.env().get(var::GCE_METADATA_HOST.name()).map(str::to_owned),
        }
    }

    fn google_host<'a>(&'a self, servers: &'a Servers) -> &'a str {
        self.google_host.as_deref().filter(|host| !host.is_empty()).unwrap_or(&servers.v4)
    }
}

/// A Google project, for exchanges of tokens.
#[derive(Debug, Clone)]
pub(crate) struct GoogleProject {
    /// Its number, as it was said.
    pub number: String,
    /// The address of the cluster; empty when its parts are not known.
    pub cluster_url: String,
}

/// The project of `GCP_METADATA`, else what the metadata server says; `None` without a number.
pub(crate) async fn google_project(known: &Known) -> Option<GoogleProject> {
    let servers = Servers::default();
    let asked = gcp::project(known, &servers);
    tokio::time::timeout(TOTAL, asked).await.ok().flatten()
}

/// What the platform says; nothing when there is none. `addresses` are the node's. Asked once in a process: the
/// program that takes over from this one is on the same machine, and Envoy waits for it.
pub(crate) async fn detect(known: &Known, addresses: &[String]) -> Platform {
    let left = handover::take(LEFT).and_then(|(_, fd)| handover::read_sealed(&fd).ok());
    let platform = match left.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
        Some(platform) => platform,
        None => ask(known, addresses, &Servers::default()).await,
    };
    if handover::is_on()
        && let Ok(bytes) = serde_json::to_vec(&platform)
        && let Ok(memory) = handover::sealed("pilot-agent platform", &bytes)
    {
        handover::offer(LEFT, "", memory);
    }
    platform
}

async fn ask(known: &Known, addresses: &[String], servers: &Servers) -> Platform {
    let asked = async {
        let cloud = match known.cloud.as_str() {
            "aws" => Cloud::Aws,
            "azure" => Cloud::Azure,
            "gcp" => Cloud::Gcp,
            "none" => return Platform::default(),
            _ => match found(known, addresses, servers).await {
                Some(cloud) => cloud,
                None => return Platform::default(),
            },
        };
        let platform = match cloud {
            Cloud::Aws => aws::describe(aws_host(addresses, servers)).await,
            Cloud::Azure => azure::describe(&servers.v4).await,
            Cloud::Gcp => gcp::describe(known, servers).await,
        };
        tracing::info!("platform is {cloud:?}, region {:?}", platform.locality.region);
        platform
    };
    tokio::time::timeout(TOTAL, asked).await.unwrap_or_else(|_| {
        tracing::warn!(
            "the platform's metadata server did not answer within {TOTAL:?}: no platform metadata and no locality \
             (CLOUD_PLATFORM=none skips the question)"
        );
        Platform::default()
    })
}

// The first to be recognised; each question ends by itself.
async fn found(known: &Known, addresses: &[String], servers: &Servers) -> Option<Cloud> {
    if !known.gcp.is_empty() || known.google_host.is_some() {
        return Some(Cloud::Gcp);
    }
    let vendor = std::fs::read_to_string(Path::new(servers.vendor)).unwrap_or_default();
    if vendor.contains("Microsoft Corporation") {
        return Some(Cloud::Azure);
    }
    let (gcp, aws) = (gcp::is_there(&servers.v4), aws::is_there(aws_host(addresses, servers)));
    tokio::pin!(gcp, aws);
    tokio::select! {
        here = &mut gcp => if here { Some(Cloud::Gcp) } else { aws.await.then_some(Cloud::Aws) },
        here = &mut aws => if here { Some(Cloud::Aws) } else { gcp.await.then_some(Cloud::Gcp) },
    }
}

// A node that has any IPv6 address is asked for at the IPv6 one only, as the Go agent does.
fn aws_host<'a>(addresses: &[String], servers: &'a Servers) -> &'a str {
    let six = addresses.iter().any(|a| matches!(a.parse(), Ok(IpAddr::V6(_))));
    if six { &servers.v6 } else { &servers.v4 }
}
