//! The way upstream: which roots, names, certificates and headers, for the config path and for the CA.

use std::path::PathBuf;
use std::time::Duration;

use super::{Error, Sources};
use crate::base::bounded;
use crate::base::path::cleaned;
use crate::ca::provider::Calls;
use crate::ca::vault;
use crate::config::env::{Key, kinds, var};
use crate::fetch::Proxies;
use crate::istiod::auth::CallHeaders;
use crate::istiod::{self, ClientFiles, Compliance, Roots, Tls, Transport};
use crate::proto::mesh::AuthenticationPolicy;
use crate::trouble::Kind;

/// Limit of a dial; the Go agent's library has the same.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// The root that istiod's certificate is checked with in a pod.
const ISTIOD_ROOT: &str = "./var/run/secrets/istio/root-cert.pem";
/// Where mounted certificates lie.
pub(crate) const MOUNTED_ROOT: &str = "./etc/certs/root-cert.pem";

/// `COMPLIANCE_POLICY`; [`crate::config::load`] has refused an unknown one.
#[must_use]
pub(crate) fn compliance(config: &Sources) -> Compliance {
    Compliance::of(config.settings.text(var::COMPLIANCE_POLICY)).unwrap_or_default()
}

/// The proxy that `variable` (or it in lower case) names, and `NO_PROXY`.
pub(crate) fn proxy(config: &Sources, variable: &str) -> Option<(String, String)> {
    let env = config.settings.env();
    let set = |name: &str| env.get(name).filter(|value| !value.is_empty());
    let either = |name: &str| set(name).or_else(|| set(&name.to_ascii_lowercase())).map(ToOwned::to_owned);
    either(variable).map(|url| (url, either("NO_PROXY").unwrap_or_default()))
}

/// Headers of calls: the cluster id and `XDS_HEADER_*` or `CA_HEADER_*`.
#[must_use]
pub(crate) fn headers(config: &Sources, prefix: &str) -> CallHeaders {
    let extra = config.settings.env().with_prefix(prefix);
    CallHeaders {
        cluster_id: config.settings.text(var::ISTIO_META_CLUSTER_ID).to_owned(),
        extra: extra.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect(),
    }
}

fn meta(config: &Sources, key: &str) -> Option<PathBuf> {
    let path = config.mesh.proxy.proxy_metadata.get(key).filter(|p| !p.is_empty())?;
    Some(config.path(path))
}

fn provided(config: &Sources) -> Option<PathBuf> {
    config.settings.some_text(var::PROV_CERT).map(|dir| config.path(dir))
}

// The certificate in `PROV_CERT`; mostly it is the agent's own of last time.
fn shown(config: &Sources) -> Option<ClientFiles> {
    let dir = provided(config)?;
    let output = config.settings.some_text(var::OUTPUT_CERTS).map(|dir| config.path(dir));
    let written = output.is_some_and(|output| cleaned(&output) == cleaned(&dir));
    Some(ClientFiles { cert: dir.join("cert-chain.pem"), key: dir.join("key.pem"), written })
}

/// The way to istiod, for the config path.
#[derive(Debug, Clone)]
pub(crate) struct Upstream {
    /// The connection.
    pub connection: istiod::Config,
    /// Headers of calls.
    pub headers: CallHeaders,
}

impl Upstream {
    /// Whether there is none that istiod could know this proxy by, where it asks.
    #[must_use]
    pub(crate) fn shows_no_certificate(&self) -> bool {
        matches!(&self.connection.transport, Transport::Tls(tls) if tls.client.is_none())
    }
}

/// The way to istiod.
///
/// # Errors
/// When the root cannot be located.
pub(crate) fn upstream(config: &Sources, file_mounted: bool) -> Result<Upstream, Error> {
    Ok(Upstream { connection: xds(config, file_mounted)?, headers: headers(config, "XDS_HEADER_") })
}

/// The connection of the config path.
///
/// # Errors
/// When the root cannot be located.
pub(crate) fn xds(config: &Sources, file_mounted: bool) -> Result<istiod::Config, Error> {
    let address = &config.mesh.proxy.discovery_address;
    // 1.5's flag spoke of Mixer and Pilot's old port; its agents kept TLS towards this one.
    let flag = config.flags.get("controlPlaneAuthPolicy") == Some("NONE") && address.ends_with(":15012");
    let transport = if config.mesh.proxy.control_plane_auth_policy() == AuthenticationPolicy::None && !flag {
        tracing::warn!(
            "istiod at {address} is called in plain text, token included, because controlPlaneAuthPolicy is NONE: write MUTUAL_TLS"
        );
        Transport::Plaintext
    } else {
        let client = match shown(config) {
            Some(files) => Some(files),
            None if file_mounted => {
                let cert = meta(config, "ISTIO_META_TLS_CLIENT_CERT_CHAIN");
                let key = meta(config, "ISTIO_META_TLS_CLIENT_KEY");
                cert.zip(key).map(|(cert, key)| ClientFiles { cert, key, written: false })
            }
            None => None,
        };
        Transport::Tls(Tls {
            roots: xds_roots(config, file_mounted)?,
            server_name: config.settings.some_text(var::ISTIOD_SAN).map(str::to_owned),
            client,
            compliance: compliance(config),
        })
    };
    Ok(istiod::Config {
        address: config.mesh.proxy.discovery_address.clone(),
        transport,
        connect_timeout: CONNECT_TIMEOUT,
        shuffle: config.settings.flag(var::XDS_SHUFFLE_ADDRESSES),
        // As the Go agent's library sets it where pings are on.
        user_timeout: Some(config.settings.duration(var::GRPC_KEEPALIVE_TIMEOUT)).filter(|d| !d.is_zero()),
        proxy: proxy(config, "HTTPS_PROXY"),
    })
}

