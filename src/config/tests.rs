//! Bad input, one row each: wrong types, out of range, unknown names, huge, no UTF-8, missing and unreadable.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use super::env::{Kind, REDIRECT, VARS};
use super::*;
use crate::config::env::var;

fn start(words: &[&str], env: &Env, root: &Path, annotation: &str) -> Result<Arc<Sources>, Vec<String>> {
    let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
    let parsed = args::parse(&words, args::PROXY, true).map_err(|e| vec![e.to_string()])?;
    read(parsed, env, root, |key| (key == "proxy.istio.io/config").then(|| annotation.to_owned()))
}

fn with(env: &[(&str, &str)]) -> Result<Arc<Sources>, Vec<String>> {
    start(&[], &Env::of(env), tempfile::tempdir().unwrap().path(), "")
}

#[test]
fn every_variable_of_a_wrong_type_gives_one_warning_and_its_default() {
    let plain = with(&[]).unwrap();
    let huge = "9".repeat(100_000);
    for var in VARS.iter().filter(|v| v.kind != Kind::Text && v.part != REDIRECT) {
        for bad in ["x", "", " 1", "1 ", "0x", "--1", huge.as_str()] {
            // A float may be as long as it likes.
            if var.kind == Kind::Float && bad == huge {
                continue;
            }
            let config = with(&[(var.name, bad)]).unwrap_or_else(|e| panic!("{}={bad:.20}: {e:?}", var.name));
            let named: Vec<_> = config.warnings.iter().filter(|w| w.contains(var.name)).collect();
            assert_eq!(named.len(), 1, "{}={bad:.20}: {:?}", var.name, named);
            assert!(named[0].contains("defaulting to"), "{}", named[0]);
            let same = config.settings.shown(var.name) == plain.settings.shown(var.name);
            assert!(same, "{} must keep its default", var.name);
        }
    }
}

#[test]
fn a_spread_that_cannot_be_meant_gives_one_warning() {
    let table = [
        ("0s", None, None),
        ("90s", Some(90), None),
        ("10m", Some(600), None),
        ("-90s", None, Some("expecting zero or more, defaulting to 0s")),
        ("10m1s", Some(600), Some("expecting 0s to 10m, defaulting to 10m")),
        ("soon", None, Some("expecting a duration, defaulting to 0s")),
    ];
    for (text, seconds, warning) in table {
        let config = with(&[("XDS_RECONNECT_SPREAD", text)]).unwrap();
        assert_eq!(parts::spread(&config.settings).0.map(|over| over.as_secs()), seconds, "{text}");
        let told: Vec<_> = config.warnings.iter().filter(|w| w.contains("XDS_RECONNECT_SPREAD")).collect();
        assert_eq!(told.len(), usize::from(warning.is_some()), "{told:?}");
        assert!(warning.is_none_or(|text| told[0].contains(text)), "{told:?}");
    }
    let config = with(&[("XDS_RECONNECT_SPREAD", "90s"), ("XDS_HOLD_TIMEOUT", "0")]).unwrap();
    assert_eq!(parts::spread(&config.settings).0, None);
    assert!(config.warnings.iter().any(|w| w.contains("no effect with XDS_HOLD_TIMEOUT=0")));
}

#[test]
fn a_variable_that_is_no_utf8_counts_as_unset_and_is_named() {
    for var in VARS {
        let garbled = OsString::from_vec(vec![b'a', 0xff]);
        let env = Env::from_os([(OsString::from(var.name), garbled)]);
        let config = start(&[], &env, tempfile::tempdir().unwrap().path(), "").unwrap();
        assert_eq!(config.warnings.iter().filter(|w| w.contains(var.name)).count(), 1, "{}", var.name);
    }
}

#[test]
fn flags_that_cannot_be_read_are_refused_in_pflags_words() {
    for (word, text) in [
        (
            "--concurrency=two",
            "invalid argument \"two\" for \"--concurrency\" flag: strconv.ParseInt: parsing \"two\": invalid syntax",
        ),
        ("--concurrency=99999999999999999999", "value out of range"),
        ("--profiling=maybe", "strconv.ParseBool: parsing \"maybe\": invalid syntax"),
        ("--stsPort=", "strconv.ParseInt: parsing \"\": invalid syntax"),
        ("--domain", "flag needs an argument: --domain"),
        ("--=x", "bad flag syntax: --=x"),
    ] {
        let errors = start(&[word], &Env::of(&[]), Path::new("/nope"), "").unwrap_err();
        assert!(errors.len() == 1 && errors[0].contains(text), "{word}: {errors:?}");
    }
}

