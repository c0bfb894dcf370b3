//! Plays istiod for the demo, the tests, the benches and other people's conformance tests.
//!
//! A [`MockIstiod`] is a server on a loopback port with istiod's two services:
//! - a certificate authority that checks tokens (or client certificates) and really signs ([`ca`], [`pki`], [`jwt`]);
//! - an aggregated discovery service, state of the world and incremental, that serves a [`Store`] of resources and
//!   pushes every change, or hands each stream to the test as two channels ([`ads`], [`MockIstiod::take_streams`]).
//!
//! What goes wrong is scripted ([`fault`]), what was received is recorded ([`record`]). HTTP/2 is spoken through `h2`
//! directly, because the faults need what servers above it do not offer: a frame cut in the middle, headers only
//! with the first answer, GOAWAY at a chosen moment.

mod admission;
pub mod ads;
pub mod apiserver;
pub mod auth;
pub mod bulk;
pub mod ca;
pub mod control;
pub mod fault;
pub mod folder;
mod google;
pub mod grpc;
pub mod json;
pub mod jwt;
mod messages;
pub mod names;
pub mod net;
pub mod pki;
pub mod record;
mod reply;
pub mod resources;
mod server;
mod sever;
mod shared;
mod stream;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, SystemTime};

use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admission::Admission;
pub use crate::ads::{AdsStream, Responses};
pub use crate::fault::{Fault, Script};
pub use crate::grpc::{Code, Status};
pub use crate::jwt::Token;
pub use crate::pki::{Authority, Leaf, Pair};
pub use crate::record::Record;
pub use crate::resources::{Resource, Set, Store};
use crate::shared::{Pki, Setting, Shared, tls_config, tls_config_of};

/// How the server is set up; the defaults are istiod's on port 15012.
#[derive(Debug, Clone)]
pub struct Builder {
    listen: SocketAddr,
    trust_domain: String,
    dns_names: Vec<String>,
    intermediates: usize,
    plaintext: bool,
    plaintext_auth: bool,
    ads_auth: bool,
    eager_headers: bool,
    ttl: Option<Duration>,
    down: bool,
}

impl Default for Builder {
    fn default() -> Self {
        let names =
            ["istiod.istio-system.svc", "istiod-remote.istio-system.svc", "istio-pilot.istio-system.svc"];
        Self {
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            trust_domain: "cluster.local".to_owned(),
            dns_names: names.iter().map(ToString::to_string).chain(["localhost".to_owned()]).collect(),
            intermediates: 1,
            plaintext: false,
            plaintext_auth: false,
            ads_auth: true,
            eager_headers: false,
            ttl: None,
            down: false,
        }
    }
}

impl Builder {
    /// Where to listen; port 0 takes a free one. Default: `127.0.0.1:0`.
    #[must_use]
    pub fn listen(self, listen: SocketAddr) -> Self {
        Self { listen, ..self }
    }

    /// The trust domain of issued identities. Default: `cluster.local`.
    #[must_use]
    pub fn trust_domain(self, trust_domain: impl Into<String>) -> Self {
        Self { trust_domain: trust_domain.into(), ..self }
    }

    /// The DNS names of the server's certificate. Default: istiod's, and `localhost`.
    #[must_use]
    pub fn dns_names(self, names: impl IntoIterator<Item = String>) -> Self {
        Self { dns_names: names.into_iter().collect(), ..self }
    }

    /// How many intermediates stand between root and leaf. Default: 1.
    #[must_use]
    pub fn intermediates(self, intermediates: usize) -> Self {
        Self { intermediates, ..self }
    }

    /// Without TLS, as istiod on port 15010: ADS takes anybody, the certificate service nobody.
    #[must_use]
    pub fn plaintext(self) -> Self {
        Self { plaintext: true, ..self }
    }

    /// With [`Builder::plaintext`], callers are authenticated all the same (istiod's `XDS_AUTH_PLAINTEXT`).
    #[must_use]
    pub fn plaintext_auth(self) -> Self {
        Self { plaintext: true, plaintext_auth: true, ..self }
    }

    /// ADS takes anybody (istiod's `XDS_AUTH=false`).
    #[must_use]
    pub fn anonymous_ads(self) -> Self {
        Self { ads_auth: false, ..self }
    }

