//! Secrets of gateways, and the socket for callers with tokens.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Error, Sources, identity};
use crate::base::path::cleaned;
use crate::config::env::var;
use crate::gateway::{Api, Config as Gateway, Origin};
use crate::secrets::probe;

/// The folder whose presence switched it on in release 1.5.
const FOLDER: &str = "./var/run/ingress_gateway";
const SOCKET: &str = "./var/run/ingress_gateway/sds";
const ACCOUNT: &str = "./var/run/secrets/kubernetes.io/serviceaccount";
const CALLERS: &str = "/var/run/sds/uds_path";

// However they are written; links are not looked at.
fn same(one: &Path, other: &Path) -> bool {
    let whole = |path: &Path| cleaned(&std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
    whole(one) == whole(other)
}

/// The source of a gateway's secrets and its socket; `None` when it is off.
///
/// # Errors
/// When it was asked for and lacks something.
pub(crate) fn secrets(config: &Sources) -> Result<Option<(Gateway, PathBuf)>, Error> {
    let s = &config.settings;
    let folder = config.flags.get("gateway-secrets-dir").filter(|dir| !dir.is_empty());
    let asked = s.flag(var::ENABLE_INGRESS_GATEWAY_SDS);
    let found = config.node_type == "router" && config.path(FOLDER).is_dir();
    if folder.is_none() && !asked && !found {
        return Ok(None);
    }
    let socket = config.flags.get("gatewayUdsPath").filter(|path| !path.is_empty());
    let socket = config.path(socket.unwrap_or(SOCKET));
    if same(&socket, &config.path(identity::WORKLOAD_DIR).join(probe::DEFAULT_SOCKET)) {
        return Err(Error::new(format!(
            "--gatewayUdsPath={}: this is the workload's socket; gateway secrets need another one",
            socket.display()
        )));
    }
    let origin = match folder {
        Some(folder) => {
            let path = config.path(folder);
            if !path.is_dir() {
                return Err(Error::new(format!("--gateway-secrets-dir={folder}: there is no such folder")));
            }
            Origin::Folder(path)
        }
        None => match api(config) {
            Ok(api) => Origin::Api(Arc::new(api)),
            Err(why) if asked => return Err(Error::new(format!("ENABLE_INGRESS_GATEWAY_SDS: {why}"))),
            Err(why) => {
                tracing::warn!(target: "sds", "no gateway secrets are served though {FOLDER} is there: {why}");
                return Ok(None);
            }
        },
    };
    let fallback = s.text(var::INGRESS_GATEWAY_FALLBACK_SECRET).to_owned();
    if !fallback.is_empty() && !crate::gateway::is_name(&fallback) {
        return Err(Error::new(format!(
            "INGRESS_GATEWAY_FALLBACK_SECRET={fallback}: no secret has such a name (lower-case letters, digits, - and .); empty: there is no fallback"
        )));
    }
    Ok(Some((Gateway { origin, fallback }, socket)))
}

/// Why the API server cannot be asked.
#[derive(Debug, thiserror::Error)]
enum NoApi {
    #[error(
        "KUBERNETES_SERVICE_HOST is not set, so this is no cluster; --gateway-secrets-dir serves secrets from a folder"
    )]
    NoCluster,
    #[error("the namespace is not known: set INGRESS_GATEWAY_NAMESPACE or POD_NAMESPACE")]
    NoNamespace,
    #[error(
        "the namespace {0:?} cannot be one: INGRESS_GATEWAY_NAMESPACE, or POD_NAMESPACE, is of lower-case letters, \
         digits and -"
    )]
    Namespace(String),
    #[error("KUBERNETES_SERVICE_PORT={0}: it is a port, 443 mostly")]
    Port(String),
}

fn api(config: &Sources) -> Result<Api, NoApi> {
    let s = &config.settings;
    let host = s.text(var::KUBERNETES_SERVICE_HOST);
    if host.is_empty() {
        return Err(NoApi::NoCluster);
    }
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let namespace = s.some_text(var::INGRESS_GATEWAY_NAMESPACE).unwrap_or(s.text(var::POD_NAMESPACE));
    if namespace.is_empty() {
        return Err(NoApi::NoNamespace);
    }
    let label = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if namespace.len() > 63 || !namespace.bytes().all(label) {
        return Err(NoApi::Namespace(namespace.to_owned()));
    }
    let port = s.text(var::KUBERNETES_SERVICE_PORT);
    if !port.parse::<u16>().is_ok_and(|port| port > 0) {
        return Err(NoApi::Port(port.to_owned()));
    }
    let account = config.path(ACCOUNT);
    Ok(Api {
        base: format!("https://{host}:{port}"),
        namespace: namespace.to_owned(),
        token: account.join("token"),
        ca: account.join("ca.crt"),
        resync: s.duration(var::SECRET_WATCHER_RESYNC_PERIOD),
        crypto: crate::tls::provider::provider(super::istiod::compliance(config)).0,
    })
}

/// The socket on which callers bring their tokens; `None` when it is off.
///
/// # Errors
/// When it is another socket's path, or nobody signs for callers.
pub(crate) fn callers(config: &Sources) -> Result<Option<PathBuf>, Error> {
    let s = &config.settings;
    if !s.flag(var::SDS_CALLER_TOKENS) {
        return Ok(None);
    }
    let flag = config.flags.get("workloadUDSPath").filter(|path| !path.is_empty());
    let variable = s.some_text(var::WORKLOAD_SDS);
    if let Some(text) = variable.filter(|text| flag.is_none() && !text.contains('/')) {
        return Err(Error::new(format!(
            "WORKLOAD_SDS={text}: it is the path of the socket for callers' tokens, {CALLERS} unless it is set"
        )));
    }
    let socket = config.path(flag.or(variable).unwrap_or(CALLERS));
    let gateway = config.flags.get("gatewayUdsPath").filter(|path| !path.is_empty()).unwrap_or(SOCKET);
    let own = config.path(identity::WORKLOAD_DIR).join(probe::DEFAULT_SOCKET);
    if same(&socket, &own) || same(&socket, &config.path(gateway)) {
        return Err(Error::new(format!(
            "--workloadUDSPath={}: another part of the agent serves this socket; callers' tokens need one of their own",
            socket.display()
        )));
    }
    if identity::plan(config)?.file_mounted {
        return Err(Error::new(
            "SDS_CALLER_TOKENS: certificates are mounted here, so no CA signs for callers; take FILE_MOUNTED_CERTS or CA_PROVIDER=GkeWorkloadCertificate away",
        ));
    }
    Ok(Some(socket))
}
