//! `vm check`: a look at the machine before anything is started, a line for each thing. Changes nothing.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::Access;

use super::accounts::Account;
use super::folders::SOCKETS;
use super::places::{MOUNTED_ROOT, Places, TOKEN};
use super::plan::Plan;
use super::rights::{no_room, refusal};
use crate::base::bounded;
use crate::base::lane::{NoAnswer, look_up_here};
use crate::istiod::auth::claims;
use crate::istiod::{Roots, Transport};
use crate::net::proxy::Proxy;
use crate::tls::cert;

/// A name server or a firewall that stays silent is silent for longer than this.
const LIMIT: Duration = Duration::from_secs(5);

/// How a thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grade {
    /// Good.
    Ok,
    /// The agent would start and something would be missing.
    Warn,
    /// The agent would not start, or never become ready.
    Fail,
}

/// One line.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// How it stands.
    pub grade: Grade,
    /// What was looked at.
    pub what: &'static str,
    /// What was seen, and what to do about it.
    pub said: String,
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let grade = match self.grade {
            Grade::Ok => "ok  ",
            Grade::Warn => "warn",
            Grade::Fail => "FAIL",
        };
        write!(f, "{grade}  {:<11} {}", self.what, self.said)
    }
}

fn line(grade: Grade, what: &'static str, said: impl Into<String>) -> Line {
    Line { grade, what, said: said.into() }
}

/// What of a loaded configuration is looked at.
#[derive(Debug, Clone)]
pub(crate) struct Facts {
    /// Where Envoy is; why none is looked for.
    pub envoy: Result<String, &'static str>,
    /// How istiod is spoken to; none where that was told with the settings.
    pub xds: Option<Way>,
    /// How the CA is, where one is asked.
    pub ca: Option<Way>,
    /// Who is called: istiod, and the CA where that is another one.
    pub servers: Vec<Server>,
    /// Why no token is needed, where none is.
    pub without_token: Option<&'static str>,
    /// Where the agent writes Envoy's bootstrap and its sockets (`configPath`).
    pub work: PathBuf,
}

/// Who is called.
#[derive(Clone)]
pub(crate) struct Server {
    /// Who it is.
    pub what: &'static str,
    /// `host:port`.
    pub address: String,
    /// A proxy's URL, and whom it is not for.
    pub proxy: Option<(String, String)>,
}

// The URL may hold a password.
impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("what", &self.what).field("address", &self.address).finish()
    }
}

/// How a server is spoken to.
#[derive(Debug, Clone)]
pub(crate) enum Way {
    /// With this.
    By(Transport),
    /// Not at all, and why: its root cannot be located.
    Barred(String),
}

/// Looks at everything that does not need the rules. Without a plan (some setting cannot be used) at what does not depend
/// on it, so that everything that is wrong is told at once; `env` are the variables as far as they could be read.
#[must_use]
pub(crate) fn look(
    places: &Places,
    env: &BTreeMap<String, String>,
    planned: Option<(&Plan, &Facts)>,
    now: SystemTime,
) -> Vec<Line> {
    // Whose rights count; nobody's where that is not known.
    let whose = planned.map(|(plan, _)| plan.become_user.as_ref());
    let mut out = vec![files(places, whose)];
    match planned {
        Some((_, facts)) => out.extend(roots(facts, whose, now)),
        None => {
            let provided = env.get("PROV_CERT").filter(|dir| !dir.is_empty());
            let provided = provided.map(|dir| Path::new(dir).join("root-cert.pem"));
            let candidates = [Some(Path::new(MOUNTED_ROOT).to_owned()), provided];
            let candidates: Vec<_> = candidates.into_iter().flatten().map(|p| places.at(&p)).collect();
            out.push(root("root", &candidates, whose, now));
        }
    }
    out.push(match planned.and_then(|(_, facts)| facts.without_token) {
        Some(why) => line(Grade::Ok, "token", format!("none is needed: {why}")),
        None => token(places, env, whose, now),
    });
    match planned {
        Some((plan, facts)) => out.extend(of_plan(places, plan, facts)),
        None => out.extend(["envoy", "user", "folders", "istiod"].map(|what| {
            line(
                Grade::Warn,
                what,
                "not looked at: settings cannot be used (above), and they say which it is",
            )
        })),
    }
    out.push(unit(places));
    out
}

/// Who will run the agent, if that is known; `Some(None)` is who runs this.
type Whose<'a> = Option<Option<&'a Account>>;

