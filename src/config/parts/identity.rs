//! Where certificates come from, and what the secret manager and the SDS server are told.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::{Error, Sources, keepalive};
use crate::base::files::Watches;
use crate::base::{handover, uds};
use crate::ca::csr::spiffe_id;
use crate::config::env::{Settings, var};
use crate::istiod::auth::MetadataServer;
use crate::proto::mesh::private_key_provider::Provider as Given;
use crate::sds::{self, KeyAccelerator, PrivateKeyProvider};
use crate::secrets::{self, Mounted, files, output, probe};
use crate::tls::keys::KeyOptions;
use crate::trouble::Kind;

/// Folder of the workload socket.
pub(crate) const WORKLOAD_DIR: &str = "./var/run/secrets/workload-spiffe-uds";
/// Socket of a third party's credential server.
pub(crate) const CREDENTIAL_SOCKET: &str = "./var/run/secrets/credential-uds/socket";
/// Our socket when another server owns the workload socket.
const FILES_SOCKET: &str = "./var/run/secrets/credential-uds/files-socket";
/// Certificates that a platform mounts.
const CREDENTIALS_DIR: &str = "./var/run/secrets/workload-spiffe-credentials";
/// Where the mounted revocation list is; absolute, as in the Go agent.
const CRL: &str = "/var/run/secrets/istio/crl/ca-crl.pem";

/// Certificates: where they come from, and what is done with them.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// Files only: no CA client.
    pub file_mounted: bool,
    /// Kind of key.
    pub key: KeyOptions,
    /// The look at the workload's socket; without Envoy too, for who owns it gives the certificates.
    pub socket: probe::Config,
    /// Socket of a third party's credential server.
    pub credential_socket: PathBuf,
    /// Where tokens come from.
    pub tokens: Tokens,
    /// `TRUST_DOMAIN`.
    pub trust_domain: String,
    manager: Manager,
    private_key_provider: Option<PrivateKeyProvider>,
    crl: Option<PathBuf>,
    keepalive: (Duration, Duration),
    allowed: Option<BTreeSet<u32>>,
    // By who owns the workload's socket: this agent, somebody else.
    sockets: [Vec<sds::Address>; 2],
}

/// Where tokens come from.
#[derive(Debug, Clone)]
pub(crate) struct Tokens {
    /// The file that holds one, or is given one.
    pub path: PathBuf,
    /// Who gives it.
    pub fetcher: Fetcher,
}

/// `CREDENTIAL_FETCHER_TYPE`.
#[derive(Debug, Clone)]
pub(crate) enum Fetcher {
    /// Whoever mounts the file.
    File,
    /// Nobody: a fixed one, for tests.
    Mock,
    /// The metadata server of Compute Engine.
    GoogleComputeEngine(MetadataServer),
}

/// What the secret manager is told, as far as it is known before the start.
#[derive(Debug, Clone)]
struct Manager {
    identity: String,
    ttl: Duration,
    grace_ratio: f64,
    grace_jitter: f64,
    early: bool,
    near_expiry: secrets::NearExpiry,
    mounted: Mounted,
    output: Option<output::Config>,
    persist: Option<secrets::persist::Config>,
    file_debounce: Duration,
    proxyless: bool,
    call_bound: Duration,
}

/// Where certificates come from.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Files only: no CA client.
    pub file_mounted: bool,
    /// The files.
    pub mounted: Mounted,
}

/// Decides where certificates come from.
///
/// # Errors
/// Settings that exclude each other, or files that must be there and are not.
pub(crate) fn plan(config: &Sources) -> Result<Plan, Error> {
    let s = &config.settings;
    let dir = config.path(CREDENTIALS_DIR);
    let named = |names: [&str; 3]| {
        let [cert, key, root] = names.map(|n| dir.join(n));
        Mounted { cert, key, root }
    };
    let all = |m: &Mounted| [&m.cert, &m.key, &m.root].iter().all(|p| p.exists());
    let provided = s.some_text(var::PROV_CERT).is_some();
    let gke = s.text(var::CA_PROVIDER) == "GkeWorkloadCertificate";
    if gke {
        let mounted = named(["certificates.pem", "private_key.pem", "ca_certificates.pem"]);
        if !all(&mounted) {
            return Err(Error::new(format!(
                "CA_PROVIDER=GkeWorkloadCertificate needs certificates.pem, private_key.pem and ca_certificates.pem in {}: are workload certificates switched on for this cluster and pod?",
                dir.display()
            ))
            .of(Kind::CertificateFiles));
        }
        if provided {
            return Err(Error::new(
                "invalid options: PROV_CERT and FILE_MOUNTED_CERTS are mutually exclusive (CA_PROVIDER=GkeWorkloadCertificate mounts files)",
            ));
        }
    }
    if provided && s.flag(var::FILE_MOUNTED_CERTS) {
        return Err(Error::new("invalid options: PROV_CERT and FILE_MOUNTED_CERTS are mutually exclusive"));
    }
    let workload = named(["cert-chain.pem", "key.pem", "root-cert.pem"]);
    if all(&workload) {
        return Ok(Plan { file_mounted: true, mounted: workload });
    }
    if gke {
        let mounted = named(["certificates.pem", "private_key.pem", "ca_certificates.pem"]);
        return Ok(Plan { file_mounted: true, mounted });
    }
    let at = |name: &str| config.path(format!("./etc/certs/{name}"));
    let mounted = Mounted { cert: at("cert-chain.pem"), key: at("key.pem"), root: at("root-cert.pem") };
    Ok(Plan { file_mounted: s.flag(var::FILE_MOUNTED_CERTS), mounted })
}

