//! Envoy: there, which version, and what it says of the bootstrap.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::{Check, Outcome, Scene};
use crate::agent;
use crate::config::parts::envoy::{Bootstrap, Presence};
use crate::config::parts::{self, identity};
use crate::envoy::validate::{self, Verdict};
use crate::secrets::probe::{self, Mode};
use crate::trouble::Kind;

/// An Envoy that is well says its version in a tenth of a second, also on a busy machine.
const VERSION: Duration = Duration::from_secs(5);

const BOOTSTRAP: &str = "bootstrap";

pub(super) async fn checks(scene: &Scene) -> Vec<Check> {
    let config = &scene.config;
    let none = match parts::envoy::presence(config) {
        Ok(Presence::Own) => None,
        Ok(Presence::External) => Some("ENVOY_EXTERNAL: somebody else starts it"),
        Ok(Presence::None) => Some("DISABLE_ENVOY: none is started"),
        Err(_) => Some("the configuration above comes first"),
    };
    if let Some(why) = none {
        return vec![Check::skip("envoy", why)];
    }
    let binary = config.envoy_binary();
    let version = version(binary).await;
    let told = version.state == Outcome::Ok;
    let failed = version.state == Outcome::Fail;
    let mut out = vec![version];
    if told {
        out.push(bootstrap(scene, binary).await);
    } else if !failed {
        // What is no Envoy cannot judge one's bootstrap.
        out.push(Check::skip("bootstrap", "not asked: what tells no version judges no bootstrap"));
    }
    out
}

async fn version(binary: &str) -> Check {
    match validate::version(binary, VERSION).await {
        Ok(version) => Check::ok("envoy", format!("{binary}: {version}")),
        Err(e) if e.kind() == ErrorKind::TimedOut => {
            let said = format!("{binary}: {e} within {} s", VERSION.as_secs());
            Check::warn("envoy", said, "is it an Envoy, and has this machine CPU to spare?")
        }
        Err(e) if matches!(e.kind(), ErrorKind::Other) => {
            Check::warn("envoy", format!("{binary}: {e}"), "binaryPath of the proxy config names an Envoy")
        }
        Err(e) if e.kind() == ErrorKind::InvalidData => {
            let hint = "is the file whole, and for this processor and its C library? Copy it anew, with its checksum";
            Check::fail("envoy", Kind::EnvoyCrashed, format!("{binary}: {e}")).hint(hint)
        }
        Err(e) => {
            let folder = std::path::Path::new(binary).is_dir();
            let why = if folder { "it is a directory".to_owned() } else { e.to_string() };
            Check::fail("envoy", Kind::EnvoyNotStarted, format!("{binary} cannot be started: {why}"))
        }
    }
}

async fn bootstrap(scene: &Scene, binary: &str) -> Check {
    const NAME: &str = BOOTSTRAP;
    let config = &scene.config;
    if let Some(path) = parts::envoy::custom(config) {
        return custom(scene, binary, &path).await;
    }
    // A running agent's own socket is no third party's.
    let socket = identity::workload_socket(config);
    let credential = config.path(identity::CREDENTIAL_SOCKET);
    // What follows looks at both where nobody else has a turn meanwhile.
    let places = [socket.dir.join(&socket.file), credential.clone()];
    let touched = move || places.iter().for_each(|place| drop(std::fs::metadata(place)));
    if let Err(late) = super::beside(NAME, scene.end, touched).await {
        return late;
    }
    let look = probe::look(&socket).await;
    let mode = match look {
        Ok(Mode::External) if socket.file != probe::DEFAULT_SOCKET => Mode::External,
        Ok(_) => Mode::Own,
        Err(e) => {
            return Check::fail(NAME, Kind::ConfigInvalid, e.to_string())
                .hint("start the identity provider first");
        }
    };
    let bootstrap = Bootstrap::new(config);
    let made = super::within(scene.end, NAME, agent::bootstrap_text(&bootstrap, &credential, mode)).await;
    let text = match made {
        Ok(Ok(text)) => text,
        Ok(Err(e)) if scene.refused.iter().any(|refused| refused.text == e.text) => {
            return Check::skip(NAME, "the configuration above comes first");
        }
        Ok(Err(e)) => {
            return Check::fail(NAME, Kind::ConfigInvalid, e.to_string()).hint("repair the value named");
        }
        Err(late) => return late,
    };
    judged(scene, binary, validate::Bootstrap::named(&parts::envoy::generated(config), &text)).await
}

async fn custom(scene: &Scene, binary: &str, path: &Path) -> Check {
    let file = path.to_owned();
    match super::beside(BOOTSTRAP, scene.end, move || std::fs::File::open(file)).await {
        Ok(Ok(_)) => judged(scene, binary, validate::Bootstrap::File(path)).await,
        // Told among the files.
        Ok(Err(_)) => Check::skip(BOOTSTRAP, "customConfigFile cannot be read"),
        Err(late) => late,
    }
}

async fn judged(scene: &Scene, binary: &str, bootstrap: validate::Bootstrap<'_>) -> Check {
    const NAME: &str = BOOTSTRAP;
    let config = scene.config.clone();
    // One that cannot be read is told among the files, and has no effect.
    let over = super::beside(NAME, scene.end, move || parts::envoy::override_json(&config)).await;
    let over = match over {
        Ok(over) => over.ok().flatten(),
        Err(late) => return late,
    };
    let limit = scene.end.saturating_duration_since(Instant::now());
    match agent::judged(binary, bootstrap, over.as_deref(), limit).await {
        Verdict::Accepted => Check::ok(NAME, "Envoy accepts the bootstrap"),
        Verdict::Refused { status, reason } => {
            let said = format!("Envoy refuses the bootstrap ({status}): {reason}");
            Check::fail(NAME, Kind::BootstrapRejected, said)
        }
        // Told as Envoy's.
        Verdict::NotStarted(e) => Check::skip(NAME, format!("{binary} cannot be started: {e}")),
        Verdict::Late => super::unfinished(NAME, limit),
        Verdict::TooLong => Check::skip(NAME, "it is longer than a command line may be"),
    }
}
