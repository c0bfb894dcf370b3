//! The security token service, and the exchange of tokens before they go to a CA.

use std::net::SocketAddr;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;

use super::{Error, Sources};
use crate::ca::provider::CaProvider;
use crate::config::env::var;
use crate::config::{go, platform};
use crate::status;
use crate::sts::{self, Audience, Google, Handle, Plugin, Upstream};
use crate::trouble::Reporter;

/// The Go agent's name of its only plug-in.
const GOOGLE: &str = "GoogleTokenExchange";
const PASSTHROUGH: &str = "Passthrough";

impl Sources {
    /// The port of the token service: `--stsPort`, else `STS_PORT` where `TOKEN_MANAGER_PLUGIN` stands beside it
    /// (alone it has no effect in the Go agent, and none here). Zero or less: no service.
    #[must_use]
    pub(crate) fn sts_port(&self) -> i64 {
        let s = &self.settings;
        let given = self.flags.get("stsPort");
        let given =
            given.or_else(|| s.some_text(var::TOKEN_MANAGER_PLUGIN).and_then(|_| s.some_text(var::STS_PORT)));
        given.and_then(|text| go::integer(text, 64).ok()).unwrap_or(0)
    }
}

#[derive(Debug, Clone)]
enum Planned {
    /// All is known.
    Made(Plugin),
    /// Google, once its project is known.
    Google(Audience, platform::Known),
}

/// The service as it is wanted.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    address: SocketAddr,
    crypto: Arc<CryptoProvider>,
    name: &'static str,
    plugin: Planned,
}

impl Service {
    /// What to start. Google's plug-in needs a project number, and may have to ask for it.
    ///
    /// # Errors
    /// When no project number is to be had now.
    pub(crate) async fn config(&self) -> Result<sts::Config, Error> {
        let plugin = match &self.plugin {
            Planned::Made(plugin) => plugin.clone(),
            Planned::Google(audience, known) => Plugin::Google(google(audience, known).await?),
        };
        Ok(sts::Config { address: self.address, plugin, crypto: self.crypto.clone() })
    }

    /// What will be told about it.
    #[must_use]
    pub(crate) fn handle(&self, trouble: Reporter) -> Handle {
        Handle::new(self.address.port(), self.name, trouble)
    }
}

/// The service; `None` without a port.
///
/// # Errors
/// A port that cannot be, or a plug-in that lacks what it needs.
pub(crate) fn service(config: &Sources, all_ipv6: bool) -> Result<Option<Service>, Error> {
    let s = &config.settings;
    let meant = config.flags.get("stsPort").is_none() && s.some_text(var::TOKEN_MANAGER_PLUGIN).is_some();
    if let Some(text) = s.some_text(var::STS_PORT).filter(|text| meant && go::integer(text, 64).is_err()) {
        return Err(Error::new(format!("STS_PORT={text}: it is a port, or 0 for no token service")));
    }
    let port = config.sts_port();
    if port <= 0 {
        return Ok(None);
    }
    let Ok(number) = u16::try_from(port) else {
        return Err(Error::new(format!("--stsPort={port}: a port must be in the range 1..65535")));
    };
    if i64::from(config.mesh.proxy.status_port) == port {
        return Err(Error::new(format!(
            "--stsPort={port}: the status server has this port; give the token service another one"
        )));
    }
    let ipv6 = status::ipv6_mode(all_ipv6, s.text(var::INSTANCE_IP));
    let (name, plugin) = plugin(config)?;
    Ok(Some(Service {
        address: SocketAddr::new(status::loopback(ipv6), number),
        crypto: crate::tls::provider::provider(super::istiod::compliance(config)).0,
        name,
        plugin,
    }))
}

async fn google(audience: &Audience, known: &platform::Known) -> Result<Google, Error> {
    let Some(project) = platform::google_project(known).await else {
        return Err(Error::new(format!(
            "failed to create token manager with plugin {GOOGLE}: no Google project number: neither GCP_METADATA (PROJECT_ID|PROJECT_NUMBER|CLUSTER_NAME|CLUSTER_ZONE) nor the metadata server gives one; --stsPort=0 does without the service"
        )));
    };
    let mut audience = audience.clone();
    if audience.provider.is_empty() {
        audience.provider = project.cluster_url;
    }
    Ok(Google { project_number: project.number, audience })
}

