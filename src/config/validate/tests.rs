use super::*;

fn problems(document: &str) -> Vec<String> {
    let mut effective = Effective::new();
    effective.overlay(document).unwrap_or_else(|f| panic!("{document}: {f:?}"));
    proxy(&effective).iter().map(ToString::to_string).collect()
}

#[test]
fn the_defaults_are_valid() {
    assert_eq!(problems(""), [""; 0]);
    assert_eq!(problems("tracingServiceName: CANONICAL_NAME_ONLY"), [""; 0]);
    // Of a newer release, kept as a number.
    assert_eq!(problems("tracingServiceName: 9"), [""; 0]);
    assert_eq!(problems("tracing: {zipkin: {address: '$(HOST_IP):9411'}}"), [""; 0]);
    assert_eq!(problems("privateKeyProvider: {qat: {pollDelay: 2ms}}"), [""; 0]);
}

#[test]
fn each_check_has_its_line() {
    for (document, line) in [
        ("configPath: ''", "configPath: config path must be set"),
        ("binaryPath: ''", "binaryPath: binary path must be set"),
        ("serviceCluster: ''", "serviceCluster: service cluster must be specified"),
        ("drainDuration: 0s", "drainDuration: invalid drain duration: duration must be greater than 1ms"),
        ("drainDuration: -1s", "drainDuration: invalid drain duration: duration must be greater than 1ms"),
        ("drainDuration: 1.5s", "drainDuration: drain time only supports durations to seconds precision"),
        (
            "drainDuration: 1000000001ns",
            "drainDuration: invalid drain duration: only durations to ms precision",
        ),
        ("discoveryAddress: ''", "discoveryAddress: discovery address must be set"),
        (
            "discoveryAddress: istiod",
            "discoveryAddress: invalid discovery address: unable to split \"istiod\": address istiod: missing port",
        ),
        ("discoveryAddress: unix:///x", "port (///x) is not a number"),
        ("discoveryAddress: 'a:b'", "port (b) is not a number"),
        ("discoveryAddress: 'a_b:1'", "\"a_b\" is not a valid hostname or an IP address"),
        ("discoveryAddress: '1.2.3.400:1'", "is not a valid hostname"),
        ("discoveryAddress: 'a:0'", "port number 0 must be in the range 1..65535"),
        ("tracing: {zipkin: {}}", "tracing.zipkin.address: invalid zipkin config: unable to split"),
        (
            "tracing: {lightstep: {}}",
            "tracing.lightstep.address: invalid lightstep config: address is required",
        ),
        (
            "tracing: {lightstep: {address: 'a:1'}}",
            "accessToken: invalid lightstep config: access token is required",
        ),
        ("tracing: {datadog: {address: a}}", "invalid datadog config"),
        (
            "tracing: {tlsSettings: {mode: MUTUAL, privateKey: k}}",
            "client certificate required for mutual tls",
        ),
        (
            "tracing: {tlsSettings: {mode: SIMPLE, insecureSkipVerify: true, caCertificates: c}}",
            "insecureSkipVerify",
        ),
        ("tracing: {tlsSettings: {credentialName: 'configmap://x'}}", "credentialName"),
        ("statsdUdpAddress: x", "statsdUdpAddress: invalid statsd udp address \"x\""),
        ("envoyMetricsServiceAddress: x", "invalid envoy metrics service address \"x\""),
        ("envoyMetricsService: {address: x}", "envoyMetricsService.address: invalid envoy metrics service"),
        ("envoyAccessLogService: {address: x}", "invalid envoy access log service address"),
        ("proxyAdminPort: 0", "proxyAdminPort: invalid proxy admin port: port number 0"),
        ("statusPort: -1", "statusPort: invalid status port: port number -1"),
        ("statusPort: 65536", "statusPort: invalid status port: port number 65536"),
        ("controlPlaneAuthPolicy: INHERIT", "unrecognized control plane auth policy \"INHERIT\""),
        ("controlPlaneAuthPolicy: 7", "unrecognized control plane auth policy \"7\""),
        ("privateKeyProvider: {}", "private key provider configuration is required"),
        ("privateKeyProvider: {cryptomb: {}}", "pollDelay is required"),
        ("privateKeyProvider: {cryptomb: {pollDelay: 0s}}", "pollDelay must be non zero"),
    ] {
        let got = problems(document);
        assert!(got.iter().any(|g| g.contains(line)), "{document}: {got:#?}");
    }
    assert_eq!(problems("statusPort: 0\nproxyAdminPort: 0\nconfigPath: ''").len(), 3);
}

