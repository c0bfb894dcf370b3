//! Whole conversions against a web server that plays module servers and registries.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use futures_util::future::BoxFuture;
use prost::Message;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use super::receive::tests::gzip;
use super::tar::tests::archive;
use super::*;
use crate::base::eventually::eventually;
use crate::base::sha256;
use crate::fetch::fake::Web as Server;

const ONE: &[u8] = b"\0asm\x01\0\0\0one";
const TWO: &[u8] = b"\0asm\x01\0\0\0two";

struct Rig {
    converter: Converter,
    metrics: Metrics,
    dir: tempfile::TempDir,
}

fn rig(change: impl FnOnce(&mut Config)) -> Rig {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config {
        dir: dir.path().to_owned(),
        expiry: Duration::from_secs(3600),
        purge_interval: Duration::from_secs(3600),
        http_timeout: Duration::from_secs(15),
        http_attempts: 5,
        insecure: Vec::new(),
        max_size: 1 << 20,
        credentials: Vec::new(),
        proxies: Proxies::default(),
    };
    change(&mut config);
    let metrics = Metrics::new();
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Rig { converter: Converter::new(config, crypto, &metrics), metrics, dir }
}

fn wanted(url: &str) -> Wanted {
    Wanted {
        resource: "f1".to_owned(),
        url: Some(url.to_owned()),
        checksum: String::new(),
        timeout: Duration::from_secs(20),
        secret: Secret::None,
        policy: Policy::Unspecified,
        version: "1".to_owned(),
    }
}

impl Rig {
    async fn get(&self, wanted: &Wanted) -> Result<PathBuf, String> {
        self.converter.module(wanted).await.map_err(|failure| failure.to_string())
    }

    fn metric(&self, line: &str) -> bool {
        let text =
            prometheus::TextEncoder::new().encode_to_string(&self.metrics.registry().gather()).unwrap();
        text.lines().any(|l| l == line)
    }
}

fn answer(status: u16, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
    [head.as_bytes(), body].concat()
}

fn path(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}

#[tokio::test]
async fn policies_over_http() {
    let server = Server::start(|head| answer(200, "", if path(head) == "/two" { TWO } else { ONE })).await;
    let rig = rig(|_| {});
    let at = |path: &str| wanted(&format!("http://{}{path}", server.addr));
    let count = || server.heads().len();
    let first = rig.get(&at("/one")).await.unwrap();
    assert_eq!(std::fs::read(&first).unwrap(), ONE);
    let newer = Wanted { version: "2".to_owned(), ..at("/one") };
    let always = |wanted: &Wanted| Wanted { policy: Policy::Always, ..wanted.clone() };
    assert_eq!(rig.get(&Wanted { policy: Policy::IfNotPresent, ..newer.clone() }).await.unwrap(), first);
    assert_eq!(rig.get(&always(&newer)).await.unwrap(), first);
    assert_eq!(count(), 1, "there, and of the version that asked last");
    let newest = Wanted { version: "3".to_owned(), ..newer };
    assert_eq!(rig.get(&always(&newest)).await.unwrap(), first, "the same bytes");
    assert_eq!(count(), 2, "but looked at again");
    assert_ne!(rig.get(&at("/two")).await.unwrap(), first);
    assert_eq!(count(), 3);
    assert!(rig.metric("wasm_cache_entries 2"));
    assert!(rig.metric("wasm_remote_fetch_count{result=\"success\"} 2"));
}

#[tokio::test]
async fn checksums_are_of_what_comes_out() {
    let packed = gzip(ONE);
    let sent = packed.clone();
    let server = Server::start(move |_| answer(200, "", &sent)).await;
    let rig = rig(|_| {});
    let url = format!("http://{}/m", server.addr);
    let with = |checksum: &str| Wanted { checksum: checksum.to_owned(), ..wanted(&url) };
    let error = rig.get(&with(&sha256::of(&packed))).await.unwrap_err();
    assert!(error.contains("does not match"), "{error}");
    super::receive::tests::gone(rig.dir.path());
    assert!(rig.get(&with(&sha256::of(ONE))).await.is_ok());
    let seen = server.heads().len();
    assert!(rig.get(&with(&sha256::of(ONE))).await.is_ok());
    assert_eq!(server.heads().len(), seen, "there already");
    assert!(rig.get(&with(&sha256::of(TWO))).await.is_err());
    assert_eq!(server.heads().len(), seen + 1, "asked for all the same");
}