    /// Response headers are sent at once, unlike a server written in Go.
    #[must_use]
    pub fn eager_headers(self) -> Self {
        Self { eager_headers: true, ..self }
    }

    /// Every certificate lives so long, whatever was asked for.
    #[must_use]
    pub fn ttl(self, ttl: Duration) -> Self {
        Self { ttl: Some(ttl), ..self }
    }

    /// Begins without listening (an istiod that is yet to come): the port is chosen, [`MockIstiod::up`] opens it.
    #[must_use]
    pub fn down(self) -> Self {
        Self { down: true, ..self }
    }

    /// Starts the server on the current runtime.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub async fn start(self) -> io::Result<MockIstiod> {
        let listener = bind(self.listen)?;
        let address = listener.local_addr()?;
        let authority = Authority::new(&self.trust_domain, self.intermediates);
        let pki = Pki {
            bundle: authority.root_pem().to_owned(),
            tls: tls_config(&authority, &[&authority], &self.dns_names),
            authority,
        };
        let shared = Arc::new(Shared {
            record: Record::default(),
            ca: Script::default(),
            ads: Script::default(),
            admission: Admission::default(),
            connections: Script::default(),
            resources: Store::default(),
            trust_domain: self.trust_domain,
            dns_names: self.dns_names,
            plaintext: self.plaintext,
            plaintext_auth: self.plaintext_auth,
            ads_auth: self.ads_auth.into(),
            eager_headers: self.eager_headers.into(),
            ttl: Setting::default(),
            takers: Setting::default(),
            pki: RwLock::new(pki),
            next_connection: 0.into(),
            next_stream: 0.into(),
        });
        shared.ttl.set(self.ttl);
        let mock = MockIstiod {
            shared,
            address,
            tasks: TaskTracker::new(),
            whole: CancellationToken::new(),
            listening: Mutex::new(None),
        };
        if !self.down {
            mock.listen(listener);
        }
        Ok(mock)
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1024)
}

/// A running server; it stops when dropped.
pub struct MockIstiod {
    shared: Arc<Shared>,
    address: SocketAddr,
    tasks: TaskTracker,
    whole: CancellationToken,
    listening: Mutex<Option<(CancellationToken, TaskTracker)>>,
}

impl Drop for MockIstiod {
    fn drop(&mut self) {
        self.whole.cancel();
    }
}

impl MockIstiod {
    /// What to set up before starting.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Starts with the defaults.
    ///
    /// # Panics
    /// When no loopback port can be bound.
    pub async fn start() -> Self {
        Builder::default().start().await.expect("a loopback port can be bound")
    }

