//! Microsoft: the instance metadata service.

use std::collections::BTreeMap;

use serde_json::Value;

use super::http::get;
use crate::bootstrap::Locality;
use crate::config::node::Platform;

/// The version of the interface that is there in any case.
const OLDEST: &str = "2019-08-15";
const PATH: &str = "/metadata/instance";

pub(super) async fn describe(host: &str) -> Platform {
    // Without a version the answer is an error that names the newest ones.
    let Some(versions) = document(host, PATH).await else { return Platform::default() };
    let offered = versions.get("newest-versions").and_then(Value::as_array).into_iter().flatten();
    let version = offered.filter_map(Value::as_str).fold(OLDEST, |newest, v| newest.max(v));
    let path = format!("{PATH}?api-version={version}");
    let document = document(host, &path).await.unwrap_or_default();
    document.get("compute").map(parse).unwrap_or_default()
}

async fn document(host: &str, path: &str) -> Option<Value> {
    let answer = get(host, path, &[("metadata", "True")]).await?;
    Some(serde_json::from_str(&answer.body).unwrap_or_default())
}

fn parse(compute: &Value) -> Platform {
    let text = |key: &str| compute.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut metadata = BTreeMap::new();
    for key in ["name", "location", "vmId"] {
        let value = text(key);
        if !value.is_empty() {
            metadata.insert(format!("azure_{key}"), value);
        }
    }
    // A list that is there counts, also one without tags.
    if let Some(tags) = compute.get("tagsList") {
        for tag in tags.as_array().into_iter().flatten() {
            let of = |key: &str| tag.get(key).and_then(Value::as_str).unwrap_or_default();
            metadata.insert(format!("azure_{}", of("name")), of("value").to_owned());
        }
    } else if let tags = text("tags")
        && !tags.is_empty()
    {
        // Each part is a tag, as in the Go agent, also the empty one behind a last semicolon.
        for tag in tags.split(';') {
            let (key, value) = tag.split_once(':').unwrap_or((tag, ""));
            metadata.insert(format!("azure_{key}"), value.to_owned());
        }
    }
    let locality = Locality { region: text("location"), zone: text("zone"), sub_zone: String::new() };
    Platform { metadata, locality, ..Platform::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_both_forms() {
        let platform = parse(&serde_json::json!({"tags": "a:b;c;d:e:f;", "location": "west", "zone": "1"}));
        let wanted = [
            ("azure_", ""),
            ("azure_a", "b"),
            ("azure_c", ""),
            ("azure_d", "e:f"),
            ("azure_location", "west"),
        ];
        let wanted: BTreeMap<_, _> = wanted.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
        assert_eq!(platform.metadata, wanted);
        assert_eq!((platform.locality.region.as_str(), platform.locality.zone.as_str()), ("west", "1"));
        let platform =
            parse(&serde_json::json!({"tags": "a:b", "tagsList": [{"name": "x", "value": "y"}, 1]}));
        assert_eq!(platform.metadata["azure_x"], "y");
        assert!(!platform.metadata.contains_key("azure_a"));
        for none in [serde_json::json!({"tags": ""}), serde_json::json!({"tags": "a:b", "tagsList": null})] {
            assert!(parse(&none).metadata.is_empty(), "{none}");
        }
    }
}
