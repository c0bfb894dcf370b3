//! Where a VM's files lie: Istio's places below the working directory, each of which can be named otherwise.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::links::{self, Folder, Make};
use crate::base::bounded;

/// Where the agent reads its token.
pub(crate) const TOKEN: &str = "./var/run/secrets/tokens/istio-token";
/// Where istiod's root may lie besides the directory of certificates.
pub(crate) const MOUNTED_ROOT: &str = "./etc/certs/root-cert.pem";

const WRITTEN: &str =
    "\"istioctl x workload entry configure\" writes it, \"pilot-agent vm install\" puts it there";

/// The places. Relative ones hang off `root`.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// The agent's working directory; `/` under systemd.
    pub root: PathBuf,
    /// What the operator sets.
    pub sidecar_env: PathBuf,
    /// What `istioctl` wrote, and whether somebody asked for this file: then it must be there.
    pub cluster_env: (PathBuf, bool),
    /// The mesh's settings, `--meshConfig`.
    pub mesh: PathBuf,
    /// Directory of certificates, when it was named.
    pub certs: Option<PathBuf>,
    /// A token to be put where the agent reads it, when one was named.
    pub token: Option<PathBuf>,
    /// `/etc/hosts`.
    pub hosts: PathBuf,
    /// The unit.
    pub unit: PathBuf,
}

/// A file as the user knows it, and what it sets.
type Settings = (String, BTreeMap<String, String>);

/// The variables, and what is odd about them.
type Read = (BTreeMap<String, String>, Vec<String>);

impl Places {
    /// From the flags of the command (`flag` gives a flag's value, if it was given) and the environment.
    #[must_use]
    pub(crate) fn new(flag: impl Fn(&str) -> Option<PathBuf>, env: &BTreeMap<String, String>) -> Self {
        let set = |name: &str| env.get(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let cluster_env = flag("cluster-env").or_else(|| set("ISTIO_CLUSTER_CONFIG"));
        let named = cluster_env.is_some();
        let path = |name: &str, default: &str| flag(name).unwrap_or_else(|| PathBuf::from(default));
        Self {
            root: path("root", "."),
            sidecar_env: flag("sidecar-env")
                .or_else(|| set("ISTIO_SIDECAR_CONFIG"))
                .unwrap_or_else(|| PathBuf::from("./var/lib/istio/envoy/sidecar.env")),
            cluster_env: (
                cluster_env.unwrap_or_else(|| PathBuf::from("./var/lib/istio/envoy/cluster.env")),
                named,
            ),
            mesh: path("mesh", "./etc/istio/config/mesh"),
            certs: flag("certs"),
            token: flag("token"),
            hosts: path("hosts", "./etc/hosts"),
            unit: path("unit", "./etc/systemd/system/istio.service"),
        }
    }

    /// A place as the file system knows it.
    #[must_use]
    pub(crate) fn at(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix(".").unwrap_or(path))
    }

    /// The folder that relative places hang off, as files are put into it: links are read against it. The working directory
    /// of a machine that runs has none of its own, there they mean what they always mean.
    fn jail(&self) -> PathBuf {
        if self.root == Path::new(".") { PathBuf::from("/") } else { self.root.clone() }
    }

    /// What made folders are named relative to.
    #[must_use]
    pub(crate) fn base(&self) -> PathBuf {
        if self.root == Path::new(".") {
            std::env::current_dir().unwrap_or_default()
        } else {
            self.root.clone()
        }
    }

    /// Where a file for this place goes: links on the way are followed inside the root, the last one, too. `true` beside the
    /// link itself where it leads to `/dev/null`, which nobody means to write to.
    ///
    /// # Errors
    /// The system's, and links that are not followed.
    pub(crate) fn target(&self, path: &Path) -> io::Result<(PathBuf, bool)> {
        let (jail, path) = self.way(path);
        let parent = links::follow(&jail, path.parent().unwrap_or(Path::new("")))?;
        let place = parent.join(path.file_name().unwrap_or_default());
        if std::fs::read_link(&place).is_ok_and(|to| to == Path::new("/dev/null")) {
            return Ok((place, true));
        }
        links::follow(&jail, &path).map(|target| (target, false))
    }

