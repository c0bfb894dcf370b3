//! Extension configs with Wasm modules: fetched by the agent, which gives Envoy a local file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier as Code;
use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
use envoy_types::pb::envoy::config::core::v3::{
    AsyncDataSource, HttpUri, RemoteDataSource, TypedExtensionConfig,
};
use envoy_types::pb::envoy::extensions::filters::http::rbac::v3::Rbac;
use envoy_types::pb::envoy::extensions::filters::http::wasm::v3::Wasm;
use envoy_types::pb::envoy::extensions::wasm::v3::plugin_config::Vm;
use envoy_types::pb::envoy::extensions::wasm::v3::{
    EnvironmentVariables, FailurePolicy, PluginConfig, VmConfig,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::protobuf::{Any, Duration as Span};
use mock_istiod::AdsStream;
use prost::Message;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::ads::{CDS, Delta, World, answer, ask, ended, request};
use super::dns::Nameserver;
use super::replay::{LDS, answer_delta, ask_delta, delta, resource};
use crate::support::builder::Builder;
use crate::support::{eventually, root_for};

const ECDS: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const FILTER: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const RBAC: &str = "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC";
const MODULE: &[u8] = b"\0asm\x01\0\0\0one";
/// Where modules go is fixed, so each agent has a folder of its own mounted there.
const FOLDER: &str = "mount -t tmpfs tmpfs /var/lib && mkdir -p /var/lib/istio/data && exec \"$@\"";

pub fn with_folder(builder: Builder) -> Builder {
    builder.before(&["unshare", "--mount", "sh", "-c", FOLDER, "sh"].map(ToOwned::to_owned))
}

/// Serves a module at every path but `/none`; `/slow` waits until it is released.
struct Modules {
    port: u16,
    paths: Arc<Mutex<Vec<String>>>,
    release: watch::Sender<bool>,
    _serving: JoinSet<()>,
}

impl Modules {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let paths = Arc::new(Mutex::new(Vec::new()));
        let (release, released) = watch::channel(false);
        let mut serving = JoinSet::new();
        let seen = paths.clone();
        serving.spawn(async move {
            let mut open = JoinSet::new();
            loop {
                let Ok((mut stream, _)) = listener.accept().await else { return };
                let (seen, mut released) = (seen.clone(), released.clone());
                open.spawn(async move {
                    let Some(head) = crate::support::http::head(&mut stream).await else { return };
                    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                    seen.lock().unwrap().push(path.clone());
                    if path == "/slow" {
                        let _ = released.wait_for(|released| *released).await;
                    }
                    let (status, body) = if path == "/none" { (404, &b""[..]) } else { (200, MODULE) };
                    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n", body.len());
                    let _ = stream.write_all(&[head.as_bytes(), body].concat()).await;
                });
            }
        });
        Self { port, paths, release, _serving: serving }
    }

    fn paths(&self) -> Vec<String> {
        self.paths.lock().unwrap().clone()
    }

    /// A filter whose module is at `path`.
    fn filter(&self, name: &str, path: &str, change: impl FnOnce(&mut PluginConfig, &mut VmConfig)) -> Any {
        remote(name, format!("http://127.0.0.1:{}{path}", self.port), change)
    }
}

/// A filter whose module is somewhere else.
pub fn remote(name: &str, uri: String, change: impl FnOnce(&mut PluginConfig, &mut VmConfig)) -> Any {
    let uri = HttpUri { uri, timeout: Some(Span { seconds: 20, nanos: 0 }), ..HttpUri::default() };
    let remote = RemoteDataSource { http_uri: Some(uri), sha256: "nil".to_owned(), retry_policy: None };
    let code = Some(AsyncDataSource { specifier: Some(Code::Remote(remote)) });
    let mut vm = VmConfig { vm_id: "vm".to_owned(), code, ..VmConfig::default() };
    let mut plugin = PluginConfig { name: name.to_owned(), ..PluginConfig::default() };
    change(&mut plugin, &mut vm);
    plugin.vm = Some(Vm::VmConfig(vm));
    extension(name, FILTER, &Wasm { config: Some(plugin) })
}

