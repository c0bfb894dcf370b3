//! Where certificates come from, and what the secret manager and the SDS server are told.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::{Config, Error};
use crate::ca::csr::spiffe_id;
use crate::config::env::var;
use crate::proto::mesh::private_key_provider::Provider as Given;
use crate::sds::{self, PrivateKeyProvider, Provider};
use crate::secrets::{self, Mounted, files, output, probe};
use crate::tls::keys::KeyOptions;

/// Folder of the workload socket.
pub const WORKLOAD_DIR: &str = "./var/run/secrets/workload-spiffe-uds";
/// Socket of a third party's credential server.
pub const CREDENTIAL_SOCKET: &str = "./var/run/secrets/credential-uds/socket";
/// Our socket when another server owns the workload socket.
const FILES_SOCKET: &str = "./var/run/secrets/credential-uds/files-socket";
/// Certificates that a platform mounts.
const CREDENTIALS_DIR: &str = "./var/run/secrets/workload-spiffe-credentials";
/// Where the mounted revocation list is; absolute, as in the Go agent.
const CRL: &str = "/var/run/secrets/istio/crl/ca-crl.pem";

/// Where certificates come from.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Files only: no CA client.
    pub file_mounted: bool,
    /// The files.
    pub mounted: Mounted,
}

/// Decides where certificates come from.
///
/// # Errors
/// Settings that exclude each other, or files that must be there and are not.
pub fn plan(config: &Config) -> Result<Plan, Error> {
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
            )));
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
pub fn key_options(config: &Config) -> KeyOptions {
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
pub fn workload_socket(config: &Config) -> probe::Config {
    probe::Config {
        dir: config.path(WORKLOAD_DIR),
        file: config.settings.text(var::WORKLOAD_IDENTITY_SOCKET_FILE).to_owned(),
        wait: config.settings.duration(var::WORKLOAD_SOCKET_WAIT),
    }
}

/// The secret manager.
#[must_use]
pub fn secrets(config: &Config, plan: &Plan) -> secrets::Config {
    let s = &config.settings;
    let mode = if s.text(var::KUBERNETES_SERVICE_HOST).is_empty() { 0o600 } else { 0o644 };
    secrets::Config {
        identity: spiffe_id(
            s.text(var::TRUST_DOMAIN),
            s.text(var::POD_NAMESPACE),
            s.text(var::SERVICE_ACCOUNT),
        ),
        key: key_options(config),
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
        output: s.some_text(var::OUTPUT_CERTS).map(|dir| output::Config { dir: config.path(dir), mode }),
        persist: s.flag(var::IDENTITY_PERSIST).then(|| super::replay_dir(config).join("identity")),
        file_debounce: s.duration(var::FILE_DEBOUNCE_DURATION),
        system_bundle: files::system_bundle(),
        proxyless: s.flag(var::DISABLE_ENVOY),
        eager: true,
        first_key: None,
        trouble: std::sync::Arc::default(),
        // Only a client that forgets its own bounds ever meets this one.
        call_bound: super::istiod::ca_limits(config).1 + Duration::from_secs(10),
    }
}

/// `SDS_ALLOWED_UIDS`; `None`: everybody.
///
/// # Errors
/// When it holds anything but numbers.
pub fn uids(text: &str) -> Result<Option<BTreeSet<u32>>, String> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let uids = text.split(',').map(|uid| uid.trim().parse().map_err(|_| uid.trim().to_owned()));
    uids.collect::<Result<_, _>>().map(Some).map_err(|bad| {
        format!("SDS_ALLOWED_UIDS={text}: {bad:?} is no user ID; write numbers separated by commas, such as 1337,0")
    })
}

/// The SDS server; no sockets without Envoy.
#[must_use]
pub fn sds(config: &Config, mode: probe::Mode) -> sds::Config {
    let sockets: Vec<PathBuf> = if config.settings.flag(var::DISABLE_ENVOY) {
        Vec::new()
    } else {
        match mode {
            probe::Mode::Own => {
                let mut sockets = vec![config.path(WORKLOAD_DIR).join(probe::DEFAULT_SOCKET)];
                // Where 1.5 to 1.8 had it; whoever moved the folder since then does not look there.
                if crate::envoy::bootstrap::path::clean(&config.mesh.proxy.config_path) == "etc/istio/proxy" {
                    sockets.push(config.config_path().join("SDS"));
                }
                sockets
            }
            probe::Mode::External => vec![config.path(FILES_SOCKET)],
        }
    };
    let given = config.mesh.proxy.private_key_provider.as_ref().and_then(|p| p.provider.as_ref());
    let private_key_provider = given.map(|given| {
        let (provider, poll_delay, fallback) = match given {
            Given::Cryptomb(c) => (Provider::CryptoMb, c.poll_delay.as_ref(), c.fallback.as_ref()),
            Given::Qat(q) => (Provider::Qat, q.poll_delay.as_ref(), q.fallback.as_ref()),
        };
        let poll_delay = Config::span(poll_delay);
        PrivateKeyProvider { provider, poll_delay, fallback: fallback.is_some_and(|f| f.value) }
    });
    let crl = config.settings.flag(var::PILOT_ENABLE_CA_CRL).then(|| PathBuf::from(CRL));
    let s = &config.settings;
    let keepalive = (s.duration(var::GRPC_KEEPALIVE_INTERVAL), s.duration(var::GRPC_KEEPALIVE_TIMEOUT));
    // A list that cannot be read has ended the start.
    let allowed = uids(s.text(var::SDS_ALLOWED_UIDS)).unwrap_or_default();
    sds::Config { sockets, private_key_provider, crl, keepalive: Some(keepalive), allowed }
}
