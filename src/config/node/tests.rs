use super::*;

fn map(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
    entries.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

struct Given {
    env: BTreeMap<String, String>,
    json: Vec<(String, String)>,
    addresses: Vec<String>,
    proxy_config: Value,
    proxy_metadata: BTreeMap<String, String>,
    cluster_name: ClusterName,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    platform: Platform,
}

impl Given {
    fn env(entries: &[(&str, &str)]) -> Self {
        let json = entries.iter().filter(|(k, _)| k.starts_with("ISTIO_METAJSON_"));
        Self {
            env: map(entries),
            json: json.map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            addresses: vec!["10.0.0.1".into(), "10.0.0.2".into(), "10.0.0.1".into()],
            proxy_config: json!({"configPath": "./etc/istio/proxy"}),
            proxy_metadata: BTreeMap::new(),
            cluster_name: ClusterName::Service("istio-proxy".into()),
            labels: None,
            annotations: None,
            platform: Platform::default(),
        }
    }

    fn build(&self) -> Result<Node, Error> {
        let json: Vec<(&str, &str)> = self.json.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        build(&Inputs {
            env: &self.env,
            json: &json,
            kind: "sidecar",
            addresses: &self.addresses,
            domain: "",
            id: None,
            proxy_config: &self.proxy_config,
            proxy_metadata: &self.proxy_metadata,
            cluster_name: &self.cluster_name,
            pilot_san: None,
            labels: self.labels.as_ref(),
            annotations: self.annotations.as_ref(),
            platform: &self.platform,
            credential_socket: false,
            external_sds: false,
            sts_port: 0,
            outlier_log_path: "",
            envoy_status_port: 15021,
            envoy_prometheus_port: 15090,
            secure_ports: [15091, 0],
            dns_address: "",
            release: Release::V1_31,
            exit_on_zero_connections: false,
            metadata_discovery: None,
            skip_deprecated_logs: false,
            workload_socket_file: "socket",
        })
    }

    fn metadata(&self) -> Map<String, Value> {
        self.build().unwrap().metadata()
    }
}

#[test]
fn ids_and_domains() {
    let node = Given::env(&[("POD_NAME", "a-1"), ("POD_NAMESPACE", "n")]).build().unwrap();
    assert_eq!(node.id, "sidecar~10.0.0.1~a-1.n~n.svc.cluster.local");
    assert_eq!(node.addresses, ["10.0.0.1", "10.0.0.2"]);
    assert_eq!(Given::env(&[]).build().unwrap().id, "sidecar~10.0.0.1~.~.svc.cluster.local");
    assert_eq!(domain("x.test", "n"), "x.test");
    assert_eq!(pilot_san("localhost:15012"), "istiod.istio-system.svc");
    assert_eq!(pilot_san("[fd00::1]:15012"), "[fd00");
}

#[test]
fn later_sources_replace_earlier_ones() {
    let mut given = Given::env(&[
        ("ISTIO_META_NETWORK", "env"),
        ("ISTIO_META_MINE", "env"),
        ("ISTIO_METAJSON_X", r#"{"MINE":[1.0,2.5,10000000000000000000],"mesh_id":"json"}"#),
        ("ISTIO_METAJSON_BAD", "[1]"),
        ("ISTIO_METAJSON_WORSE", "{"),
    ]);
    given.proxy_metadata =
        map(&[("ISTIO_META_NETWORK", "pc"), ("ISTIO_META_CLUSTER_ID", "pc"), ("OTHER", "x")]);
    let metadata = given.metadata();
    assert_eq!(metadata["NETWORK"], "env");
    assert_eq!(metadata["CLUSTER_ID"], "pc");
    assert_eq!(metadata["MINE"], json!([1, 2.5, 1e19]));
    assert_eq!((&metadata["MESH_ID"], &metadata["mesh_id"]), (&json!("json"), &json!("json")));
    assert!(!metadata.contains_key("OTHER"));
    let keys: Vec<_> = metadata.keys().cloned().collect();
    let mut sorted = keys.clone();
    sorted.sort();
    assert_eq!(keys, sorted);
}

#[test]
fn of_equal_members_the_last_given_counts() {
    let given = [("ISTIO_METAJSON_B", r#"{"K":1,"L":1}"#), ("ISTIO_METAJSON_A", r#"{"K":2}"#)];
    let env = crate::config::env::Env::of(&given);
    assert_eq!(env.json(), given);
    let metadata = Given::env(&given).metadata();
    assert_eq!((&metadata["K"], &metadata["L"]), (&json!(2), &json!(1)));
}

#[test]
fn an_empty_typed_field_lets_the_raw_text_show() {
    let metadata = Given::env(&[
        ("ISTIO_META_DNS_CAPTURE", "false"),
        ("ISTIO_META_ENABLE_HBONE", "T"),
        ("ISTIO_META_POD_PORTS", "[ ]"),
        ("ISTIO_META_NAME", "raw"),
        ("POD_NAME", ""),
    ])
    .metadata();
    assert_eq!(metadata["DNS_CAPTURE"], "false");
    assert_eq!(metadata["ENABLE_HBONE"], "true");
    assert_eq!(metadata["METADATA_DISCOVERY"], "true");
    assert_eq!(metadata["POD_PORTS"], "[ ]");
    assert_eq!(metadata["NAME"], "raw");
}

#[test]
fn ports_are_written_again() {
    let text = "[\n {\"name\":\"http\",\"containerPort\":80,\"protocol\":\"TCP\",\"hostPort\":1}, {}, null ]";
    let metadata = Given::env(&[("ISTIO_META_POD_PORTS", text)]).metadata();
    let wanted = r#"[{"name":"http","containerPort":80,"protocol":"TCP"},{"containerPort":0,"protocol":""},{"containerPort":0,"protocol":""}]"#;
    assert_eq!(metadata["POD_PORTS"], wanted);
}

#[test]
fn a_wrong_type_is_refused_with_its_name() {
    for (key, value) in [
        ("ISTIO_META_ENVOY_STATUS_PORT", "15021"),
        ("ISTIO_META_LABELS", "x"),
        ("ISTIO_META_PROXY_CONFIG", "x"),
        ("ISTIO_META_ENABLE_HBONE", "sure"),
        ("ISTIO_META_ENABLE_HBONE", ""),
        ("ISTIO_META_enable_hbone", "sure"),
        ("ISTIO_META_POD_PORTS", ""),
        ("ISTIO_META_POD_PORTS", "{"),
        ("ISTIO_META_POD_PORTS", r#"[{"containerPort":"80"}]"#),
        ("ISTIO_METAJSON_X", r#"{"DNS_CAPTURE":true}"#),
        ("ISTIO_METAJSON_X", r#"{"OWNER":1}"#),
        ("ISTIO_METAJSON_X", r#"{"LABELS":{"a":1}}"#),
        ("ISTIO_METAJSON_X", r#"{"PILOT_SAN":"x"}"#),
        ("ISTIO_METAJSON_X", r#"{"DNS_CAPTURE":null}"#),
        ("ISTIO_METAJSON_X", r#"{"METADATA_DISCOVERY":true}"#),
        ("ISTIO_METAJSON_X", r#"{"PROXY_CONFIG":{"statusPort":"x"}}"#),
    ] {
        let error = Given::env(&[(key, value)]).build().unwrap_err();
        assert!(error.to_string().starts_with("metadata field "), "{key}={value}: {error}");
    }
    let error = Given::env(&[("ISTIO_META_owner", "x"), ("ISTIO_META_enable_HBONE", "maybe")]).build();
    let Err(Error::Field { field, key, .. }) = error else { panic!("{error:?}") };
    assert_eq!((field, key.as_str()), ("ENABLE_HBONE", "enable_HBONE"));
}

#[test]
fn what_says_nothing_is_no_wrong_type() {
    let given =
        [("ISTIO_METAJSON_X", r#"{"METADATA_DISCOVERY":null,"PILOT_SAN":[null,"a"],"LABELS":{"b":null}}"#)];
    let metadata = Given::env(&given).metadata();
    assert_eq!(metadata["METADATA_DISCOVERY"], "false", "the agent's own");
    assert_eq!(metadata["PILOT_SAN"], json!([null, "a"]), "as it was given");
}

#[test]
fn letters_that_only_look_like_others_are_others() {
    let metadata =
        Given::env(&[("ISTIO_META_NETWOR\u{212a}", "x"), ("ISTIO_META_\u{17f}TS_PORT", "y")]).metadata();
    assert!(!metadata.contains_key("NETWORK") && !metadata.contains_key("STS_PORT"));
    assert_eq!(metadata["NETWOR\u{212a}"], "x");
}

#[test]
fn addresses_of_any_type_give_way_to_the_agents_own() {
    for value in
        [r#"{"INSTANCE_IPS":["10.0.0.9"]}"#, r#"{"INSTANCE_IPS":9}"#, r#"{"instance_ips":"10.0.0.9"}"#]
    {
        let own = Given::env(&[]).metadata()["INSTANCE_IPS"].clone();
        assert_eq!(Given::env(&[("ISTIO_METAJSON_X", value)]).metadata()["INSTANCE_IPS"], own, "{value}");
    }
}

#[test]
fn labels_come_from_the_file_over_fixed_ones() {
    let mut given = Given::env(&[("ISTIO_METAJSON_LABELS", r#"{"app":"fixed","v":"1","n":2}"#)]);
    given.platform.labels = map(&[("v", "machine")]);
    let without = given.metadata();
    assert_eq!(without["LABELS"], json!({"app": "fixed", "v": "machine", "n": ""}));
    assert_eq!(without["LABELS"], without["STATIC_LABELS"]);
    assert_eq!(without["n"], 2);
    given.labels =
        Some(map(&[("app", "file"), ("pod-template-hash", "x"), ("istio-locality", "r.z.s.more")]));
    let node = given.build().unwrap();
    assert_eq!(
        node.typed["LABELS"],
        json!({"app": "file", "istio-locality": "r/z/s/more", "n": "", "v": "machine"})
    );
    assert_eq!(node.typed["STATIC_LABELS"], json!({"app": "fixed", "v": "machine", "n": ""}));
    assert_eq!(node.locality, Locality { region: "r".into(), zone: "z".into(), sub_zone: "s".into() });
}

#[test]
fn a_locality_label_beats_the_platform() {
    let mut given = Given::env(&[("ISTIO_METAJSON_LABELS", r#"{"topology.istio.io/locality":"r.z"}"#)]);
    given.platform.locality.region = "elsewhere".into();
    let node = given.build().unwrap();
    assert_eq!(node.locality.region, "r");
    // One map without a labels file: the tidied text shows in both.
    assert_eq!(node.typed["STATIC_LABELS"]["istio-locality"], "r/z");
    given.env.clear();
    given.json.clear();
    assert_eq!(given.build().unwrap().locality.region, "elsewhere");
    // The new label is there, so the old one does not count.
    given.labels = Some(map(&[("topology.istio.io/locality", ""), ("istio-locality", "r.z")]));
    let node = given.build().unwrap();
    assert_eq!(
        (node.locality.region.as_str(), &node.typed["LABELS"]["istio-locality"]),
        ("elsewhere", &json!("r.z"))
    );
}

#[test]
fn platform_metadata_may_come_by_json_where_the_platform_has_none() {
    let mut given = Given::env(&[("ISTIO_METAJSON_X", r#"{"PLATFORM_METADATA":{"gcp_project":"p"}}"#)]);
    assert_eq!(given.build().unwrap().platform["gcp_project"], "p");
    given.platform.metadata = map(&[("azure_name", "v")]);
    assert!(!given.build().unwrap().platform.contains_key("gcp_project"));
}

#[test]
fn service_clusters() {
    let of = |name: &ClusterName, labels: &[(&str, &str)], workload, namespace| {
        cluster(name, &map(labels), workload, namespace)
    };
    let service = |name: &str| ClusterName::Service(name.to_owned());
    let all = [("app", "a"), ("app.kubernetes.io/name", "k"), ("service.istio.io/canonical-name", "c")];
    assert_eq!(of(&service("own"), &all, "w", "n"), "own");
    assert_eq!(of(&service("istio-proxy"), &all, "w", "n"), "a.n");
    assert_eq!(of(&service(""), &all[1..], "w", ""), "k.");
    assert_eq!(of(&ClusterName::AppLabelAndNamespace, &[], "w", "n"), "w.n");
    assert_eq!(of(&ClusterName::AppLabelAndNamespace, &[], "", "n"), "istio-proxy.n");
    assert_eq!(of(&ClusterName::AppLabelAndNamespace, &[], "", ""), "istio-proxy");
    assert_eq!(of(&ClusterName::CanonicalName, &all, "w", "n"), "c");
    assert_eq!(of(&ClusterName::CanonicalName, &[], "", "n"), "istio-proxy.n");
    assert_eq!(of(&ClusterName::CanonicalNameAndNamespace, &all[..2], "w", "n"), "k.n");
    assert_eq!(of(&ClusterName::CanonicalNameAndNamespace, &[], "w", ""), "w");
}

#[test]
fn metadata_in_json_that_half_of_a_letter_or_an_endless_number_spoils_is_ignored() {
    for odd in [r#"{"a": "\ud800", "b": 1}"#, r#"{"a": 1e400, "b": 1}"#] {
        assert!(
            super::fault("ISTIO_METAJSON_X", odd).is_some_and(|line| line.contains("is ignored")),
            "{odd}"
        );
    }
    assert_eq!(super::fault("ISTIO_METAJSON_X", r#"{"a": "\ud83d\ude00", "b": 1e300}"#), None);
}
