use envoy_types::pb::envoy::config::core::v3::HttpUri;
use envoy_types::pb::envoy::extensions::filters::http::rbac::v3::Rbac as HttpRbac;
use envoy_types::pb::envoy::extensions::filters::network::rbac::v3::Rbac as NetworkRbac;
use envoy_types::pb::envoy::extensions::wasm::v3::{EnvironmentVariables, VmConfig};
use envoy_types::pb::google::protobuf::Duration as Span;

use super::*;

const UNKNOWN: [u8; 6] = [0xc2, 0x3e, 0x03, b'a', b'b', b'c'];

fn remote(sha256: &str) -> AsyncDataSource {
    let uri = HttpUri {
        uri: "http://a/m".to_owned(),
        timeout: Some(Span { seconds: 7, nanos: 0 }),
        ..HttpUri::default()
    };
    let remote = RemoteDataSource { http_uri: Some(uri), sha256: sha256.to_owned(), retry_policy: None };
    AsyncDataSource { specifier: Some(Code::Remote(remote)) }
}

fn vm(variables: &[(&str, &str)]) -> VmConfig {
    let key_values: HashMap<_, _> =
        variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let environment = EnvironmentVariables { key_values, host_env_keys: Vec::new() };
    VmConfig {
        vm_id: "vm".to_owned(),
        code: Some(remote("nil")),
        environment_variables: (!variables.is_empty()).then_some(environment),
        ..VmConfig::default()
    }
}

fn plugin(vm: VmConfig) -> PluginConfig {
    PluginConfig { name: "p".to_owned(), vm: Some(Vm::VmConfig(vm)), ..PluginConfig::default() }
}

fn resource(type_url: &str, value: Vec<u8>) -> Bytes {
    let config = Some(Any { type_url: type_url.to_owned(), value: value.into() });
    let extension = Extension { name: "f1".to_owned(), typed_config: config };
    let value = [extension.encode_to_vec(), UNKNOWN.to_vec()].concat();
    Any { type_url: EXTENSION.to_owned(), value: value.into() }.encode_to_vec().into()
}

fn wasm(kind: &str, plugin: PluginConfig) -> Bytes {
    resource(kind, [Wasm { config: Some(plugin) }.encode_to_vec(), UNKNOWN.to_vec()].concat())
}

fn filter(resource: &Bytes) -> Filter {
    match judge(resource).unwrap() {
        Decision::Remote(filter) => *filter,
        Decision::Untouched => panic!("its code is remote"),
    }
}

fn inner(resource: &Bytes) -> Any {
    let any = Any::decode(resource.clone()).unwrap();
    assert_eq!(any.type_url, EXTENSION);
    assert!(any.value.windows(6).any(|w| w == UNKNOWN), "unknown fields stay");
    let extension = Extension::decode(any.value).unwrap();
    assert_eq!(extension.name, "f1");
    extension.typed_config.unwrap()
}

#[test]
fn code_becomes_local_and_what_is_for_the_agent_goes() {
    let all = [
        ("ISTIO_META_WASM_IMAGE_PULL_SECRET", "s3cret"),
        ("ISTIO_META_X", "x"),
        ("KEY", "value"),
        (POLICY, "Always"),
        (VERSION, "17"),
    ];
    for (variables, kept) in [(&all[..], Some(vec!["KEY"])), (&all[..2], None), (&[], None)] {
        for kind in [HTTP, NETWORK] {
            let filter = filter(&wasm(kind, plugin(vm(variables))));
            let made = filter.local("/data/m.wasm").unwrap();
            let config = inner(&made);
            assert_eq!(config.type_url, kind);
            assert!(config.value.windows(6).any(|w| w == UNKNOWN));
            assert!(!made.windows(6).any(|w| w == b"s3cret"));
            let Some(Vm::VmConfig(vm)) = Wasm::decode(config.value).unwrap().config.unwrap().vm else {
                panic!()
            };
            assert_eq!(vm.vm_id, "vm");
            let Some(Code::Local(local)) = vm.code.unwrap().specifier else { panic!("not local") };
            assert_eq!(local.specifier, Some(Specifier::Filename("/data/m.wasm".to_owned())));
            let names = vm.environment_variables.map(|e| e.key_values.into_keys().collect::<Vec<_>>());
            assert_eq!(names, kept.clone().map(|k| k.into_iter().map(ToOwned::to_owned).collect::<Vec<_>>()));
        }
    }
    let wanted = filter(&wasm(HTTP, plugin(vm(&all)))).wanted;
    assert_eq!(
        (wanted.policy, wanted.version.as_str(), wanted.checksum.as_str()),
        (Policy::Always, "17", "")
    );
    assert_eq!((wanted.timeout, wanted.resource.as_str()), (Duration::from_secs(7), "f1"));
    assert!(matches!(&wanted.secret, Secret::Given(text) if text.as_str() == "s3cret"));
    assert!(!format!("{wanted:?}").contains("s3cret"));
    let empty = filter(&wasm(HTTP, plugin(vm(&[(SECRET, "")])))).wanted;
    assert!(matches!(empty.secret, Secret::Missing));
}