#[test]
fn letters_and_help_are_read_as_pflag_reads_them() {
    let flags = [
        args::Flag::new("output", args::Kind::Text, "", "").short('o'),
        args::Flag::new("short", args::Kind::Bool, "false", "").short('s'),
    ];
    let read = |line: &str, tolerant| {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        args::parse(&words, &flags, tolerant)
    };
    let bad = "strconv.ParseBool: parsing \"no\": invalid syntax";
    for (line, text) in [
        ("-sx", "unknown shorthand flag: 'x' in -x".to_owned()),
        ("-hx", "unknown shorthand flag: 'x' in -x".to_owned()),
        ("-s=", "unknown shorthand flag: '=' in -=".to_owned()),
        ("-so", "flag needs an argument: 'o' in -o".to_owned()),
        ("--short=no", format!("invalid argument \"no\" for \"-s, --short\" flag: {bad}")),
        ("--help=no", format!("invalid argument \"no\" for \"-h, --help\" flag: {bad}")),
    ] {
        assert_eq!(read(line, false).unwrap_err().to_string(), text, "{line}");
    }
    for (line, output) in [("-o=", "="), ("-o==", "="), ("-o=x", "x"), ("-ox", "x"), ("-so x", "x")] {
        assert_eq!(read(line, false).unwrap().get("output"), Some(output), "{line}");
    }
    for (line, help) in [("-hs", true), ("--help", true), ("--help=false", false), ("-h --help=0", false)] {
        assert_eq!(read(line, false).unwrap().help, help, "{line}");
    }
    for (line, left) in [("-x= router", ""), ("-x=1 router", "router"), ("-ab 1 router", "router")] {
        assert_eq!(read(line, true).unwrap().positional.join(" "), left, "{line}");
    }
}

#[test]
fn of_a_variable_that_is_given_twice_the_first_counts() {
    let env = Env::of(&[("ISTIO_METAJSON_A", "1"), ("B", "x"), ("ISTIO_METAJSON_A", "2")]);
    assert_eq!((env.get("ISTIO_METAJSON_A"), env.json()), (Some("1"), vec![("ISTIO_METAJSON_A", "1")]));
}

#[test]
fn numbers_of_64_bits_are_cut_to_32_where_the_go_agent_cuts_them() {
    for (words, env, threads) in [
        (&[][..], &[("ISTIO_CPU_LIMIT", "4294967298")][..], Some(2)),
        (&["--concurrency=4294967299"], &[], Some(3)),
        (&["--concurrency=-1"], &[("ISTIO_CPU_LIMIT", "4")], Some(-1)),
    ] {
        let config = start(words, &Env::of(env), Path::new("/nope"), "").unwrap();
        assert_eq!(config.mesh.proxy.concurrency.as_ref().map(|c| c.value), threads, "{words:?} {env:?}");
    }
}

#[test]
fn an_annotation_may_name_a_port_that_is_none_and_there_is_no_status_server() {
    for (text, port) in [
        ("70000", 70000),
        ("-5", -5),
        ("+15030", 15030),
        ("4294982326", 15030),
        ("99999999999999999999", -1),
        ("-99999999999999999999", 0),
        ("http", 0),
    ] {
        let flags = args::parse(&[], args::PROXY, true).unwrap();
        let annotation = |key: &str| (key == "status.sidecar.istio.io/port").then(|| text.to_owned());
        let config = read(flags, &Env::of(&[]), Path::new("/nope"), annotation).unwrap();
        assert_eq!(config.mesh.proxy.status_port, port, "{text}");
        let server = parts::status::server(&config, false).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(server.is_some(), port == 15030, "{text}");
    }
}

