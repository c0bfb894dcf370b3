//! The composition root: the only place that makes parts and connects them. Read it from top to bottom
//! and you know the order of the start; `shutdown` knows the order of the end.
//!
//! [`run`] promises: everything that can be refused is refused before anything is bound; everything is
//! bound before Envoy is started, which so never finds a socket missing; whoever fails or panics is named
//! in the last line.

mod bootstrap;
mod ca;
mod callers;
mod dns;
mod document;
mod dry_run;
mod health;
mod shutdown;
mod signals;
mod sts;
mod systemd;
mod wasm;
mod wiring;

pub use bootstrap::all_ipv6;
pub use ca::client as ca_client;
pub use dry_run::{bootstrap_text, dry_run};

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tokio::time::Instant;

use crate::base::clock::{Clock, System};
use crate::base::metrics::Metrics;
use crate::base::notify::Notify;
use crate::base::tasks::Group;
use crate::config::Config;
use crate::config::env::var;
use crate::config::parts::{self, Error, identity};
use crate::envoy::Supervisor;
use crate::istiod::Connector;
use crate::istiod::auth::{GoogleComputeEngine, MetadataServer, Mock, TokenFile, TokenSource};
use crate::secrets::probe::{self, Mode};
use crate::secrets::{self, Manager};
use crate::status;
use crate::trouble::{Kind, Report, Troubles, What};
use crate::{sds, xds};

/// What istiod's tokens are made for; only named in log lines.
pub const AUDIENCE: &str = "istio-ca";

/// Runs the agent to its end; gives the process's exit status.
pub async fn run(config: Config) -> u8 {
    match start(config).await {
        Ok(code) => code,
        Err(error) => {
            tracing::error!("{error}");
            eprintln!("Error: {error}");
            error.exit_code
        }
    }
}

