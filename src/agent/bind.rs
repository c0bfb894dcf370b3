//! Every socket and port, and the certificate on its way.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::callers::{ByToken, Told};
use super::common::Common;
use super::sts::Pending;
use super::upgrade::Heir;
use super::upstream::Upstream;
use super::wiring::Wires;
use super::{let_others_run, said, sts, wasm};
use crate::base::lane::Lane;
use crate::base::uds;
use crate::config::parts::Error;
use crate::config::parts::envoy::Presence;
use crate::envoy::port;
use crate::secrets::{self, Manager};
use crate::status;
use crate::trouble::{Kind, Report};
use crate::wasm::Converter;
use crate::{dns, gateway, sds, xds};

/// The look for who holds the status port; the sockets of Envoy, which are bound next, wait no longer for it.
static LOOKS: Lane = Lane::new("status port's holder", 1);
const LOOK: Duration = Duration::from_secs(1);

/// What is bound and not served yet.
pub(super) struct Bound {
    pub identity: secrets::Handle,
    pub token_service: Option<Pending>,
    pub status: Option<status::Bound>,
    pub dns: Option<dns::Bound>,
    pub wires: Wires,
    pub sds: sds::Server,
    /// Sockets that only some agents have, by name.
    pub more_sds: Vec<(&'static str, sds::Server)>,
    pub gateway: Option<gateway::Secrets>,
    pub callers: Option<Told>,
    pub modules: Option<Arc<Converter>>,
    pub xds: (xds::Server, crate::base::uds::Bound),
}

/// Binds everything. The certificate takes longest of all: its first steps, a name to resolve and a connection to
/// open, go on beside, whenever this lets go of the thread.
pub(super) async fn bind(
    common: &Common,
    upstream: &mut Upstream,
    heir: Option<&Heir>,
) -> Result<Bound, Error> {
    let Common { config, metrics, troubles, .. } = common;
    let token_service = sts::prepare(config).await?;
    let identity = certificates(common, upstream, heir);
    let_others_run().await;
    let status = match config.status.as_ref().map(|config| (config, status::bind(config))) {
        Some((config, Err(error))) => {
            let trouble = troubles.reporter("default");
            trouble.report(status_taken(&error, config.port).await);
            Some(status::Bound::later(config, trouble))
        }
        Some((_, Ok(bound))) => Some(bound),
        None => None,
    };
    let mut wires = Wires::new(config, heir);
    let dns = match config.dns.as_ref().zip(wires.names.clone()) {
        Some((dns, names)) => match dns::bind(&dns.server, names, metrics, troubles.reporter("dns")).await {
            Ok(bound) => Some(bound),
            Err(error) => return Err(dns_refused(error, &dns.server.address).await),
        },
        None => None,
    };
    // From the inside out.
    let mut settings = sds::Config { watches: common.watches.clone(), ..config.identity.sds(upstream.mode) };
    let own = config.envoy.process.user.filter(|_| config.envoy.presence == Presence::Own);
    admit(&mut settings.allowed, own);
    if own.is_some() || config.envoy.presence == Presence::External {
        // It may be another user's.
        settings.sockets.iter_mut().for_each(|socket| socket.mode = uds::SHARED);
    }
    let sds = sds::Server::bind(settings, Arc::new(identity.clone()), metrics)
        .with_trouble(troubles.reporter("sds"));
    let (more_sds, gateway, callers) = more_sds(common, &sds);
    let modules = wasm::converter(config, metrics, troubles.reporter("wasm"));
    let xds = relay(common, upstream, &wires, modules.clone(), heir)?;
    wires.taken_over().await;
    let_others_run().await;
    Ok(Bound { identity, token_service, status, dns, wires, sds, more_sds, gateway, callers, modules, xds })
}

// The Envoy that we start may connect, also where it does not run as our user: `SDS_ALLOWED_UIDS` need not name it.
fn admit(allowed: &mut Option<BTreeSet<u32>>, envoys: Option<(u32, u32)>) {
    if let (Some(allowed), Some((user, _))) = (allowed, envoys) {
        allowed.insert(user);
    }
}

fn certificates(common: &Common, upstream: &mut Upstream, heir: Option<&Heir>) -> secrets::Handle {
    let mut config = common.config.identity.secrets();
    config.trouble = upstream.trouble.clone();
    config.first_key = upstream.first_key.take();
    config.kept = heir.and_then(Heir::secrets);
    config.bundle = heir.map(Heir::bundle).unwrap_or_default();
    config.watches = common.watches.clone();
    let (handle, manager) = Manager::new(config, upstream.ca.clone(), &common.metrics, common.clock.clone());
    common.tasks.secrets.lasting("secrets", manager.run(common.tasks.secrets.token()));
    handle
}

fn more_sds(
    common: &Common,
    sds: &sds::Server,
) -> (Vec<(&'static str, sds::Server)>, Option<gateway::Secrets>, Option<Told>) {
    let Common { config, clock, troubles, tasks, .. } = common;
    let mut more = Vec::new();
    let gateway = config.gateway.clone().map(|(settings, socket)| {
        let source =
            gateway::Secrets::new(settings, &common.watches, tasks.secrets.clone(), troubles.reporter("sds"));
        more.push(("gateway sds", sds.beside(socket, Arc::new(source.clone()))));
        source
    });
    let callers = config.callers.clone().map(|socket| {
        tracing::info!(target: "sds", "tokens of callers are taken on {}", socket.display());
        let trouble = troubles.reporter("sds");
        let source = ByToken::new(config.clone(), clock.clone(), tasks.secrets.clone(), trouble);
        let told = source.told();
        more.push(("callers' sds", sds.for_callers(socket, Arc::new(source))));
        told
    });
    (more, gateway, callers)
}

fn relay(
    common: &Common,
    upstream: &Upstream,
    wires: &Wires,
    modules: Option<Arc<Converter>>,
    heir: Option<&Heir>,
) -> Result<(xds::Server, crate::base::uds::Bound), Error> {
    let Common { config, clock, metrics, troubles, .. } = common;
    let mut settings = config.xds.clone();
    settings.watches = common.watches.clone();
    if let Some(replay) = &mut settings.replay {
        replay.left = heir.and_then(Heir::replay);
    }
    let server = xds::Server::new(
        settings,
        xds::Parts {
            upstream: Arc::new(upstream.connector.clone()),
            tokens: upstream.tokens.source.clone(),
            headers: config.istiod.headers.clone(),
            taps: wires.taps.clone(),
            convert: modules.map(|m| Arc::new(wasm::Conversion(m)) as Arc<dyn xds::Convert>),
            wake: wires.wake.clone(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            trouble: troubles.reporter("xdsproxy"),
        },
    );
    let bound = server.bind().map_err(|e| said(e).after("failed to start xds proxy"))?;
    Ok((server, bound))
}

// A port that is taken, by whom.
async fn dns_refused(error: dns::Error, address: &str) -> Error {
    let taken = matches!(error, dns::Error::Bind { .. });
    let mut refused = said(error);
    if let Some(port) = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).filter(|_| taken) {
        let look = move || port::holder(port).or_else(|| port::datagram_holder(port));
        if let Ok(Some(holder)) = LOOKS.within(LOOK, look).await {
            refused.text.push_str(&format!("; held by {holder}"));
        }
    }
    refused
}

// The agent goes on: certificates and config must not hang on a port that only probes and scrapers use.
async fn status_taken(error: &status::Error, port: u16) -> Report {
    let mut detail = format!("Error listening on status port: {}", crate::base::error::chain(error));
    // All connections of the machine and all files of its processes are gone through.
    let looked = LOOKS.within(LOOK, move || port::holder(port)).await;
    if let Ok(Some(holder)) = looked {
        detail.push_str(&format!("; held by {holder}"));
    }
    detail.push_str("; the agent runs without its status server and tries again");
    let kind = Kind::of_chain(error).unwrap_or(Kind::StatusPortTaken);
    Report::new(kind, detail).about(port.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_envoy_that_is_started_may_connect_whoever_it_runs_as() {
        let mut allowed = Some(BTreeSet::from([4711]));
        admit(&mut allowed, None);
        admit(&mut allowed, Some((1337, 1338)));
        assert_eq!(allowed, Some(BTreeSet::from([4711, 1337])));
        let mut everybody = None;
        admit(&mut everybody, Some((1337, 1337)));
        assert_eq!(everybody, None);
    }
}
