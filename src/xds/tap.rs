//! Local handlers of types that never reach Envoy.
//!
//! A [`Tap`] names a type URL; the relay then asks istiod for it on every stream, hands each good
//! response's first resource over, and answers for it. A later part (name table, trust bundle) plugs in
//! here without the relay knowing what it does.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::protocol::Protocol;
use super::types;
use crate::base::error::BoxError;
use crate::base::lane::Lane;
use crate::base::quote::shown;
use crate::base::wire;

/// Handles one type.
pub trait Tap: Send + Sync + fmt::Debug {
    /// Its type URL.
    fn type_url(&self) -> &'static str;

    /// Takes the body of the first resource. Runs on the relay's task: it may decode and store, but not
    /// wait.
    ///
    /// # Errors
    /// Only when the body cannot be decoded; the text goes to istiod as the reason of the rejection.
    fn apply(&self, body: Bytes) -> Result<(), BoxError>;

    /// Whether [`Tap::apply`] may take long, and so runs on a thread: probes are answered meanwhile.
    fn is_heavy(&self) -> bool {
        false
    }
}

/// What is heavy is done one after the other, so that a stream that has ended does not overtake the next one's.
static HEAVY: Lane = Lane::new("a table from istiod", 1);

/// Converts extension configs (fetches Wasm modules). May take long: it runs beside the relay.
pub trait Convert: Send + Sync + fmt::Debug {
    /// Converts the resource bodies of one whole response; everything else stays as it is.
    ///
    /// # Errors
    /// The reason of the rejection that istiod is sent; nothing is forwarded then.
    fn convert(&self, protocol: Protocol, response: Bytes) -> BoxFuture<'static, Result<Bytes, BoxError>>;

    /// Envoy has none of them any more, and asks for none.
    fn dropped(&self) {}
}

/// A resource's body, as both protocols carry it.
#[derive(Clone, PartialEq, prost::Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
struct DeltaResource {
    #[prost(message, optional, tag = "2")]
    resource: Option<Any>,
}

/// The field of both protocols' responses that holds resources.
const RESOURCES: u32 = 2;
/// A response above this, in bytes, is read on a thread, whatever it brings: it may be all tiny fields.
const LARGE: usize = 256 * 1024;

/// Hands a whole response to its tap. `None`: it had no resources, and is neither handled nor answered.
pub(super) async fn apply(
    tap: &Arc<dyn Tap>,
    protocol: Protocol,
    response: Bytes,
) -> Option<Result<(), BoxError>> {
    if tap.is_heavy() || response.len() > LARGE {
        let (tap, response) = (tap.clone(), response.clone());
        if let Ok(applied) = HEAVY.run(move || take(&*tap, protocol, response)).await {
            return applied;
        }
        // There is no thread.
    }
    take(&**tap, protocol, response)
}

fn take(tap: &dyn Tap, protocol: Protocol, response: Bytes) -> Option<Result<(), BoxError>> {
    let first = match first(protocol, &response) {
        Ok(first) => first?,
        Err(error) => return Some(Err(error.into())),
    };
    if first.type_url != tap.type_url() {
        let got = shown(&first.type_url).into_owned();
        return Some(Err(Mismatch { got, want: tap.type_url() }.into()));
    }
    Some(tap.apply(first.value))
}

/// A resource of another type than the response's.
#[derive(Debug, thiserror::Error)]
#[error("mismatched message type: got {got:?}, want {want:?}")]
struct Mismatch {
    got: String,
    want: &'static str,
}

// A delta resource without a body stands as an empty one, and so is refused. Only the first is kept: a response of
// nothing but empty ones would be thirty times its size.
fn first(protocol: Protocol, response: &Bytes) -> Result<Option<Any>, prost::DecodeError> {
    let mut first = None;
    for field in wire::each(response) {
        let field = field?;
        if field.tag != RESOURCES {
            continue;
        }
        let resource = match protocol {
            Protocol::Sotw => field.message::<Any>(response)?,
            Protocol::Delta => field.message::<DeltaResource>(response)?.resource.unwrap_or_default(),
        };
        first.get_or_insert(resource);
    }
    Ok(first)
}

