use serde_json::json;

use super::*;

/// A template in the form of Istio's own, for the sample with collectors as for the plain one.
fn stock() -> Value {
    bootstrap::generate(&samples()[0]).unwrap()
}

fn judged(template: &Value) -> Found {
    judge(&template.to_string(), &BTreeMap::new())
}

#[test]
fn what_any_release_had_is_passed_over() {
    assert_eq!(judged(&stock()), Found::Stock);
    let mut older = stock();
    let all = older.as_object_mut().unwrap();
    for newer in ["application_log_config", "overload_manager", "deferred_stat_options"] {
        all.remove(newer).unwrap();
    }
    older["bootstrap_extensions"] = json!([]);
    older["admin"] = json!({"access_log_path": "/dev/null", "address": older["admin"]["address"]});
    older["layered_runtime"] = json!({"layers": [
        {"name": "deprecation", "static_layer": {"re2.max_program_size.error_level": 1024}},
        {"name": "global config", "static_layer": {"overload.global_downstream_max_connections": 2147483647}},
        {"name": "admin", "admin_layer": {}},
    ]});
    let tags = older["stats_config"]["stats_tags"].as_array_mut().unwrap();
    tags.reverse();
    tags[0]["regex"] = json!("^cluster\\.((.+?)\\.)");
    tags.push(json!({"tag_name": "source_app", "regex": "(source_app=\\.=(.+?);\\.;)"}));
    let listeners = older["static_resources"]["listeners"].as_array_mut().unwrap();
    listeners.iter_mut().for_each(|l| drop(l.as_object_mut().unwrap().remove("name")));
    let xds = older["static_resources"]["clusters"].as_array_mut().unwrap();
    let xds = xds.iter_mut().find(|c| c["name"] == "xds-grpc").unwrap();
    xds["type"] = json!("STRICT_DNS");
    xds["http2_protocol_options"] = json!({});
    assert_eq!(judged(&older), Found::Stock);
    // Its agents had the socket elsewhere; another identity provider's is somebody's own.
    let pipe = |template: &mut Value, path: &str| {
        let clusters = template["static_resources"]["clusters"].as_array_mut().unwrap();
        let sds = clusters.iter_mut().find(|c| c["name"] == "sds-grpc").unwrap();
        sds["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["pipe"]["path"] =
            json!(path);
    };
    let mut spire = older.clone();
    pipe(&mut spire, "/run/spire/sockets/agent.sock");
    assert!(matches!(judged(&spire), Found::Changed(thing) if thing.contains("/run/spire/")));
    pipe(&mut older, "./etc/istio/proxy/SDS");
    assert_eq!(judged(&older), Found::Stock);
}

#[test]
fn one_of_a_known_sum_is_not_looked_at_any_further() {
    let env = BTreeMap::new();
    let odd = b"no template at all";
    assert!(matches!(told(odd, &RELEASED, &env), Found::Useless(_)));
    assert_eq!(told(odd, &[RELEASED[0], &sha256::of(odd)], &env), Found::Stock);
    assert_eq!(told(stock().to_string().as_bytes(), &[], &env), Found::Stock);
}

#[test]
fn what_no_release_had_is_somebodys_own() {
    type Change = fn(&mut Value);
    let changes: [(Change, &str); 6] = [
        (
            |t| {
                t["static_resources"]["clusters"]
                    .as_array_mut()
                    .unwrap()
                    .push(json!({"name": "mine", "type": "STATIC"}))
            },
            "static_resources.clusters.mine",
        ),
        (
            |t| t["static_resources"]["clusters"][0]["connect_timeout"] = json!("9s"),
            "static_resources.clusters.prometheus_stats.connect_timeout = \"9s\"",
        ),
        (
            |t| t["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = json!(1),
            "static_resources.listeners.15090.per_connection_buffer_limit_bytes",
        ),
        (
            |t| t["layered_runtime"]["layers"][0]["static_layer"]["mine"] = json!(true),
            "layered_runtime.layers.global config.static_layer.mine",
        ),
        (|t| t["hds_config"] = json!({"api_type": "GRPC"}), "hds_config"),
        (
            |t| {
                t["stats_config"]["stats_tags"]
                    .as_array_mut()
                    .unwrap()
                    .push(json!({"tag_name": "mine", "regex": "(m)"}))
            },
            "stats_config.stats_tags.mine",
        ),
    ];
    for (change, named) in changes {
        let mut template = stock();
        change(&mut template);
        assert_eq!(judged(&template), Found::Changed(named.to_owned()));
    }
    // In a part that is only there with a collector.
    let text = stock().to_string();
    let text =
        text.replacen("\"clusters\":[", "\"clusters\":[{{ if .zipkin }}{\"name\":\"mine\"},{{ end }}", 1);
    assert_eq!(judge(&text, &BTreeMap::new()), Found::Changed("static_resources.clusters.mine".to_owned()));
}

#[test]
fn what_no_envoy_could_start_with_is_useless() {
    for (text, why) in [
        (r#"{"@type": "type.googleapis.com/envoy.api.v2.Listener"}"#, "version 2"),
        ("{{ nothing }}", "nothing"),
        (r#"{"node": {{ .nobody }}}"#, "not JSON"),
    ] {
        let found = judge(text, &BTreeMap::new());
        assert!(matches!(&found, Found::Useless(said) if said.contains(why)), "{text}: {found:?}");
    }
    assert_eq!(look(Path::new("/nowhere/at all"), &BTreeMap::new()), Found::Nothing);
}
