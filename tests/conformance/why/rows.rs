//! The faults that are met most: token, way to istiod, CA, stream of configuration, start.

use std::time::Duration;

use mock_istiod::jwt::Expiry;

use super::judge::{Life, Row, ends, row, unseen};
use crate::support::agent::{Builder, ROOT, TOKEN};
use crate::support::{Code, Fault, MockIstiod, Token, free_port};

pub(super) fn token(builder: Builder, change: impl FnOnce(Token) -> Token) -> Builder {
    builder.file_mode(TOKEN, change(Token::of("ns", "sa")).sign(), 0o600)
}

pub(super) fn ca(builder: Builder, mock: &MockIstiod, fault: Fault) -> Builder {
    mock.ca().always(vec![fault]);
    builder.env("CA_ATTEMPT_TIMEOUT", "2s").env("CA_TIMEOUT", "4s")
}

pub(super) fn ads(builder: Builder, mock: &MockIstiod, fault: Fault) -> Builder {
    mock.ads().always(vec![fault]);
    builder
}

pub(super) const ROWS: &[Row] = &[
    row("token missing", &["TokenMissing"], &["token"], |b, _| b.without_file(TOKEN)),
    row("token empty", &["TokenMalformed"], &["token"], |b, _| b.file(TOKEN, " \n")),
    row(
        "token is junk",
        &["TokenMalformed", "CertificateRefused", "AdsRefused"],
        &["token", "UNAUTHENTICATED"],
        |b, _| b.file(TOKEN, "junk"),
    ),
    row("token in quotes", &["TokenMalformed"], &["no JSON Web Token"], |b, _| {
        b.file(TOKEN, format!("\"{}\"", Token::of("ns", "sa").sign()))
    }),
    row("token in two lines", &["TokenMalformed"], &["line breaks"], |b, _| {
        let token = Token::of("ns", "sa").sign();
        let (one, two) = token.split_at(40);
        b.file(TOKEN, format!("{one}\n{two}"))
    }),
    row("token is no text", &["TokenMalformed"], &["not text"], |b, _| b.file(TOKEN, vec![0xff; 64])),
    row("token expired", &["TokenExpired"], &["expired"], |b, _| {
        token(b, |t| Token { expires: Expiry::Ago(Duration::from_secs(60)), ..t })
    }),
    row("token for another audience", &["TokenWrongAudience"], &["audience"], |b, _| {
        token(b, |t| Token { audience: "elsewhere".into(), ..t })
    }),
    row("token of another issuer", &["CertificateRefused", "AdsRefused"], &["UNAUTHENTICATED"], |b, _| {
        token(b, |t| Token { issuer: "https://elsewhere".into(), ..t })
    }),
    row("name not resolved", &["NameNotResolved"], &["name"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod.invalid:15012")
    }),
    row("port closed", &["ConnectionRefused"], &["refused"], |b, _| {
        b.proxy_config("discoveryAddress", format!("localhost:{}", free_port()))
    }),
    row(
        "silent server",
        &["IstiodSilent", "CertificateNotAnswered"],
        &["no answer", "says nothing"],
        |b, mock| {
            mock.connections().always(vec![Fault::HalfOpen]);
            b.env("CA_ATTEMPT_TIMEOUT", "2s").env("CA_TIMEOUT", "4s")
        },
    ),
    row("another root", &["RootDoesNotSign"], &["root"], |b, _| {
        b.file(ROOT, mock_istiod::Authority::new("cluster.local", 0).root_pem())
    }),
    row(
        "clock behind",
        &["ClockWrong", "ServerCertificateNotYetValid"],
        &["clock", "not valid yet"],
        |b, _| b.clock_off_by(-10 * 86_400),
    ),
    row(
        "clock ahead",
        &["ClockWrong", "TokenExpired", "ServerCertificateExpired"],
        &["expired", "clock"],
        |b, _| b.clock_off_by(20 * 86_400),
    ),
    row("another name", &["ServerNameMismatch"], &["name"], |b, _| {
        b.env("ISTIOD_SAN", "istiod.elsewhere.svc")
    }),
    row("no HTTP proxy", &["ProxyRefused"], &["HTTPS_PROXY"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod.example.com:15012")
            .env("HTTPS_PROXY", format!("http://127.0.0.1:{}", free_port()))
    }),
    row("CA: not authenticated", &["CertificateRefused"], &["UNAUTHENTICATED"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unauthenticated))
    }),
    row("CA: not allowed", &["CertificateRefused"], &["PERMISSION_DENIED"], |b, m| {
        ca(b, m, Fault::refuse(Code::PermissionDenied))
    }),
    row("CA: bad request", &["CertificateRefused"], &["INVALID_ARGUMENT"], |b, m| {
        ca(b, m, Fault::refuse(Code::InvalidArgument))
    }),
    row("CA: not there", &["CertificateRefused"], &["UNIMPLEMENTED"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unimplemented))
    }),
    row("CA: unavailable", &["CertificateRefused", "CertificateNotAnswered"], &["UNAVAILABLE"], |b, m| {
        ca(b, m, Fault::refuse(Code::Unavailable))
    }),
    row(
        "CA: too busy",
        &["CertificateRefused", "CertificateNotAnswered"],
        &["RESOURCE_EXHAUSTED"],
        |b, m| ca(b, m, Fault::exhausted()),
    ),
    row("CA: breaks the connection", &["CertificateNotAnswered"], &["connection broke"], |b, m| {
        ca(b, m, Fault::Drop)
    }),
    row("CA: silent", &["CertificateNotAnswered"], &["no answer", "not answer"], |b, m| {
        ca(b, m, Fault::HalfOpen)
    }),
    row("CA: garbage", &["CertificateUnusable"], &["certificate"], |b, m| {
        ca(b, m, Fault::Chain(vec!["junk".to_owned(), "more junk".to_owned()]))
    }),
    row("CA: no root", &["CertificateUnusable"], &["certificate", "CertChain"], |b, m| {
        ca(b, m, Fault::OneCertificate)
    }),
    row("CA: empty chain", &["CertificateUnusable"], &["certificate", "CertChain"], |b, m| {
        ca(b, m, Fault::EmptyChain)
    }),
    row("CA: too much", &["CertificateUnusable"], &["more than 4096 entries"], |b, m| {
        ca(b, m, Fault::Chain(vec!["junk".to_owned(); 5000]))
    }),
    row("CA: for another key", &["CertificateUnusable"], &["key"], |b, m| ca(b, m, Fault::WrongKey)),
    row("CA: in the wrong order", &["CertificateUnusable"], &["order"], |b, m| ca(b, m, Fault::WrongOrder)),
    row("CA: expired already", &["CertificateUnusable", "ClockWrong"], &["expired"], |b, m| {
        ca(b, m, Fault::Expired(Duration::from_secs(60)))
    }),
    row("ADS: not authenticated", &["AdsRefused"], &["UNAUTHENTICATED"], |b, m| {
        ads(b, m, Fault::refuse(Code::Unauthenticated))
    }),
    row("ADS: not allowed", &["AdsRefused"], &["PERMISSION_DENIED"], |b, m| {
        ads(b, m, Fault::refuse(Code::PermissionDenied))
    }),
    row("ADS: unavailable", &["AdsRefused", "IstiodCloses"], &["UNAVAILABLE", "unavailable"], |b, m| {
        ads(b, m, Fault::refuse(Code::Unavailable))
    }),
    row("ADS: internal error", &["AdsRefused", "IstiodCloses"], &["INTERNAL"], |b, m| {
        ads(b, m, Fault::refuse(Code::Internal))
    }),
    unseen(row("no configuration", &["NoConfig", "NoListeners"], &["config"], |b, _| b)),
    unseen(row(
        "name table missing",
        &["NoConfig", "NameTableMissing", "NoListeners"],
        &["config", "DNS"],
        |b, _| {
            b.env("ISTIO_META_DNS_CAPTURE", "true")
                .env("DNS_PROXY_ADDR", format!("localhost:{}", free_port()))
        },
    )),
    Row {
        name: "OUTPUT_CERTS is no folder",
        life: Life::Ready,
        kinds: &["OutputCertsFailed"],
        words: &["OUTPUT_CERTS", "nowhere"],
        make: |b, _| b.env("OUTPUT_CERTS", "nowhere").fake("ready", true),
        unseen: false,
    },
    ends("root missing", &["RootMissing"], &["root"], |b, _| b.without_file(ROOT)),
    ends("root is a folder", &["RootMissing"], &["a folder is in the file's place"], |b, _| {
        b.without_file(ROOT).file(&format!("{ROOT}/x"), "")
    }),
    ends("root broken", &["RootBroken"], &["root"], |b, _| b.file(ROOT, "no certificate")),
    ends("Envoy is not there", &["EnvoyNotStarted"], &["/no/envoy"], |b, _| {
        b.proxy_config("binaryPath", "/no/envoy")
    }),
    unseen(ends("Envoy ends by itself", &["EnvoyCrashed"], &["nvoy"], |b, _| {
        b.fake("exit", serde_json::json!({"after": 0.2, "status": 3}))
    })),
    ends("configuration refused", &["ConfigInvalid"], &["drainDuration"], |b, _| {
        b.proxy_config("drainDuration", "45")
    }),
    ends("unknown node type", &["ConfigInvalid"], &["gateway"], |b, _| b.args(&["proxy", "gateway"])),
    ends("address without a port", &["ConfigInvalid", "AddressInvalid"], &["discovery address"], |b, _| {
        b.proxy_config("discoveryAddress", "istiod")
    }),
];