#[test]
fn addresses_are_split_as_go_splits_them() {
    for good in [
        "a:1",
        "[::1]:80",
        "istiod.test.:15012",
        "10.0.0.1:65535",
        "a-b.c:1",
        "10.0.0.1.:1",
        "[fe80::1%eth0]:1",
        "99999999999999999999:1",
    ] {
        assert_eq!(address(good), Ok(()), "{good}");
    }
    for bad in [
        "",
        "a",
        ":1",
        "::1:80",
        "[::1]",
        "[::1]80",
        "[::1",
        "a:",
        "a:1:2",
        "-a:1",
        "a..b:1",
        "a:+",
        "[[a]:1",
        "[fe80::1%]:1",
        "[10.0.0.1%eth0]:1",
        "a.5:1",
        ".:1",
    ] {
        assert!(address(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_mesh_file_is_judged_as_a_whole() {
    let judge = |text: &str| {
        let document = Effective::new().overlay_mesh(text).unwrap();
        mesh(&document).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    for good in [
        "trustDomain: cluster.local\nconnectTimeout: 10s\nproxyListenPort: 15001",
        "trustDomain: cluster.local.",
        "protocolDetectionTimeout: -5s",
        "serviceSettings: [{hosts: ['*', '*.a', '*-a.b', web., a.b.c.]}]",
        "localityLbSetting: {distribute: [{from: a, to: {b/c: 50, b/d: 50}}], failoverPriority: [x]}",
        "localityLbSetting: {failover: [{from: a, to: b}], failoverPriority: [x]}",
        "zoneAwareLbSetting: {enabled: true, failover: [{from: a, to: b}], failoverPriority: [x]}",
        "defaultTrafficPolicy: {connectionPool: {tcp: {idleTimeout: 0s, tcpKeepalive: {time: 1s}}, http: {h2UpgradePolicy: UPGRADE}}}",
        "defaultTrafficPolicy: {outlierDetection: {consecutiveLocalOriginFailures: 1, splitExternalLocalOriginErrors: true}}",
    ] {
        assert_eq!(judge(good), [""; 0], "{good}");
    }
    for (text, line) in [
        ("proxyListenPort: 0", "invalid proxy listen port"),
        ("connectTimeout: 2h", "invalid connect timeout"),
        ("connectTimeout: 0s", "invalid connect timeout"),
        ("protocolDetectionTimeout: 1us", "ms precision"),
        ("connectTimeout: 1000500us", "invalid connect timeout: only durations to ms precision"),
        ("trustDomain: a_b", "invalid trust domain \"a_b\""),
        ("trustDomain: ''", "invalid trust domain \"\""),
        ("trustDomainAliases: [ok, -x]", "invalid trust domain \"-x\""),
        ("meshMTLS: {ecdhCurves: [P-256]}", "does not support ECDH curves"),
        ("serviceSettings: [{hosts: ['a..b']}]", "invalid host \"a..b\""),
        ("serviceSettings: [{hosts: [a.5]}]", "invalid host \"a.5\""),
        ("serviceSettings: [{hosts: ['a.*.b']}]", "invalid host \"a.*.b\""),
        ("localityLbSetting: {distribute: [{from: a, to: {b: 50}}]}", "total locality weight 50 != 100"),
        ("localityLbSetting: {distribute: [{from: a, to: {b: 0, c: 100}}]}", "must be in range [1, 100]"),
        (
            "localityLbSetting: {distribute: [{from: a/b}], failover: [{from: a, to: b}]}",
            "simultaneously specify",
        ),
        (
            "localityLbSetting: {failover: [{from: a, to: b}], failoverPriority: [topology.kubernetes.io/zone]}",
            "topology label 'topology.kubernetes.io/zone'",
        ),
        ("localityLbSetting: {distribute: [{from: a, to: {b: 50, b/c: 50}}]}", "locality b/c overlap"),
        ("localityLbSetting: {distribute: [{from: a//b, to: {b: 100}}]}", "must not contain empty"),
        ("localityLbSetting: {distribute: [{from: 'a/*/b', to: {b: 100}}]}", "must be in the end"),
        ("localityLbSetting: {failover: [{from: a/b, to: c}]}", "only specify region"),
        ("localityLbSetting: {failover: [{from: '*', to: c}]}", "should not contain '*'"),
        ("localityLbSetting: {failover: [{from: a, to: a}]}", "different regions"),
        ("zoneAwareLbSetting: {failover: [{from: a, to: a}]}", "zone aware lb failover settings"),
        (
            "zoneAwareLbSetting: {failoverPriority: [topology.kubernetes.io/zone]}",
            "must not use topology label 'topology.kubernetes.io/zone'",
        ),
        ("defaultTrafficPolicy: {connectionPool: {}}", "at least one field"),
        (
            "defaultTrafficPolicy: {connectionPool: {http: {maxRetries: -1}}}",
            "http.maxRetries: must be non-negative",
        ),
        ("defaultTrafficPolicy: {connectionPool: {http: {idleTimeout: 0s}}}", "greater than 1ms"),
        (
            "defaultTrafficPolicy: {connectionPool: {http: {h2UpgradePolicy: UPGRADE, useClientProtocol: true}}}",
            "use client protocol",
        ),
        ("defaultTrafficPolicy: {connectionPool: {tcp: {idleTimeout: 1500us}}}", "ms precision"),
        (
            "defaultTrafficPolicy: {connectionPool: {tcp: {tcpKeepalive: {interval: -1s}}}}",
            "greater than 1ms",
        ),
        ("defaultTrafficPolicy: {outlierDetection: {consecutiveLocalOriginFailures: 1}}", "is set to false"),
        ("defaultTrafficPolicy: {outlierDetection: {minHealthPercent: 101}}", "not in range 0..100"),
    ] {
        let got = judge(text);
        assert!(got.iter().any(|g| g.contains(line)), "{text}: {got:#?}");
    }
}