/// Trust anchors that istiod hands out in pushed proxy configuration.
#[derive(Debug)]
pub struct TrustBundle(watch::Sender<Vec<String>>);

/// Of `ProxyConfig` only the field with the certificates is read.
const CERTIFICATES: u32 = 34;
/// Entries of a bundle at most, and bytes of the message it comes in: a mesh has a few roots. Each copy on the way to
/// Envoy and to files costs as much again.
const ENTRIES: usize = 8192;
const BUNDLE: usize = 4 << 20;

/// A trust bundle that is none.
#[derive(Debug, thiserror::Error)]
enum BadBundle {
    #[error("{0}")]
    Message(#[from] prost::DecodeError),
    #[error("the trust bundle has {0} bytes, more than {BUNDLE}")]
    Bytes(usize),
    #[error("the trust bundle has more than {ENTRIES} entries")]
    Entries,
}

fn certificates(config: &[u8]) -> Result<Vec<String>, BadBundle> {
    if config.len() > BUNDLE {
        return Err(BadBundle::Bytes(config.len()));
    }
    let pems = wire::texts(config, CERTIFICATES).take(ENTRIES + 1).collect::<Result<Vec<_>, _>>()?;
    if pems.len() > ENTRIES { Err(BadBundle::Entries) } else { Ok(pems) }
}

impl TrustBundle {
    /// The tap, and where its bundle can be read: PEM texts as they were sent, at first those that are `known`.
    #[must_use]
    pub fn tap(known: Vec<String>) -> (Arc<dyn Tap>, watch::Receiver<Vec<String>>) {
        let (sender, bundle) = watch::channel(known);
        (Arc::new(Self(sender)), bundle)
    }
}

impl Tap for TrustBundle {
    fn type_url(&self) -> &'static str {
        types::PROXY_CONFIG
    }