#[test]
fn old_flags_take_effect_below_every_newer_source() {
    let words = [
        "--discoveryAddress=old:15010",
        "--configPath",
        "/old",
        "--statusPort=15999",
        "--trust-domain=td",
        "--zipkinAddress=z:9411",
        "--lightstepSecure",
        "router",
        "--connectTimeout",
    ];
    let env = Env::of(&[("PROXY_CONFIG", "discoveryAddress: new:15012")]);
    let config = start(&words, &env, Path::new("/nope"), "statusPort: 15888").unwrap();
    let proxy = &config.mesh.proxy;
    assert_eq!(config.node_type, "router", "a boolean of old takes no word");
    assert_eq!((proxy.discovery_address.as_str(), proxy.config_path.as_str()), ("new:15012", "/old"));
    assert_eq!((proxy.status_port, config.settings.text(var::TRUST_DOMAIN)), (15888, "td"));
    assert!(proxy.tracing.is_some());
    assert!(config.warnings.iter().any(|w| w.contains("--connectTimeout")));
}

#[test]
fn each_bad_source_is_named_with_its_fault_and_nothing_of_its_content() {
    let secret = "tracing: {lightstep: {address: 'a:1', accessToken: hunter2}}\n";
    for (text, reason) in [
        ("{", "yaml"),
        ("[1]", "document"),
        ("statusPort: abc", "statusPort: \"abc\" is no int32"),
        ("statusPort: 99999999999", "statusPort"),
        ("concurrency: 1.5", "concurrency"),
        ("controlPlaneAuthPolicy: mutual", "controlPlaneAuthPolicy: unknown value"),
        ("proxyMetadata: {A: 1}", "proxyMetadata.A"),
        ("drainDuration: 45", "drainDuration"),
        ("configPath: ''", "config path must be set"),
        ("a: *b", "anchor"),
    ] {
        // A broken document cannot hold the secret too.
        let both = format!("{secret}{text}");
        let text = if matches!(text, "{" | "[1]") { text } else { &both };
        let root = tempfile::tempdir().unwrap();
        let from_env = start(&[], &Env::of(&[("PROXY_CONFIG", text)]), root.path(), "").unwrap_err();
        let from_annotation = start(&[], &Env::of(&[]), root.path(), text).unwrap_err();
        let file = root.path().join("mesh");
        let indented = text.replace('\n', "\n  ");
        std::fs::write(&file, format!("defaultConfig:\n  {indented}")).unwrap();
        let flag = format!("--meshConfig={}", file.display());
        let from_file = start(&[flag.as_str()], &Env::of(&[]), root.path(), "").unwrap_err();
        for errors in [from_env, from_annotation, from_file] {
            let all = errors.join("\n");
            assert!(all.contains("failed to get proxy config: "), "{all}");
            assert!(all.contains(reason) || all.contains("defaultConfig"), "{reason} in {all}");
            assert!(!all.contains("hunter2"), "{all}");
        }
    }
}

#[test]
fn files_that_cannot_be_read_are_named_and_missing_ones_are_none() {
    let root = tempfile::tempdir().unwrap();
    start(&["--meshConfig=missing"], &Env::of(&[]), root.path(), "").unwrap();
    std::fs::create_dir(root.path().join("folder")).unwrap();
    let errors = start(&["--meshConfig=folder"], &Env::of(&[]), root.path(), "").unwrap_err();
    assert!(errors[0].contains("failed to read mesh config file: folder: "), "{errors:?}");
    // The default file needs no flag, so there may be none to take away.
    assert!(errors[0].contains("or name another file with --meshConfig"), "{errors:?}");
    std::fs::write(root.path().join("latin1"), b"a: \xe9").unwrap();
    let errors = start(&["--meshConfig=latin1"], &Env::of(&[]), root.path(), "").unwrap_err();
    assert!(errors[0].contains("UTF-8"), "{errors:?}");
    std::fs::write(root.path().join("empty"), "").unwrap();
    start(&["--meshConfig=empty"], &Env::of(&[]), root.path(), "").unwrap();
}

#[test]
fn all_problems_are_reported_together_and_once() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("mesh"), "defaultConfig: {drainDuration: 1.5s}\ntrustDomain: a_b\n")
        .unwrap();
    let env =
        Env::of(&[("PROXY_CONFIG", "statusPort: 0\nproxyAdminPort: 70000"), ("ENVOY_STATUS_PORT", "70000")]);
    let errors = start(&["gateway", "--meshConfig=mesh"], &env, root.path(), "concurrency: [1").unwrap_err();
    let all = errors.join("\n");
    for part in [
        "invalid proxy Type: gateway",
        "drainDuration",
        "a_b",
        "statusPort",
        "proxyAdminPort",
        "annotation",
        "ENVOY_STATUS_PORT",
    ] {
        assert_eq!(errors.iter().filter(|e| e.contains(part)).count(), 1, "{part} in {all}");
    }
}