/// Kind of key.
#[must_use]
pub(crate) fn key_options(config: &Sources) -> KeyOptions {
    let s = &config.settings;
    KeyOptions::from_settings(
        s.int(var::WORKLOAD_RSA_KEY_SIZE),
        s.text(var::ECC_SIGNATURE_ALGORITHM),
        s.text(var::ECC_CURVE),
        s.flag(var::PKCS8_KEY),
    )
}

/// The look at the workload socket.
#[must_use]
pub(crate) fn workload_socket(config: &Sources) -> probe::Config {
    probe::Config {
        dir: config.path(WORKLOAD_DIR),
        file: config.settings.text(var::WORKLOAD_IDENTITY_SOCKET_FILE).to_owned(),
        wait: config.settings.duration(var::WORKLOAD_SOCKET_WAIT),
    }
}

/// Whether somebody else may own the workload's socket: another name than ours demands it, and what is there
/// may be theirs. Only a look by [`probe`] tells.
#[must_use]
pub(crate) fn may_be_external(config: &Sources) -> bool {
    let socket = workload_socket(config);
    socket.file != probe::DEFAULT_SOCKET || socket.dir.join(socket.file).exists()
}

/// Where tokens come from.
///
/// # Errors
/// When `CREDENTIAL_FETCHER_TYPE` is none of the known.
pub(crate) fn tokens(config: &Sources) -> Result<Tokens, Error> {
    let fetcher = match config.settings.text(var::CREDENTIAL_FETCHER_TYPE) {
        "JWT" | "" => Fetcher::File,
        "Mock" => Fetcher::Mock,
        "GoogleComputeEngine" => Fetcher::GoogleComputeEngine(super::ca::metadata_server(config)),
        other => {
            return Err(Error::new(format!(
                "failed to create credential fetcher: invalid credential fetcher type {other}: CREDENTIAL_FETCHER_TYPE is JWT or GoogleComputeEngine"
            )));
        }
    };
    Ok(Tokens { path: config.token.clone(), fetcher })
}

/// A member of the list that is no number.
#[derive(Debug, thiserror::Error)]
#[error("SDS_ALLOWED_UIDS={text}: {bad:?} is no user ID; write numbers separated by commas, such as 1337,0")]
pub(crate) struct NoUid {
    text: String,
    bad: String,
}

/// What is odd about `SECRET_TTL`: a CA is asked in whole seconds.
#[must_use]
pub(crate) fn without_validity(settings: &Settings) -> Option<String> {
    let given =
        settings.env().get("SECRET_TTL").filter(|_| settings.duration(var::SECRET_TTL).as_secs() == 0)?;
    Some(format!(
        "SECRET_TTL={given} asks for certificates of no validity: istiod gives its own default then (24h0m0s), and another CA may \
         refuse; write how long they are to live, or leave it out"
    ))
}

/// `SDS_ALLOWED_UIDS`; `None`: everybody.
///
/// # Errors
/// When it holds anything but numbers.
pub(crate) fn uids(text: &str) -> Result<Option<BTreeSet<u32>>, NoUid> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let uids = text.split(',').map(|uid| uid.trim().parse().map_err(|_| uid.trim().to_owned()));
    uids.collect::<Result<_, _>>().map(Some).map_err(|bad| NoUid { text: text.to_owned(), bad })
}