/// Why there is no Envoy that the user may execute, in a line; `None` where there is one.
#[must_use]
pub(crate) fn no_envoy(place: &Path, user: Option<&Account>) -> Option<String> {
    let shown = place.display();
    match std::fs::metadata(place) {
        Ok(about) if about.is_file() => {
            let why = refusal(user, place, Access::EXEC_OK)?;
            Some(format!("{shown}: {why}; mode 0755 and folders that all may enter are usual"))
        }
        Ok(_) => Some(format!("{shown} is no file")),
        Err(e) => Some(format!("{shown}: {e}; binaryPath in the mesh file names another")),
    }
}

// What was read by who looks may be shut to the agent.
fn unread(whose: Whose<'_>, place: &Path) -> Option<String> {
    let why = refusal(whose?, place, Access::READ_OK)?;
    Some(format!("{}: {why}", place.display()))
}

fn of_plan(places: &Places, plan: &Plan, facts: &Facts) -> Vec<Line> {
    let user = plan.become_user.as_ref();
    let mut out = Vec::new();
    out.push(match &facts.envoy {
        Err(why) => line(Grade::Ok, "envoy", *why),
        Ok(envoy) => match no_envoy(&places.at(Path::new(envoy)), user) {
            None => line(Grade::Ok, "envoy", envoy.clone()),
            Some(why) => line(Grade::Fail, "envoy", why),
        },
    });
    out.push(match user {
        Some(user) => line(Grade::Ok, "user", format!("{} (uid {}, gid {})", user.name, user.uid, user.gid)),
        None => line(Grade::Ok, "user", "stays who runs this"),
    });
    out.push(folders(places, plan, facts));
    out.extend(facts.servers.iter().map(reach));
    out
}

// Where the agent writes.
fn folders(places: &Places, plan: &Plan, facts: &Facts) -> Line {
    let user = plan.become_user.as_ref();
    let sockets = places.at(Path::new(SOCKETS));
    for dir in [&facts.work, &sockets] {
        // What is missing of the usual ones is made by `vm run`, as root, and that of sockets is given to the user.
        let usual = *dir == sockets || dir.ends_with("etc/istio/proxy");
        if user.is_some() && usual && !dir.exists() {
            continue;
        }
        let given = user.is_some() && *dir == sockets && dir.is_dir();
        let why = match dir.parent().filter(|_| given) {
            Some(above) => refusal(user, above, Access::EXEC_OK),
            None => no_room(user, dir),
        };
        if let Some(why) = why {
            return line(Grade::Fail, "folders", format!("the agent writes to {}: {why}", dir.display()));
        }
    }
    let certs =
        plan.env.get("OUTPUT_CERTS").filter(|dir| !dir.is_empty()).map(|dir| places.at(Path::new(dir)));
    if let Some(certs) = certs {
        let missing = (!certs.is_dir()).then(|| "it is not there, and nobody makes it".to_owned());
        if let Some(why) = missing.or_else(|| no_room(user, &certs)) {
            let said = format!("certificates go to {} (OUTPUT_CERTS): {why}", certs.display());
            return line(
                Grade::Warn,
                "folders",
                format!("{said}; without them a new token is needed each time"),
            );
        }
    }
    line(
        Grade::Ok,
        "folders",
        format!("{} and those of sockets and certificates can be written to", facts.work.display()),
    )
}

fn files(places: &Places, whose: Whose<'_>) -> Line {
    let place = places.at(&places.mesh);
    if let Some(why) = unread(whose, &place).filter(|_| place.exists()) {
        return line(Grade::Fail, "mesh", why);
    }
    match bounded::given_text(&place) {
        Ok(text) if text.trim().is_empty() => {
            line(Grade::Warn, "mesh", format!("{} is empty", place.display()))
        }
        Ok(_) => line(Grade::Ok, "mesh", place.display().to_string()),
        Err(e) => line(Grade::Warn, "mesh", format!("{}: {e}; defaults are used", place.display())),
    }
}