#[tokio::test]
async fn only_what_may_pass_is_tried_again() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let server = Server::start(move |head| {
        let n = count.fetch_add(1, Relaxed);
        match path(head) {
            "/once" if n == 0 => answer(503, "", b""),
            "/cut" if n == 0 => b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n\0asm".to_vec(),
            "/once" | "/cut" => answer(200, "", ONE),
            "/501" => answer(501, "", b""),
            "/gz" => answer(200, "Content-Encoding: gzip\r\n", b"no gzip"),
            _ => answer(404, "", b""),
        }
    })
    .await;
    let rig = rig(|_| {});
    for (path, attempts, good) in
        [("/once", 2, true), ("/cut", 2, true), ("/none", 1, false), ("/501", 1, false), ("/gz", 1, false)]
    {
        asked.store(0, Relaxed);
        let result = rig.get(&wanted(&format!("http://{}{path}", server.addr))).await;
        assert_eq!((asked.load(Relaxed), result.is_ok()), (attempts, good), "{path}: {result:?}");
        if let Err(why) = result {
            assert!(why.contains("failed after 1 attempts, last error: "), "{why}");
        }
    }
}

#[tokio::test]
async fn a_time_that_is_over_asks_nobody() {
    let server = Server::start(|_| answer(200, "", ONE)).await;
    let rig = rig(|_| {});
    let at = |url: String| Wanted { timeout: Duration::ZERO, ..wanted(&url) };
    let error = rig.get(&at(format!("http://{}/m", server.addr))).await.unwrap_err();
    assert!(error.contains("after 1 attempts") && error.contains("deadline"), "{error}");
    let error = rig.get(&at(format!("oci://{}/ab/c", server.addr))).await.unwrap_err();
    assert!(error.contains(&format!("https://{}/v2/", server.addr)), "{error}");
    assert_eq!(server.heads().len(), 0);
}

#[tokio::test]
async fn nothing_that_is_no_module_is_kept() {
    let server = Server::start(|head| match path(head) {
        "/long" => answer(200, "", &[ONE, &vec![0; 2 << 20]].concat()),
        _ => answer(200, "", b"<html>no module</html>"),
    })
    .await;
    let rig = rig(|_| {});
    for (path, said) in [("/html", "is invalid"), ("/long", "ISTIO_WASM_MAX_BINARY_SIZE_BYTES")] {
        let error = rig.get(&wanted(&format!("http://{}{path}", server.addr))).await.unwrap_err();
        assert!(error.contains(said), "{error}");
    }
    super::receive::tests::gone(rig.dir.path());
    for (url, said) in [("ftp://a/b", "unsupported"), ("oci://X/Y", "reference")] {
        assert!(rig.get(&wanted(url)).await.unwrap_err().contains(said));
    }
    let missing = Wanted { secret: Secret::Missing, ..wanted("oci://r.io/ab/c") };
    assert!(rig.get(&missing).await.unwrap_err().contains("missing image pulling secret"));
}

