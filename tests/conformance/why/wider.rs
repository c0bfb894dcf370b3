//! More of them: what stands between, what answers oddly, files, ports, Envoy itself.

use std::time::{Duration, SystemTime};

use mock_istiod::Leaf;
use serde_json::json;

use super::judge::{Row, ends, row, unseen};
use super::rows::{ads, ca, token};
use super::servers;
use crate::support::agent::{Builder, Envoy, ROOT, TOKEN};
use crate::support::{Code, Fault, MockIstiod, Token, free_port};

const HOUR: Duration = Duration::from_secs(3600);

fn at(builder: Builder, port: u16) -> Builder {
    builder.proxy_config("discoveryAddress", format!("localhost:{port}"))
}

fn through(builder: Builder, proxy: u16) -> Builder {
    builder
        .proxy_config("discoveryAddress", "istiod.example.com:15012")
        .env("HTTPS_PROXY", format!("http://127.0.0.1:{proxy}"))
}

/// What Envoy says of itself, for good istiods.
fn envoy_says(builder: Builder, cds: u8, lds: u8, rejected: u8, state: u8, workers: u8) -> Builder {
    builder.fake(
        "stats",
        format!(
            "cluster_manager.cds.update_success: {cds}\ncluster_manager.cds.update_rejected: 0\n\
             listener_manager.lds.update_success: {lds}\nlistener_manager.lds.update_rejected: {rejected}\n\
             server.state: {state}\nlistener_manager.workers_started: {workers}\n"
        ),
    )
}

/// Files in place of a CA: chain and key as they are given.
fn mounted(builder: Builder, mock: &MockIstiod, chain: String, key: String) -> Builder {
    builder
        .env("FILE_MOUNTED_CERTS", "true")
        .file("etc/certs/cert-chain.pem", chain)
        .file_mode("etc/certs/key.pem", key, 0o600)
        .file("etc/certs/root-cert.pem", mock.root_pem())
}

const REFUSED: &[&str] = &["AdsRefused"];
const INVALID: &[&str] = &["ConfigInvalid"];
const FILES: &[&str] = &["CertificateFiles"];
const TAKEN: &[&str] = &["PortTaken"];