#[test]
fn a_mesh_file_must_be_valid_on_its_own() {
    let root = tempfile::tempdir().unwrap();
    std::fs::write(root.path().join("mesh"), "defaultConfig: {drainDuration: 1.5s}").unwrap();
    let env = Env::of(&[("PROXY_CONFIG", "drainDuration: 2s")]);
    assert!(start(&["--meshConfig=mesh"], &env, root.path(), "").is_err());
}

#[test]
fn concurrency_comes_from_config_then_limit_and_the_flag_beats_both() {
    let of = |pairs: &[(&str, &str)], words: &[&str]| {
        let config = start(words, &Env::of(pairs), Path::new("/nope"), "").unwrap();
        config.mesh.proxy.concurrency.map(|c| c.value)
    };
    assert_eq!(of(&[], &[]), None);
    assert_eq!(of(&[("ISTIO_CPU_LIMIT", "4")], &[]), Some(4));
    assert_eq!(of(&[("ISTIO_CPU_LIMIT", "2.5")], &[]), None);
    assert_eq!(of(&[("ISTIO_CPU_LIMIT", "4"), ("PROXY_CONFIG", "concurrency: 0")], &[]), Some(0));
    assert_eq!(of(&[("PROXY_CONFIG", "concurrency: 2")], &["--concurrency=3"]), Some(3));
}

#[test]
fn a_collector_that_cannot_be_found_is_left_out() {
    let config = with(&[("PROXY_CONFIG", "statsdUdpAddress: 10.1.1.1")]).unwrap();
    assert_eq!(config.mesh.proxy.statsd_udp_address, "");
    assert!(config.warnings.iter().any(|w| w.contains("resolve StatsdUdpAddress failed")));
}

proptest::proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,80}", mesh in "[a-zA-Z:{}\\[\\]\",' \n0-9]{0,80}") {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("mesh"), &mesh).unwrap();
        // No look-up of names from random text.
        if !text.contains("statsd") && !mesh.contains("statsd") {
            let _ = start(&["--meshConfig=mesh"], &Env::of(&[("PROXY_CONFIG", text.as_str())]), root.path(), &text);
        }
    }
}

#[test]
fn a_mesh_file_that_is_no_text_file_is_not_read_whole() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("mesh");
    std::fs::File::create(&file).unwrap().set_len(1 << 40).unwrap();
    let flag = format!("--meshConfig={}", file.display());
    let errors = start(&[flag.as_str()], &Env::of(&[]), root.path(), "").unwrap_err().join("\n");
    assert!(errors.contains("failed to read mesh config file") && errors.contains("larger than"), "{errors}");
}

#[test]
fn sizes_below_zero_and_numbers_in_hexadecimal_are_the_defaults() {
    use super::parts;
    let sizes = |value| {
        let names =
            ["ISTIO_GPRC_MAXRECVMSGSIZE", "ISTIO_GPRC_MAXSTREAMS", "ISTIO_WASM_MAX_BINARY_SIZE_BYTES"];
        // In plain text, which needs no root.
        let plain = ("PROXY_CONFIG", "controlPlaneAuthPolicy: NONE");
        let config = with(&[&names.map(|name| (name, value))[..], &[plain]].concat()).unwrap();
        let way = parts::istiod::upstream(&config, false).unwrap();
        let xds = parts::xds(&config, &way, false);
        (xds.max_request, xds.max_streams, parts::wasm::converter(&config).unwrap().max_size)
    };
    assert_eq!(sizes("-1"), (64 << 20, 100_000, 256 << 20));
    assert_eq!(sizes("7"), (7, 7, 7));
    for odd in ["0x1p-1", "0_1.5", "inf", "NaN"] {
        let config = with(&[("SECRET_GRACE_PERIOD_RATIO", odd)]).unwrap();
        assert!(config.warnings.iter().any(|w| w.contains("SECRET_GRACE_PERIOD_RATIO")), "{odd}");
        assert_eq!(
            config.settings.float(var::SECRET_GRACE_PERIOD_RATIO).to_bits(),
            0.5_f64.to_bits(),
            "{odd}"
        );
    }
}