#[tokio::test]
async fn what_nobody_is_asked_for_is_counted_as_the_go_agent_does() {
    let rig = rig(|_| {});
    let null = Secret::Given("null".to_owned().into());
    for (wanted, lookups, manifest) in [
        (wanted("http://a/\n"), 0, false),
        (wanted("http://a/%zz"), 0, false),
        (wanted("ftp://a/b"), 1, false),
        (wanted("oci://X/Y"), 2, true),
        (Wanted { secret: null, ..wanted("oci://r.io/ab/c") }, 3, true),
        (Wanted { secret: Secret::Missing, url: None, ..wanted("") }, 3, false),
    ] {
        let failure = rig.converter.module(&wanted).await.unwrap_err();
        assert_eq!(failure.label(), manifest.then_some("manifest_failure"), "{failure}");
        assert_eq!(failure.conversion(), "fetch_failure", "{failure}");
        let counted = rig.metric(&format!("wasm_cache_lookup_count{{hit=\"false\"}} {lookups}"));
        assert_eq!(counted, lookups > 0, "{failure}");
    }
    let hintless = rig.converter.module(&Wanted { url: None, ..wanted("") }).await.unwrap_err();
    assert_eq!((hintless.label(), hintless.conversion()), (None, "miss_remote_fetch_hint"));
}

/// A registry with one image, `team/plug`, of this manifest and these blobs.
fn registry(manifest: String, index: Option<String>, blobs: Vec<Vec<u8>>) -> impl Fn(&str) -> Vec<u8> {
    move |head| {
        let path = path(head);
        if path == "/v2/" {
            return answer(200, "", b"");
        }
        let found = |text: &str| answer(200, "Content-Type: application/x\r\n", text.as_bytes());
        if let Some(name) = path.strip_prefix("/v2/team/plug/manifests/") {
            return match &index {
                Some(index) if name == "v1" || name.ends_with(&sha256::of(index.as_bytes())) => found(index),
                _ if name == "v1" || name.ends_with(&sha256::of(manifest.as_bytes())) => found(&manifest),
                _ => answer(404, "", b""),
            };
        }
        let blob = blobs.iter().find(|b| path.ends_with(&format!("/blobs/sha256:{}", sha256::of(b))));
        blob.map_or_else(|| answer(404, "", b""), |blob| answer(200, "", blob))
    }
}

fn manifest(kind: &str, layers: &[(&str, &[u8])]) -> String {
    let layers: Vec<_> = layers
        .iter()
        .map(|(kind, blob)| json!({"mediaType": kind, "size": blob.len(), "digest": format!("sha256:{}", sha256::of(blob))}))
        .collect();
    json!({"schemaVersion": 2, "mediaType": kind, "layers": layers}).to_string()
}

const OCI: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

#[tokio::test]
async fn images_are_known_by_their_manifest() {
    let layer = gzip(&archive(&[("./plugin.wasm", ONE)]));
    let text = manifest(OCI, &[(LAYER, &layer)]);
    let sum = sha256::of(text.as_bytes());
    let server = Server::start(registry(text, None, vec![layer])).await;
    let rig = rig(|_| {});
    let url = format!("oci://{}/team/plug:v1", server.addr);
    let file = rig.get(&wanted(&url)).await.unwrap();
    assert!(file.ends_with(format!("{sum}.wasm")));
    assert_eq!(std::fs::read(&file).unwrap(), ONE);
    let seen = server.heads().len();
    let pinned = format!("oci://{}/team/plug@sha256:{sum}", server.addr);
    assert_eq!(rig.get(&wanted(&pinned)).await.unwrap(), file);
    assert_eq!(server.heads().len(), seen, "the digest says which one it is");
    let changed = Wanted { policy: Policy::Always, version: "2".to_owned(), ..wanted(&url) };
    assert_eq!(rig.get(&changed).await.unwrap(), file);
    assert_eq!(server.heads().len(), seen + 2, "a tag that has not moved costs the manifest only");
    let error = rig.get(&Wanted { checksum: sha256::of(ONE), ..wanted(&url) }).await.unwrap_err();
    assert!(error.contains("does not match"), "{error}");
}

