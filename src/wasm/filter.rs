//! What a filter asks for, and the filter that Envoy is given in its place. Pure.
//!
//! Only extension configs whose filter is Wasm with remote code are touched. They are decoded to be
//! judged, as strictly as Envoy would, but what goes on are the bytes that came, with three changes: the
//! code is a local file, variables that istiod meant for the agent are gone (one is a pull secret), and a
//! filter that came as a struct is a message.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::config::core::v3::async_data_source::Specifier as Code;
use envoy_types::pb::envoy::config::core::v3::data_source::Specifier;
use envoy_types::pb::envoy::config::core::v3::{AsyncDataSource, DataSource, RemoteDataSource};
use envoy_types::pb::envoy::extensions::wasm::v3::plugin_config::Vm;
use envoy_types::pb::envoy::extensions::wasm::v3::{FailurePolicy, PluginConfig};
use prost::{DecodeError, Message};
use zeroize::Zeroizing;

use super::typed_struct::{self, Error as StructError};
use crate::base::quote::shown;
use crate::base::wire;

const EXTENSION: &str = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig";
const STRUCT: &str = "type.googleapis.com/udpa.type.v1.TypedStruct";
const HTTP: &str = "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm";
const NETWORK: &str = "type.googleapis.com/envoy.extensions.filters.network.wasm.v3.Wasm";
const HTTP_RBAC: &str = "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC";
const NETWORK_RBAC: &str = "type.googleapis.com/envoy.extensions.filters.network.rbac.v3.RBAC";

/// Variables that begin so are for the agent, not for the module.
const FOR_THE_AGENT: &str = "ISTIO_META_";
const SECRET: &str = "ISTIO_META_WASM_IMAGE_PULL_SECRET";
const POLICY: &str = "ISTIO_META_WASM_IMAGE_PULL_POLICY";
const VERSION: &str = "ISTIO_META_WASM_PLUGIN_RESOURCE_VERSION";

/// Where things stand: `Any`, `TypedExtensionConfig`, and the path from a Wasm filter to its machine.
const ANY_TYPE: u32 = 1;
const ANY_VALUE: u32 = 2;
const TYPED_CONFIG: u32 = 2;
const CODE: [u32; 3] = [1, 3, 3];
const LOCAL: u32 = 1;
const REMOTE: u32 = 2;
const ENVIRONMENT: [u32; 3] = [1, 3, 7];
const KEY_VALUES: u32 = 2;

/// The limit of a fetch where `http_uri` names none (the Go agent's; istiod always sends 30 s).
const TIMEOUT: Duration = Duration::from_secs(5);
/// Longest limit of a fetch: nobody waits longer for a module, and no clock counts all that the field can hold.
const LONGEST: Duration = Duration::from_secs(3600);

/// Longest filter that is decoded, in bytes: one of millions of tiny fields takes forty times its bytes. What Kubernetes
/// holds of one object is hardly longer.
const FILTER: usize = 1 << 20;
/// Longest name of an extension config, and version of its resource, that asks for a module, in bytes: both are kept, and
/// told. Those of istiod have a few hundred.
const TEXT: usize = 1024;

/// When a module that is there already is good enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// `IfNotPresent`, but for images with the tag `latest`.
    Unspecified,
    /// Whenever it is there.
    IfNotPresent,
    /// As long as the plugin's resource has not changed.
    Always,
}

/// Credentials for a registry that came with the filter: the content of a Docker config.
#[derive(Clone)]
pub enum Secret {
    /// None came; those of the machine are used.
    None,
    /// One was meant but istiod could not give it.
    Missing,
    /// The text.
    Given(Zeroizing<String>),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Missing => "Missing",
            Self::Given(_) => "Given(..)",
        })
    }
}

/// The module that a filter asks for.
#[derive(Debug, Clone)]
pub struct Wanted {
    /// Name of the extension config.
    pub resource: String,
    /// `None` where `http_uri` is missing.
    pub url: Option<String>,
    /// Lower-case hex; empty where none was given.
    pub checksum: String,
    /// For everything together; an hour at most.
    pub timeout: Duration,
    /// Credentials.
    pub secret: Secret,
    /// When to look again.
    pub policy: Policy,
    /// Version of the plugin's resource.
    pub version: String,
}

/// What becomes of an extension config.
#[derive(Debug)]
pub enum Decision {
    /// It goes on as it came.
    Untouched,
    /// Its code is remote.
    Remote(Box<Filter>),
}

