//! The token: there, readable, a token, in date, for istiod, and whose. Never shown.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::{Mode as FileMode, OFlags};

use super::{Check, Scene};
use crate::agent;
use crate::config::parts::identity::Fetcher;
use crate::istiod::auth::MetadataServer;
use crate::istiod::auth::claims::{self, Claims};
use crate::istiod::auth::text_of;
use crate::trouble::Kind;

const NAME: &str = "token";
/// Longer than any token.
const MOST: u64 = 64 * 1024;

/// The check, and what the token says of itself.
pub(super) async fn checks(scene: &Arc<Scene>) -> (Check, Option<Claims>) {
    match scene.fetcher() {
        Fetcher::GoogleComputeEngine(server) => (metadata_server(&server).await, None),
        Fetcher::Mock => {
            (Check::warn(NAME, "CREDENTIAL_FETCHER_TYPE=Mock sends a fixed token", "for tests only"), None)
        }
        Fetcher::File => {
            let looked = scene.clone();
            let read = super::beside(NAME, scene.end, move || file(&looked)).await;
            read.unwrap_or_else(|late| (late, None))
        }
    }
}

fn file(scene: &Scene) -> (Check, Option<Claims>) {
    let path = scene.config.token.clone();
    let shown = path.display();
    let needed = scene.needs_token();
    let unneeded = |said: String| Check::ok(NAME, format!("{said}; none is needed, certificates are there"));
    let uid = rustix::process::geteuid().as_raw();
    let text = match read(&path) {
        Ok(text) => text,
        Err(e) => {
            let missing = e.kind() == io::ErrorKind::NotFound;
            let said = if missing {
                format!("{shown} is not there")
            } else {
                let owner = std::fs::metadata(&path);
                let owner =
                    owner.map(|m| format!(" (it belongs to user {}, mode {:o})", m.uid(), m.mode() & 0o777));
                format!("user {uid} cannot read {shown}: {e}{}", owner.unwrap_or_default())
            };
            let kind = match e.kind() {
                io::ErrorKind::NotFound => Kind::TokenMissing,
                io::ErrorKind::InvalidData => Kind::TokenMalformed,
                _ => Kind::TokenUnreadable,
            };
            let said =
                if kind == Kind::TokenMalformed { format!("{shown} holds no token: {e}") } else { said };
            return (if needed { Check::fail(NAME, kind, said) } else { unneeded(said) }, None);
        }
    };
    if text.trim().is_empty() {
        let said = format!("{shown} is empty");
        return (if needed { Check::fail(NAME, Kind::TokenMalformed, said) } else { unneeded(said) }, None);
    }
    let Some(claims) = claims::read(&text) else {
        let said = format!("{shown} holds {} bytes that are no JSON Web Token", text.trim().len());
        let check = if needed { Check::fail(NAME, Kind::TokenMalformed, said) } else { unneeded(said) };
        return (check, None);
    };
    (judge(scene, needed, &path, &claims), Some(claims))
}

fn judge(scene: &Scene, needed: bool, path: &Path, claims: &Claims) -> Check {
    let shown = path.display();
    let whose = claims.subject.as_deref().unwrap_or("somebody it does not name");
    let audiences = claims.audiences.join(", ");
    if let Some(expires) = claims.expires.filter(|at| *at <= scene.now) {
        let said = format!("the token in {shown} (of {whose}) expired {} ago", ago(scene.now, expires));
        if !needed {
            // As on every machine an hour after its installation; it counts where istiod refuses what is shown.
            return Check::ok(NAME, format!("{said}; certificates are shown instead"))
                .maybe(Kind::TokenExpired);
        }
        return Check::fail(NAME, Kind::TokenExpired, said);
    }
    let left = claims.expires.map(|at| format!("expires in {}", ago(at, scene.now)));
    let left = left.unwrap_or_else(|| "never expires".to_owned());
    let issuer = claims.issuer.as_deref().unwrap_or("nobody it names");
    let said = format!("of {whose}, audience {audiences}, issued by {issuer}, {left} ({shown})");
    if !claims.audiences.is_empty() && !claims.audiences.iter().any(|a| a == agent::AUDIENCE) {
        return Check::warn(NAME, said, Kind::TokenWrongAudience.hint()).maybe(Kind::TokenWrongAudience);
    }
    let (namespace, account) = scene.config.account();
    if let Some((ns, sa)) = claims.subject.as_deref().and_then(account_of)
        && !namespace.is_empty()
        && !account.is_empty()
        && (ns, sa) != (namespace, account)
    {
        let hint =
            "istiod issues for the token's owner: make POD_NAMESPACE and SERVICE_ACCOUNT agree with it";
        return Check::warn(NAME, format!("{said}; this workload calls itself {namespace}/{account}"), hint);
    }
    Check::ok(NAME, said)
}

/// Namespace and account of `system:serviceaccount:NAMESPACE:ACCOUNT`.
fn account_of(subject: &str) -> Option<(&str, &str)> {
    subject.strip_prefix("system:serviceaccount:")?.split_once(':')
}

fn read(path: &Path) -> io::Result<zeroize::Zeroizing<String>> {
    use io::Read;
    // A pipe without a writer would be waited for without an end.
    let options = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = std::fs::File::from(rustix::fs::open(path, options, FileMode::empty())?);
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(rustix::io::Errno::ISDIR.into());
    }
    if !metadata.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut bytes = zeroize::Zeroizing::new(Vec::with_capacity(8 * 1024));
    file.take(MOST + 1).read_to_end(&mut bytes)?;
    let text = text_of(&bytes).map_err(|why| io::Error::new(io::ErrorKind::InvalidData, why))?;
    Ok(zeroize::Zeroizing::new(text.to_owned()))
}

async fn metadata_server(server: &MetadataServer) -> Check {
    let limit = Duration::from_secs(3);
    // Which account it is, and not its token, which would be left in the file.
    let asked = server.get("instance/service-accounts/default/email");
    match tokio::time::timeout(limit, asked).await {
        Ok(Ok(email)) => {
            let email: String = String::from_utf8_lossy(&email).chars().take(200).collect();
            Check::ok(NAME, format!("the metadata server {} gives tokens of {}", server.host, email.trim()))
        }
        Ok(Err(e)) => Check::fail(NAME, Kind::TokenMissing, e.to_string()).hint("is this machine on Compute Engine with a service account? GCE_METADATA_HOST names another server"),
        Err(_) => {
            let said = format!("the metadata server {} does not answer within {limit:?}", server.host);
            Check::fail(NAME, Kind::TokenMissing, said).hint("is this machine on Compute Engine? GCE_METADATA_HOST names another server")
        }
    }
}

/// The time between two moments, as people say it.
pub(super) fn ago(later: SystemTime, earlier: SystemTime) -> String {
    crate::trouble::span(later.duration_since(earlier).unwrap_or_default())
}