fn extension(name: &str, type_url: &str, config: &impl Message) -> Any {
    let typed_config = Some(Any { type_url: type_url.to_owned(), value: config.encode_to_vec() });
    let extension = TypedExtensionConfig { name: name.to_owned(), typed_config };
    Any { type_url: ECDS.to_owned(), value: extension.encode_to_vec() }
}

pub fn push(nonce: &str, resources: Vec<Any>) -> DiscoveryResponse {
    let (type_url, nonce) = (ECDS.to_owned(), nonce.to_owned());
    DiscoveryResponse { type_url, nonce, resources, version_info: "1".to_owned(), ..Default::default() }
}

/// Names and filters of a response.
fn filters(response: &DiscoveryResponse) -> Vec<(String, Any)> {
    let one = |any: &Any| {
        let extension = TypedExtensionConfig::decode(&any.value[..]).unwrap();
        (extension.name, extension.typed_config.unwrap())
    };
    response.resources.iter().map(one).collect()
}

fn local(filter: &Any) -> PathBuf {
    assert_eq!(filter.type_url, FILTER);
    let Some(Vm::VmConfig(vm)) = Wasm::decode(&filter.value[..]).unwrap().config.unwrap().vm else {
        panic!("a machine")
    };
    match vm.code.unwrap().specifier {
        Some(Code::Local(source)) => match source.specifier {
            Some(Specifier::Filename(path)) => path.into(),
            other => panic!("no file: {other:?}"),
        },
        other => panic!("not local: {other:?}"),
    }
}

#[tokio::test]
async fn a_remote_module_becomes_a_local_file_and_what_is_for_the_agent_stays_behind() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let mut world = World::with(with_folder).await;
    let (mut envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(ECDS));
    request(&mut istiod).await;
    let variables = [
        ("ISTIO_META_WASM_IMAGE_PULL_SECRET", "{\"auths\":{}}"),
        ("ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION", "7"),
        ("KEY", "value"),
    ];
    let key_values: HashMap<_, _> = variables.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    let environment = EnvironmentVariables { key_values, host_env_keys: Vec::new() };
    let filter = modules.filter("f1", "/one", |_, vm| vm.environment_variables = Some(environment));
    for nonce in ["n1", "n2"] {
        istiod.responses.sotw(&push(nonce, vec![filter.clone()])).await.unwrap();
        let raw = envoy.next_raw().await.unwrap();
        let text = String::from_utf8_lossy(&raw).into_owned();
        assert!(!text.contains("ISTIO_META_") && !text.contains("auths") && text.contains("KEY"), "{text}");
        let got = DiscoveryResponse::decode(raw).unwrap();
        assert_eq!((got.nonce.as_str(), got.version_info.as_str()), (nonce, "1"));
        let file = local(&filters(&got)[0].1);
        assert!(file.starts_with("/var/lib/istio/data"), "{file:?}");
        let root = PathBuf::from(format!("/proc/{}/root", world.agent.pid().as_raw_nonzero()));
        assert_eq!(std::fs::read(root.join(file.strip_prefix("/").unwrap())).unwrap(), MODULE);
    }
    assert_eq!(modules.paths(), ["/one"], "fetched once");
    let ack =
        DiscoveryRequest { type_url: ECDS.to_owned(), response_nonce: "n2".to_owned(), ..Default::default() };
    envoy.send(&ack);
    assert!(request(&mut istiod).await.is_ack(), "Envoy's answers pass");
}