    fn listen(&self, listener: TcpListener) {
        let (stop, tasks) = (self.whole.child_token(), TaskTracker::new());
        tasks.spawn(server::accept(self.shared.clone(), listener, tasks.clone(), stop.clone()));
        *self.listening.lock().expect("no panic holds this lock") = Some((stop, tasks));
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `localhost:<port>`, for `discoveryAddress`: a client of this name expects istiod's certificate.
    #[must_use]
    pub fn discovery_address(&self) -> String {
        format!("localhost:{}", self.address.port())
    }

    /// Stops listening and drops every connection.
    pub async fn down(&self) {
        let running = self.listening.lock().expect("no panic holds this lock").take();
        if let Some((stop, tasks)) = running {
            stop.cancel();
            tasks.close();
            tasks.wait().await;
        }
    }

    /// Listens again on the same port.
    ///
    /// # Errors
    /// When somebody else has taken the port.
    pub async fn up(&self) -> io::Result<()> {
        self.down().await;
        self.listen(bind(self.address)?);
        Ok(())
    }

    /// What the calls of the certificate service meet.
    #[must_use]
    pub fn ca(&self) -> &Script {
        &self.shared.ca
    }

    /// What ADS streams meet.
    #[must_use]
    pub fn ads(&self) -> &Script {
        &self.shared.ads
    }

    /// What new connections meet: [`Fault::Delay`], [`Fault::HalfOpen`] (accepted, never a TLS answer) and
    /// [`Fault::Drop`].
    #[must_use]
    pub fn connections(&self) -> &Script {
        &self.shared.connections
    }

    /// What has happened.
    #[must_use]
    pub fn record(&self) -> &Record {
        &self.shared.record
    }

    /// What ADS serves.
    #[must_use]
    pub fn resources(&self) -> &Store {
        &self.shared.resources
    }

    /// Serves a folder and follows its changes ([`folder`]).
    ///
    /// # Errors
    /// When the folder cannot be read or watched.
    pub fn serve_folder(&self, path: &Path) -> Result<(), folder::Error> {
        let following = folder::follow(path, self.shared.resources.clone())?;
        self.tasks.spawn(self.whole.clone().run_until_cancelled_owned(following));
        Ok(())
    }

    /// From now on each ADS stream comes to the caller, who plays the server; until the receiver is dropped and
    /// [`MockIstiod::serve_streams`] called, nobody else answers.
    #[must_use]
    pub fn take_streams(&self) -> mpsc::UnboundedReceiver<AdsStream> {
        // Unbounded: a stream waits here only until the test looks, and there are as many as the client opens.
        let (taker, streams) = mpsc::unbounded_channel();
        self.shared.takers.set(Some(taker));
        streams
    }

    /// New ADS streams are served from the resources again.
    pub fn serve_streams(&self) {
        self.shared.takers.set(None);
    }

    /// The root bundle that workloads are told, PEM.
    #[must_use]
    pub fn root_pem(&self) -> String {
        self.shared.root_bundle()
    }

    /// The authority that signs now.
    #[must_use]
    pub fn authority(&self) -> Authority {
        self.shared.authority()
    }

    /// A good service-account token.
    #[must_use]
    pub fn mint(&self, namespace: &str, account: &str) -> String {
        Token::of(namespace, account).sign()
    }

    /// The identity that such a token is given.
    #[must_use]
    pub fn identity(&self, namespace: &str, account: &str) -> String {
        format!("spiffe://{}/ns/{namespace}/sa/{account}", self.shared.trust_domain)
    }

    /// A client certificate for `identity`, as a VM has it.
    #[must_use]
    pub fn issue(&self, identity: &str, ttl: Duration) -> Pair {
        self.authority().pair(&Leaf::workload(identity, ttl))
    }

    /// Every certificate lives so long from now on; `None`: as asked for.
    pub fn set_ttl(&self, ttl: Option<Duration>) {
        self.shared.ttl.set(ttl);
    }

    /// So many ADS streams are admitted a second from now on, as istiod's `PILOT_MAX_REQUESTS_PER_SECOND` does it; 0: all.
    pub fn set_admitted(&self, rate: u32) {
        self.shared.admission.set(rate);
    }

    /// Whether response headers are sent at once.
    pub fn set_eager_headers(&self, eager: bool) {
        self.shared.eager_headers.store(eager, Ordering::Relaxed);
    }

    /// A new root signs from now on, for the server's own certificate too. Workloads are told both roots when
    /// `keep_old`, or only the new one.
    pub fn rotate_root(&self, keep_old: bool) {
        let mut pki = self.shared.pki.write().expect("no panic holds this lock");
        let fresh = Authority::new(&self.shared.trust_domain, pki.authority.intermediates().count());
        pki.tls = match keep_old {
            true => tls_config(&fresh, &[&fresh, &pki.authority], &self.shared.dns_names),
            false => tls_config(&fresh, &[&fresh], &self.shared.dns_names),
        };
        pki.bundle = match keep_old {
            true => format!("{}{}", fresh.root_pem(), pki.bundle),
            false => fresh.root_pem().to_owned(),
        };
        pki.authority = fresh;
    }

    /// The server's own certificate is valid in this time only, from the next connection on.
    ///
    /// # Panics
    /// Never; no panic holds the lock.
    pub fn serve_within(&self, valid: Range<SystemTime>) {
        let mut pki = self.shared.pki.write().expect("no panic holds this lock");
        let own = pki.authority.server_within(&self.shared.dns_names, valid);
        pki.tls = tls_config_of(own, &[&pki.authority]);
    }

    /// The server shows this chain, in DER, from the next connection on.
    ///
    /// # Panics
    /// When the key is not the chain's.
    pub fn present(&self, chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) {
        let mut pki = self.shared.pki.write().expect("no panic holds this lock");
        pki.tls = tls_config_of((chain, key), &[&pki.authority]);
    }

    /// Stops everything and waits for it.
    pub async fn stop(self) {
        self.down().await;
        self.whole.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