#[tokio::test]
async fn an_index_can_be_pinned() {
    let layer = gzip(&archive(&[("plugin.wasm", ONE)]));
    let text = manifest(OCI, &[(LAYER, &layer)]);
    let child = json!({"digest": format!("sha256:{}", sha256::of(text.as_bytes()))});
    let index =
        json!({"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [child]}).to_string();
    let sum = sha256::of(index.as_bytes());
    let server = Server::start(registry(text, Some(index), vec![layer])).await;
    let rig = rig(|_| {});
    let url = format!("oci://{}/team/plug@sha256:{sum}", server.addr);
    let file = rig.get(&wanted(&url)).await.unwrap();
    let seen = server.heads().len();
    assert_eq!(rig.get(&wanted(&url)).await.unwrap(), file);
    assert_eq!(server.heads().len(), seen);
}

#[tokio::test]
async fn images_without_a_module_say_what_was_tried() {
    let empty = gzip(&archive(&[("other", ONE)]));
    let text = manifest(OCI, &[(LAYER, &empty)]);
    let server = Server::start(registry(text, None, vec![empty])).await;
    let error = rig(|_| {}).get(&wanted(&format!("oci://{}/team/plug:v1", server.addr))).await.unwrap_err();
    for part in [
        "could not fetch Wasm binary: ",
        "2 errors occurred",
        "plugin.wasm not found in the archive",
        "must be 2",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let error = rig(|_| {}).get(&wanted(&format!("oci://{}/team/plug:v9", server.addr))).await.unwrap_err();
    assert!(error.starts_with("could not fetch Wasm OCI image: could not fetch manifest: "), "{error}");
}

#[tokio::test]
async fn a_manifest_that_cannot_be_read_is_found_out_about_behind_its_checksum() {
    for (kind, label) in
        [(OCI, "download_failure"), ("application/vnd.oci.image.index.v1+json", "manifest_failure")]
    {
        let server = Server::start(move |head| match path(head) {
            "/v2/" => answer(200, "", b""),
            _ => answer(200, &format!("Content-Type: {kind}\r\n"), b"{"),
        })
        .await;
        let (rig, url) = (rig(|_| {}), format!("oci://{}/team/plug:v1", server.addr));
        let failure = rig.converter.module(&wanted(&url)).await.unwrap_err();
        assert_eq!(failure.label(), Some(label), "{failure}");
        let pinned = Wanted { checksum: sha256::of(ONE), ..wanted(&url) };
        let failure = rig.converter.module(&pinned).await.unwrap_err();
        assert_eq!(
            failure.label(),
            Some(if kind == OCI { "checksum_mismatched" } else { label }),
            "{failure}"
        );
    }
}

#[tokio::test]
async fn a_layer_that_is_not_what_its_digest_says_is_refused() {
    let (layer, other) = (gzip(&archive(&[("plugin.wasm", ONE)])), gzip(&archive(&[("plugin.wasm", TWO)])));
    let text = manifest(OCI, &[(LAYER, &layer)]);
    let inner = registry(text, None, vec![]);
    let server = Server::start(
        move |head| if head.contains("/blobs/") { answer(200, "", &other) } else { inner(head) },
    )
    .await;
    let error = rig(|_| {}).get(&wanted(&format!("oci://{}/team/plug:v1", server.addr))).await.unwrap_err();
    assert!(error.contains("has checksum"), "{error}");
}

#[tokio::test]
async fn a_secret_reaches_the_registry_and_nobody_else() {
    let layer = gzip(&archive(&[("plugin.wasm", ONE)]));
    let inner = registry(manifest(OCI, &[(LAYER, &layer)]), None, vec![layer]);
    let server = Server::start(move |head| {
        // "u:p" in base64.
        let known = head.to_lowercase().contains("authorization: basic dtpw");
        if known { inner(head) } else { answer(401, "WWW-Authenticate: Basic realm=\"r\"\r\n", b"") }
    })
    .await;
    let rig = rig(|_| {});
    let url = format!("oci://{}/team/plug:v1", server.addr);
    let secret = json!({"auths": {server.addr.to_string(): {"username": "u", "password": "p"}}}).to_string();
    let given = |text: String| Wanted { secret: Secret::Given(text.into()), ..wanted(&url) };
    // The challenge comes to the ping, which is asked without credentials, so it is known by then.
    let error = rig.get(&given("{}".to_owned())).await.unwrap_err();
    assert!(error.contains("authentication required"), "{error}");
    assert!(rig.get(&given(secret)).await.is_ok());
}

#[tokio::test]
async fn a_token_server_inside_is_never_asked() {
    let inside = Server::start(|_| answer(200, "", b"{\"token\":\"t\"}")).await;
    let header = format!("WWW-Authenticate: Bearer realm=\"http://{}/token\",service=\"s\"\r\n", inside.addr);
    let server = Server::start(move |_| answer(401, &header, b"")).await;
    let error = rig(|_| {}).get(&wanted(&format!("oci://{}/team/plug:v1", server.addr))).await.unwrap_err();
    assert!(error.contains("rejected unsafe bearer realm"), "{error}");
    assert_eq!(inside.heads().len(), 0);
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[tokio::test]
async fn one_resource_that_cannot_be_read_refuses_all() {
    let rig = rig(|_| {});
    let any = |type_url: &str| {
        Bytes::from(Any { type_url: type_url.to_owned(), value: Bytes::new() }.encode_to_vec())
    };
    let error = rig.converter.convert(vec![any("a"), any("b")], true).await.unwrap_err().to_string();
    assert!(error.contains("\"a\"") && error.contains("\"b\""), "all are told: {error}");
    assert!(rig.converter.convert(vec![], true).await.unwrap().is_empty(), "an empty response is fine");
    assert!(rig.metric("wasm_config_conversion_count{result=\"unmarshal_failure\"} 2"));
    assert!(rig.metric("wasm_config_conversion_duration_count 2"));
}

/// An extension whose module is at `uri`.
fn extension(name: &str, uri: &str) -> Bytes {
    use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier;
    use envoy_types::pb::envoy::config::core::v3::{
        AsyncDataSource, HttpUri, RemoteDataSource, TypedExtensionConfig,
    };
    use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
    use envoy_types::pb::envoy::extensions::wasm::v3::{PluginConfig, VmConfig, plugin_config::Vm};
    use envoy_types::pb::google::protobuf::Any;
    let http_uri = Some(HttpUri { uri: uri.to_owned(), ..HttpUri::default() });
    let specifier = Some(Specifier::Remote(RemoteDataSource { http_uri, ..RemoteDataSource::default() }));
    let vm = VmConfig { code: Some(AsyncDataSource { specifier }), ..VmConfig::default() };
    let config = Some(PluginConfig { vm: Some(Vm::VmConfig(vm)), ..PluginConfig::default() });
    let any =
        |kind: &str, value: Vec<u8>| Any { type_url: format!("type.googleapis.com/envoy.{kind}"), value };
    let wasm = any("extensions.filters.http.wasm.v3.Wasm", Wasm { config }.encode_to_vec());
    let extension = TypedExtensionConfig { name: name.to_owned(), typed_config: Some(wasm) };
    any("config.core.v3.TypedExtensionConfig", extension.encode_to_vec()).encode_to_vec().into()
}

#[tokio::test]
async fn the_trouble_of_a_module_is_over_with_its_extension() {
    let troubles = crate::trouble::Troubles::default();
    let mut rig = rig(|_| {});
    rig.converter = rig.converter.with_trouble(troubles.reporter("wasm"));
    let bad = |name| extension(name, "nowhere://x");
    let failing = || {
        let mut names: Vec<_> = troubles.snapshot().into_iter().map(|trouble| trouble.subject).collect();
        names.sort();
        names
    };
    let convert = async |names: &[&'static str], whole| {
        rig.converter.convert(names.iter().map(|name| bad(*name)).collect(), whole).await.unwrap();
    };
    convert(&["a", "b", "c"], true).await;
    assert_eq!(failing(), ["a", "b", "c"]);
    convert(&["b", "c"], true).await;
    assert_eq!(failing(), ["b", "c"], "it is in the newest response no more");
    convert(&["d"], false).await;
    assert_eq!(failing(), ["b", "c", "d"], "the others are not told again, and are there");
    rig.converter.removed(&["c".to_owned()]);
    assert_eq!(failing(), ["b", "d"]);
    convert(&[], true).await;
    assert!(failing().is_empty());
}

#[tokio::test]
async fn a_conversion_that_is_overtaken_brings_no_trouble_back() {
    let troubles = crate::trouble::Troubles::default();
    let converter = rig(|config| config.http_attempts = 1).converter.with_trouble(troubles.reporter("wasm"));
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let slow = extension("slow", &format!("http://{}/m", server.local_addr().unwrap()));
    let slow = converter.convert(vec![slow], true);
    tokio::pin!(slow);
    let connection = tokio::select! {
        _ = &mut slow => panic!("nobody has answered"),
        connection = server.accept() => connection.unwrap(),
    };
    converter.convert(vec![], true).await.unwrap();
    drop((connection, server));
    slow.await.unwrap();
    assert!(troubles.snapshot().is_empty());
}

/// A conversion of `f` that waits for its download.
struct Waits<'a> {
    work: BoxFuture<'a, ()>,
    connection: tokio::net::TcpStream,
    server: tokio::net::TcpListener,
}

impl<'a> Waits<'a> {
    async fn begun(converter: &'a Converter) -> Self {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let slow = extension("f", &format!("http://{}/slow", server.local_addr().unwrap()));
        let mut work: BoxFuture<'a, ()> = Box::pin(async move {
            converter.convert(vec![slow], false).await.unwrap();
        });
        let connection = tokio::select! {
            () = &mut work => panic!("nobody has answered"),
            connection = server.accept() => connection.unwrap().0,
        };
        Self { work, connection, server }
    }

    async fn fails(self) {
        drop((self.connection, self.server));
        self.work.await;
    }

    async fn succeeds(self) {
        let Self { work, mut connection, server: _ } = self;
        let answered = async {
            crate::net::http::head(&mut connection).await.unwrap();
            connection.write_all(&answer(200, "", ONE)).await.unwrap();
        };
        tokio::join!(answered, work);
    }
}

#[tokio::test]
async fn what_has_come_or_gone_meanwhile_is_in_no_trouble() {
    let troubles = crate::trouble::Troubles::default();
    let Rig { converter, dir: _dir, .. } = rig(|config| config.http_attempts = 1);
    let converter = converter.with_trouble(troubles.reporter("wasm"));
    let web = Server::start(|_| answer(200, "", ONE)).await;
    for gone in [false, true] {
        let old = Waits::begun(&converter).await;
        if gone {
            converter.removed(&["f".to_owned()]);
        } else {
            let good = extension("f", &format!("http://{}/m", web.addr));
            converter.convert(vec![good], false).await.unwrap();
        }
        old.fails().await;
        assert!(troubles.snapshot().is_empty(), "gone: {gone}");
    }
}

#[tokio::test]
async fn what_comes_late_does_not_end_the_trouble_of_what_is_newer() {
    let troubles = crate::trouble::Troubles::default();
    let Rig { converter, dir: _dir, .. } = rig(|config| config.http_attempts = 1);
    let converter = converter.with_trouble(troubles.reporter("wasm"));
    let old = Waits::begun(&converter).await;
    converter.convert(vec![extension("f", "nowhere://x")], false).await.unwrap();
    old.succeeds().await;
    assert_eq!(troubles.snapshot().len(), 1);
    Waits::begun(&converter).await.succeeds().await;
    assert!(troubles.snapshot().is_empty());
    let failing = converter.failing();
    assert!(failing.settled.is_empty() && failing.under_way.is_empty(), "nothing is left to contradict");
}

#[tokio::test]
async fn what_a_killed_agent_has_left_of_a_download_is_removed() {
    let rig = rig(|_| {});
    let plant = |name: &str, modified: std::time::SystemTime| {
        let path = rig.dir.path().join(name);
        std::fs::File::create(&path).unwrap().set_modified(modified).unwrap();
        path
    };
    let left = plant(".download.0123456789abcde6.new", std::time::UNIX_EPOCH);
    // Of another agent's, perhaps.
    let fresh = plant(".download.0123456789abcde7.new", std::time::SystemTime::now());
    let other = plant("download.0123456789abcde8.new", std::time::UNIX_EPOCH);
    let stop = Stop::new();
    let gone = async {
        eventually("it is removed", async || !left.exists()).await;
        stop.cancel();
    };
    let purging = rig.converter.purge(stop.clone(), || std::future::ready(Ok(Vec::new())));
    let both = futures_util::future::join(purging, gone);
    tokio::time::timeout(Duration::from_secs(20), both).await.expect("it is left");
    assert!(fresh.exists() && other.exists());
}

// An extension config whose module is at this address.
fn remote(name: &str, url: &str) -> Bytes {
    use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier;
    use envoy_types::pb::envoy::config::core::v3::http_uri::HttpUpstreamType;
    use envoy_types::pb::envoy::config::core::v3::{
        AsyncDataSource, HttpUri, RemoteDataSource, TypedExtensionConfig,
    };
    use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
    use envoy_types::pb::envoy::extensions::wasm::v3::{PluginConfig, VmConfig, plugin_config::Vm};
    use envoy_types::pb::google::protobuf::{Any, Duration as Time};

    let timeout = Some(Time { seconds: 30, nanos: 0 });
    let http_upstream_type = Some(HttpUpstreamType::Cluster("c".to_owned()));
    let uri = HttpUri { uri: url.to_owned(), timeout, http_upstream_type };
    let code = RemoteDataSource { http_uri: Some(uri), sha256: "nil".to_owned(), ..Default::default() };
    let code = Some(AsyncDataSource { specifier: Some(Specifier::Remote(code)) });
    let vm = Some(Vm::VmConfig(VmConfig { code, ..Default::default() }));
    let filter = Wasm { config: Some(PluginConfig { vm, ..Default::default() }) };
    let any = |of: &str, value| Any { type_url: format!("type.googleapis.com/envoy.{of}"), value };
    let filter = any("extensions.filters.http.wasm.v3.Wasm", filter.encode_to_vec());
    let config = TypedExtensionConfig { name: name.to_owned(), typed_config: Some(filter) };
    any("config.core.v3.TypedExtensionConfig", config.encode_to_vec()).encode_to_vec().into()
}

#[tokio::test]
async fn of_many_modules_a_few_are_fetched_at_a_time_and_their_order_stays() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let rig = rig(|_| {});
    let count = 2 * FETCHES;
    let resources: Vec<_> = (0..count).map(|n| remote(&format!("f{n}"), &format!("{url}{n}"))).collect();
    // Says no to one only when nobody else comes.
    let server = async {
        let (mut open, mut most, mut answered) = (Vec::new(), 0, 0);
        while answered < count {
            tokio::select! {
                biased;
                Ok((io, _)) = listener.accept() => open.push(io),
                () = tokio::task::yield_now(), if !open.is_empty() => {
                    let mut io: tokio::net::TcpStream = open.remove(0);
                    io.write_all(&answer(404, "", b"")).await.unwrap();
                    answered += 1;
                }
            }
            most = most.max(open.len());
        }
        most
    };
    let (converted, most) = tokio::join!(rig.converter.convert(resources, true), server);
    assert!(most <= FETCHES, "{most} at a time");
    for (n, resource) in converted.unwrap().iter().enumerate() {
        let name = format!("f{n}");
        assert!(resource.windows(name.len() + 1).any(|w| w == [name.as_bytes(), b"\x12"].concat()), "{n}");
    }
}

#[tokio::test]
async fn of_many_refusals_a_few_are_told() {
    let rig = rig(|_| {});
    let why = rig.converter.convert(vec![Bytes::new(); 1000], true).await.unwrap_err().to_string();
    assert!(why.len() < 10_000 && why.ends_with("; and 968 more"), "{why}");
}

mod removed;
