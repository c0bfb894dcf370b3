//! One name that Envoy asked for: the secrets that may hold it, the fallback, what is published.

use std::sync::Arc;

use futures_util::StreamExt;
use futures_util::future::OptionFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;

use super::kube::{self, Api, Held};
use super::read::{BadSecret, CACERT, is_ours, secrets_of};
use super::{Asked, LOOK, Secrets};
use crate::base::slack;
use crate::secrets::Secret;

/// What one secret is good for.
enum Usable {
    /// Not heard of yet.
    Unknown,
    /// It is not there, or has nothing of the kind.
    Absent,
    /// It is there and cannot be served.
    Bad(BadSecret),
    /// It cannot be asked for at the moment.
    Failed(kube::Error),
    /// It can be served.
    Good(Secret),
}

/// The names of secrets that may hold a resource: its own, and the fallback behind them. Gives how many are its
/// own.
pub(super) fn wanted<'a>(name: &'a str, fallback: &'a str) -> (Vec<&'a str>, usize) {
    let mut wanted: Vec<&str> = secrets_of(name).into_iter().filter(|secret| is_ours(secret)).collect();
    let own = wanted.len();
    // Trust anchors of somebody else would let the wrong clients in.
    if !fallback.is_empty() && fallback != name && !name.ends_with(CACERT) {
        wanted.push(fallback);
    }
    (wanted, own)
}

/// Follows until nobody asks for the name any more.
pub(super) async fn run(secrets: &Secrets, api: &Arc<Api>, name: &str, asked: &Asked) {
    let (wanted, own) = wanted(name, &secrets.0.config.fallback);
    // One message is enough: a watch waits until the last one is looked at.
    let (tell, mut news) = mpsc::channel::<(usize, Held)>(1);
    let begin = || -> FuturesUnordered<_> {
        wanted[..own].iter().enumerate().map(|(at, secret)| api.watch(secret, at, tell.clone())).collect()
    };
    let mut watches = begin();
    // Each watch is a connection: the fallback has one only while it may be needed.
    let mut spare = None;
    let mut states: Vec<Usable> = wanted.iter().map(|_| Usable::Unknown).collect();
    let mut look = Box::pin(slack::sleep(LOOK));
    if own == 0 {
        secrets
            .note(name, Some("secrets whose names begin with istio or prometheus are not served".to_owned()));
    }
    loop {
        if asked.has_own() {
            spare = None;
        } else if spare.is_none()
            && let Some(secret) = wanted.get(own)
            && !states[..own].iter().any(|state| matches!(state, Usable::Unknown))
        {
            spare = Some(Box::pin(api.watch(secret, own, tell.clone())));
        }
        tokio::select! {
            Some(()) = watches.next() => {}
            Some(()) = OptionFuture::from(spare.as_mut()) => {}
            Some((at, held)) = news.recv() => {
                states[at] = state(secrets, name, wanted[at], at >= own, held);
                settle(secrets, name, &wanted, own, &states, asked);
            }
            () = &mut look => {
                if secrets.forget(name) {
                    return;
                }
                // Others may have made room, of which no event tells.
                if states.iter().any(|state| matches!(state, Usable::Bad(BadSecret::Room))) {
                    (watches, spare) = (begin(), None);
                    states.fill_with(|| Usable::Unknown);
                }
                look.set(slack::sleep(LOOK));
            }
        }
    }
}

fn state(secrets: &Secrets, name: &str, secret: &str, spare: bool, held: Held) -> Usable {
    match held {
        Held::Absent => Usable::Absent,
        Held::Failed(why) => Usable::Failed(why),
        Held::Secret(object) => {
            // A fallback is read under its own name.
            let under = if spare { secret } else { name };
            match secrets.resource(name, under, secret, &|field| object.field(field)) {
                Ok(Some(value)) => Usable::Good(value),
                Ok(None) => Usable::Absent,
                Err(why) => Usable::Bad(why),
            }
        }
    }
}

/// Publishes the best of what there is, and notes what is wrong.
fn settle(secrets: &Secrets, name: &str, wanted: &[&str], own: usize, states: &[Usable], asked: &Asked) {
    let (owns, spare) = states.split_at(own);
    let good = owns.iter().find_map(|state| match state {
        Usable::Good(value) => Some(value),
        _ => None,
    });
    if let Some(value) = good {
        secrets.publish(name, asked, value.clone(), false);
        return secrets.note(name, None);
    }
    let bad = owns.iter().find_map(|state| match state {
        Usable::Bad(why) => Some(why.to_string()),
        Usable::Failed(why) => Some(why.to_string()),
        _ => None,
    });
    if bad.is_none() && owns.iter().any(|state| matches!(state, Usable::Unknown)) {
        return;
    }
    let failed = bad.is_some();
    let why = bad.unwrap_or_else(|| "there is no such secret".to_owned());
    let rest = match spare.first() {
        Some(Usable::Good(value)) if !asked.has_own() => {
            secrets.publish(name, asked, value.clone(), true);
            format!("{} is served in its place", wanted[own])
        }
        _ if asked.has_any() => "what was served before stays".to_owned(),
        // What is wrong is told at once: a server that is silent may take as long again to say nothing of the fallback.
        Some(Usable::Unknown) if !failed => return,
        _ => "Envoy waits for it".to_owned(),
    };
    secrets.note(name, Some(format!("{why}; {rest}")));
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::PathBuf;

    use super::*;
    use crate::base::files::Watches;
    use crate::base::tasks::Group;
    use crate::gateway::kube::Why;
    use crate::gateway::{Config, Origin};
    use crate::trouble::{Kind, Reporter};

    // What is told of `web` when it cannot be asked for, and nothing is known of the fallback yet.
    fn told(why: Why) -> (Kind, String) {
        let config = Config { origin: Origin::Folder(PathBuf::new()), fallback: "spare".to_owned() };
        let secrets = Secrets::new(config, &Watches::default(), Group::new(), Reporter::default());
        let failed = Usable::Failed(kube::Error::Broken { base: "https://server".to_owned(), why });
        settle(&secrets, "web", &["web", "spare"], 1, &[failed, Usable::Unknown], &Asked::default());
        let report = secrets.troubles().pop().expect("it is told");
        (report.kind, report.detail)
    }

    #[tokio::test]
    async fn what_is_wrong_is_told_before_the_fallback_is_known() {
        let (kind, detail) = told(Why::Silent);
        assert_eq!(kind, Kind::GatewaySecret);
        assert!(detail.ends_with("no answer within 30 s; Envoy waits for it"), "{detail}");
    }

    #[tokio::test]
    async fn what_this_machine_lacks_is_no_fault_of_the_secret() {
        let source = io::Error::from_raw_os_error(24);
        assert_eq!(told(Why::Token { path: "token".into(), source }).0, Kind::OpenFiles);
    }
}
