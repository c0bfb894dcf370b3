//! A CA in this process that follows a script, for the tests of this module.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::BoxFuture;
use mock_istiod::pki::{Authority, Leaf, read_request};

use crate::base::clock::{Clock, Fixed};
use crate::ca::{CaClient, Error};

/// What becomes of a request.
#[derive(Debug, Clone)]
pub(super) enum Act {
    Issue(Duration),
    Refuse(tonic::Code),
    /// No connection.
    Unreachable,
    Hang,
    Slow(Duration),
    Expired,
    /// Valid only after so long.
    Future(Duration),
    WrongKey,
    OtherIdentity,
    Entries(Vec<&'static str>),
    OutOfOrder,
    NewRoot,
    /// Signed, but there is no connection for the roots.
    NoBundle,
    /// Its chain and root are those of another CA of the same name.
    OtherSigner,
}

pub(super) const DAY: Duration = Duration::from_secs(86_400);
pub(super) const ID: &str = "spiffe://cluster.local/ns/default/sa/a";

#[derive(Clone)]
pub(super) struct FakeCa {
    state: Arc<Mutex<Inner>>,
    clock: Fixed,
}

struct Inner {
    authority: Authority,
    other: Authority,
    act: Act,
    calls: usize,
    keys: Vec<Vec<u8>>,
    left: bool,
}

impl std::fmt::Debug for FakeCa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FakeCa")
    }
}

impl FakeCa {
    pub(super) fn new(clock: Fixed) -> Self {
        let state = Inner {
            authority: Authority::new("cluster.local", 1),
            other: Authority::new("cluster.local", 0),
            act: Act::Issue(DAY),
            calls: 0,
            keys: Vec::new(),
            left: false,
        };
        Self { state: Arc::new(Mutex::new(state)), clock }
    }

    pub(super) fn act(&self, act: Act) {
        self.state.lock().unwrap().act = act;
    }

    pub(super) fn calls(&self) -> usize {
        self.state.lock().unwrap().calls
    }

    /// The key of each request.
    pub(super) fn keys(&self) -> Vec<Vec<u8>> {
        self.state.lock().unwrap().keys.clone()
    }

    /// Whether it was told last that nobody asks.
    pub(super) fn left(&self) -> bool {
        self.state.lock().unwrap().left
    }

    pub(super) fn root(&self) -> String {
        self.state.lock().unwrap().authority.root_pem().to_owned()
    }

    /// Of whom signs for [`Act::OtherSigner`].
    pub(super) fn other_root(&self) -> String {
        self.state.lock().unwrap().other.root_pem().to_owned()
    }

    fn answer(&self, csr: &str) -> Result<Option<Vec<String>>, Error> {
        let mut state = self.state.lock().unwrap();
        state.calls += 1;
        state.left = false;
        let asked = read_request(csr).expect("a request that istiod would take");
        state.keys.push(rcgen::PublicKeyData::der_bytes(&asked).to_vec());
        let act = state.act.clone();
        if matches!(act, Act::NewRoot) {
            state.authority = Authority::new("cluster.local", 1);
            state.act = Act::Issue(DAY);
        }
        let authority = &state.authority;
        let now = self.clock.now();
        let mut leaf = Leaf {
            uris: vec![ID.to_owned()],
            dns: Vec::new(),
            not_before: now - Duration::from_secs(120),
            not_after: now + DAY,
        };
        let endpoint = || "fake".to_owned();
        match &act {
            Act::Refuse(code) => {
                let status = Box::new(tonic::Status::new(*code, "scripted"));
                return Err(Error::Status { endpoint: endpoint(), status, hint: "" });
            }
            Act::Unreachable => {
                let source = "scripted".into();
                return Err(Error::Unsent(Box::new(Error::Connect { endpoint: endpoint(), source })));
            }
            Act::Entries(entries) => return Ok(Some(entries.iter().map(|e| (*e).to_owned()).collect())),
            Act::Hang => return Ok(None),
            Act::Issue(life) => leaf.not_after = now + *life,
            Act::Expired => leaf.not_after = now - Duration::from_secs(5),
            Act::Future(by) => {
                leaf.not_before = now + *by;
                leaf.not_after = now + *by + DAY;
            }
            Act::OtherIdentity => leaf.uris = vec!["spiffe://other/ns/x/sa/y".to_owned()],
            _ => {}
        }
        let certificate = match act {
            Act::WrongKey => authority.pair(&leaf).chain,
            Act::OtherSigner => state.other.sign(&asked, &leaf),
            _ => authority.sign(&asked, &leaf),
        };
        let mut entries = vec![certificate];
        entries.extend(authority.intermediates().map(ToOwned::to_owned));
        entries.push(authority.root_pem().to_owned());
        if matches!(act, Act::OutOfOrder) {
            entries.swap(0, 1);
        }
        Ok(Some(entries))
    }
}

impl CaClient for FakeCa {
    fn sign<'a>(&'a self, csr: &'a str, _ttl: Duration) -> BoxFuture<'a, Result<Vec<String>, Error>> {
        Box::pin(async move {
            let slow = match &self.state.lock().unwrap().act {
                Act::Slow(by) => Some(*by),
                _ => None,
            };
            if let Some(by) = slow {
                tokio::time::sleep(by).await;
            }
            match self.answer(csr)? {
                Some(entries) => Ok(entries),
                None => std::future::pending().await,
            }
        })
    }

    fn root_bundle(&self) -> BoxFuture<'_, Result<Vec<String>, Error>> {
        Box::pin(async {
            if !matches!(self.state.lock().unwrap().act, Act::NoBundle) {
                return Ok(Vec::new());
            }
            let connect = Error::Connect { endpoint: "fake".to_owned(), source: "scripted".into() };
            Err(Error::Unsent(Box::new(connect)))
        })
    }

    fn left(&self) {
        self.state.lock().unwrap().left = true;
    }
}
