//! The exchange with a registry: who may pull, the manifest, the layer.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde::Deserialize;
use tokio::time::{Instant, sleep_until, timeout_at};
use zeroize::{ZeroizeOnDrop, Zeroizing};

use super::challenge::{Challenge, UnsafeRealm, is_inside, is_same_host, may_give_tokens, refuse_unsafe};
use super::credentials::{self, BadConfig, Credentials};
use super::error::{BadToken, Error};
use super::machine::of_machine;
use super::manifest::{ACCEPT, BadManifest, Image, LONGEST, Layer, Manifest, names_image};
use super::reference::{DOCKER_HUB, Reference};
use crate::base::backoff::{Jitter, Policy};
use crate::base::sha256;
use crate::fetch::url::Url;
use crate::fetch::{Dialer, Get, Reply};
use crate::net::percent;
use crate::wasm::download::{Web, receive};
use crate::wasm::filter::Secret;
use crate::wasm::receive::{Form, Received};

/// Tries of one request, and the pauses between them (1 s, 3 s, ±10 %): those of the client library of
/// the Go agent.
const TRIES: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
const GROWTH: f64 = 3.0;
const SPREAD: f64 = 0.1;
/// How long HTTPS is waited for before plain HTTP is tried beside it, where that may be.
const PLAIN_AFTER: Duration = Duration::from_millis(300);
/// Longest answer of a token server.
const TOKEN: usize = 1 << 20;
/// What else a registry may want a token to be good for: so many scopes, and so long, in bytes.
const SCOPES: usize = 8;
const LONGEST_SCOPE: usize = 1024;
/// The key of Docker Hub in config files.
const DOCKER_HUB_KEY: &str = "https://index.docker.io/v1/";

/// One image's registry, for as long as it takes to pull it.
pub(in crate::wasm) struct Registry<'a> {
    web: &'a Web,
    dialer: &'a Dialer,
    reference: &'a Reference,
    credentials: Credentials,
    until: Instant,
    pauses: Policy,
    /// Scheme and host, once known.
    base: String,
    authorization: Option<HeaderValue>,
    /// Realm and service of the token server, where the registry has one.
    bearer: Option<(String, String)>,
}

/// An image as the registry has it.
pub(in crate::wasm) struct Pulled {
    /// Of its manifest, in hex.
    pub(in crate::wasm) digest: String,
    /// Of the index that led to it.
    index: Option<String>,
    /// One that cannot be read is found out about when the module is wanted, as by the library of the Go agent: its
    /// digest comes first.
    image: Result<Image, BadManifest>,
}

impl Pulled {
    /// All digests that mean this image, its own first.
    pub(in crate::wasm) fn digests(&self) -> Vec<&str> {
        std::iter::once(&self.digest).chain(&self.index).map(String::as_str).collect()
    }
}

impl<'a> Registry<'a> {
    /// Nothing is asked yet.
    pub(in crate::wasm) async fn new(
        web: &'a Web,
        reference: &'a Reference,
        secret: &Secret,
        until: Instant,
    ) -> Result<Self, BadConfig> {
        let host = reference.registry();
        let key = if host == DOCKER_HUB { DOCKER_HUB_KEY } else { host }.to_owned();
        let credentials = match secret {
            Secret::Given(document) => credentials::find(document, &[key])?,
            Secret::None | Secret::Missing => of_machine(web, &[reference.name(), key]).await,
        };
        Ok(Self {
            web,
            dialer: web.dialer(host),
            reference,
            credentials,
            until,
            pauses: Policy::new(FIRST_PAUSE, LONGEST_PAUSE, GROWTH, Jitter::PlusMinus(SPREAD))
                .expect("constants that can be meant"),
            base: String::new(),
            authorization: None,
            bearer: None,
        })
    }

    /// The image's manifest.
    pub(in crate::wasm) async fn manifest(&mut self) -> Result<Pulled, Error> {
        let failed = |error| Error::Manifest(Box::new(error));
        self.open().await.map_err(failed)?;
        let (digest, manifest) = self.read_manifest(&self.reference.identifier()).await.map_err(failed)?;
        let child = match manifest {
            Ok(Manifest::Index(child)) => child,
            Ok(Manifest::Image(image)) => return Ok(Pulled { digest, index: None, image: Ok(image) }),
            Err(why) => return Ok(Pulled { digest, index: None, image: Err(why) }),
        };
        let within = |error: Error| Error::Image(Box::new(error));
        let found = self.read_manifest(&format!("sha256:{child}")).await;
        let (child, manifest) = found.map_err(within)?;
        let image = match manifest {
            Ok(Manifest::Index(_)) => return Err(within(Error::Nested)),
            Ok(Manifest::Image(image)) => Ok(image),
            Err(why) => Err(why),
        };
        Ok(Pulled { digest: child, index: Some(digest), image })
    }