/// A module that is asked for: the file that Envoy is told. `plant` is given the agent's root beforehand, which is its
/// own once the agent has answered: the folder is mounted before.
async fn fetched(modules: &Modules, plant: impl FnOnce(&Path)) -> PathBuf {
    let mut world = World::with(with_folder).await;
    let root = PathBuf::from(format!("/proc/{}/root", world.agent.pid().as_raw_nonzero()));
    let (mut envoy, mut istiod) = world.sotw().await;
    plant(&root);
    envoy.send(&ask(ECDS));
    request(&mut istiod).await;
    let filter = modules.filter("f1", "/one", |_, _| ());
    istiod.responses.sotw(&push("n1", vec![filter])).await.unwrap();
    let file = local(&filters(&DiscoveryResponse::decode(envoy.next_raw().await.unwrap()).unwrap())[0].1);
    assert_eq!(std::fs::read(root.join(file.strip_prefix("/").unwrap())).unwrap(), MODULE);
    file
}

// Where a module goes is known from its address, and others may be faster.
#[tokio::test]
async fn links_planted_where_a_module_goes_lead_nowhere() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let file = fetched(&modules, |_| ()).await;
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "kept").unwrap();
    let plant = |root: &Path| {
        let place = root.join(file.strip_prefix("/").unwrap());
        std::fs::create_dir_all(place.parent().unwrap()).unwrap();
        for ending in ["", ".new", ".tmp", ".download", "~"] {
            let mut name = place.clone().into_os_string();
            name.push(ending);
            std::os::unix::fs::symlink(&victim, name).unwrap();
        }
    };
    assert_eq!(fetched(&modules, plant).await, file);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "kept");
}

#[tokio::test]
#[expect(deprecated, reason = "istiod still sends the older field")]
async fn a_module_that_cannot_be_had_is_replaced_and_refuses_nothing() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let mut world = World::with(with_folder).await;
    let (mut envoy, istiod) = world.sotw().await;
    let resources = vec![
        modules.filter("closed", "/none", |_, _| {}),
        modules.filter("good", "/one", |_, _| {}),
        modules.filter("open", "/none", |plugin, _| plugin.fail_open = true),
        modules.filter("policy", "/none", |plugin, _| plugin.failure_policy = FailurePolicy::FailOpen.into()),
    ];
    istiod.responses.sotw(&push("n1", resources)).await.unwrap();
    let got = filters(&envoy.next().await.unwrap());
    let names: Vec<&str> = got.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["closed", "good", "open", "policy"]);
    local(&got[1].1);
    for (at, open) in [(0, false), (2, true), (3, true)] {
        assert_eq!(got[at].1.type_url, RBAC);
        assert_eq!(Rbac::decode(&got[at].1.value[..]).unwrap().rules.is_none(), open);
    }
    super::why::beside::told(&world.agent, "WasmFailed", "404").await;
}

#[tokio::test]
async fn without_its_folder_a_module_cannot_be_had() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let nowhere = "mount -t tmpfs tmpfs /var/lib && exec \"$@\"";
    let words = ["unshare", "--mount", "sh", "-c", nowhere, "sh"].map(ToOwned::to_owned);
    let mut world = World::with(|b| b.before(&words)).await;
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.sotw(&push("n1", vec![modules.filter("f", "/one", |_, _| {})])).await.unwrap();
    assert_eq!(filters(&envoy.next().await.unwrap())[0].1.type_url, RBAC);
}

#[tokio::test]
async fn a_full_disk_is_no_fault_of_the_module() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let full = FOLDER.replace(
        "exec",
        "mount -t tmpfs -o size=4k tmpfs /var/lib/istio/data && head -c 4096 /dev/zero >/var/lib/istio/data/all && exec",
    );
    let words = ["unshare", "--mount", "sh", "-c", &full, "sh"].map(ToOwned::to_owned);
    let mut world = World::with(|b| b.before(&words)).await;
    let (mut envoy, istiod) = world.sotw().await;
    istiod.responses.sotw(&push("n1", vec![modules.filter("f", "/one", |_, _| {})])).await.unwrap();
    assert_eq!(filters(&envoy.next().await.unwrap())[0].1.type_url, RBAC);
    super::why::beside::told(&world.agent, "DiskFull", "No space left on device").await;
}

