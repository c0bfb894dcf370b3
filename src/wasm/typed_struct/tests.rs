use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier as Code;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3::plugin_config::Vm;
use serde_json::{Value as JsonValue, json};

use super::*;

fn value(json: &JsonValue) -> Value {
    let kind = match json {
        JsonValue::Null => Json::NullValue(0),
        JsonValue::Bool(b) => Json::BoolValue(*b),
        JsonValue::Number(n) => Json::NumberValue(n.as_f64().unwrap()),
        JsonValue::String(s) => Json::StringValue(s.clone()),
        JsonValue::Array(list) => {
            Json::ListValue(prost_types::ListValue { values: list.iter().map(value).collect() })
        }
        JsonValue::Object(_) => Json::StructValue(object(json)),
    };
    Value { kind: Some(kind) }
}

fn object(json: &JsonValue) -> Struct {
    Struct { fields: json.as_object().unwrap().iter().map(|(k, v)| (k.clone(), value(v))).collect() }
}

fn convert(json: &JsonValue) -> Result<Wasm, Error> {
    let inner = Inner { type_url: String::new(), value: Some(object(json)) };
    inner.wasm().map(|bytes| Wasm::decode(bytes).expect("what is made can be read"))
}

fn vm(wasm: Wasm) -> envoy_types::pb::envoy::extensions::wasm::v3::VmConfig {
    let Some(Vm::VmConfig(vm)) = wasm.config.unwrap().vm else { panic!("a machine") };
    vm
}

#[test]
fn a_filter_as_istiod_writes_it() {
    let read = convert(&json!({"config": {
        "name": "p", "rootId": "r", "fail_open": true, "failure_policy": "FAIL_OPEN",
        "configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue", "value": "cfg"},
        "vmConfig": {
            "vm_id": "vm", "runtime": "envoy.wasm.runtime.v8", "allowPrecompiled": true,
            "code": {"remote": {
                "http_uri": {"uri": "http://a/m", "cluster": "", "timeout": "1.5s"},
                "sha256": "nil",
                "retryPolicy": {"numRetries": 3, "retry_back_off": {"baseInterval": "0.1s"}},
            }},
            "environmentVariables": {"hostEnvKeys": ["HOME"], "keyValues": {"K": "v", "E": ""}},
            "configuration": {"@type": "type.googleapis.com/google.protobuf.Struct", "value": {"a": [1, null]}},
        },
        "capability_restriction_config": {"allowed_capabilities": {"fd_write": {}}},
        "allow_on_headers_stop_iteration": false,
    }}))
    .unwrap();
    let config = read.config.clone().unwrap();
    assert_eq!((config.name.as_str(), config.root_id.as_str(), config.failure_policy), ("p", "r", 3));
    let any = config.configuration.unwrap();
    assert_eq!(any.type_url, "type.googleapis.com/google.protobuf.StringValue");
    assert_eq!(String::decode(&any.value[..]).unwrap(), "cfg");
    assert_eq!(config.allow_on_headers_stop_iteration.map(|v| v.value), Some(false), "given, so present");
    let vm = vm(read);
    let Some(Code::Remote(remote)) = vm.code.unwrap().specifier else { panic!("remote") };
    let uri = remote.http_uri.unwrap();
    assert_eq!(uri.timeout.map(|t| (t.seconds, t.nanos)), Some((1, 500_000_000)));
    assert!(uri.http_upstream_type.is_some(), "an empty member of a oneof is given all the same");
    assert_eq!(remote.retry_policy.unwrap().num_retries.unwrap().value, 3);
    let variables = vm.environment_variables.unwrap();
    assert_eq!(variables.key_values.len(), 2);
    assert_eq!(variables.host_env_keys, ["HOME"]);
    let any = vm.configuration.unwrap();
    assert_eq!(Struct::decode(&any.value[..]).unwrap(), object(&json!({"a": [1, null]})));
}

#[test]
fn nulls_are_nothing_and_local_code_can_be_bytes() {
    let local = |inline: JsonValue| {
        let read =
            convert(&json!({"config": {"name": null, "vm_config": {"code": {"local": inline}}}})).unwrap();
        let Some(Code::Local(local)) = vm(read).code.unwrap().specifier else { panic!("local") };
        local.specifier.unwrap()
    };
    use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
    for text in ["+/8=", "-_8", "+/8"] {
        assert_eq!(local(json!({"inline_bytes": text})), Specifier::InlineBytes(vec![0xfb, 0xff]));
    }
    assert_eq!(local(json!({"inlineString": ""})), Specifier::InlineString(String::new()));
}

#[test]
fn what_does_not_fit_is_refused_by_name_and_never_repeated() {
    for (inner, said) in [
        (json!({"nonsense": 1}), "unknown field \"config.nonsense\""),
        (json!({"name": 5}), "field \"config.name\" is not a string"),
        (json!({"fail_open": "s3cret"}), "\"config.fail_open\" is not true or false"),
        (json!({"failure_policy": "s3cret"}), "\"config.failure_policy\""),
        (json!({"name": "a", "Name": "b"}), "unknown field"),
        (json!({"root_id": "a", "rootId": "b"}), "together with"),
        (json!({"vm_config": {"code": {"local": {}, "remote": {}}}}), "together with"),
        (json!({"vm_config": []}), "\"config.vm_config\" is not an object"),
        (
            json!({"vm_config": {"code": {"remote": {"http_uri": {"timeout": "s3cret"}}}}}),
            "is not a duration",
        ),
        (
            json!({"vm_config": {"code": {"remote": {"retry_policy": {"num_retries": 1.5}}}}}),
            "unsigned 32-bit",
        ),
        (json!({"vm_config": {"code": {"local": {"inline_bytes": "s3cret!"}}}}), "base64"),
        (json!({"vm_config": {"environment_variables": {"key_values": {"s3cret": 1}}}}), "is not a string"),
        (json!({"vm_config": {"environment_variables": {"host_env_keys": "HOME"}}}), "is not a list"),
        (json!({"configuration": {"value": 1}}), "is not the URL of a type"),
        (json!({"configuration": {"@type": "type.googleapis.com/a.B"}}), "not known here"),
        (
            json!({"configuration": {"@type": "type.googleapis.com/google.protobuf.StringValue"}}),
            "is not there",
        ),
        (
            json!({"configuration": {"@type": "x/google.protobuf.StringValue", "value": "", "more": 1}}),
            "unknown field",
        ),
    ] {
        let error = convert(&json!({"config": inner})).unwrap_err().to_string();
        assert!(error.contains(said), "{error}, not {said}");
        assert!(!error.contains("s3cret"), "{error}");
    }
    let none = Inner { type_url: String::new(), value: None };
    assert!(none.wasm().unwrap_err().to_string().contains("no value"));
}

#[test]
fn durations() {
    let read = |text: &str| duration(text).map(|d| (d.seconds, d.nanos));
    assert_eq!(read("5s"), Some((5, 0)));
    assert_eq!(read("-1.25s"), Some((-1, -250_000_000)));
    assert_eq!(read(".5s"), Some((0, 500_000_000)));
    for bad in ["", "s", "5", "1h", "1.s5", "1e3s", "+1s", "1.0000000000s", "999999999999s", "--1s"] {
        assert_eq!(read(bad), None, "{bad}");
    }
}
