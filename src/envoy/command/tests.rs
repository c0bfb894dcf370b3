use super::*;

fn line(options: &Options, epoch: Option<&Epoch<'_>>) -> String {
    let args = arguments(Path::new("test.json"), options, epoch);
    args.iter().map(|a| a.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_defaults() {
    assert_eq!(
        line(&Options::default(), None),
        "-c test.json --drain-time-s 45 --drain-strategy immediate --local-address-ip-version v4 \
         --file-flush-interval-msec 1000 --disable-hot-restart --allow-unknown-static-fields \
         -l warning --skip-deprecated-logs"
    );
}

#[test]
fn everything_at_once_in_order() {
    let options = Options {
        drain_seconds: 7,
        ip_version: IpVersion::V6,
        file_flush_milliseconds: Some(250),
        file_flush_min_size_kb: 64,
        log: LogLevels { base: "trace".into(), components: "misc:error".into() },
        skip_deprecated_logs: true,
        core_dump: true,
        override_json: Some(r#"{"key":"value"}"#.into()),
        concurrency: 8,
    };
    assert_eq!(
        line(&options, None),
        "-c test.json --drain-time-s 7 --drain-strategy immediate --local-address-ip-version v6 \
         --file-flush-interval-msec 250 --disable-hot-restart --allow-unknown-static-fields \
         --file-flush-min-size-kb 64 -l trace --component-log-level misc:error --skip-deprecated-logs \
         --enable-core-dump --config-yaml {\"key\":\"value\"} --concurrency 8"
    );
}

#[test]
fn an_epoch_takes_the_place_of_the_switch_off() {
    let first = Epoch {
        number: 0,
        base_id: None,
        base_id_path: Path::new("id"),
        parent_shutdown_seconds: 60,
        alone: false,
    };
    let text = line(&Options::default(), Some(&first));
    assert!(
        text.contains(
            " --restart-epoch 0 --parent-shutdown-time-s 60 --use-dynamic-base-id --base-id-path id "
        )
    );
    assert!(!text.contains("--disable-hot-restart"));
    let second = Epoch { number: 1, base_id: Some(42), ..first };
    let text = line(&Options::default(), Some(&second));
    assert!(text.contains(" --restart-epoch 1 --parent-shutdown-time-s 60 --base-id 42 "));
    assert!(!text.contains("dynamic"));
}

#[test]
fn log_levels_are_split() {
    for (levels, component_flag, base, components, wrong) in [
        ("info", "", "info", "", 0),
        ("info,warn", "", "warn", "", 0),
        ("err", "", "error", "", 0),
        ("misc:warn,info,upstream:debug", "x:y", "info", "misc:warn,upstream:debug", 0),
        ("misc:warn", "", "", "misc:warn", 0),
        ("info,", "", "", "", 0),
        ("", "misc:error", "", "misc:error", 0),
        ("warning", "misc:error", "warning", "misc:error", 0),
        ("a:b:c,info", "misc:error", "info", "misc:error", 1),
    ] {
        let (got, dropped) = LogLevels::parse(levels, component_flag);
        assert_eq!(
            (got.base.as_str(), got.components.as_str(), dropped.len()),
            (base, components, wrong),
            "{levels}"
        );
    }
}

#[test]
fn addresses_choose_the_family() {
    assert_eq!(IpVersion::of(&[] as &[&str]), IpVersion::V6);
    assert_eq!(IpVersion::of(&["fd00::1"]), IpVersion::V6);
    assert_eq!(IpVersion::of(&["no address"]), IpVersion::V6);
    assert_eq!(IpVersion::of(&["fd00::1", "10.0.0.1"]), IpVersion::V4);
    assert_eq!(IpVersion::of(&["::ffff:10.0.0.1", "fd00::1"]), IpVersion::V6, "in notation, as everywhere");
    assert_eq!(IpVersion::of(&["::ffff:10.0.0.1", "10.0.0.1"]), IpVersion::V4);
}

#[test]
fn the_override_is_compact_sorted_json() {
    let json = |text: &str| override_value(&serde_json::from_str(text).unwrap());
    assert_eq!(json(r#"{"key": "value"}"#).unwrap(), r#"{"key":"value"}"#);
    assert_eq!(
        json(r#"{"b": 1, "a": ["x", 2.5, null, true], "c": {"z": 0, "y": 1}}"#).unwrap(),
        r#"{"a":["x",2.5,null,true],"b":1,"c":{"y":1,"z":0}}"#
    );
    assert_eq!(json(r#"{"a": "<b>&c"}"#).unwrap(), "{\"a\":\"\\u003cb\\u003e\\u0026c\"}");
    assert_eq!(json("null"), None, "an empty override is none");
    for (number, shown) in [
        ("1e19", "10000000000000000000"),
        ("1.5e20", "150000000000000000000"),
        ("1e21", "1e+21"),
        ("-2.5e300", "-2.5e+300"),
        ("0.000001", "0.000001"),
        ("1.5e-7", "1.5e-7"),
        ("18446744073709551615", "18446744073709551615"),
    ] {
        assert_eq!(json(number).unwrap(), shown);
    }
}

#[test]
fn the_hosts_address_is_put_in() {
    assert_eq!(override_text("a: $(HOST_IP):80", "10.0.0.1"), "a: 10.0.0.1:80");
    assert_eq!(override_text("a: '$(HOST_IP):80'", "fd00::1"), "a: '[fd00::1]:80'");
    assert_eq!(override_text("a: '[$(HOST_IP)]:80'", "fd00::1"), "a: '[fd00::1]:80'");
    assert_eq!(override_text("a: 'x$(HOST_IP)'", ""), "a: 'x'");
}
