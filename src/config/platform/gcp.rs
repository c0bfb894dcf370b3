//! Google: the metadata server, or what `GCP_METADATA` says in its place.

use std::collections::BTreeMap;
use std::path::Path;

use futures_util::stream::{self, StreamExt};

use super::http::get;
use super::{GoogleProject, Known, Servers};
use crate::base::bounded;
use crate::bootstrap::Locality;
use crate::config::node::Platform;

/// Questions under way at a time: a server that emulates Google's may have a short queue.
const AT_ONCE: usize = 3;
const CLUSTERS: &str = "https://container.googleapis.com/v1";
const FLAVOR: (&str, &str) = ("metadata-flavor", "Google");

/// Whether the server at `host` is Google's.
pub(super) async fn is_there(host: &str) -> bool {
    let answer = get(host, "/", &[FLAVOR]).await;
    answer.is_some_and(|a| a.headers.get(FLAVOR.0).is_some_and(|flavor| flavor == FLAVOR.1))
}

// What is there and empty is known to be so. Attributes are somebody's own text.
async fn value(host: &str, path: &str) -> Option<String> {
    let answer = get(host, &format!("/computeMetadata/v1/{path}"), &[FLAVOR]).await?;
    if path.starts_with("instance/attributes/") { answer.untrimmed() } else { answer.text() }
}

// `projects/<number>/zones/<zone>`
async fn zone(host: &str) -> Option<String> {
    value(host, "instance/zone").await.map(|path| path.rsplit('/').next().unwrap_or_default().to_owned())
}

pub(super) async fn describe(known: &Known, servers: &Servers) -> Platform {
    let host = known.google_host(servers);
    let given = known.gcp.as_str();
    let mut metadata = BTreeMap::new();
    if !given.is_empty() {
        metadata = from_variables(given, &known.quota_project, &known.zone);
    }
    // Variables that say nothing count as not set.
    if metadata.is_empty() && (known.google_host.is_some() || is_there(host).await) {
        metadata = asked(host).await;
    }
    let zone = match metadata.get("gcp_zone") {
        Some(zone) => Some(zone.clone()),
        None => match zone_of_search(&bounded::given_text(Path::new(servers.resolv)).unwrap_or_default()) {
            Some(zone) => Some(zone),
            None => zone(host).await,
        },
    };
    Platform { metadata, locality: locality(zone.as_deref().unwrap_or_default()), ..Platform::default() }
}

fn from_variables(given: &str, quota_project: &str, zone: &str) -> BTreeMap<String, String> {
    let mut metadata = BTreeMap::new();
    let mut put = |key: &str, value: &str| drop(metadata.insert(key.to_owned(), value.to_owned()));
    if let [project, number, cluster, location] = given.split('|').collect::<Vec<_>>()[..] {
        put("gcp_project", project);
        put("gcp_project_number", number);
        put("gcp_gke_cluster_name", cluster);
        put("gcp_location", location);
    } else {
        tracing::warn!(
            "GCP_METADATA is {given:?}: wanted PROJECT_ID|PROJECT_NUMBER|CLUSTER_NAME|CLUSTER_ZONE"
        );
    }
    if !quota_project.is_empty() {
        put("gcp_quota_project", quota_project);
    }
    if !zone.is_empty() {
        put("gcp_zone", zone);
    }
    with_cluster_url(metadata)
}

/// The project's number and its cluster's address. Empty parts of `GCP_METADATA` count as known; one with other
/// than four parts counts as not set.
pub(super) async fn project(known: &Known, servers: &Servers) -> Option<GoogleProject> {
    let given: Vec<&str> = known.gcp.split('|').collect();
    let url = |project: &str, location: &str, cluster: &str| {
        format!("{CLUSTERS}/projects/{project}/locations/{location}/clusters/{cluster}")
    };
    let (number, cluster_url) = if let [project, number, cluster, location] = given[..] {
        (number.to_owned(), url(project, location, cluster))
    } else {
        let mut said = asked(known.google_host(servers)).await;
        let cluster_url = said.remove("gcp_gke_cluster_url").unwrap_or_default();
        (said.remove("gcp_project_number")?, cluster_url)
    };
    (!number.is_empty()).then_some(GoogleProject { number, cluster_url })
}