// What istiod is checked with, and the CA where that is something else.
fn roots(facts: &Facts, whose: Whose<'_>, now: SystemTime) -> Vec<Line> {
    let of = |what, by: &Way| match by {
        Way::Barred(why) => line(Grade::Fail, what, why.clone()),
        Way::By(Transport::Plaintext) => line(Grade::Ok, what, "none is needed: plain text"),
        Way::By(Transport::Tls(tls)) => match files_of(&tls.roots) {
            Some(files) => root(what, &files, whose, now),
            None => line(Grade::Ok, what, "the system's"),
        },
    };
    let mut out: Vec<Line> = facts.xds.iter().map(|xds| of("root", xds)).collect();
    let Some(ca) = &facts.ca else { return out };
    let chosen = |by: &Way| match by {
        Way::By(Transport::Tls(tls)) => files_of(&tls.roots).map(|all| first(&all).cloned()),
        _ => None,
    };
    let told = match ca {
        // It is the same one that is missing.
        Way::Barred(_) => out.iter().any(|line| line.grade == Grade::Fail),
        Way::By(Transport::Plaintext) => true,
        Way::By(Transport::Tls(_)) => Some(chosen(ca)) == facts.xds.as_ref().map(chosen),
    };
    if !told {
        out.push(of("ca root", ca));
    }
    out
}

// None for the system's.
fn files_of(roots: &Roots) -> Option<Vec<PathBuf>> {
    // Without the dots in the middle.
    let plain = |path: &PathBuf| path.components().collect::<PathBuf>();
    match roots {
        Roots::System => None,
        Roots::File(path) => Some(vec![plain(path)]),
        Roots::FirstOf(one, other) => Some(vec![plain(one), plain(other)]),
    }
}

fn first(candidates: &[PathBuf]) -> Option<&PathBuf> {
    candidates.iter().find(|place| place.exists())
}

// The first of the files that is there is what a server is checked with, and by its dates the clock.
fn root(what: &'static str, candidates: &[PathBuf], whose: Whose<'_>, now: SystemTime) -> Line {
    let Some(place) = first(candidates) else {
        let place = candidates.first().map(|place| place.display().to_string()).unwrap_or_default();
        let said = format!("{place} is not there: copy root-cert.pem to it, as vm install does");
        return line(Grade::Fail, what, said);
    };
    if let Some(why) = unread(whose, place) {
        return line(Grade::Fail, what, why);
    }
    let text = match bounded::given(place) {
        Ok(text) => text,
        Err(e) => return line(Grade::Fail, what, format!("{}: {e}", place.display())),
    };
    let shown = place.display();
    match cert::parse_chain(&text) {
        Err(e) => line(Grade::Fail, what, format!("{shown}: {e}")),
        Ok(chain) if chain.iter().all(|c| c.not_before > now) => line(
            Grade::Fail,
            "time",
            format!("{shown} is not valid yet: this machine's clock is behind (is time synchronised?)"),
        ),
        Ok(chain) if chain.iter().all(|c| c.not_after < now) => line(
            Grade::Fail,
            what,
            format!("{shown} has expired, or this machine's clock is ahead: configure the workload anew"),
        ),
        Ok(chain) => {
            let what = if what == "root" { "root, time" } else { what };
            line(Grade::Ok, what, format!("{shown}: {} certificate(s), valid now", chain.len()))
        }
    }
}

// The certificate of an earlier start, by which istiod may know this machine without a token.
enum Earlier {
    None,
    Good,
    // It would not be shown, and why.
    Useless(String),
}

fn earlier(places: &Places, env: &BTreeMap<String, String>, whose: Whose<'_>, now: SystemTime) -> Earlier {
    let Some(dir) = env.get("PROV_CERT").filter(|dir| !dir.is_empty()) else { return Earlier::None };
    let [key, chain] = ["key.pem", "cert-chain.pem"].map(|name| places.at(&Path::new(dir).join(name)));
    if !key.exists() || !chain.exists() {
        return Earlier::None;
    }
    if let Some(why) = [&key, &chain].into_iter().find_map(|place| unread(whose, place)) {
        return Earlier::Useless(why);
    }
    let shown = chain.display();
    match bounded::given(&chain).map(|text| cert::parse_chain(&text)) {
        Err(e) => Earlier::Useless(format!("{shown}: {e}")),
        Ok(Err(e)) => Earlier::Useless(format!("{shown}: {e}")),
        Ok(Ok(certs)) if certs.first().is_none_or(|leaf| leaf.not_after <= now) => {
            Earlier::Useless(format!("{shown} has expired"))
        }
        Ok(Ok(_)) => Earlier::Good,
    }
}