/// Everything between a configuration and a started Envoy.
async fn start(config: Config) -> Result<u8, Error> {
    let started = Instant::now();
    let clock: Arc<dyn Clock> = Arc::new(System);
    let metrics = Metrics::new();
    let troubles = Troubles::new(clock.clone());
    troubles.note(What::Started, "the agent");
    for counted in [crate::base::tasks::panics(), crate::net::accept::failures()] {
        metrics.register(Box::new(counted)).map_err(said)?;
    }
    crate::trouble::export(&troubles, &metrics);
    let config = Arc::new(config);

    // Before there is a key. Not by RLIMIT_CORE: Envoy would inherit it, and a core handler in a pipe does not care.
    if config.settings.flag(var::NO_CORE_DUMPS)
        && let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable)
    {
        tracing::warn!("NO_CORE_DUMPS has no effect: {error}");
    }

    // Where identity comes from; an RSA key takes longest of all, so it is begun at once.
    let plan = identity::plan(&config)?;
    let disabled = config.settings.flag(var::DISABLE_ENVOY);
    let external = config.settings.flag(var::ENVOY_EXTERNAL);
    if disabled && external {
        return Err(Error::new(
            "DISABLE_ENVOY and ENVOY_EXTERNAL are both true: there is no Envoy, or there is one that somebody else \
             runs; take one of them away"
                .to_owned(),
        ));
    }
    let needs_ca = !plan.file_mounted;
    let first_key = needs_ca.then(|| secrets::FirstKey::begin(identity::key_options(&config)));

    // What can be refused is refused now.
    let addresses = bootstrap::addresses(&config);
    let ipv6 = bootstrap::all_ipv6(&addresses);
    let status_config = parts::status::server(&config, ipv6)?;
    let signals = signals::Signals::install().map_err(|e| Error::new(format!("signals: {e}")))?;
    let mode = if disabled {
        Mode::Own
    } else {
        probe::workload(&identity::workload_socket(&config)).await.map_err(said)?
    };
    let tokens = token_source(&config, &clock)?;
    let identity_trouble = Arc::new(troubles.reporter("citadelclient"));
    let ca = if needs_ca && mode == Mode::Own {
        ca::client(&config, tokens.source.clone(), &metrics, &clock, &identity_trouble).await?
    } else {
        None
    };
    let upstream = Connector::with_clock(parts::istiod::xds(&config, plan.file_mounted)?, clock.clone())
        .map_err(|e| Error::new(format!("failed to start xds proxy: {}", crate::base::error::chain(&e))))?;

    let root = upstream.root_file();

    let token_service = sts::prepare(&config, ipv6).await?;
    let gateway = parts::gateway::secrets(&config)?;
    let callers_socket = callers::prepare(&config)?;

    // The certificate takes longest of all: its first steps, a name to resolve and a connection to open, go on
    // beside what follows, whenever that lets go of the thread.
    let mut secret_config = identity::secrets(&config, &plan);
    secret_config.trouble = identity_trouble.clone();
    secret_config.first_key = first_key.filter(|_| ca.is_some());
    let (identity_source, manager) = Manager::new(secret_config, ca, &metrics, clock.clone());
    let tasks = shutdown::Stages::new();
    tasks.secrets.spawn("secrets", manager.run(tasks.secrets.token()));
    tokio::task::yield_now().await;

    let status_bound = status_config.as_ref().map(|config| {
        status::bind(config).unwrap_or_else(|error| {
            // Certificates and config must not hang on a port that only probes and scrapers use.
            let trouble = troubles.reporter("default");
            trouble.report(status_taken(&error, config.port));
            status::Bound::later(config, trouble)
        })
    });

    let dns_root = rustix::process::getuid().is_root();
    let wires = wiring::Wires::new(&config);
    let names = wires.names.clone();
    let dns_bound = match &names {
        Some(names) => Some(
            crate::dns::bind(&parts::dns::server(&config, dns_root), names.clone(), &metrics)
                .await
                .map_err(said)?,
        ),
        None => None,
    };

    // The parts, from the inside out.
    let sds_server =
        sds::Server::bind(identity::sds(&config, mode), Arc::new(identity_source.clone()), &metrics)
            .with_trouble(troubles.reporter("sds"));
    // Beside it the sockets that only some agents have.
    let mut more_sds = Vec::new();
    let gateway = gateway.map(|(settings, socket)| {
        let source = crate::gateway::Secrets::new(settings, tasks.secrets.clone(), troubles.reporter("sds"));
        more_sds.push(("gateway sds", sds_server.beside(socket, Arc::new(source.clone()))));
        source
    });
    let callers = callers_socket.map(|socket| {
        let trouble = troubles.reporter("sds");
        let source = callers::ByToken::new(config.clone(), clock.clone(), tasks.secrets.clone(), trouble);
        let told = source.told();
        more_sds.push(("callers' sds", sds_server.for_callers(socket, Arc::new(source))));
        told
    });
    let crypto = crate::tls::provider::provider(parts::istiod::compliance(&config)).0;
    let modules = wasm::converter(&config, &crypto, &metrics, troubles.reporter("wasm"));
    let xds_server = xds::Server::new(
        parts::xds(&config),
        xds::Parts {
            upstream: Arc::new(upstream),
            tokens: tokens.source.clone(),
            headers: parts::istiod::headers(&config, "XDS_HEADER_"),
            taps: wires.taps.clone(),
            convert: modules.clone().map(|m| Arc::new(wasm::Conversion(m)) as Arc<dyn xds::Convert>),
            wake: wires.wake.clone(),
            metrics: metrics.clone(),
            clock: clock.clone(),
            trouble: troubles.reporter("xdsproxy"),
        },
    );
    let xds_handle = xds_server.handle();
    let xds_bound = xds_server
        .bind()
        .map_err(|e| Error::new(format!("failed to start xds proxy: {}", crate::base::error::chain(&e))))?;
    tokio::task::yield_now().await;

    // What Envoy will be told.
    let credential = probe::credential(&config.path(identity::CREDENTIAL_SOCKET)).await.map_err(|e| {
        Error::new(format!("failed to generate bootstrap metadata: {}", crate::base::error::chain(&e)))
    })?;
    let node = bootstrap::node(&config, &addresses, mode, credential).await?;
    tokio::task::yield_now().await;
    bootstrap::write_grpc(&config, &node)?;
    if let Some(keeper) = xds_server.keeper(bootstrap::owner(&config, &node), tasks.xds.token()) {
        tasks.xds.run("last good configuration", keeper);
    }
    let (supervisor, envoy_handle) = if disabled {
        Supervisor::idle(&metrics)
    } else {
        let root = rustix::process::getuid().is_root();
        let process = parts::envoy::process(&config, &addresses, Path::new("/proc/self/exe"), root)?;
        let text = bootstrap::Bootstrap::new(config.clone(), node);
        let supervisor = if external { Supervisor::external } else { Supervisor::new };
        let (supervisor, handle) = supervisor(process, Box::new(text), &metrics).map_err(said)?;
        (supervisor.with_trouble(troubles.reporter("default")), handle)
    };

    tokio::task::yield_now().await;

    // Serve, then start Envoy.
    tasks.status.run("log", {
        let stop = tasks.status.token();
        async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = crate::base::logging::attend() => {}
            }
        }
    });
    tasks.status.run("troubles", {
        let (stop, troubles) = (tasks.status.token(), troubles.clone());
        async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = troubles.attend() => {}
            }
        }
    });
    let token_service =
        token_service.map(|service| service.spawn(&config, &tasks, &metrics, &clock, &troubles));
    if let Some(server) = dns_bound {
        tasks.dns.run("dns", server.serve(tasks.dns.token()));
    }
    wires.spawn(&tasks, &config, root, &identity_source);
    if let Some(refresh) = tokens.refresh {
        let stop = tasks.secrets.token();
        spawn(&tasks.secrets, "token", async move { refresh.refresh(stop).await });
    }
    spawn(&tasks.sds, "sds", {
        let stop = tasks.sds.token();
        async move { sds_server.run_with(stop, crate::base::authority::Shim::new).await }
    });
    for (name, server) in more_sds {
        spawn(&tasks.sds, name, server.run(tasks.sds.token()));
    }
    tasks.xds.spawn("xds", {
        let stop = tasks.xds.token();
        let (listener, file) = xds_bound.into_parts();
        async move {
            let _file = file;
            xds_server.serve(listener, stop).await
        }
    });
    if let Some(modules) = &modules {
        wasm::spawn(modules, &tasks);
    }
    let joined = health::Joined {
        envoy: &envoy_handle,
        xds: &xds_handle,
        crypto: crypto.clone(),
        metrics: &metrics,
        clock: &clock,
        trouble: troubles.reporter("healthcheck"),
    };
    let health = health::start(&config, ipv6, joined, &tasks);
    let face: Arc<dyn status::Agent> = Arc::new(document::Face::new(
        &config,
        &envoy_handle,
        &identity_source,
        &xds_handle,
        names,
        health,
        token_service,
        gateway,
        callers,
        &tasks,
        &troubles,
    ));
    if let Some(manager) = Notify::new(|name| config.settings.env().get(name)) {
        let admin = status_config.as_ref().and_then(|config| config.ready.envoy_admin);
        systemd::start(manager, systemd::Asked::new(face.clone(), admin, &envoy_handle, &troubles), &tasks);
    }
    if let Some(bound) = status_bound {
        let handles = status::Handles { agent: face, metrics: metrics.clone(), crypto, started };
        tasks.status.spawn("status", bound.serve(handles, tasks.closing.clone(), tasks.status.token()));
    }
    // Starting Envoy holds this thread for a millisecond or two; the CA is greeted before, and answers meanwhile:
    // one turn to find the connection open, one to speak on it.
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
    Ok(shutdown::supervise(supervisor, &envoy_handle, signals, tasks, &troubles).await)
}