// First matching row wins; the rows are those of the reference.
fn xds_roots(config: &Sources, file_mounted: bool) -> Result<Roots, Error> {
    match config.settings.text(var::XDS_ROOT_CA) {
        "SYSTEM" => return Ok(Roots::System),
        "" => {}
        path => return existing(config.path(path)).map(Roots::File),
    }
    let mounted = config.path(MOUNTED_ROOT);
    match (config.is_file(MOUNTED_ROOT), unmounted_root(config, file_mounted)) {
        (_, Ok(other)) => Ok(Roots::FirstOf(mounted, other)),
        (true, Err(_)) => Ok(Roots::File(mounted)),
        (false, Err(error)) => Err(error),
    }
}

fn existing(path: PathBuf) -> Result<PathBuf, Error> {
    root_file("XDS", "XDS_ROOT_CA", path)
}

// The text is the Go agent's where the file is not there; where it cannot be looked at, the reason.
fn root_file(of: &str, variable: &str, path: PathBuf) -> Result<PathBuf, Error> {
    let shown = path.display().to_string();
    match std::fs::metadata(&path) {
        Ok(found) if found.is_file() => Ok(path),
        Ok(found) if found.is_dir() => Err(Error::missing(
            format!(
                "root CA file for {of} does not exist {shown}: Is a directory (os error 21); {variable} names another file, or SYSTEM"
            ),
            path,
        )
        .of(Kind::RootMissing)),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::missing(
            format!(
                "root CA file for {of} cannot be looked at: {shown}: {error}; {variable} names another file, or SYSTEM"
            ),
            path,
        )
        .of(Kind::RootBroken)),
        _ => Err(Error::missing(
            format!(
                "root CA file for {of} does not exist {shown}: is it mounted? {variable} names another file, or SYSTEM"
            ),
            path,
        )
        .of(Kind::RootMissing)),
    }
}

// Certificates are files, and none is said to be the root. It begins as the Go agent's text does.
fn unnamed_root(variable: &str) -> Error {
    let text = format!(
        "root CA file for XDS does not exist : certificates come from files here, and {variable} names no root; \
         XDS_ROOT_CA names one, or SYSTEM"
    );
    Error::missing(text, PathBuf::new()).of(Kind::RootMissing)
}

// Without a mounted root.
fn unmounted_root(config: &Sources, file_mounted: bool) -> Result<PathBuf, Error> {
    if let Some(dir) = provided(config) {
        return Ok(dir.join("root-cert.pem"));
    }
    if file_mounted {
        const NAMES: &str = "ISTIO_META_TLS_CLIENT_ROOT_CERT";
        return meta(config, NAMES).map_or_else(|| Err(unnamed_root(NAMES)), existing);
    }
    if config.settings.text(var::PILOT_CERT_PROVIDER) == "none" {
        return Err(Error::no_root(
            "root CA file for XDS required but configured provider as none: set XDS_ROOT_CA, or PILOT_CERT_PROVIDER=istiod",
        ));
    }
    existing(config.path(ISTIOD_ROOT))
}

/// The connection to the CA.
///
/// # Errors
/// When the root cannot be located.
pub(crate) fn ca(config: &Sources) -> Result<istiod::Config, Error> {
    let s = &config.settings;
    let own = s.some_text(var::CA_ADDR);
    let address = own.unwrap_or(&config.mesh.proxy.discovery_address).to_owned();
    let transport = if address.ends_with(":15010") {
        tracing::warn!(target: "citadelclient", "the CA at {address} is called in plain text");
        Transport::Plaintext
    } else {
        Transport::Tls(Tls {
            roots: ca_roots(config)?,
            // Only a CA that is istiod itself goes by istiod's name.
            server_name: s.some_text(var::ISTIOD_SAN).filter(|_| own.is_none()).map(str::to_owned),
            client: shown(config),
            compliance: compliance(config),
        })
    };
    Ok(to_ca(config, address, transport))
}

fn to_ca(config: &Sources, address: String, transport: Transport) -> istiod::Config {
    istiod::Config {
        address,
        transport,
        connect_timeout: CONNECT_TIMEOUT,
        shuffle: config.settings.flag(var::XDS_SHUFFLE_ADDRESSES),
        user_timeout: None,
        proxy: proxy(config, "HTTPS_PROXY"),
    }
}