fn plugin(config: &Sources) -> Result<(&'static str, Planned), Error> {
    let s = &config.settings;
    let flag = config.flags.get("tokenManagerPlugin");
    let name = flag.or(s.some_text(var::TOKEN_MANAGER_PLUGIN)).unwrap_or(GOOGLE);
    match name {
        GOOGLE => Ok((GOOGLE, Planned::Google(audience(config, true), platform::Known::of(s)))),
        PASSTHROUGH => {
            let url = s.text(var::STS_UPSTREAM_URL);
            if url.is_empty() {
                return Err(Error::new(format!(
                    "plugin {PASSTHROUGH} needs STS_UPSTREAM_URL, the token endpoint that it asks"
                )));
            }
            Upstream::new(url, s.text(var::STS_UPSTREAM_AUDIENCE))
                .map(|upstream| (PASSTHROUGH, Planned::Made(Plugin::Upstream(upstream))))
                .map_err(|e| Error::new(e.to_string()))
        }
        other => {
            tracing::warn!(target: "security",
                "token manager plugin {other:?} is unknown: the token service can only answer that it has none (it is {GOOGLE} or {PASSTHROUGH})");
            Ok(("none", Planned::Made(Plugin::None)))
        }
    }
}

// Whose identity provider knows our tokens. Empty: that of the cluster's address, which the platform tells.
fn audience(config: &Sources, of_token: bool) -> Audience {
    let s = &config.settings;
    let fetcher = match s.text(var::CREDENTIAL_FETCHER_TYPE) {
        "GoogleComputeEngine" => s.text(var::CREDENTIAL_IDENTITY_PROVIDER),
        "Mock" => "fakeIDP",
        _ => "",
    };
    let provider = [fetcher, s.text(var::GKE_CLUSTER_URL)].into_iter().find(|text| !text.is_empty());
    Audience {
        trust_domain: s.text(var::TRUST_DOMAIN).to_owned(),
        of_token,
        provider: provider.unwrap_or_default().to_owned(),
    }
}

/// The workload's token is exchanged before it goes to the CA.
#[derive(Debug, Clone)]
pub(crate) struct Exchange {
    audience: Audience,
    known: platform::Known,
    crypto: Arc<CryptoProvider>,
}

impl Exchange {
    /// For whom, and what the exchange is made with.
    ///
    /// # Errors
    /// When nothing tells which cluster's tokens these are.
    pub(crate) async fn settle(&self) -> Result<(Audience, Arc<CryptoProvider>), Error> {
        let mut to = self.audience.clone();
        if to.provider.is_empty()
            && let Some(project) = platform::google_project(&self.known).await
        {
            to.provider = project.cluster_url;
        }
        if to.provider.is_empty() {
            return Err(Error::new(
                "the token cannot be exchanged for Google's: no identity provider is known; set GKE_CLUSTER_URL to the cluster's address",
            ));
        }
        Ok((to, self.crypto.clone()))
    }
}

/// Whether the workload's token is exchanged before it goes to the CA: `PLUGINS` says so, and Google's own Mesh CA
/// takes nothing else.
#[must_use]
pub(crate) fn exchange(config: &Sources, provider: &CaProvider) -> Option<Exchange> {
    let s = &config.settings;
    let mut wanted = *provider == CaProvider::GoogleCa && s.text(var::CA_ADDR).contains("googleapis.com");
    for name in s.text(var::PLUGINS).split(',').map(str::trim).filter(|name| !name.is_empty()) {
        if name == GOOGLE {
            wanted = true;
        } else {
            tracing::warn!("PLUGINS: {name:?} is unknown and has no effect: it is {GOOGLE}");
        }
    }
    wanted.then(|| Exchange {
        audience: audience(config, false),
        known: platform::Known::of(s),
        crypto: crate::tls::provider::provider(super::istiod::compliance(config)).0,
    })
}