#[tokio::test]
async fn configs_that_cannot_be_read_are_refused_and_do_not_reach_envoy() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let mut world = World::with(with_folder).await;
    let (mut envoy, mut istiod) = world.sotw().await;
    let bad = extension("bad", FILTER, &Wasm { config: None });
    istiod.responses.sotw(&push("n1", vec![modules.filter("good", "/one", |_, _| {}), bad])).await.unwrap();
    let nack = request(&mut istiod).await;
    assert_eq!((nack.type_url.as_str(), nack.nonce.as_str(), nack.nack.unwrap().0), (ECDS, "n1", 13));
    istiod.responses.sotw(&answer(CDS, "c1", 3)).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().type_url, CDS, "nothing came before");
    istiod.responses.sotw(&push("n2", vec![])).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "n2", "an empty response is none of them");
}

#[tokio::test]
async fn a_resource_without_a_body_is_refused() {
    if !root_for("a mount namespace") {
        return;
    }
    let mut world = World::with(with_folder).await;
    let (mut envoy, mut istiod) = world.delta().await;
    let heartbeat = resource(ECDS, "f", "1");
    let heartbeat = Resource { resource: None, ..heartbeat };
    istiod.responses.delta(&delta(ECDS, "n1", &[heartbeat], &[])).await.unwrap();
    let nack = request(&mut istiod).await;
    assert_eq!((nack.type_url.as_str(), nack.nonce.as_str(), nack.nack.unwrap().0), (ECDS, "n1", 13));
    istiod.responses.delta(&delta(ECDS, "n2", &[], &["f"])).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "n2", "nothing came before");
}

#[tokio::test]
async fn a_slow_download_holds_up_nothing_and_never_overtakes() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let mut world = World::with(with_folder).await;
    let (mut envoy, istiod) = world.sotw().await;
    let slow = push("old", vec![modules.filter("f", "/slow", |_, _| {})]);
    istiod.responses.sotw(&slow).await.unwrap();
    eventually("the download has begun", || async { (!modules.paths().is_empty()).then_some(()) }).await;
    istiod.responses.sotw(&answer(CDS, "c1", 3)).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().type_url, CDS);
    istiod.responses.sotw(&push("new", vec![modules.filter("f", "/one", |_, _| {})])).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "new");
    modules.release.send_replace(true);
    let both = [modules.filter("f", "/slow", |_, _| {}), modules.filter("g", "/two", |_, _| {})];
    istiod.responses.sotw(&push("newest", both.to_vec())).await.unwrap();
    assert_eq!(envoy.next().await.unwrap().nonce, "newest", "the old one has not come in between");
}

/// As in a cluster whose resolver answers for the cluster and is silent about the world.
#[tokio::test]
async fn a_registry_whose_name_is_not_answered_holds_up_nobody_on_the_way_to_istiod() {
    let Some(nameserver) = Nameserver::start().await else { return };
    let resolv = format!("nameserver {}\noptions timeout:30 attempts:5\n", nameserver.ip);
    let mounts = format!("mount --bind resolv.conf /etc/resolv.conf && {FOLDER}");
    let words = ["unshare", "--mount", "sh", "-c", &mounts, "sh"].map(ToOwned::to_owned);
    let mut world = World::with(|b| b.before(&words).file("resolv.conf", resolv)).await;
    let (envoy, istiod) = world.sotw().await;
    let module = |nth| remote(&format!("m{nth}"), "http://registry.test./m".to_owned(), |_, _| {});
    istiod.responses.sotw(&push("n1", (0..32).map(module).collect())).await.unwrap();
    nameserver.asked_by(8).await;
    // Each look-up takes minutes, whoever still waits for it.
    drop(envoy);
    let (envoy, mut istiod) = world.sotw().await;
    envoy.send(&ask(CDS));
    assert_eq!(request(&mut istiod).await.type_url, CDS);
    world.agent.stop().await;
}