async fn asked(host: &str) -> BTreeMap<String, String> {
    let questions = [
        ("gcp_project", "project/project-id"),
        ("gcp_project_number", "project/numeric-project-id"),
        ("gcp_location", "instance/attributes/cluster-location"),
        ("gcp_gke_cluster_name", "instance/attributes/cluster-name"),
        ("gcp_gce_instance", "instance/name"),
        ("gcp_gce_instance_id", "instance/id"),
        ("gcp_gce_instance_template", "instance/attributes/instance-template"),
        ("gcp_gce_instance_created_by", "instance/attributes/created-by"),
    ];
    let answers =
        questions.map(|(key, path)| async move { Some((key.to_owned(), value(host, path).await?)) });
    let answers = stream::iter(answers).buffered(AT_ONCE);
    let mut metadata: BTreeMap<String, String> = answers.filter_map(std::future::ready).collect().await;
    if !metadata.contains_key("gcp_location")
        && let Some(zone) = zone(host).await
    {
        metadata.insert("gcp_location".to_owned(), zone);
    }
    with_cluster_url(metadata)
}

fn with_cluster_url(mut metadata: BTreeMap<String, String>) -> BTreeMap<String, String> {
    // Parts of `GCP_METADATA` that are empty count as known.
    let of = |key: &str| metadata.get(key);
    if let (Some(project), Some(location), Some(cluster)) =
        (of("gcp_project"), of("gcp_location"), of("gcp_gke_cluster_name"))
    {
        let url = format!("{CLUSTERS}/projects/{project}/locations/{location}/clusters/{cluster}");
        metadata.insert("gcp_gke_cluster_url".to_owned(), url);
    }
    metadata
}

// A search domain `<zone>.c.<project>.internal`, as Google's DHCP server gives it.
fn zone_of_search(resolv: &str) -> Option<String> {
    let lines = resolv.lines().filter_map(|line| line.trim_start().strip_prefix("search"));
    lines.flat_map(str::split_whitespace).find_map(|domain| {
        let (zone, rest) = domain.split_once('.')?;
        let project = rest.strip_prefix("c.")?.strip_suffix(".internal")?;
        (zone.split('-').count() == 3 && !project.is_empty()).then(|| zone.to_owned())
    })
}

// `<country>-<region>-<zone>`; anything else is no place.
fn locality(zone: &str) -> Locality {
    let three = zone.split('-').count() == 3 && zone.split('-').all(|part| !part.is_empty());
    match zone.rsplit_once('-').filter(|_| three) {
        Some((region, _)) => {
            Locality { region: region.to_owned(), zone: zone.to_owned(), sub_zone: String::new() }
        }
        None => Locality::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_place_of_the_server() {
        let all = from_variables("p|1|c|eu-a-b", "q", "eu-a-b");
        assert_eq!(all.len(), 7);
        assert_eq!(
            all["gcp_gke_cluster_url"],
            "https://container.googleapis.com/v1/projects/p/locations/eu-a-b/clusters/c"
        );
        assert_eq!(
            from_variables("p|1||eu-a-b", "", "")["gcp_gke_cluster_url"],
            "https://container.googleapis.com/v1/projects/p/locations/eu-a-b/clusters/"
        );
        assert_eq!(
            from_variables("p|1", "", "z").into_iter().collect::<Vec<_>>(),
            [("gcp_zone".into(), "z".into())]
        );
    }

    #[test]
    fn zones_and_regions() {
        assert_eq!(
            zone_of_search("nameserver x\nsearch a.b eu-west1-b.c.proj.internal google.internal").unwrap(),
            "eu-west1-b"
        );
        assert_eq!(zone_of_search("search eu-west1.c.proj.internal c.proj.internal"), None);
        assert_eq!(locality("eu-west1-b").region, "eu-west1");
        for no_zone in ["nozone", "eu-west1", "a-b-c-d", "eu--b", "", "-a-b"] {
            assert_eq!(locality(no_zone), Locality::default(), "{no_zone}");
        }
    }
}