/// A filter with remote code.
#[derive(Debug)]
pub struct Filter {
    /// What it asks for.
    pub wanted: Wanted,
    /// Whether traffic passes when the module cannot be had.
    pub open: bool,
    network: bool,
    /// The whole resource, an `Any`.
    resource: Bytes,
    /// The concrete Wasm message.
    wasm: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[derive(Clone, PartialEq, Message)]
struct Extension {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    typed_config: Option<Any>,
}

/// Both kinds of filter are this message.
#[derive(Clone, PartialEq, Message)]
struct Wasm {
    #[prost(message, optional, tag = "1")]
    config: Option<PluginConfig>,
}

/// An extension config that cannot be read: what istiod is told. Never repeats values, which may be secrets.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// Not the message that it is said to be.
    #[error("failed to unmarshal {what}: {source}")]
    Message {
        /// Which.
        what: String,
        /// The decoder's word.
        source: DecodeError,
    },
    /// Another type.
    #[error("mismatched message type: got {0:?}, want {EXTENSION:?}")]
    Type(String),
    /// No filter.
    #[error("extension config {0:?} has no typed_config")]
    NoConfig(String),
    /// No struct.
    #[error("{0:?}: {1}")]
    NoStruct(String, #[source] StructError),
    /// A struct that is no filter.
    #[error("extension config {0:?}: {1}")]
    Struct(String, #[source] StructError),
    /// No code.
    #[error("extension config {0:?}: the Wasm filter names no code, remote or local")]
    NoCode(String),
    /// Longer than anybody writes it.
    #[error("extension config {0:?}: its {1} has {2} bytes, more than {3}")]
    Long(String, &'static str, usize, usize),
}

/// Judges a resource: an `Any` as it is on the wire.
///
/// # Errors
/// When the response is to be refused.
pub fn judge(resource: &Bytes) -> Result<Decision, Unreadable> {
    let any = Any::decode(resource.clone()).map_err(|e| broken("a resource", e))?;
    if any.type_url != EXTENSION {
        return Err(Unreadable::Type(shown(&any.type_url).into_owned()));
    }
    let extension = Extension::decode(any.value).map_err(|e| broken("an extension config", e))?;
    // What is told of it.
    let name = shown(&extension.name).into_owned();
    let config = extension.typed_config.ok_or_else(|| Unreadable::NoConfig(name.clone()))?;
    let Some((network, wasm)) = concrete(config, &name)? else { return Ok(Decision::Untouched) };
    if wasm.len() > FILTER {
        // Code that is in the filter itself may be as long as it likes.
        if has_local_code(&wasm).map_err(|e| broken(&format!("Wasm filter {name:?}"), e))? {
            return Ok(Decision::Untouched);
        }
        return Err(Unreadable::Long(name, "filter", wasm.len(), FILTER));
    }
    let filter = Wasm::decode(wasm.clone()).map_err(|e| broken(&format!("Wasm filter {name:?}"), e))?;
    let missing = || Unreadable::NoCode(name.clone());
    let plugin = filter.config.ok_or_else(missing)?;
    let open = is_open(&plugin);
    let Some(Vm::VmConfig(vm)) = plugin.vm else { return Err(missing()) };
    let remote = match vm.code.and_then(|code| code.specifier) {
        None => return Err(missing()),
        Some(Code::Local(_)) => return Ok(Decision::Untouched),
        Some(Code::Remote(remote)) => remote,
    };
    let variables = vm.environment_variables.map(|e| e.key_values).unwrap_or_default();
    let wanted = wanted(extension.name, remote, variables)
        .map_err(|(what, length)| Unreadable::Long(name, what, length, TEXT))?;
    Ok(Decision::Remote(Box::new(Filter { wanted, open, network, resource: resource.clone(), wasm })))
}

fn broken(what: &str, source: DecodeError) -> Unreadable {
    Unreadable::Message { what: what.to_owned(), source }
}

// Whether it is for connections, and the Wasm message, which may have come as a struct; `None`: another filter.
fn concrete(config: Any, name: &str) -> Result<Option<(bool, Bytes)>, Unreadable> {
    Ok(match config.type_url.as_str() {
        HTTP => Some((false, config.value)),
        NETWORK => Some((true, config.value)),
        STRUCT if config.value.len() > FILTER => {
            let of = wire::last(&config.value, ANY_TYPE)
                .map_err(|e| broken("a TypedStruct", e))?
                .unwrap_or_default();
            if of == HTTP.as_bytes() || of == NETWORK.as_bytes() {
                return Err(Unreadable::Long(name.to_owned(), "filter", config.value.len(), FILTER));
            }
            None
        }
        STRUCT => {
            let inner =
                typed_struct::inner(&config.value).map_err(|e| Unreadable::NoStruct(name.to_owned(), e))?;
            let network = match inner.type_url.as_str() {
                HTTP => false,
                NETWORK => true,
                _ => return Ok(None),
            };
            let wasm = inner.wasm().map_err(|e| Unreadable::Struct(name.to_owned(), e))?;
            Some((network, wasm))
        }
        _ => None,
    })
}

// What is to be fetched; what is too long, and its bytes, where something is.
fn wanted(
    resource: String,
    remote: RemoteDataSource,
    mut variables: HashMap<String, String>,
) -> Result<Wanted, (&'static str, usize)> {
    let timeout = limit(&remote);
    let version = variables.remove(VERSION).unwrap_or_default();
    for (what, length) in [("name", resource.len()), ("version", version.len())] {
        if length > TEXT {
            return Err((what, length));
        }
    }
    Ok(Wanted {
        resource,
        url: remote.http_uri.map(|uri| uri.uri),
        // istiod sends the word where the plugin has none, since Envoy insists on a value.
        checksum: if remote.sha256 == "nil" { String::new() } else { remote.sha256 },
        timeout,
        secret: match variables.remove(SECRET).map(Zeroizing::new) {
            None => Secret::None,
            Some(text) if text.is_empty() => Secret::Missing,
            Some(text) => Secret::Given(text),
        },
        policy: match variables.get(POLICY).map(String::as_str) {
            Some("IfNotPresent") => Policy::IfNotPresent,
            Some("Always") => Policy::Always,
            _ => Policy::Unspecified,
        },
        version,
    })
}

// How long a fetch may take.
fn limit(remote: &RemoteDataSource) -> Duration {
    let timeout = remote.http_uri.as_ref().and_then(|uri| uri.timeout.as_ref());
    timeout.map_or(TIMEOUT, |t| {
        let seconds = u64::try_from(t.seconds).unwrap_or(0);
        LONGEST
            .min(Duration::new(seconds, if t.seconds < 0 { 0 } else { u32::try_from(t.nanos).unwrap_or(0) }))
    })
}

fn has_local_code(wasm: &Bytes) -> Result<bool, DecodeError> {
    let mut inner = wasm.clone();
    for tag in CODE {
        inner = wire::merged(&inner, tag)?.unwrap_or_default();
    }
    // Of the two forms the last one counts.
    let mut last = None;
    for form in wire::each(&inner) {
        last = Some(form?.tag).filter(|tag| [LOCAL, REMOTE].contains(tag)).or(last);
    }
    Ok(last == Some(LOCAL))
}

#[expect(deprecated, reason = "istiod still sends the older field")]
fn is_open(plugin: &PluginConfig) -> bool {
    // As a number: a policy that is not known here is not "none", and closes.
    if plugin.failure_policy == i32::from(FailurePolicy::Unspecified) {
        plugin.fail_open
    } else {
        plugin.failure_policy == i32::from(FailurePolicy::FailOpen)
    }
}

impl Filter {
    /// The resource with its code in a local file.
    ///
    /// # Errors
    /// Only where the message could not have been judged.
    pub fn local(&self, file: &str) -> Result<Bytes, DecodeError> {
        let specifier = Some(Specifier::Filename(file.to_owned()));
        let local = Code::Local(DataSource { specifier, watched_directory: None });
        let code = Bytes::from(AsyncDataSource { specifier: Some(local) }.encode_to_vec());
        let wasm = wire::edit(&self.wasm, &CODE, &mut |_| Ok(Some(code.clone())))?;
        let wasm = wire::edit(&wasm, &ENVIRONMENT, &mut without_ours)?;
        self.with(if self.network { NETWORK } else { HTTP }, wasm)
    }

    /// The resource with a filter that lets everything pass, or nothing.
    ///
    /// # Errors
    /// Only where the message could not have been judged.
    pub fn replaced(&self) -> Result<Bytes, DecodeError> {
        let name = if self.open { "wasm-default-allow" } else { "wasm-default-deny" };
        let rules = Rules { rules: (!self.open).then_some(()) };
        let (type_url, prefix_tag) = if self.network { (NETWORK_RBAC, 3) } else { (HTTP_RBAC, 6) };
        let filter = wire::set(&rules.encode_to_vec().into(), prefix_tag, name)?;
        self.with(type_url, filter)
    }

    fn with(&self, type_url: &'static str, value: Bytes) -> Result<Bytes, DecodeError> {
        wire::edit(&self.resource, &[ANY_VALUE, TYPED_CONFIG], &mut |config| {
            let config = wire::set(&config.unwrap_or_default(), ANY_TYPE, type_url)?;
            Ok(Some(wire::set(&config, ANY_VALUE, value.clone())?))
        })
    }
}

/// The one field that both RBAC filters have alike: absent allows all, empty denies all.
#[derive(Clone, PartialEq, Message)]
struct Rules {
    #[prost(message, optional, tag = "1")]
    rules: Option<()>,
}

#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(string, tag = "1")]
    key: String,
}

fn without_ours(variables: Option<Bytes>) -> Result<Option<Bytes>, DecodeError> {
    let mut kept = Vec::new();
    for field in wire::each(&variables.unwrap_or_default()) {
        let field = field?;
        let ours = match (field.body(), field.tag) {
            (Some(body), KEY_VALUES) => Entry::decode(body)?.key.starts_with(FOR_THE_AGENT),
            _ => false,
        };
        if !ours {
            kept.extend_from_slice(field.raw);
        }
    }
    Ok((!kept.is_empty()).then(|| kept.into()))
}

#[cfg(test)]
mod tests;