    /// The image's module, on the disk.
    pub(in crate::wasm) async fn module(&self, pulled: Pulled) -> Result<Received, Error> {
        let (image, mut reasons) = (pulled.image?, Vec::new());
        for way in image.ways()? {
            match way {
                Err(why) => reasons.push(why.into()),
                Ok((layer, form)) => match self.layer(layer, form).await {
                    Ok(received) => return Ok(received),
                    Err(why) => reasons.push(why),
                },
            }
        }
        let only = if reasons.len() == 1 { reasons.pop() } else { None };
        Err(only.unwrap_or(Error::NoWay(reasons)))
    }

    async fn layer(&self, layer: &Layer, form: Form) -> Result<Received, Error> {
        let path = format!("/v2/{}/blobs/sha256:{}", self.reference.repository(), layer.digest);
        let reply = self.ask(&path, None).await?;
        // A disk that does not answer is waited for no longer than the registry.
        let received = async { receive(reply, self.web.receiver(form).await?).await };
        let received = timeout_at(self.until, received).await.map_err(|_| Error::Late(path))??;
        if received.packed != layer.digest {
            return Err(Error::Checksum { layer: layer.digest.clone(), found: received.packed });
        }
        match received.entry {
            Ok(true) => Ok(received),
            Ok(false) => Err(Error::NoPlugin),
            Err(why) => Err(Error::Packed(why)),
        }
    }

    // The inner error: of an image that cannot be read.
    async fn read_manifest(
        &self,
        identifier: &str,
    ) -> Result<(String, Result<Manifest, BadManifest>), Error> {
        let path = format!("/v2/{}/manifests/{identifier}", self.reference.repository());
        let mut reply = self.ask(&path, Some(ACCEPT)).await?;
        let kind = reply.headers().get(header::CONTENT_TYPE).cloned();
        let body = timeout_at(self.until, self.web.document(&mut reply, LONGEST)).await;
        let body = body.map_err(|_| Error::Late(path))?.map_err(Error::Body)?;
        let digest = sha256::of(&body);
        if let Some(wanted) = identifier.strip_prefix("sha256:")
            && wanted != digest
        {
            return Err(Error::Digest { found: digest, wanted: identifier.to_owned() });
        }
        let kind = kind.as_ref().and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        match Manifest::parse(&body, kind) {
            Err(why) if !names_image(kind) => Err(why.into()),
            manifest => Ok((digest, manifest)),
        }
    }

    /// Finds out how the registry is spoken to and gets the right to pull.
    async fn open(&mut self) -> Result<(), Error> {
        let (base, reply) = self.ping().await?;
        self.base = base;
        self.bearer = match reply.status() {
            StatusCode::OK => None,
            StatusCode::UNAUTHORIZED => match challenges(reply.headers())?.into_iter().next() {
                Some(Challenge::Bearer { realm, service, .. }) => {
                    if !Url::parse(&realm).is_ok_and(|url| self.gives_tokens()(&url)) {
                        return Err(UnsafeRealm::of(&realm).into());
                    }
                    Some((realm, service))
                }
                Some(Challenge::Basic) => None,
                None if wants_token(reply.headers()) => return Err(Error::Authentication),
                // Some refuse this address to everybody and give the rest; what they want is tried as Basic.
                None => None,
            },
            status => return Err(Error::Status { url: format!("{}/v2/", self.base), status }),
        };
        self.authorization = match &self.bearer {
            // Given as it is, it is used whatever the registry asks for.
            _ if let Some(token) = &self.credentials.registry => Some(authorization("Bearer", token)?),
            Some((realm, service)) => Some(authorization("Bearer", &self.token(realm, service, &[]).await?)?),
            None => self.credentials.basic.as_ref().map(|b| authorization("Basic", b)).transpose()?,
        };
        Ok(())
    }