fn spawn(group: &Group, name: &str, task: impl Future<Output = ()> + Send + 'static) {
    group.run(name, task);
}

// The agent goes on: certificates and config must not hang on a port that only probes and scrapers use.
fn status_taken(error: &status::Error, port: u16) -> Report {
    let mut detail = format!("Error listening on status port: {}", crate::base::error::chain(error));
    if let Some(holder) = crate::envoy::port::holder(port) {
        detail.push_str(&format!("; held by {holder}"));
    }
    detail.push_str("; the agent runs without its status server and tries again");
    Report::new(Kind::StatusPortTaken, detail).about(port.to_string())
}

fn said(error: impl std::error::Error + 'static) -> Error {
    Error::new(crate::base::error::chain(&error))
}

/// A source of tokens, and what keeps it fresh.
struct Tokens {
    source: Arc<dyn TokenSource>,
    refresh: Option<Arc<GoogleComputeEngine>>,
}

fn token_source(config: &Config, clock: &Arc<dyn Clock>) -> Result<Tokens, Error> {
    let path = config.token.clone();
    let plain = |source: Arc<dyn TokenSource>| Tokens { source, refresh: None };
    match config.settings.text(var::CREDENTIAL_FETCHER_TYPE) {
        "JWT" | "" => Ok(plain(Arc::new(TokenFile::new(path, AUDIENCE, clock.clone())))),
        "Mock" => Ok(plain(Arc::new(Mock))),
        "GoogleComputeEngine" => {
            let server = metadata_server(config);
            let trust_domain = config.settings.text(var::TRUST_DOMAIN);
            let fetcher = Arc::new(GoogleComputeEngine::new(server, trust_domain, path, clock.clone()));
            Ok(Tokens { source: fetcher.clone(), refresh: Some(fetcher) })
        }
        other => Err(Error::new(format!(
            "failed to create credential fetcher: invalid credential fetcher type {other}: CREDENTIAL_FETCHER_TYPE is JWT or GoogleComputeEngine"
        ))),
    }
}

pub(crate) fn metadata_server(config: &Config) -> MetadataServer {
    let host = config.settings.some_text(var::GCE_METADATA_HOST);
    host.map_or_else(MetadataServer::default, |host| MetadataServer { host: host.to_owned() })
}

/// How long a stage of the end may take before it is named and cut off.
pub(crate) const STAGE: Duration = Duration::from_secs(3);
