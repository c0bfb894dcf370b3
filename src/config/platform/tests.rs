use std::collections::BTreeMap;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::*;
use crate::base::tasks::Set;
use crate::config::env::Env;

// Answers each request from a table of `METHOD path`; `None` accepts and never answers.
struct Server {
    host: String,
    _task: Set,
}

impl Server {
    async fn new(paths: Option<&[(&str, &str)]>, headers: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let paths: Option<BTreeMap<String, String>> =
            paths.map(|p| p.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        let mut task = Set::new("test server");
        task.spawn(async move {
            let mut silent = Vec::new();
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let Some(paths) = &paths else {
                    silent.push(stream);
                    continue;
                };
                let request = crate::net::http::head(&mut stream).await.unwrap_or_default();
                let target: Vec<&str> = request.split(' ').take(2).collect();
                let found = paths.get(&target.join(" "));
                let status = if found.is_some() { "200 OK" } else { "404 Not Found" };
                let body = found.cloned().unwrap_or_default();
                let answer =
                    format!("HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\n\r\n{body}", body.len());
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        Self { host, _task: task }
    }

    fn servers(&self) -> Servers {
        Servers { v4: self.host.clone(), v6: "[::1]:1".into(), vendor: "/dev/null", resolv: "/dev/null" }
    }
}

async fn asked(env: &[(&str, &str)], addresses: &[&str], servers: &Servers) -> Platform {
    let (settings, _) = Settings::read(&Env::of(env));
    let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    ask(&Known::of(&settings), &addresses, servers).await
}

const AWS: &[(&str, &str)] = &[
    ("PUT /latest/api/token", "tok"),
    ("GET /latest/meta-data/iam/info", "{\"InstanceProfileArn\":\"arn:aws:iam::1:x\"}"),
    ("GET /latest/meta-data/placement/region", "r"),
    ("GET /latest/meta-data/placement/availability-zone", "r-1\n"),
];

#[tokio::test]
async fn amazon_is_recognised_and_described() {
    let server = Server::new(Some(AWS), "").await;
    let platform = asked(&[], &["10.0.0.1"], &server.servers()).await;
    let wanted = [("aws_region", "r"), ("aws_availability_zone", "r-1")];
    assert_eq!(platform.metadata, wanted.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
    assert_eq!((platform.locality.region.as_str(), platform.locality.zone.as_str()), ("r", "r-1"));
    // With IPv6 only that address counts, and nobody is there.
    assert_eq!(
        asked(&[("CLOUD_PLATFORM", "AWS")], &["10.0.0.1", "fd00::1"], &server.servers()).await,
        Platform::default()
    );
    assert_eq!(asked(&[("CLOUD_PLATFORM", "none")], &[], &server.servers()).await, Platform::default());
    let old = Server::new(Some(&AWS[1..]), "").await;
    assert_eq!(asked(&[], &[], &old.servers()).await.metadata.len(), 2);
}

#[tokio::test]
async fn google_is_recognised_by_its_header() {
    let paths = &[
        ("GET /", ""),
        ("GET /computeMetadata/v1/project/project-id", "p"),
        ("GET /computeMetadata/v1/instance/zone", "projects/1/zones/eu-a-b"),
    ];
    let server = Server::new(Some(paths), "Metadata-Flavor: Google\r\n").await;
    let platform = asked(&[], &[], &server.servers()).await;
    assert_eq!(platform.metadata["gcp_location"], "eu-a-b");
    assert_eq!(platform.locality.region, "eu-a");
    let other = Server::new(Some(paths), "").await;
    assert_eq!(asked(&[], &[], &other.servers()).await, Platform::default());
    // Told that it is Google, the locality is looked up all the same.
    let told = asked(&[("CLOUD_PLATFORM", "gcp")], &[], &other.servers()).await;
    assert_eq!((told.metadata.len(), told.locality.zone.as_str()), (0, "eu-a-b"));
    let host = asked(
        &[("GCE_METADATA_HOST", &server.host)],
        &[],
        &Servers { v4: "127.0.0.1:1".into(), ..server.servers() },
    )
    .await;
    assert_eq!(host.metadata["gcp_project"], "p");
}

#[tokio::test]
async fn what_google_says_and_leaves_empty_is_known_and_attributes_stay_as_they_are() {
    let paths = &[
        ("GET /", ""),
        ("GET /computeMetadata/v1/project/project-id", " p\n"),
        ("GET /computeMetadata/v1/instance/attributes/cluster-location", ""),
        ("GET /computeMetadata/v1/instance/attributes/cluster-name", " c\n"),
        ("GET /computeMetadata/v1/instance/zone", "projects/1/zones/eu-a-b"),
    ];
    let server = Server::new(Some(paths), "Metadata-Flavor: Google\r\n").await;
    let platform = asked(&[], &[], &server.servers()).await;
    let of = |key: &str| platform.metadata[key].as_str();
    assert_eq!([of("gcp_project"), of("gcp_location"), of("gcp_gke_cluster_name")], ["p", "", " c\n"]);
    assert_eq!(platform.locality.region, "eu-a");
}

#[tokio::test]
async fn nobody_there_and_nobody_answering_are_both_no_platform() {
    let none =
        Servers { v4: "127.0.0.1:1".into(), v6: "[::1]:1".into(), vendor: "/dev/null", resolv: "/dev/null" };
    assert_eq!(asked(&[], &["10.0.0.1"], &none).await, Platform::default());
    let silent = Server::new(None, "").await;
    for cloud in ["", "aws", "azure", "gcp"] {
        let answer = asked(&[("CLOUD_PLATFORM", cloud)], &[], &silent.servers()).await;
        assert_eq!(answer, Platform::default(), "{cloud}");
    }
}

/// Later on an application may have used up the pod's processes.
#[tokio::test]
async fn a_server_with_a_name_is_looked_for_without_the_runtimes_threads() {
    let server = Server::new(Some(&[("GET /a", "b")]), "").await;
    let host = server.host.replace("127.0.0.1", "localhost");
    let got = http::get(&host, "/a", &[]).await.and_then(|answer| answer.text());
    assert_eq!(got.as_deref(), Some("b"));
    let _none = crate::base::lane::scarce::NoThreads::from_now_on();
    assert!(http::get(&host, "/a", &[]).await.is_none());
    assert!(http::get(&server.host, "/a", &[]).await.is_some(), "a literal needs none");
}
