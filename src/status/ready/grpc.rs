//! Proxyless gRPC applications in the pod read a bootstrap file that the agent writes: not ready before
//! it can be read, nor while a certificate file it names is missing.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::base::bounded;
use crate::base::lane::Lane;

static LOOKS: Lane = Lane::new("gRPC bootstrap", 1);

/// Within what the kubelet waits for.
const PATIENCE: Duration = Duration::from_millis(500);

pub(super) struct Bootstrap {
    files: Option<Arc<Named>>,
    /// What the last look found that a disk has answered.
    last: Mutex<Result<(), String>>,
}

/// The bootstrap file.
struct Named {
    path: PathBuf,
    /// Files that a good load named.
    files: OnceLock<Vec<String>>,
}

#[derive(Deserialize, Default)]
struct Document {
    #[serde(default)]
    certificate_providers: Option<std::collections::BTreeMap<String, CertificateProvider>>,
}

#[derive(Deserialize)]
struct CertificateProvider {
    #[serde(default)]
    plugin_name: String,
    #[serde(default)]
    config: Value,
}

#[derive(Deserialize, Default)]
struct Files {
    #[serde(default)]
    certificate_file: String,
    #[serde(default)]
    private_key_file: String,
    #[serde(default)]
    ca_certificate_file: String,
}

impl Bootstrap {
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        let files = path.map(|path| Arc::new(Named { path, files: OnceLock::new() }));
        let unread = files.as_ref().map(|named| format!("{} was never read", named.path.display()));
        Self { files, last: Mutex::new(unread.map_or(Ok(()), Err)) }
    }

    /// What is missing. A disk that does not answer changes nothing.
    pub(super) async fn check(&self) -> Result<(), String> {
        let Some(named) = self.files.clone() else { return Ok(()) };
        // It was read and names none, as with an Envoy: not worth a thread for each request.
        if named.files.get().is_some_and(Vec::is_empty) {
            return Ok(());
        }
        let looked = LOOKS.within(PATIENCE, move || named.look()).await;
        let mut last = self.last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Ok(found) = looked {
            *last = found;
        }
        last.clone()
    }
}

impl Named {
    fn look(&self) -> Result<(), String> {
        let path = &self.path;
        let files = match self.files.get() {
            Some(files) => files,
            None => {
                let files = load(path).map_err(|e| format!("failed loading {}: {e}", path.display()))?;
                self.files.get_or_init(|| files)
            }
        };
        match files.iter().find(|file| missing(Path::new(file))) {
            Some(file) => Err(format!("{file} does not exist")),
            None => Ok(()),
        }
    }
}

fn load(path: &Path) -> Result<Vec<String>, String> {
    let text = bounded::usual(path).map_err(|e| e.to_string())?;
    // As Go reads a structure: null has nothing in it, a list is none.
    let document: Value = serde_json::from_slice(&text).map_err(|e| e.to_string())?;
    if !document.is_object() && !document.is_null() {
        return Err("it is no JSON object".to_owned());
    }
    let document: Option<Document> = serde_json::from_value(document).map_err(|e| e.to_string())?;
    let providers = document.unwrap_or_default().certificate_providers.unwrap_or_default();
    Ok(providers
        .into_values()
        .find(|provider| provider.plugin_name == "file_watcher")
        // What cannot be read names no files, which then are missing; other plugins' configs are their own.
        .map(|p| serde_json::from_value(p.config).unwrap_or_default())
        .map(|f: Files| vec![f.certificate_file, f.private_key_file, f.ca_certificate_file])
        .unwrap_or_default())
}

// Only a file that is not there counts; one that may not be looked at passes, as in the Go agent.
fn missing(path: &Path) -> bool {
    std::fs::metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loads_once_and_looks_for_the_files_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("grpc-bootstrap.json");
        let probe = Bootstrap::new(Some(path.clone()));
        assert!(probe.check().await.unwrap_err().starts_with("failed loading"));
        for text in ["{", "", "[]", "[null]", "1", "\"x\""] {
            std::fs::write(&path, text).unwrap();
            assert!(probe.check().await.unwrap_err().starts_with("failed loading"), "{text}");
        }
        let file = |name: &str| dir.path().join(name).display().to_string();
        let text = serde_json::json!({"certificate_providers": {"default": {"plugin_name": "file_watcher", "config": {
            "certificate_file": file("c"), "private_key_file": file("k"), "ca_certificate_file": file("r")}}}});
        std::fs::write(&path, text.to_string()).unwrap();
        for name in ["c", "k", "r"] {
            assert_eq!(probe.check().await.unwrap_err(), format!("{} does not exist", file(name)));
            std::fs::write(file(name), "").unwrap();
        }
        assert_eq!(probe.check().await, Ok(()));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(probe.check().await, Ok(()), "a good load is kept");
        std::fs::remove_file(file("k")).unwrap();
        assert!(probe.check().await.is_err());
        assert_eq!(Bootstrap::new(None).check().await, Ok(()));
    }

    #[tokio::test]
    async fn other_providers_name_no_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.json");
        let other =
            r#"{"certificate_providers":{"x":{"plugin_name":"mesh_ca","config":{"certificate_file":1}}}}"#;
        std::fs::write(&path, other).unwrap();
        assert_eq!(Bootstrap::new(Some(path.clone())).check().await, Ok(()));
        for nothing in ["null", "{}", r#"{"certificate_providers":null}"#] {
            std::fs::write(&path, nothing).unwrap();
            assert_eq!(Bootstrap::new(Some(path.clone())).check().await, Ok(()), "{nothing}");
        }
    }
}