/// All of it.
#[must_use]
pub(crate) fn identity(config: &Sources, plan: &Plan, tokens: Tokens) -> Identity {
    let s = &config.settings;
    let mode = if s.text(var::KUBERNETES_SERVICE_HOST).is_empty() { 0o600 } else { 0o644 };
    let proxyless = s.flag(var::DISABLE_ENVOY);
    let name = spiffe_id(s.text(var::TRUST_DOMAIN), s.text(var::POD_NAMESPACE), s.text(var::SERVICE_ACCOUNT));
    let persist = s.flag(var::IDENTITY_PERSIST).then(|| secrets::persist::Config {
        folder: super::replay_dir(config).join("identity"),
        seal: s
            .some_text(var::IDENTITY_PERSIST_KEY)
            .map(|file| secrets::Seal { file: config.path(file), about: name.clone() }),
    });
    let manager = Manager {
        identity: name,
        ttl: s.duration(var::SECRET_TTL),
        grace_ratio: s.float(var::SECRET_GRACE_PERIOD_RATIO),
        grace_jitter: s.float(var::SECRET_GRACE_PERIOD_RATIO_JITTER),
        early: s.flag(var::RENEWAL_EARLY),
        near_expiry: secrets::NearExpiry {
            // An unknown word has ended the start.
            action: s.text(var::IDENTITY_NEAR_EXPIRY).parse().unwrap_or_default(),
            before: s.duration(var::IDENTITY_NEAR_EXPIRY_BEFORE),
            jitter: s.duration(var::IDENTITY_NEAR_EXPIRY_JITTER),
        },
        mounted: plan.mounted.clone(),
        output: s.some_text(var::OUTPUT_CERTS).map(|dir| output::Config {
            dir: config.path(dir),
            mode,
            seal: None,
        }),
        persist,
        file_debounce: s.duration(var::FILE_DEBOUNCE_DURATION),
        proxyless,
        // Only a client that forgets its own bounds ever meets this one.
        call_bound: super::istiod::ca_limits(config).1 + Duration::from_secs(10),
    };
    let mut own = vec![config.path(WORKLOAD_DIR).join(probe::DEFAULT_SOCKET).into()];
    // Where 1.5 to 1.8 had it; whoever moved the folder since then does not look there. Everybody may enter that folder on a VM,
    // and Envoy, which has a use for it, mostly runs as the agent's user.
    if crate::base::path::clean(&config.mesh.proxy.config_path) == "etc/istio/proxy" {
        own.push(sds::Address { path: config.config_path().join("SDS"), mode: 0o660 });
    }
    let sockets = if proxyless { Default::default() } else { [own, vec![config.path(FILES_SOCKET).into()]] };
    let pings = keepalive(&config.settings).downstream();
    let crl = config.settings.flag(var::PILOT_ENABLE_CA_CRL).then(|| PathBuf::from(CRL));
    Identity {
        file_mounted: plan.file_mounted,
        key: key_options(config),
        socket: workload_socket(config),
        credential_socket: config.path(CREDENTIAL_SOCKET),
        tokens,
        trust_domain: s.text(var::TRUST_DOMAIN).to_owned(),
        manager,
        private_key_provider: private_key_provider(config),
        crl,
        // A list that cannot be read has ended the start.
        allowed: uids(s.text(var::SDS_ALLOWED_UIDS)).unwrap_or_default(),
        keepalive: (pings.interval, pings.timeout),
        sockets,
    }
}

fn private_key_provider(config: &Sources) -> Option<PrivateKeyProvider> {
    let given = config.mesh.proxy.private_key_provider.as_ref()?;
    let (provider, poll_delay, fallback) = match given.provider.as_ref()? {
        Given::Cryptomb(c) => (KeyAccelerator::CryptoMb, c.poll_delay.as_ref(), c.fallback.as_ref()),
        Given::Qat(q) => (KeyAccelerator::Qat, q.poll_delay.as_ref(), q.fallback.as_ref()),
    };
    let poll_delay = Sources::span(poll_delay);
    Some(PrivateKeyProvider { provider, poll_delay, fallback: fallback.is_some_and(|f| f.value) })
}

impl Identity {
    /// The secret manager.
    #[must_use]
    pub(crate) fn secrets(&self) -> secrets::Config {
        let own = self.manager.clone();
        secrets::Config {
            identity: own.identity,
            key: self.key.clone(),
            ttl: own.ttl,
            grace_ratio: own.grace_ratio,
            grace_jitter: own.grace_jitter,
            early: own.early,
            near_expiry: own.near_expiry,
            mounted: own.mounted,
            output: own.output,
            persist: own.persist,
            file_debounce: own.file_debounce,
            system_bundle: files::system_bundle(),
            proxyless: own.proxyless,
            eager: true,
            first_key: None,
            kept: None,
            bundle: Vec::new(),
            watches: Watches::default(),
            trouble: std::sync::Arc::default(),
            call_bound: own.call_bound,
        }
    }

    /// Whether the program before us in this process has left the workload's socket to us.
    #[must_use]
    pub(crate) fn owns_socket_already(&self) -> bool {
        self.sockets[0].iter().any(|socket| handover::gives(&uds::key(&socket.path)))
    }

    /// The SDS server; no sockets without Envoy.
    #[must_use]
    pub(crate) fn sds(&self, mode: probe::Mode) -> sds::Config {
        let [own, external] = &self.sockets;
        let sockets = match mode {
            probe::Mode::Own => own.clone(),
            probe::Mode::External => external.clone(),
        };
        sds::Config {
            sockets,
            private_key_provider: self.private_key_provider.clone(),
            crl: self.crl.clone(),
            keepalive: Some(self.keepalive),
            allowed: self.allowed.clone(),
            watches: Watches::default(),
        }
    }
}