    // HTTPS; where the registry is a neighbour, plain HTTP too, a little later or when HTTPS has failed.
    // An answer in plain HTTP to a TLS greeting says for itself what is spoken.
    async fn ping(&self) -> Result<(String, Reply), Error> {
        let host = self.reference.registry();
        let at = |scheme: &str| format!("{scheme}://{host}");
        let (secure, plain) = (at("https"), at("http"));
        if !self.reference.may_be_plain() {
            return match self.get_there(&format!("{secure}/v2/"), &HeaderMap::new()).await {
                Ok(reply) => Ok((secure, reply)),
                Err(failed) if failed.is_plain() => {
                    tracing::debug!(target: "wasm", "{host} does not speak TLS ({failed}): plain HTTP is tried");
                    let reply = self.get_there(&format!("{plain}/v2/"), &HeaderMap::new()).await;
                    reply.map(|reply| (plain, reply))
                }
                Err(failed) => Err(failed),
            };
        }
        let (secure_url, plain_url) = (format!("{secure}/v2/"), format!("{plain}/v2/"));
        let none = HeaderMap::new();
        let mut over_tls = std::pin::pin!(self.get_there(&secure_url, &none));
        let mut why = tokio::select! {
            answer = &mut over_tls => match answer {
                Ok(reply) => return Ok((secure, reply)),
                Err(failed) => Some(failed),
            },
            () = tokio::time::sleep(PLAIN_AFTER) => None,
        };
        let mut over_plain = std::pin::pin!(self.get_there(&plain_url, &none));
        let mut plain_why = None;
        loop {
            tokio::select! {
                answer = &mut over_tls, if why.is_none() => match answer {
                    Ok(reply) => return Ok((secure, reply)),
                    Err(failed) => why = Some(failed),
                },
                answer = &mut over_plain, if plain_why.is_none() => match answer {
                    Ok(reply) => return Ok((plain, reply)),
                    Err(failed) => plain_why = Some(failed),
                },
                else => {}
            }
            if let (Some(_), Some(_)) = (&why, &plain_why)
                && let (Some(first), Some(second)) = (why.take(), plain_why.take())
            {
                return Err(Error::both(first, second));
            }
        }
    }

    /// Which addresses may be asked for a token.
    fn gives_tokens(&self) -> impl Fn(&Url) -> bool + Clone + Send + Sync + 'static {
        let (registry, secure) = (self.reference.registry().to_owned(), self.base.starts_with("https://"));
        move |url| may_give_tokens(url, &registry, secure)
    }

    // `scopes`: wanted beside the right to pull, and named before it, since some servers look at the first one only.
    async fn token(&self, realm: &str, service: &str, scopes: &[String]) -> Result<Zeroizing<String>, Error> {
        if let Some(token) = &self.credentials.registry {
            return Ok(token.clone());
        }
        let scopes: Vec<_> = scopes.iter().cloned().chain([self.scope()]).collect();
        let by_identity = match &self.credentials.identity {
            Some(identity) => {
                let own = [
                    ("client_id", "pilot-agent"),
                    ("grant_type", "refresh_token"),
                    ("refresh_token", identity.as_str()),
                ];
                let joint = scopes.join(" ");
                let wanted = [("scope", joint.as_str()), ("service", service)];
                let form = Zeroizing::new(percent::pairs(own.into_iter().chain(wanted)));
                let reply = self.get_through(realm, &HeaderMap::new(), Some(&form), |_, _| false).await?;
                // A server without that way has the other one.
                Some(reply).filter(|reply| reply.status() != StatusCode::NOT_FOUND)
            }
            None => None,
        };
        let mut reply = match by_identity {
            Some(reply) => reply,
            None => {
                let joint = if realm.contains('?') { '&' } else { '?' };
                let mut headers = HeaderMap::new();
                if let Some(basic) = &self.credentials.basic {
                    headers.insert(header::AUTHORIZATION, authorization("Basic", basic)?);
                }
                let scopes = scopes.iter().map(|scope| ("scope", scope.as_str()));
                let url = format!("{realm}{joint}{}", percent::pairs(scopes.chain([("service", service)])));
                let may = self.gives_tokens();
                let own = |first: &Url, next: &Url| is_same_host(first, next) && (next.https || !first.https);
                self.get_through(&url, &headers, None, move |first, next| own(first, next) || may(next))
                    .await?
            }
        };
        let refused = |wrong| Error::Token { realm: realm.to_owned(), wrong };
        if reply.status() != StatusCode::OK {
            return Err(refused(BadToken::Status(reply.status())));
        }
        let body = timeout_at(self.until, self.web.document(&mut reply, TOKEN)).await;
        let body = body.map_err(|_| refused(BadToken::Late))?;
        let body = body.map_err(Error::Body)?;
        let answer: Answer = serde_json::from_slice(&body).map_err(|_| refused(BadToken::Json))?;
        // Of two the Go agent takes the second.
        let mut tokens = [&answer.access_token, &answer.token].into_iter().flatten();
        let token = tokens.find(|token| !token.is_empty()).ok_or_else(|| refused(BadToken::None))?;
        Ok(Zeroizing::new(token.clone()))
    }

    /// What a token has to be good for.
    fn scope(&self) -> String {
        format!("repository:{}:pull", self.reference.repository())
    }

    /// Something of the registry, which must be there.
    // It leads nowhere inside: where a registry says that something lies, it could have anything asked for.
    async fn ask(&self, path: &str, accept: Option<&'static str>) -> Result<Reply, Error> {
        let url = format!("{}{path}", self.base);
        let mut headers = HeaderMap::new();
        if let Some(accept) = accept {
            headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
        }
        if let Some(authorization) = &self.authorization {
            headers.insert(header::AUTHORIZATION, authorization.clone());
        }
        let mut reply = self.get_there(&url, &headers).await?;
        // A token may have ended while the image was on its way, or be good for too little: another one is asked for, once.
        if reply.status() == StatusCode::UNAUTHORIZED
            && let again = challenges(reply.headers())?
            && !again.is_empty()
            && let Some((realm, service)) = &self.bearer
        {
            let token = self.token(realm, service, &scopes(&again, &self.scope())).await?;
            headers.insert(header::AUTHORIZATION, authorization("Bearer", &token)?);
            reply = self.get_there(&url, &headers).await?;
        }
        match reply.status() {
            StatusCode::OK => Ok(reply),
            StatusCode::UNAUTHORIZED => {
                challenges(reply.headers())?;
                Err(Error::Unauthorized(url))
            }
            status => Err(Error::Status { url, status }),
        }
    }

    // Leads nowhere inside.
    async fn get_there(&self, url: &str, headers: &HeaderMap) -> Result<Reply, Error> {
        self.get_through(url, headers, None, |first, next| {
            is_same_host(first, next) || !is_inside(&next.host)
        })
        .await
    }

    // One GET, or a POST of a form, tried again where the failure may be temporary.
    async fn get_through(
        &self,
        url: &str,
        headers: &HeaderMap,
        form: Option<&str>,
        follow: impl Fn(&Url, &Url) -> bool + Clone + Send + Sync + 'static,
    ) -> Result<Reply, Error> {
        let mut tries = 0;
        loop {
            let get = Get::new(url).map_err(Error::Url)?;
            let get =
                get.headers(headers.clone()).guarded().dialer(self.dialer).keep(None).follow(follow.clone());
            let get = if let Some(form) = form { get.form(form) } else { get };
            let result = self.within(url, get).await;
            tries += 1;
            let again = match &result {
                Ok(reply) => matches!(reply.status().as_u16(), 408 | 429 | 499 | 500 | 502 | 503 | 504 | 522),
                Err(failed) => failed.is_temporary(),
            };
            if !again || tries == TRIES {
                return result;
            }
            let pause = Instant::now() + self.pauses.delay(tries - 1);
            if pause >= self.until {
                return result;
            }
            sleep_until(pause).await;
        }
    }

    async fn within(&self, url: &str, get: Get<'_>) -> Result<Reply, Error> {
        let late = || Error::Late(url.to_owned());
        if Instant::now() >= self.until {
            return Err(late());
        }
        match timeout_at(self.until, get.send()).await {
            Err(_) => Err(late()),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(source)) => Err(Error::Get { url: url.to_owned(), source }),
        }
    }
}