#[test]
fn no_limit_is_beyond_what_a_clock_counts() {
    let limit = |seconds, nanos| {
        let mut vm = vm(&[]);
        if let Some(Code::Remote(remote)) = &mut vm.code.as_mut().unwrap().specifier {
            remote.http_uri.as_mut().unwrap().timeout = Some(Span { seconds, nanos });
        }
        filter(&wasm(HTTP, plugin(vm))).wanted.timeout
    };
    assert_eq!(limit(i64::MAX, i32::MAX), LONGEST);
    assert_eq!(limit(i64::MIN, i32::MIN), Duration::ZERO);
    assert_eq!(limit(0, 1), Duration::from_nanos(1));
}

#[test]
fn host_variables_keep_the_message() {
    let mut vm = vm(&[("ISTIO_META_X", "x")]);
    vm.environment_variables.as_mut().unwrap().host_env_keys.push("HOME".to_owned());
    let made = filter(&wasm(HTTP, plugin(vm))).local("/m").unwrap();
    let Some(Vm::VmConfig(vm)) = Wasm::decode(inner(&made).value).unwrap().config.unwrap().vm else {
        panic!()
    };
    let environment = vm.environment_variables.unwrap();
    assert_eq!((environment.host_env_keys, environment.key_values.len()), (vec!["HOME".to_owned()], 0));
}

#[test]
#[expect(deprecated, reason = "istiod still sends the older field")]
fn what_stands_in_depends_on_the_failure_policy() {
    use FailurePolicy::{FailClosed, FailOpen, FailReload, Unspecified};
    let newer = 99;
    for (policy, fail_open, open) in [
        (Unspecified.into(), false, false),
        (Unspecified.into(), true, true),
        (FailOpen.into(), false, true),
        (FailClosed.into(), true, false),
        (FailReload.into(), true, false),
        (newer, true, false),
    ] {
        let plugin = PluginConfig { failure_policy: policy, fail_open, ..plugin(vm(&[(SECRET, "s3cret")])) };
        let http = inner(&filter(&wasm(HTTP, plugin.clone())).replaced().unwrap());
        assert_eq!(http.type_url, HTTP_RBAC);
        let rbac = HttpRbac::decode(http.value).unwrap();
        let name = if open { "wasm-default-allow" } else { "wasm-default-deny" };
        assert_eq!((rbac.rules.is_none(), rbac.rules_stat_prefix.as_str()), (open, name));
        let network = inner(&filter(&wasm(NETWORK, plugin)).replaced().unwrap());
        assert_eq!(network.type_url, NETWORK_RBAC);
        let rbac = NetworkRbac::decode(network.value).unwrap();
        assert_eq!((rbac.rules.is_none(), rbac.stat_prefix.as_str()), (open, name));
    }
}