    fn apply(&self, body: Bytes) -> Result<(), BoxError> {
        let bundle = certificates(&body)?;
        self.0.send_if_modified(|current| {
            let changed = *current != bundle;
            *current = bundle;
            changed
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[derive(Clone, PartialEq, prost::Message)]
    struct SotwResources {
        #[prost(message, repeated, tag = "2")]
        resources: Vec<Any>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct DeltaResources {
        #[prost(message, repeated, tag = "2")]
        resources: Vec<DeltaResource>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    struct PushedConfig {
        #[prost(string, repeated, tag = "34")]
        ca_certificates_pem: Vec<String>,
    }

    fn sotw(resources: Vec<Any>) -> Bytes {
        SotwResources { resources }.encode_to_vec().into()
    }

    fn pushed(pems: &[&str]) -> Any {
        let ca_certificates_pem = pems.iter().map(|p| (*p).to_owned()).collect();
        let value = PushedConfig { ca_certificates_pem }.encode_to_vec().into();
        Any { type_url: types::PROXY_CONFIG.to_owned(), value }
    }

    #[test]
    fn the_bundle_is_told_only_when_it_changes() {
        let (tap, mut bundle) = TrustBundle::tap(Vec::new());
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![pushed(&["a", "b"])])), Some(Ok(()))));
        assert_eq!(*bundle.borrow_and_update(), ["a", "b"]);
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![pushed(&["a", "b"])])), Some(Ok(()))));
        assert!(!bundle.has_changed().unwrap());
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![pushed(&[])])), Some(Ok(()))));
        assert!(bundle.borrow_and_update().is_empty());
    }

    #[test]
    fn a_bundle_is_bounded_in_entries_and_in_bytes() {
        let (tap, bundle) = TrustBundle::tap(vec!["known".to_owned()]);
        let long = "a".repeat(BUNDLE);
        for (pems, why) in [(vec![""; ENTRIES + 1], "entries"), (vec![&*long], "bytes")] {
            let told = take(&*tap, Protocol::Sotw, sotw(vec![pushed(&pems)])).unwrap().unwrap_err();
            assert!(told.to_string().contains(why), "{told}");
            assert_eq!(*bundle.borrow(), ["known"]);
        }
        let most = vec!["a"; ENTRIES];
        take(&*tap, Protocol::Sotw, sotw(vec![pushed(&most)])).unwrap().unwrap();
        assert_eq!(bundle.borrow().len(), ENTRIES);
    }

    #[test]
    fn what_else_stands_in_a_configuration_is_passed_over() {
        let (tap, bundle) = TrustBundle::tap(Vec::new());
        let mut config = pushed(&["a"]);
        config.value = [&[0x0a, 1, b'x'][..], &config.value, &[0x10, 5]].concat().into();
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![config])), Some(Ok(()))));
        assert_eq!(*bundle.borrow(), ["a"]);
    }

    #[test]
    fn of_many_resources_the_first_counts_and_all_are_read() {
        let (tap, bundle) = TrustBundle::tap(Vec::new());
        let mut many = vec![pushed(&["a"]), pushed(&["b"])];
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(many.clone())), Some(Ok(()))));
        assert_eq!(*bundle.borrow(), ["a"]);
        // One that is cut behind it.
        many[0] = pushed(&["c"]);
        let whole = sotw(many);
        assert!(matches!(take(&*tap, Protocol::Sotw, whole.slice(..whole.len() - 1)), Some(Err(_))));
        assert_eq!(*bundle.borrow(), ["a"]);
    }

    /// Takes a table only when somebody else on the runtime has come to say so.
    #[derive(Debug)]
    struct Slow(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

    impl Tap for Slow {
        fn type_url(&self) -> &'static str {
            types::NAME_TABLE
        }

        fn apply(&self, _: Bytes) -> Result<(), BoxError> {
            Ok(self.0.lock().unwrap().recv()?)
        }

        fn is_heavy(&self) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn a_large_table_holds_up_nobody_else() {
        let (say, said) = std::sync::mpsc::channel();
        let tap: Arc<dyn Tap> = Arc::new(Slow(said.into()));
        let table = Any { type_url: types::NAME_TABLE.to_owned(), value: Bytes::new() };
        let taken = apply(&tap, Protocol::Sotw, sotw(vec![table]));
        let (taken, ()) = tokio::join!(taken, async { say.send(()).unwrap() });
        assert!(matches!(taken, Some(Ok(()))));
    }

    #[test]
    fn empty_is_not_answered_and_foreign_or_broken_is_refused() {
        let (tap, bundle) = TrustBundle::tap(Vec::new());
        assert!(take(&*tap, Protocol::Sotw, sotw(vec![])).is_none());
        let foreign = Any { type_url: types::LISTENER.to_owned(), value: Bytes::new() };
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![foreign])), Some(Err(_))));
        let long = Any { type_url: "\u{1}".repeat(100_000), value: Bytes::new() };
        let why = take(&*tap, Protocol::Sotw, sotw(vec![long])).unwrap().unwrap_err().to_string();
        assert!(why.contains("(100000 bytes)") && why.len() < 2000, "{why}");
        let broken = Any { value: Bytes::from_static(&[0xff, 0xff]), ..pushed(&[]) };
        assert!(matches!(take(&*tap, Protocol::Sotw, sotw(vec![broken])), Some(Err(_))));
        let bodyless = DeltaResources { resources: vec![DeltaResource { resource: None }] };
        assert!(matches!(take(&*tap, Protocol::Delta, bodyless.encode_to_vec().into()), Some(Err(_))));
        assert!(bundle.borrow().is_empty());
    }
}
