//! Amazon: the instance metadata service, version 2 where it gives a token, else version 1.

use std::collections::BTreeMap;

use hyper::Method;

use super::http::{Answer, ask, get};
use crate::bootstrap::Locality;
use crate::config::node::Platform;

// Nothing: nobody listens. Empty: version 1.
async fn token(host: &str) -> Option<String> {
    let lifetime = [("x-aws-ec2-metadata-token-ttl-seconds", "60")];
    let answer = ask(Method::PUT, host, "/latest/api/token", &lifetime).await?;
    Some(answer.text().unwrap_or_default())
}

async fn value(host: &str, token: &str, path: &str) -> Option<String> {
    let path = format!("/latest/meta-data/{path}");
    let header = [("x-aws-ec2-metadata-token", token)];
    let answer: Option<Answer> = get(host, &path, if token.is_empty() { &[] } else { &header }).await;
    answer?.text().filter(|text| !text.is_empty())
}

/// Whether the machine has a role, which tells Amazon's service from others at the same address.
pub(super) async fn is_there(host: &str) -> bool {
    let Some(token) = token(host).await else { return false };
    value(host, &token, "iam/info").await.is_some_and(|info| info.contains("arn:aws:iam"))
}

pub(super) async fn describe(host: &str) -> Platform {
    let Some(token) = token(host).await else { return Platform::default() };
    let (region, zone, instance) = tokio::join!(
        value(host, &token, "placement/region"),
        value(host, &token, "placement/availability-zone"),
        value(host, &token, "instance-id"),
    );
    let locality = Locality {
        region: region.clone().unwrap_or_default(),
        zone: zone.clone().unwrap_or_default(),
        sub_zone: String::new(),
    };
    let metadata: BTreeMap<String, String> =
        [("aws_region", region), ("aws_availability_zone", zone), ("aws_instance_id", instance)]
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)))
            .collect();
    Platform { metadata, locality, ..Platform::default() }
}
