//! The effective ProxyConfig: built-in defaults, old flags, mesh file, `PROXY_CONFIG`, annotation, in
//! this order.
//!
//! Layers are merged as canonical documents ([`jsonpb`]), top-level field by field, because an explicit
//! zero must override and a list, map or message must be replaced; protobuf's own merge does neither. The
//! result is then parsed into the typed message.

use serde_json::{Value, json};

use super::jsonpb::{self, Fault, Object};
use super::release::Release;
use super::yaml;
use crate::proto::mesh::ProxyConfig;
use crate::proto::schema::{
    ISTIO_MESH_V1ALPHA1_MESHCONFIG as MESH, ISTIO_MESH_V1ALPHA1_PROXYCONFIG as PROXY,
};

/// Members of `proxyHeaders` that an overlay without them leaves as they were.
const KEPT_HEADERS: [&str; 5] =
    ["forwardedClientCert", "requestId", "attemptCount", "server", "envoyDebugHeaders"];

/// The merged document and its typed form. May hold access tokens: [`super::report`] shows it without.
#[derive(Clone)]
pub struct Effective {
    document: Object,
    release: Release,
    parent_shutdown: Option<String>,
    /// Typed; enum numbers that have no name are left out here, but kept in [`Effective::to_json`].
    pub proxy: ProxyConfig,
}

/// Fields that 1.30 passes over, in both spellings.
const NEW_IN_31: [&str; 2] = ["connectionSettings", "connection_settings"];
/// Those of a mesh file.
const NEW_IN_31_MESH: [&str; 6] = [
    "defaultTrafficPolicy",
    "default_traffic_policy",
    "serviceEntryVisibility",
    "service_entry_visibility",
    "zoneAwareLbSetting",
    "zone_aware_lb_setting",
];

/// The agent's status server, unless said otherwise.
pub(super) const STATUS_PORT: i32 = 15020;

// What 1.30.3 and 1.31.0 start from.
fn defaults() -> Value {
    json!({
        "configPath": "./etc/istio/proxy",
        "binaryPath": "/usr/local/bin/envoy",
        "serviceCluster": "istio-proxy",
        "drainDuration": "45s",
        "terminationDrainDuration": "5s",
        "discoveryAddress": "istiod.istio-system.svc:15012",
        "proxyAdminPort": 15000,
        "controlPlaneAuthPolicy": "MUTUAL_TLS",
        "statNameLength": 189,
        "statusPort": STATUS_PORT,
    })
}

impl Effective {
    /// The defaults alone.
    #[must_use]
    pub fn new() -> Self {
        Self::of(Release::default())
    }

    /// The defaults alone, for the fields that a release knows.
    #[must_use]
    pub fn of(release: Release) -> Self {
        let mut out =
            Self { document: Object::new(), release, parent_shutdown: None, proxy: ProxyConfig::default() };
        out.lay(&defaults()).expect("the defaults are a ProxyConfig");
        out
    }

    /// Lays a ProxyConfig document (YAML or JSON) over what is there, or nothing of it.
    ///
    /// # Errors
    /// Every fault of the document.
    pub fn overlay(&mut self, text: &str) -> Result<(), Vec<Fault>> {
        self.lay(&parse(text)?)
    }

    /// Lays the `defaultConfig` of a mesh file over what is there, and gives the whole file, canonical.
    ///
    /// # Errors
    /// Every fault of the file, also where the agent uses nothing of it.
    pub fn overlay_mesh(&mut self, text: &str) -> Result<Object, Vec<Fault>> {
        let mut document = parse(text)?;
        self.forget(&mut document, &NEW_IN_31_MESH);
        let mesh = jsonpb::read(&MESH, &document)?;
        // Only this spelling takes effect; `default_config` is read and then dropped.
        if let Some(proxy) = document.get("defaultConfig") {
            self.lay(proxy)?;
        }
        Ok(mesh)
    }