fn token(places: &Places, env: &BTreeMap<String, String>, whose: Whose<'_>, now: SystemTime) -> Line {
    let from = places.token.clone().unwrap_or_else(|| TOKEN.into());
    let place = places.at(&from);
    let shown = place.display();
    let earlier = earlier(places, env, whose, now);
    let known = matches!(earlier, Earlier::Good);
    let bad = if known { Grade::Warn } else { Grade::Fail };
    let instead = match earlier {
        Earlier::None => String::new(),
        Earlier::Good => "; the certificate of an earlier start is shown instead".to_owned(),
        Earlier::Useless(why) => format!("; the certificate of an earlier start is of no use: {why}"),
    };
    let text = match bounded::given_text(&place) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let todo = if known { "" } else { ": copy istio-token to it, as vm install does" };
            return line(bad, "token", format!("{shown} is not there{todo}{instead}"));
        }
        Err(e) => return line(bad, "token", format!("{shown}: {e}{instead}")),
    };
    // One that was named is put in its place for the agent's user by `vm run`.
    if places.token.is_none()
        && let Some(why) = unread(whose, &place)
    {
        return line(bad, "token", format!("{why}{instead}"));
    }
    match claims::read(&text) {
        None => line(bad, "token", format!("{shown}: this is no token{instead}")),
        Some(claims) if claims.expires.is_some_and(|at| at <= now) => {
            let todo = if known { "" } else { ": istioctl x workload entry configure writes another" };
            line(bad, "token", format!("{shown}: it has expired{todo}{instead}"))
        }
        Some(claims) if !claims.audiences.is_empty() && !claims.audiences.iter().any(|a| a == "istio-ca") => {
            line(
                Grade::Warn,
                "token",
                format!("{shown}: it is for {}, istiod asks for istio-ca", claims.audiences.join(", ")),
            )
        }
        Some(_) => line(Grade::Ok, "token", format!("{shown}: not expired")),
    }
}

fn reach(server: &Server) -> Line {
    let Server { what, address, proxy } = server;
    let (host, port) = address.rsplit_once(':').unwrap_or((address, ""));
    let host = host.trim_matches(['[', ']']);
    let Ok(number) = port.parse() else {
        return line(Grade::Fail, what, format!("{address}: this is no host:port"));
    };
    match Proxy::for_target(proxy.as_ref(), host, port) {
        Err(why) => {
            let said = format!("{address}: {why}; set NO_PROXY for it if it is reached directly");
            line(Grade::Fail, what, said)
        }
        Ok(Some(proxy)) => {
            let shown = format!("{address} by the proxy {}:{}", proxy.host, proxy.port);
            let number = proxy.port.parse().unwrap_or_default();
            let hints = ["is HTTPS_PROXY right?", "is it up, and HTTPS_PROXY right?"];
            takes(what, &shown, (&proxy.host, number), hints)
        }
        Ok(None) => {
            let hints = [
                "is the line of the file hosts in /etc/hosts?",
                "is the east-west gateway up and its port open?",
            ];
            takes(what, address, (host, number), hints)
        }
    }
}

// Whether connections are taken there; what to ask oneself where the name leads nowhere, and where nobody answers.
fn takes(what: &'static str, address: &str, place: (&str, u16), hints: [&str; 2]) -> Line {
    let [unknown, silent] = hints;
    let all = match look_up_here(place.0, place.1, LIMIT) {
        Ok(all) => all,
        Err(why) => {
            let why = match why {
                NoAnswer::Thread(e) => format!("the name is not resolved: {e}"),
                NoAnswer::Late => format!("the name is not resolved within {LIMIT:?}"),
                NoAnswer::LookUp(e) => format!("{e}; {unknown}"),
            };
            return line(Grade::Fail, what, format!("{address}: {why}"));
        }
    };
    let mut last = "the name has no address".to_owned();
    for one in &all {
        match TcpStream::connect_timeout(one, LIMIT) {
            Ok(_) => return line(Grade::Ok, what, format!("{address}: {one} takes connections")),
            Err(e) => last = format!("{one}: {e}"),
        }
    }
    line(Grade::Fail, what, format!("{address}: {last}; {silent}"))
}

fn unit(places: &Places) -> Line {
    let dirs = ["./etc/systemd/system", "./lib/systemd/system", "./usr/lib/systemd/system"];
    let found = dirs.iter().map(|dir| places.at(Path::new(dir)).join("istio.service")).find(|p| p.exists());
    match found {
        // Left by the removal of some package, or made by hand: it starts nothing.
        Some(place) if std::fs::read_link(&place).is_ok_and(|to| to == Path::new("/dev/null")) => {
            let said = "is masked (a link to /dev/null), so it cannot be started: systemctl unmask istio";
            line(Grade::Warn, "unit", format!("{} {said}", place.display()))
        }
        Some(place) => line(Grade::Ok, "unit", place.display().to_string()),
        None => line(
            Grade::Warn,
            "unit",
            "no istio.service: the package brings one, and \"pilot-agent vm install\" writes one",
        ),
    }
}