#[tokio::test]
async fn switched_off_everything_passes_as_it_is() {
    let mut world = World::with(|b| b.env("ISTIO_AGENT_ENABLE_WASM_REMOTE_LOAD_CONVERSION", "false")).await;
    let modules = Modules::start().await;
    let (mut envoy, istiod) = world.sotw().await;
    let sent = push("n1", vec![modules.filter("f", "/one", |_, _| {})]).encode_to_vec();
    istiod.responses.message(&sent).await.unwrap();
    assert_eq!(envoy.next_raw().await.unwrap(), sent);
    assert_eq!(modules.paths().len(), 0);
}

/// What Envoy is told, and accepts.
async fn accepted(
    envoy: &mut Delta,
    istiod: &mut AdsStream,
    response: &DeltaDiscoveryResponse,
) -> DeltaDiscoveryResponse {
    istiod.responses.delta(response).await.unwrap();
    let got = envoy.next().await.unwrap();
    assert_eq!(got.nonce, response.nonce);
    envoy.send(&answer_delta(&response.type_url, &response.nonce));
    while request(istiod).await.nonce != response.nonce {}
    got
}

// The file that the only resource of a response names.
fn file_of(response: &DeltaDiscoveryResponse) -> PathBuf {
    let any = response.resources[0].resource.as_ref().unwrap();
    local(&TypedExtensionConfig::decode(&any.value[..]).unwrap().typed_config.unwrap())
}

#[tokio::test]
async fn a_module_that_the_last_good_configuration_names_stays() {
    if !root_for("a mount namespace") {
        return;
    }
    let modules = Modules::start().await;
    let mut world = World::with(|b| {
        let b = with_folder(b).env("XDS_REPLAY", "memory").env("XDS_REPLAY_AFTER", "200ms");
        b.env("WASM_MODULE_EXPIRY", "4s").env("WASM_PURGE_INTERVAL", "200ms")
    })
    .await;
    let root = PathBuf::from(format!("/proc/{}/root", world.agent.pid().as_raw_nonzero()));
    let there = |file: &Path| root.join(file.strip_prefix("/").unwrap()).exists();
    let (mut envoy, mut istiod) = world.delta().await;
    for type_url in [CDS, LDS] {
        envoy.send(&ask_delta(type_url));
        while request(&mut istiod).await.type_url != type_url {}
        let brought = delta(type_url, type_url, &[resource(type_url, "a", "1")], &[]);
        accepted(&mut envoy, &mut istiod, &brought).await;
    }
    let asked = DeltaDiscoveryRequest {
        resource_names_subscribe: ["kept", "dropped"].map(ToOwned::to_owned).to_vec(),
        ..ask_delta(ECDS)
    };
    envoy.send(&asked);
    while request(&mut istiod).await.type_url != ECDS {}
    let mut files = Vec::new();
    for name in ["kept", "dropped"] {
        let filter = modules.filter(name, &format!("/{name}"), |_, _| {});
        let resource = Resource { resource: Some(filter), ..resource(ECDS, name, "1") };
        files.push(file_of(&accepted(&mut envoy, &mut istiod, &delta(ECDS, name, &[resource], &[])).await));
    }
    accepted(&mut envoy, &mut istiod, &delta(ECDS, "gone", &[], &["dropped"])).await;
    // That one was asked for last, so the other is unused for longer.
    eventually("what nobody names is removed", || async { (!there(&files[1])).then_some(()) }).await;
    drop(envoy);
    ended(istiod).await;
    world.mock.down().await;
    let mut envoy = world.envoy().await.delta_ads();
    envoy.send(&asked);
    assert_eq!(file_of(&envoy.next().await.unwrap()), files[0]);
    assert!(there(&files[0]), "Envoy can load it");
}