    /// Sets one field, as a flag or a single-value annotation does.
    ///
    /// # Errors
    /// When the value is not one of the field's.
    pub fn set(&mut self, field: &str, value: Value) -> Result<(), Vec<Fault>> {
        self.lay(&json!({ field: value }))
    }

    // What 1.30 does not know is not judged where 1.30 is followed.
    fn forget(&self, document: &mut Value, new: &[&str]) {
        if self.release == Release::V1_30
            && let Some(object) = document.as_object_mut()
        {
            new.iter().for_each(|field| drop(object.remove(*field)));
        }
    }

    fn lay(&mut self, overlay: &Value) -> Result<(), Vec<Fault>> {
        let mut overlay = std::borrow::Cow::Borrowed(overlay);
        if self.release == Release::V1_30 {
            self.forget(overlay.to_mut(), &NEW_IN_31);
        }
        let read = jsonpb::read(&PROXY, &overlay)?;
        if let Some(span) =
            ["parentShutdownDuration", "parent_shutdown_duration"].iter().find_map(|f| overlay.get(f))
        {
            self.parent_shutdown = span.as_str().map(str::to_owned);
        }
        for (name, value) in read {
            if let Some(field) = PROXY.fields.iter().find(|f| f.json == name) {
                for sibling in jsonpb::siblings(&PROXY, field) {
                    self.document.remove(sibling);
                }
            }
            match (name.as_str(), self.document.get_mut(&name), value) {
                ("proxyMetadata", Some(Value::Object(base)), Value::Object(over)) => {
                    base.extend(over);
                    base.sort_keys();
                }
                ("proxyHeaders", Some(Value::Object(base)), Value::Object(mut over)) => {
                    for kept in KEPT_HEADERS {
                        let unset = over.get(kept).is_none_or(|v| v == "UNDEFINED");
                        if let (true, Some(value)) = (unset, base.get(kept)) {
                            over.insert(kept.to_owned(), value.clone());
                        }
                    }
                    self.document.insert(name, Value::Object(over));
                }
                (_, _, value) => {
                    self.document.insert(name, value);
                }
            }
        }
        self.proxy = typed(&self.document);
        Ok(())
    }

    /// The document with explicit zeros, camelCase.
    #[must_use]
    pub fn document(&self) -> &Object {
        &self.document
    }

    /// `parentShutdownDuration`, which is no field any more.
    #[must_use]
    pub fn parent_shutdown(&self) -> Option<&str> {
        self.parent_shutdown.as_deref()
    }

    /// As node metadata and the log show it: zeros left out.
    #[must_use]
    pub fn to_json(&self) -> Value {
        Value::Object(jsonpb::print(&PROXY, &self.document))
    }
}

impl Default for Effective {
    fn default() -> Self {
        Self::new()
    }
}

fn parse(text: &str) -> Result<Value, Vec<Fault>> {
    yaml::to_json(text).map_err(|e| vec![Fault { at: "document".to_owned(), reason: e.to_string() }])
}

fn typed(document: &Object) -> ProxyConfig {
    let mut document = Value::Object(document.clone());
    loop {
        match serde_json::from_value(document.clone()) {
            Ok(proxy) => return proxy,
            // A canonical document differs from protobuf's mapping only in enum numbers without a name.
            Err(_) if drop_numbers(&PROXY, &mut document) => {}
            Err(error) => unreachable!("a canonical document is a ProxyConfig: {error}"),
        }
    }
}