    /// Where a file of settings is read: in an image its links lead where they will there, not to this machine's own.
    ///
    /// # Errors
    /// As [`Self::target`].
    pub(crate) fn source(&self, path: &Path) -> io::Result<PathBuf> {
        if path.is_absolute() || self.jail() == Path::new("/") {
            return Ok(self.at(path));
        }
        self.target(path).map(|(place, _)| place)
    }

    // Against what links of this place are read, and the place there.
    fn way(&self, path: &Path) -> (PathBuf, PathBuf) {
        let jail = if path.is_absolute() { PathBuf::from("/") } else { self.jail() };
        let path = if self.root == Path::new(".") { self.base().join(path) } else { path.to_owned() };
        (jail, path)
    }

    /// The folder that a file for this place goes to, held open, and the file's name there: as [`Self::target`], with the
    /// folders that `make` makes. Links of `proxy` are not followed.
    ///
    /// # Errors
    /// The system's, links that are not followed, and those of `make`.
    pub(crate) fn file(
        &self,
        path: &Path,
        proxy: Option<u32>,
        make: &mut Make<'_>,
    ) -> io::Result<(Folder, OsString)> {
        let (jail, path) = self.way(path);
        let (folder, name) = links::walk(&jail, &path, false, &links::trusted(&jail, proxy), make)?;
        Ok((folder, name.ok_or(io::ErrorKind::IsADirectory)?))
    }

    /// As [`Self::file`], the folder at the place.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn folder(&self, path: &Path, proxy: Option<u32>, make: &mut Make<'_>) -> io::Result<Folder> {
        let (jail, path) = self.way(path);
        Ok(links::walk(&jail, &path, true, &links::trusted(&jail, proxy), make)?.0)
    }

    /// What the file at this place holds. Links of `proxy` are not followed: what root reads for it, it gets.
    ///
    /// # Errors
    /// The system's, and links that are not followed.
    pub(crate) fn read(&self, path: &Path, proxy: Option<u32>) -> io::Result<Vec<u8>> {
        // Standard input, and pipes that a shell makes: links that lead where no name does, in folders of the system.
        if path.starts_with("/dev") || path.starts_with("/proc") {
            return std::fs::read(path);
        }
        let (jail, path) = self.way(path);
        let trusts = |uid| uid == 0 || Some(uid) != proxy;
        let (folder, name) = links::walk(&jail, &path, false, &trusts, &mut |_, _, _| Ok(None))?;
        let name = name.ok_or(io::ErrorKind::IsADirectory)?;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(folder.handle()?, name, flags, Mode::empty())?;
        let mut content = Vec::new();
        std::fs::File::from(file).read_to_end(&mut content)?;
        Ok(content)
    }

    /// What each of the two files sets, the later over the earlier; one that cannot be read sets nothing.
    #[must_use]
    pub(crate) fn settings(&self) -> [Settings; 2] {
        [&self.sidecar_env, &self.cluster_env.0].map(|path| {
            let name = self.at(path).display().to_string();
            let text = self.source(path).and_then(|place| bounded::given_text(&place)).unwrap_or_default();
            let pairs = super::envfile::parse(&name, &text).unwrap_or_default();
            (name, pairs.into_iter().collect())
        })
    }

    /// The variables of both files over those of the process, as the script sources them.
    ///
    /// # Errors
    /// Every line that cannot be read, and files that must be there and are not.
    pub(crate) fn environment(&self, process: &BTreeMap<String, String>) -> Result<Read, Vec<String>> {
        let mut env = process.clone();
        let (mut errors, mut warnings) = (Vec::new(), Vec::new());
        let (cluster, named) = &self.cluster_env;
        for (path, must) in [(&self.sidecar_env, false), (cluster, *named)] {
            let place = self.at(path);
            match self.source(path).and_then(|place| bounded::given_text(&place)) {
                Ok(text) => match super::envfile::parse(&place.display().to_string(), &text) {
                    Ok(pairs) => {
                        if path == cluster && pairs.is_empty() {
                            warnings.push(format!("{} sets nothing: {WRITTEN}", place.display()));
                        }
                        env.extend(pairs);
                    }
                    Err(faults) => errors.extend(faults),
                },
                Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must => {
                    if path == cluster {
                        warnings.push(format!("{} is not there: {WRITTEN}", place.display()));
                    }
                }
                Err(e) => errors.push(format!("{}: {e}", place.display())),
            }
        }
        if errors.is_empty() { Ok((env, warnings)) } else { Err(errors) }
    }
}