pub(super) const ROWS: &[Row] = &[
    // Between here and istiod.
    row("plain text where TLS is meant", &["TlsFailed"], &["plain text"], |b, _| {
        at(b, servers::greeting(b"\0\0\0\x04\0\0\0\0\0"))
    }),
    row("something else at the port", &["TlsFailed"], &["TLS"], |b, _| {
        at(b, servers::greeting(b"SSH-2.0-OpenSSH_9.6\r\n"))
    }),
    row("hung up on at once", &["TlsFailed", "ConnectionFailed"], &["TLS", "closed", "reset"], |b, _| {
        at(b, servers::greeting(b""))
    }),
    row("an HTTP proxy that forbids", &["ProxyRefused"], &["403"], |b, _| {
        through(b, servers::greeting(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"))
    }),
    row("an HTTP proxy that wants a password", &["ProxyRefused"], &["407"], |b, _| {
        through(
            b,
            servers::greeting(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"),
        )
    }),
    row("a server certificate that has expired", &["ServerCertificateExpired"], &["expired"], |b, mock| {
        let now = SystemTime::now();
        mock.serve_within(now - 48 * HOUR..now - HOUR);
        b
    }),
    row(
        "a server certificate of tomorrow",
        &["ServerCertificateNotYetValid", "ClockWrong"],
        &["not valid yet"],
        |b, mock| {
            let now = SystemTime::now();
            mock.serve_within(now + 24 * HOUR..now + 48 * HOUR);
            b
        },
    ),
    row("a name that istiod does not have", &["ServerNameMismatch"], &["name"], |b, mock| {
        b.proxy_config("discoveryAddress", format!("127.0.0.1:{}", mock.address().port()))
    }),
    // The CA.
    row("CA elsewhere: port closed", &["ConnectionRefused"], &["refused"], |b, _| {
        b.env("CA_ADDR", format!("localhost:{}", free_port()))
    }),
    row("CA elsewhere: no such name", &["NameNotResolved"], &["name"], |b, _| {
        b.env("CA_ADDR", "ca.invalid:15012")
    }),
    row("CA: too slow", &["CertificateNotAnswered"], &["no answer", "not answer"], |b, m| {
        ca(b, m, Fault::Delay(HOUR))
    }),
    row("CA: cannot now", &["CertificateRefused"], &["FAILED_PRECONDITION"], |b, m| {
        ca(b, m, Fault::refuse(Code::FailedPrecondition))
    }),
    row("CA: broken inside", &["CertificateRefused"], &["INTERNAL"], |b, m| {
        ca(b, m, Fault::refuse(Code::Internal))
    }),
    // The stream of configuration.
    unseen(row("ADS: silent", &["IstiodSilent"], &["sends nothing", "no ping", "answers no"], |b, m| {
        ads(b, m, Fault::HalfOpen)
    })),
    row("ADS: too busy", REFUSED, &["RESOURCE_EXHAUSTED"], |b, m| ads(b, m, Fault::exhausted())),
    row("ADS: bad request", REFUSED, &["INVALID_ARGUMENT"], |b, m| {
        ads(b, m, Fault::refuse(Code::InvalidArgument))
    }),
    row("ADS: not there", REFUSED, &["UNIMPLEMENTED"], |b, m| ads(b, m, Fault::refuse(Code::Unimplemented))),
    row("ADS: no such thing", REFUSED, &["NOT_FOUND"], |b, m| ads(b, m, Fault::refuse(Code::NotFound))),
    // The token.
    row("token is a folder", &["TokenUnreadable"], &["a folder is in the file's place"], |b, _| {
        b.without_file(TOKEN).file(&format!("{TOKEN}/data"), "")
    }),
    row(
        "token of somebody who is no account",
        &["CertificateRefused", "AdsRefused"],
        &["UNAUTHENTICATED"],
        |b, _| token(b, |t| Token { subject: "system:node:n".into(), ..t }),
    ),
    row(
        "token with a forged signature",
        &["CertificateRefused", "AdsRefused"],
        &["UNAUTHENTICATED"],
        |b, m| {
            let mut text = m.mint("ns", "sa");
            text.replace_range(text.len() - 20.., &"A".repeat(20));
            b.file_mode(TOKEN, text, 0o600)
        },
    ),
    // Certificates of one's own.
    row("mounted: key of another certificate", FILES, &["key"], |b, m| {
        let pair = || m.issue(&m.identity("ns", "sa"), HOUR);
        mounted(b, m, pair().chain, pair().key)
    }),
    row("mounted: expired", FILES, &["has to renew it"], |b, m| {
        let leaf = Leaf::workload(m.identity("ns", "sa"), HOUR);
        let pair =
            m.authority().pair(&Leaf { not_after: SystemTime::now() - Duration::from_secs(60), ..leaf });
        mounted(b, m, pair.chain, pair.key)
    }),
    row("mounted: no certificate", FILES, &["certificate"], |b, m| {
        let pair = m.issue(&m.identity("ns", "sa"), HOUR);
        mounted(b, m, "junk".to_owned(), pair.key)
    }),
    row("mounted: nothing there", FILES, &["cert-chain.pem"], |b, m| {
        b.env("FILE_MOUNTED_CERTS", "true").file("etc/certs/root-cert.pem", m.root_pem())
    }),
    row("provided: key of another certificate", FILES, &["key"], |b, m| {
        let pair = || m.issue(&m.identity("ns", "sa"), HOUR);
        mounted(b, m, pair().chain, pair().key)
            .without_env("FILE_MOUNTED_CERTS")
            .env("PROV_CERT", "etc/certs")
    }),
    // Envoy.
    unseen(row("clusters and no listeners", &["NoListeners"], &["not fully received"], |b, _| {
        envoy_says(b, 1, 0, 0, 2, 0)
    })),
    unseen(row("listeners rejected", &["ConfigRejected"], &["rejected"], |b, _| {
        envoy_says(b, 1, 0, 3, 2, 0)
    })),
    unseen(row("Envoy initialises", &["EnvoyNotInitialised"], &["INITIALIZING"], |b, _| {
        envoy_says(b, 1, 1, 0, 3, 0)
    })),
    unseen(row("workers not started", &["EnvoyNotInitialised"], &["workers"], |b, _| {
        envoy_says(b, 1, 1, 0, 0, 0)
    })),
    unseen(row("Envoy drains", &["EnvoyNotInitialised"], &["DRAINING"], |b, _| envoy_says(b, 1, 1, 0, 1, 1))),
    unseen(row("Envoy's admin port hangs", &["EnvoyAdminSilent"], &["admin"], |b, _| {
        b.fake("hang", json!(["/stats"]))
    })),
    ends("Envoy may not be executed", &["EnvoyNotStarted"], &["make it executable"], |b, _| {
        b.file("binary", "#!/bin/sh\n").proxy_config("binaryPath", "./binary")
    }),
    ends("Envoy is no program", &["EnvoyNotStarted"], &["binary"], |b, _| {
        b.file_mode("binary", "text", 0o755).proxy_config("binaryPath", "./binary")
    }),
    ends("Envoy is a folder", &["EnvoyNotStarted"], &["names a folder"], |b, _| {
        b.file("binary/x", "").proxy_config("binaryPath", "./binary")
    }),
    ends("Envoy's admin port is taken", TAKEN, &["held by"], |b, _| {
        servers::hold(b.ports().admin);
        b
    }),
    ends("a listener's port is taken", TAKEN, &["held by"], |b, _| {
        servers::hold(b.ports().envoy_status);
        b.envoy(Envoy::Real)
    }),
    ends("Envoy refuses its bootstrap", &["BootstrapRejected"], &["soon"], |b, _| {
        b.file(
            "template.json",
            r#"{"static_resources": {"clusters": [{"name": "x", "connect_timeout": "soon"}]}}"#,
        )
        .proxy_config("proxyBootstrapTemplatePath", "template.json")
        .envoy(Envoy::Real)
    }),
    ends(
        "customConfigFile is not there",
        &["BootstrapRejected", "ConfigInvalid"],
        &["custom.json"],
        |b, _| b.proxy_config("customConfigFile", "custom.json").envoy(Envoy::Real),
    ),
    // Files, folders, ports of the agent.
    ends("configPath is a file", &["SocketFolder"], &["etc/istio/proxy"], |b, _| {
        b.file("etc/istio/proxy", "")
    }),
    ends("a socket's path is too long", &["SocketFolder"], &["XDS"], |b, _| {
        b.proxy_config("configPath", format!("./{}", "x".repeat(120)))
    }),
    ends("the DNS server's port is taken", TAKEN, &["DNS"], |b, _| {
        let port = free_port();
        servers::hold(port);
        b.env("ISTIO_META_DNS_CAPTURE", "true").env("DNS_PROXY_ADDR", format!("127.0.0.1:{port}"))
    }),
    ends("XDS_ROOT_CA is not there", &["RootMissing"], &["no-root.pem"], |b, _| {
        b.env("XDS_ROOT_CA", "no-root.pem")
    }),
    ends("PROV_CERT without a root", &["RootMissing"], &["root"], |b, _| b.env("PROV_CERT", "etc/none")),
    ends("no provider of roots", &["RootMissing"], &["PILOT_CERT_PROVIDER"], |b, _| {
        b.without_file(ROOT).env("PILOT_CERT_PROVIDER", "none")
    }),
    // Values.
    ends("PROXY_CONFIG is no YAML", INVALID, &["proxy config"], |b, _| {
        b.env("PROXY_CONFIG", "{concurrency: [")
    }),
    ends("a mesh file that does not read", INVALID, &["etc/istio/config/mesh"], |b, _| {
        b.file("etc/istio/config/mesh", "defaultConfig: [")
    }),
    ends("no such CA", INVALID, &["CA_PROVIDER", "provider"], |b, _| b.env("CA_PROVIDER", "Nobody")),
    ends("no such fetcher of tokens", INVALID, &["CREDENTIAL_FETCHER_TYPE"], |b, _| {
        b.env("CREDENTIAL_FETCHER_TYPE", "Nobody")
    }),
    ends("probes that do not read", INVALID, &["ISTIO_KUBE_APP_PROBERS", "prober"], |b, _| {
        b.env("ISTIO_KUBE_APP_PROBERS", "{")
    }),
    ends("a policy that is unknown", INVALID, &["COMPLIANCE_POLICY"], |b, _| {
        b.env("COMPLIANCE_POLICY", "fips")
    }),
    ends("a template that is not there", INVALID, &["no-template"], |b, _| {
        b.proxy_config("proxyBootstrapTemplatePath", "/no-template.json")
    }),
    ends("certificates from two places", INVALID, &["PROV_CERT"], |b, m| {
        let pair = m.issue(&m.identity("ns", "sa"), HOUR);
        mounted(b, m, pair.chain, pair.key).env("PROV_CERT", "etc/certs")
    }),
];
