//! Files and folders that the configuration names, for those who look at them before a start.

use std::path::PathBuf;

use super::{Sources, envoy, identity};
use crate::config::args;
use crate::config::env::var;
use crate::secrets::Seal;

/// Where the mesh file is unless `--meshConfig` says otherwise; it may be missing there.
const MESH_FILE: &str = "./etc/istio/config/mesh";

/// A folder that is written to.
pub(crate) const GRPC: &str = "the folder of GRPC_XDS_BOOTSTRAP";

/// Files that are read: what each is, and where.
#[must_use]
pub(crate) fn read(config: &Sources) -> Vec<(&'static str, PathBuf)> {
    let mut files = Vec::new();
    if let Some(path) = envoy::template(config) {
        files.push(("the bootstrap's template", path));
    }
    if let Some(path) = envoy::custom(config) {
        files.push(("customConfigFile", path));
    }
    if let Some(given) = config.flags.get("meshConfig").filter(|path| !path.is_empty()) {
        let path = config.path(given);
        if path.exists() || given != MESH_FILE {
            files.push(("--meshConfig", path));
        }
    }
    files
}

/// The mesh file as it was named.
#[must_use]
pub(crate) fn mesh(config: &Sources) -> &str {
    config.flags.or_default(args::PROXY, "meshConfig")
}

/// What seals the workload's key on a disk, where that is wanted.
#[must_use]
pub(crate) fn seal(config: &Sources) -> Option<Seal> {
    let s = &config.settings;
    let file = s.some_text(var::IDENTITY_PERSIST_KEY).filter(|_| s.flag(var::IDENTITY_PERSIST))?;
    Some(Seal { file: config.path(file), about: String::new() })
}

/// Certificate and key in `PROV_CERT`.
#[must_use]
pub(crate) fn provided(config: &Sources) -> Option<(PathBuf, PathBuf)> {
    let dir = config.path(config.settings.some_text(var::PROV_CERT)?);
    Some((dir.join("cert-chain.pem"), dir.join("key.pem")))
}

/// Folders that are written to: what each is, where, and whether it is made where it is missing.
#[must_use]
pub(crate) fn written(config: &Sources) -> Vec<(&'static str, PathBuf, bool)> {
    let mut folders = vec![("configPath", config.config_path(), true)];
    if !config.settings.flag(var::DISABLE_ENVOY) {
        folders.push(("the folder of the SDS socket", config.path(identity::WORKLOAD_DIR), true));
    }
    if let Some(dir) = config.settings.some_text(var::OUTPUT_CERTS) {
        folders.push(("OUTPUT_CERTS", config.path(dir), false));
    }
    if let Some(path) = config.settings.some_text(var::GRPC_XDS_BOOTSTRAP)
        && let Some(dir) = config.path(path).parent()
        && *dir != config.config_path()
    {
        folders.push((GRPC, dir.to_owned(), true));
    }
    folders
}

/// Sockets that are bound.
#[must_use]
pub(crate) fn sockets(config: &Sources) -> [PathBuf; 2] {
    [config.config_path().join("XDS"), config.path(identity::WORKLOAD_DIR).join("socket")]
}