fn drop_numbers(of: &crate::proto::schema::Message, document: &mut Value) -> bool {
    use crate::proto::schema::{Kind, Shape};
    let Value::Object(object) = document else { return false };
    let mut dropped = false;
    for field in of.fields {
        let Some(value) = object.get_mut(field.json) else { continue };
        match (field.kind, field.shape) {
            (Kind::Enum(_), Shape::One) if value.is_number() => {
                object.remove(field.json);
                dropped = true;
            }
            (Kind::Enum(_), Shape::List) => {
                if let Value::Array(items) = value {
                    let before = items.len();
                    items.retain(|item| !item.is_number());
                    dropped |= items.len() != before;
                }
            }
            (Kind::Message(inner), Shape::One) => dropped |= drop_numbers(inner, value),
            (Kind::Message(inner), Shape::List) => {
                for item in value.as_array_mut().into_iter().flatten() {
                    dropped |= drop_numbers(inner, item);
                }
            }
            (Kind::Message(inner), Shape::Map) => {
                for (_, item) in value.as_object_mut().into_iter().flatten() {
                    dropped |= drop_numbers(inner, item);
                }
            }
            _ => {}
        }
    }
    dropped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_replaces_whole_fields_and_explicit_zeros_count() {
        let mut e = Effective::new();
        e.overlay_mesh(
            "defaultConfig:\n  concurrency: 4\n  tracing: {zipkin: {address: 'a:1'}}\n  extraStatTags: [a, b]\n  \
             proxyMetadata: {A: '1', B: '1'}\n  runtimeValues: {x: '1'}\n",
        )
        .unwrap();
        let over = r#"{"concurrency": 0, "tracing": {"sampling": 10}, "proxy_metadata": {"B": "2"},
            "extraStatTags": [], "runtimeValues": {"y": "2"}, "controlPlaneAuthPolicy": "NONE"}"#;
        e.overlay(over).unwrap();
        assert_eq!(e.proxy.concurrency.as_ref().map(|c| c.value), Some(0));
        assert!(e.proxy.tracing.as_ref().unwrap().tracer.is_none());
        assert_eq!(json!(e.proxy.proxy_metadata), json!({"A": "1", "B": "2"}));
        assert_eq!(json!(e.proxy.runtime_values), json!({"y": "2"}));
        assert!(e.proxy.extra_stat_tags.is_empty());
        let shown = e.to_json();
        assert_eq!(shown["concurrency"], json!(0));
        assert_eq!(shown.get("controlPlaneAuthPolicy"), None);
        e.overlay("drainDuration: 1m30s").unwrap();
        assert_eq!(e.proxy.drain_duration.as_ref().unwrap().seconds, 90);
    }

    #[test]
    fn headers_fall_back_member_by_member() {
        let mut e = Effective::new();
        e.overlay("proxyHeaders: {requestId: {disabled: true}, server: {value: a}, preserveHttp1HeaderCase: true, forwardedClientCert: SANITIZE}")
            .unwrap();
        e.overlay("proxyHeaders: {server: {value: b}, forwardedClientCert: UNDEFINED}").unwrap();
        let want = json!({"forwardedClientCert": "SANITIZE", "requestId": {"disabled": true}, "server": {"value": "b"}});
        assert_eq!(e.to_json()["proxyHeaders"], want);
    }

    #[test]
    fn oneofs_enum_numbers_and_the_wrong_spelling_of_default_config() {
        let mut e = Effective::new();
        e.overlay("tracingServiceName: CANONICAL_NAME_ONLY\ninterceptionMode: 9\ntracing: {openCensusAgent: {context: [1, 77]}}")
            .unwrap();
        assert_eq!(e.to_json().get("serviceCluster"), None);
        assert_eq!(e.to_json()["interceptionMode"], json!(9));
        assert_eq!(e.proxy.interception_mode, 0);
        e.overlay_mesh("default_config: {configPath: /x}").unwrap();
        assert_eq!(e.proxy.config_path, "./etc/istio/proxy");
    }

    #[test]
    fn a_bad_layer_changes_nothing_and_names_every_fault() {
        let mut e = Effective::new();
        let before = e.to_json();
        let faults = e.overlay("configPath: /x\nstatusPort: {}\nconcurrency: [1]").unwrap_err();
        assert_eq!(faults.len(), 2);
        assert_eq!(e.to_json(), before);
        assert!(e.overlay("- 1").is_err());
        assert!(
            e.overlay_mesh("extensionProviders: [{name: 5}]\naccessLogEncoding: yaml").unwrap_err().len()
                == 2
        );
        e.overlay("").unwrap();
        e.overlay_mesh("# nothing\n").unwrap();
        assert_eq!(e.to_json(), before);
    }

    #[test]
    fn what_1_31_has_new_in_a_mesh_file_is_judged_where_1_31_is_followed() {
        for bad in [
            "zoneAwareLbSetting: {enabled: 'yes'}",
            "zone_aware_lb_setting: 5",
            "defaultTrafficPolicy: {connectionPool: {tcp: {maxConnections: x}}}",
            "defaultTrafficPolicy: {outlierDetection: {interval: 5}}",
            "serviceEntryVisibility: {defaultVisibility: ALL}",
            "serviceEntryVisibility: {policies: [{matchingRules: [{namespaceSelector: {matchLabels: [a]}}]}]}",
        ] {
            assert_eq!(Effective::new().overlay_mesh(bad).map_err(|faults| faults.len()), Err(1), "{bad}");
            assert_eq!(Effective::of(Release::V1_30).overlay_mesh(bad).unwrap(), Object::new(), "{bad}");
        }
    }

    // What 1.30's MeshConfig holds beside the oldest fields: a wrong type anywhere refuses the file as a whole, and a name
    // that it does not have is passed over.
    #[test]
    fn every_field_of_a_mesh_file_has_its_type() {
        let mut e = Effective::new();
        let provider = |text: &str| format!("extensionProviders: [{{name: p, {text}}}]");
        for good in [
            "{hboneIdleTimeout: 1h, compliancePolicy: 5, outboundTrafficPolicy: {tls: {mode: SIMPLE, sni: a}}}".to_owned(),
            "serviceEntryVisibility: {defaultVisibility: NAMESPACE, applyToSidecars: true, policies: [{visibility: NONE, \
                matchingRules: [{namespaceSelector: {matchLabels: {a: b}}}]}]}"
                .to_owned(),
            "serviceScopeConfigs: [{scope: GLOBAL, namespaceSelector: {matchLabels: {a: b}}}]".to_owned(),
            provider("zipkin: {path: /x, timeout: 1s, traceContextOption: USE_B3, headers: [{name: a, envName: B}]}"),
            provider("opentelemetry: {grpc: {timeout: 1s}, serviceAttributeEnrichment: ISTIO_CANONICAL}"),
            provider("opentelemetry: {dynatraceSampler: {tenant: a, clusterId: -1, httpService: {port: 1}}}"),
            provider("sds: {name: a, service: b, port: 1}"),
        ] {
            e.overlay_mesh(&good).unwrap_or_else(|faults| panic!("{good}: {faults:?}"));
        }
        for bad in [
            "hboneIdleTimeout: 5".to_owned(),
            "outboundTrafficPolicy: {tls: {mode: simple}}".to_owned(),
            "serviceScopeConfigs: [{scope: WIDE}]".to_owned(),
            "serviceScopeConfigs: [{servicesSelector: {matchLabels: [a]}}]".to_owned(),
            provider("envoyExtAuthzHttp: {clearRouteCache: 'true'}"),
            provider("envoyExtAuthzGrpc: {clearRouteCache: 1}"),
            provider("envoyFileAccessLog: {omitEmptyValues: 'no'}"),
            provider("zipkin: {traceContextOption: B3}"),
            provider("zipkin: {timeout: 5}"),
            provider("opentelemetry: {http: {headers: [{envName: 1}]}}"),
            provider("opentelemetry: {grpc: {initialMetadata: {}}}"),
            provider("opentelemetry: {serviceAttributeEnrichment: CANONICAL}"),
            provider("opentelemetry: {dynatraceSampler: {rootSpansPerMinute: -1}}"),
            provider("sds: {port: '1.5'}"),
        ] {
            assert_eq!(e.overlay_mesh(&bad).map_err(|faults| faults.len()), Err(1), "{bad}");
        }
    }
}