/// The connection to Google's CAs: their own roots are the system's, as the releases to 1.22 had it. The
/// pool in `CA_ADDR` is no address, so the Certificate Authority Service has a variable for its own.
///
/// # Errors
/// When `CA_ROOT_CA` names a file that is not there.
pub(crate) fn google_ca(config: &Sources, pool: bool) -> Result<istiod::Config, Error> {
    let s = &config.settings;
    if s.text(var::CA_ADDR).is_empty() {
        let (name, wanted) = if pool {
            ("GoogleCAS", "the pool, projects/P/locations/L/caPools/C")
        } else {
            ("GoogleCA", "the CA, meshca.googleapis.com:443")
        };
        return Err(Error::new(format!("CA_PROVIDER={name} needs CA_ADDR: {wanted}")));
    }
    let address = s.text(if pool { var::GOOGLE_CAS_ENDPOINT } else { var::CA_ADDR }).to_owned();
    let roots = match s.some_text(var::CA_ROOT_CA) {
        Some(_) => ca_roots(config)?,
        None => Roots::System,
    };
    let transport =
        Transport::Tls(Tls { roots, server_name: None, client: None, compliance: compliance(config) });
    Ok(to_ca(config, address, transport))
}

/// What a Vault is asked with.
///
/// # Errors
/// When a variable is missing, or `VAULT_TLS_ROOT_CERT` holds no certificate.
pub(crate) fn vault(config: &Sources) -> Result<vault::Config, Error> {
    let s = &config.settings;
    let needed = |key: Key<kinds::Text>| match s.text(key) {
        "" => Err(Error::new(format!("CA_PROVIDER=VaultCA needs {}, which is not set", key.name()))),
        text => Ok(text.to_owned()),
    };
    let roots = match s.text(var::VAULT_TLS_ROOT_CERT) {
        "" => Vec::new(),
        pem if pem.contains("-----BEGIN") => pem.as_bytes().to_vec(),
        path => bounded::given(&config.path(path)).map_err(|e| {
            Error::new(format!(
                "VAULT_TLS_ROOT_CERT={path}: neither a certificate in PEM nor a file with one: {e}"
            ))
        })?,
    };
    if !roots.is_empty() && crate::tls::client::roots_of(&roots).is_empty() {
        return Err(Error::new("VAULT_TLS_ROOT_CERT: there is no readable certificate in it"));
    }
    let (attempt_timeout, total_timeout) = ca_limits(config);
    let vault = vault::Config {
        address: needed(var::VAULT_ADDR)?,
        role: needed(var::VAULT_ROLE)?,
        auth_path: needed(var::VAULT_AUTH_PATH)?,
        sign_path: needed(var::VAULT_SIGN_CSR_PATH)?,
        namespace: s.text(var::VAULT_NAMESPACE).to_owned(),
        roots,
        proxies: Proxies { http: proxy(config, "HTTP_PROXY"), https: proxy(config, "HTTPS_PROXY") },
        crypto: crate::tls::provider::provider(compliance(config)).0,
        attempt_timeout,
        total_timeout,
    };
    vault.check().map_err(|e| Error::new(e.to_string()))?;
    Ok(vault)
}

/// Bounds of one attempt to reach the CA, and of a call with all its attempts. Zero means the default:
/// without an end a CA that hangs would hold up a renewal for ever.
#[must_use]
pub(crate) fn ca_limits(config: &Sources) -> (Duration, Duration) {
    let bound = |key, default: Duration| match config.settings.duration(key) {
        Duration::ZERO => default,
        set => set,
    };
    let whole = bound(var::CA_TIMEOUT, Calls::TOTAL_TIMEOUT);
    (bound(var::CA_ATTEMPT_TIMEOUT, Calls::ATTEMPT_TIMEOUT).min(whole), whole)
}

fn ca_roots(config: &Sources) -> Result<Roots, Error> {
    let must_exist = |path: PathBuf| root_file("CA", "CA_ROOT_CA", path).map(Roots::File);
    match config.settings.text(var::CA_ROOT_CA) {
        "SYSTEM" => return Ok(Roots::System),
        "" => {}
        path => return must_exist(config.path(path)),
    }
    if config.settings.text(var::PILOT_CERT_PROVIDER) == "custom" {
        return must_exist(config.path(MOUNTED_ROOT));
    }
    if let Some(dir) = provided(config) {
        let path = dir.join("root-cert.pem");
        return if path.is_file() {
            Ok(Roots::File(path))
        } else {
            Err(Error::fatal(format!(
                "invalid config - PROV_CERT={} missing a root certificate {}",
                config.settings.text(var::PROV_CERT),
                path.display()
            ))
            .of(Kind::RootMissing))
        };
    }
    if config.settings.text(var::PILOT_CERT_PROVIDER) == "none" {
        return Err(Error::no_root(
            "root CA file for CA required but configured provider as none: set CA_ROOT_CA, or PILOT_CERT_PROVIDER=istiod",
        ));
    }
    must_exist(config.path(ISTIOD_ROOT))
}
