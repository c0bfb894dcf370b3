//! `mock-istiod`: an istiod for conformance tests, demos and measurements.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use mock_istiod::MockIstiod;
use mock_istiod::fault::{Step, duration};
use mock_istiod::jwt::Token;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Plays istiod: a certificate authority and an ADS server with scripted faults.
#[derive(Debug, Parser)]
#[command(name = "mock-istiod")]
struct Flags {
    /// Where ADS and the certificate service listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:15012")]
    listen: SocketAddr,
    /// No TLS: ADS takes anybody, the certificate service nobody.
    #[arg(long)]
    plaintext: bool,
    /// With --plaintext: authenticate callers all the same.
    #[arg(long)]
    plaintext_auth: bool,
    /// ADS takes anybody.
    #[arg(long)]
    anonymous_ads: bool,
    /// Send response headers at once; a server written in Go sends them with the first response.
    #[arg(long)]
    eager_headers: bool,
    /// Folder of resources to serve and to follow.
    #[arg(long)]
    resources: Option<PathBuf>,
    /// Trust domain of the identities.
    #[arg(long, default_value = "cluster.local")]
    trust_domain: String,
    /// DNS name of the server's certificate, in place of istiod's own; may be repeated.
    #[arg(long = "dns-name")]
    dns_names: Vec<String>,
    /// Intermediates between root and leaf.
    #[arg(long, default_value_t = 1)]
    intermediates: usize,
    /// Every certificate lives so long (500ms, 10s, 5m, 1h), whatever was asked for.
    #[arg(long, value_parser = time)]
    ttl: Option<Duration>,
    /// Admit so many ADS streams a second, as istiod's PILOT_MAX_REQUESTS_PER_SECOND does it; 0 admits all.
    #[arg(long, default_value_t = 0)]
    admit: u32,
    /// Write the root certificate here.
    #[arg(long)]
    write_root: Option<PathBuf>,
    /// Write a token here: FILE=NAMESPACE/SERVICEACCOUNT; may be repeated.
    #[arg(long = "write-token")]
    write_tokens: Vec<String>,
    /// Write every event here, one line of JSON each.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Where the control port listens (plain HTTP).
    #[arg(long)]
    control: Option<SocketAddr>,
    /// A step of the certificate service's script, as in 2*refuse=14 or always*short-life=10s; may be repeated.
    #[arg(long = "ca-fault")]
    ca_faults: Vec<Step>,
    /// A step of the ADS script; may be repeated.
    #[arg(long = "ads-fault")]
    ads_faults: Vec<Step>,
    /// A step of the script of new connections: delay, half-open, drop; may be repeated.
    #[arg(long = "connection-fault")]
    connection_faults: Vec<Step>,
    /// Log what happens.
    #[arg(short, long)]
    verbose: bool,
}

fn time(text: &str) -> Result<Duration, String> {
    duration(text).ok_or_else(|| "needs a time, as in 500ms or 10s".to_owned())
}

#[tokio::main]
async fn main() -> ExitCode {
    let flags = Flags::parse();
    let level = if flags.verbose { tracing::Level::DEBUG } else { tracing::Level::INFO };
    tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).init();
    match run(flags).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mock-istiod: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(flags: Flags) -> Result<(), String> {
    let mut builder = MockIstiod::builder()
        .listen(flags.listen)
        .trust_domain(flags.trust_domain)
        .intermediates(flags.intermediates);
    if !flags.dns_names.is_empty() {
        builder = builder.dns_names(flags.dns_names);
    }
    if flags.plaintext {
        builder = builder.plaintext();
    }
    if flags.plaintext_auth {
        builder = builder.plaintext_auth();
    }
    if flags.anonymous_ads {
        builder = builder.anonymous_ads();
    }
    if flags.eager_headers {
        builder = builder.eager_headers();
    }
    if let Some(ttl) = flags.ttl {
        builder = builder.ttl(ttl);
    }
    let mock =
        builder.start().await.map_err(|error| format!("cannot listen on {}: {error}", flags.listen))?;
    mock.set_admitted(flags.admit);
    if let Some(folder) = &flags.resources {
        mock.serve_folder(folder).map_err(|error| format!("--resources: {error}"))?;
    }
    let write = |path: &PathBuf, text: &str| {
        std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
    };
    if let Some(path) = &flags.write_root {
        write(path, &mock.root_pem())?;
    }
    for spec in &flags.write_tokens {
        let parts = spec.split_once('=').and_then(|(file, who)| Some((file, who.split_once('/')?)));
        let (file, (namespace, account)) = parts
            .ok_or_else(|| format!("--write-token {spec:?}: FILE=NAMESPACE/SERVICEACCOUNT is needed"))?;
        write(&PathBuf::from(file), &Token::of(namespace, account).sign())?;
    }
    if let Some(path) = &flags.record {
        let file = std::fs::File::create(path)
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        mock.record().write_to(file);
    }
    flags.ca_faults.into_iter().for_each(|step| mock.ca().add(step));
    flags.ads_faults.into_iter().for_each(|step| mock.ads().add(step));
    flags.connection_faults.into_iter().for_each(|step| mock.connections().add(step));

    let mock = Arc::new(mock);
    // One line on stdout that a script can wait for and read the port from.
    println!("listening on {}", mock.address());
    let control = async {
        match flags.control {
            None => std::future::pending().await,
            Some(address) => {
                let listener = TcpListener::bind(address)
                    .await
                    .map_err(|error| format!("cannot listen on {address} for --control: {error}"))?;
                println!("control on {}", listener.local_addr().map_err(|error| error.to_string())?);
                mock_istiod::control::serve(mock.clone(), listener).await;
                Ok(())
            }
        }
    };
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    tokio::select! {
        result = control => result,
        _ = tokio::signal::ctrl_c() => Ok(()),
        _ = terminate.recv() => Ok(()),
    }
}