/// What a token server answers; which of the two it uses is its choice.
#[derive(Deserialize, ZeroizeOnDrop)]
struct Answer {
    #[serde(default)]
    token: Option<String>,
    #[serde(default)]
    access_token: Option<String>,
}

/// The challenges of a refusal, once all of them are safe to follow.
fn challenges(headers: &HeaderMap) -> Result<Vec<Challenge>, UnsafeRealm> {
    let values = headers.get_all(header::WWW_AUTHENTICATE);
    let texts: Vec<_> = values.iter().map(|v| String::from_utf8_lossy(v.as_bytes()).into_owned()).collect();
    texts.iter().try_for_each(|text| refuse_unsafe(text))?;
    Ok(texts.iter().filter_map(|text| Challenge::parse(text)).collect())
}

/// What they name beside `own`.
fn scopes(challenges: &[Challenge], own: &str) -> Vec<String> {
    let mut scopes: Vec<String> = Vec::new();
    for challenge in challenges {
        if let Challenge::Bearer { scope, .. } = challenge
            && (1..=LONGEST_SCOPE).contains(&scope.len())
            && scope != own
            && !scopes.contains(scope)
            && scopes.len() < SCOPES
        {
            scopes.push(scope.clone());
        }
    }
    scopes
}

/// Whether a token is wanted, though where from is not said.
fn wants_token(headers: &HeaderMap) -> bool {
    let mut values = headers.get_all(header::WWW_AUTHENTICATE).iter();
    values.any(|value| value.as_bytes().get(..6).is_some_and(|s| s.eq_ignore_ascii_case(b"bearer")))
}

fn authorization(scheme: &str, value: &Zeroizing<String>) -> Result<HeaderValue, Error> {
    let text = Zeroizing::new(format!("{scheme} {}", **value));
    let mut value = HeaderValue::from_str(&text).map_err(|_| Error::Credentials)?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests;
