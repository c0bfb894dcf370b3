//! What ADS serves: resources by type and name, for everybody and for single workloads.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use envoy_types::pb::google::protobuf::Any;
use tokio::sync::watch;

/// Type URL of clusters (CDS).
pub const CLUSTER: &str = "type.googleapis.com/envoy.config.cluster.v3.Cluster";
/// Type URL of endpoints (EDS).
pub const ENDPOINTS: &str = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment";
/// Type URL of listeners (LDS).
pub const LISTENER: &str = "type.googleapis.com/envoy.config.listener.v3.Listener";
/// Type URL of routes (RDS).
pub const ROUTES: &str = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration";
/// Type URL of secrets (SDS).
pub const SECRET: &str = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret";

/// One resource.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Resource {
    /// Its type.
    pub type_url: String,
    /// Its name; may be empty for types that have none.
    pub name: String,
    /// A digest of its content.
    pub version: String,
    /// The message's bytes.
    pub value: Bytes,
}

impl Resource {
    /// A resource from bytes, whatever they are.
    pub fn new(type_url: impl Into<String>, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        let (type_url, name, value) = (type_url.into(), name.into(), value.into());
        let version = digest(&value);
        Self { type_url, name, version, value }
    }

    pub(crate) fn any(&self) -> Any {
        Any { type_url: self.type_url.clone(), value: self.value.to_vec() }
    }
}

fn digest(value: impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Types of which a client that names nothing wants everything.
pub(crate) fn always_whole(type_url: &str) -> bool {
    type_url == CLUSTER || type_url == LISTENER || !type_url.starts_with("type.googleapis.com/envoy.")
}

type ByName = BTreeMap<String, Arc<Resource>>;

/// What one workload sees. Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct View(Arc<BTreeMap<String, ByName>>);

impl View {
    /// All resources of a type.
    pub fn all(&self, type_url: &str) -> impl Iterator<Item = &Arc<Resource>> {
        self.0.get(type_url).into_iter().flat_map(BTreeMap::values)
    }

    /// There is at least one resource of the type.
    #[must_use]
    pub fn has(&self, type_url: &str) -> bool {
        self.0.get(type_url).is_some_and(|resources| !resources.is_empty())
    }

    /// One resource.
    #[must_use]
    pub fn get(&self, type_url: &str, name: &str) -> Option<&Arc<Resource>> {
        self.0.get(type_url)?.get(name)
    }

    /// What a client gets that asked for `names` of a type: those, or all when it named none and the type allows.
    pub fn select<'a>(
        &'a self,
        type_url: &str,
        names: &'a BTreeSet<String>,
    ) -> impl Iterator<Item = &'a Arc<Resource>> {
        let whole = (names.is_empty() && always_whole(type_url)) || names.contains("*");
        self.all(type_url).filter(move |resource| whole || names.contains(&resource.name))
    }

    /// A digest of [`View::select`].
    #[must_use]
    pub fn version(&self, type_url: &str, names: &BTreeSet<String>) -> String {
        let versions: Vec<_> = self.select(type_url, names).map(|r| (&r.name, &r.version)).collect();
        digest(versions)
    }
}

/// A whole set of resources: for everybody, and for single workloads by the third part of their node ID
/// (`<pod>.<namespace>`).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Set {
    /// For everybody.
    pub common: Vec<Resource>,
    /// For single workloads, in addition; a resource of the same type and name comes in the place of the common one.
    pub workloads: BTreeMap<String, Vec<Resource>>,
}

impl Set {
    /// What workload `id` sees.
    #[must_use]
    pub fn view(&self, id: &str) -> View {
        let own = self.workloads.get(id).into_iter().flatten();
        let mut types: BTreeMap<String, ByName> = BTreeMap::new();
        for resource in self.common.iter().chain(own) {
            let of_type = types.entry(resource.type_url.clone()).or_default();
            of_type.insert(resource.name.clone(), Arc::new(resource.clone()));
        }
        View(Arc::new(types))
    }

    /// Puts a resource in, for everybody or for one workload, in the place of one of the same type and name.
    pub fn put(&mut self, workload: Option<&str>, resource: Resource) {
        let list = match workload {
            None => &mut self.common,
            Some(id) => self.workloads.entry(id.to_owned()).or_default(),
        };
        list.retain(|other| (&other.type_url, &other.name) != (&resource.type_url, &resource.name));
        list.push(resource);
    }

    /// How many resources there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.common.len() + self.workloads.values().map(Vec::len).sum::<usize>()
    }

    /// There is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The resources that are served now; a change is pushed to every stream. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Store(watch::Sender<Arc<Set>>);

impl Default for Store {
    fn default() -> Self {
        Self(watch::Sender::new(Arc::default()))
    }
}

impl Store {
    /// Serves `set` from now on.
    pub fn replace(&self, set: Set) {
        self.0.send_if_modified(|current| {
            let differs = **current != set;
            if differs {
                *current = Arc::new(set);
            }
            differs
        });
    }

    /// Changes what is served.
    pub fn update(&self, change: impl FnOnce(&mut Set)) {
        self.0.send_modify(|current| change(Arc::make_mut(current)));
    }

    /// What is served now.
    #[must_use]
    pub fn current(&self) -> Arc<Set> {
        self.0.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<Set>> {
        self.0.subscribe()
    }
}