#[test]
fn other_filters_and_local_code_are_left_alone() {
    let local = DataSource {
        specifier: Some(Specifier::InlineString("envoy.wasm.stats".into())),
        watched_directory: None,
    };
    let code = AsyncDataSource { specifier: Some(Code::Local(local)) };
    let builtin = wasm(HTTP, plugin(VmConfig { code: Some(code), ..vm(&[]) }));
    for resource in [
        builtin,
        resource(HTTP_RBAC, b"\xff".to_vec()),
        resource("type.googleapis.com/xds.type.v3.TypedStruct", vec![]),
    ] {
        assert!(matches!(judge(&resource), Ok(Decision::Untouched)));
    }
}

#[test]
fn what_cannot_be_read_is_refused() {
    let nothing = Extension { name: "f1".to_owned(), typed_config: None }.encode_to_vec();
    let foreign = Any { type_url: HTTP.to_owned(), value: Bytes::new() }.encode_to_vec();
    for (resource, said) in [
        (
            Any { type_url: EXTENSION.to_owned(), value: nothing.into() }.encode_to_vec().into(),
            "no typed_config",
        ),
        (foreign.into(), "mismatched message type"),
        (Bytes::from_static(b"\xff"), "failed to unmarshal"),
        (resource(HTTP, b"\x0a\x05".to_vec()), "failed to unmarshal Wasm filter \"f1\""),
        (resource(HTTP, vec![]), "names no code"),
        (wasm(HTTP, PluginConfig::default()), "names no code"),
        (wasm(HTTP, plugin(VmConfig { code: None, ..vm(&[]) })), "names no code"),
        (resource(STRUCT, b"\xff".to_vec()), "failed to unmarshal a TypedStruct"),
    ] {
        let error = judge(&resource).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn what_nobody_writes_so_long_is_refused_in_few_words() {
    let long = "n".repeat(TEXT + 1);
    let of = |name: &str, kind: &str, value: &[u8]| -> Bytes {
        let config = Some(Any { type_url: kind.to_owned(), value: value.to_vec().into() });
        let value = Extension { name: name.to_owned(), typed_config: config }.encode_to_vec().into();
        Any { type_url: EXTENSION.to_owned(), value }.encode_to_vec().into()
    };
    let remote = |variables: &[(&str, &str)]| Wasm { config: Some(plugin(vm(variables))) }.encode_to_vec();
    assert!(matches!(
        judge(&of(&long[1..], HTTP, &remote(&[(VERSION, &long[1..])]))),
        Ok(Decision::Remote(_))
    ));
    let struct_of =
        |kind: &str| [&[0x0a, u8::try_from(kind.len()).unwrap()], kind.as_bytes(), &padding(2)].concat();
    for (resource, said) in [
        (of(&long, HTTP, &remote(&[])), "name has 1025 bytes, more than 1024"),
        (of("f1", HTTP, &remote(&[(VERSION, &long)])), "version has 1025 bytes"),
        (of("f1", NETWORK, &[remote(&[]), padding(9)].concat()), "filter has "),
        (of("f1", STRUCT, &struct_of(HTTP)), "filter has "),
        (of(&long, HTTP, &[]), "names no code"),
        (Any { type_url: long.clone(), value: Bytes::new() }.encode_to_vec().into(), "mismatched"),
    ] {
        let error = judge(&resource).unwrap_err().to_string();
        assert!(error.contains(said) && error.len() < 500, "{error}");
    }
    // Envoy's own affair.
    let local = AsyncDataSource { specifier: Some(Code::Local(DataSource::default())) };
    let local = Wasm { config: Some(plugin(VmConfig { code: Some(local), ..vm(&[]) })) }.encode_to_vec();
    for resource in [
        of(&long, HTTP, &[local, padding(9)].concat()),
        of(&long, STRUCT, &struct_of(HTTP_RBAC)),
        of(&long, HTTP_RBAC, &padding(1)),
    ] {
        assert!(matches!(judge(&resource), Ok(Decision::Untouched)));
    }
}

// A field of so many bytes that a filter with it is too long.
fn padding(tag: u32) -> Vec<u8> {
    let mut out = Vec::new();
    wire::put(&mut out, tag, &vec![0; FILTER]);
    out
}
