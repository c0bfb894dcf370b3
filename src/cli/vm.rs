//! `vm run|clean|check|install`: what Istio's start script does on a virtual machine (see [`crate::vm`]).

mod clean;
mod look;
mod put;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::Access;

use super::{fail, istio_iptables, logging_options, runtime};
use crate::base::error::{AtPath, chain};
use crate::base::logging;
use crate::base::netlink::Netlink;
use crate::base::path::cleaned;
use crate::config::args::{self, Flag, Kind, Parsed};
use crate::config::env::Env;
use crate::config::parts::envoy::Presence;
use crate::config::parts::{self, Error, iptables};
use crate::config::{self, Config, Sources, late};
use crate::iptables::command;
use crate::iptables::exec::Ending;
use crate::iptables::run::{Real, Runner};
use crate::trouble;
use crate::vm::accounts::{Account, Accounts};
use crate::vm::check;
use crate::vm::folders;
use crate::vm::install;
use crate::vm::links::Folder;
use crate::vm::places::{Places, TOKEN};
use crate::vm::plan::{self, Machine, Plan};
use crate::vm::rights;

/// What stands behind `vm`.
pub(super) const ACTIONS: [(&str, &str); 4] = [
    ("run", "redirect traffic, become the proxy's user, run the agent and its Envoy"),
    ("clean", "take all redirection away, whatever settings made it"),
    ("check", "look at files, user, token, clock, istiod's name and port, rules and unit; a line for each"),
    ("install", "put the files that istioctl wrote into --dir, and a unit, in their places"),
];

/// How they end.
pub(super) const STATUSES: &str = "\nExit status: 255 where a flag is refused, and of run and install where a setting or a file is. Else: run as istio-iptables where \
                                   that fails, then as proxy; clean as istio-iptables; check 0 when nothing is broken, 1 when something is; install 0.\n";

const TEXT: Kind = Kind::Text;

/// The agent's help is there within milliseconds.
const TRIAL: Duration = Duration::from_secs(30);

/// Folders that the agent's user could not make.
const MADE: [&str; 3] = ["./etc/istio/proxy", folders::SOCKETS, "./var/lib/istio/data"];

/// Flags of the command.
pub(super) const FLAGS: &[Flag] = &[
    Flag::new(
        "root",
        TEXT,
        ".",
        "directory that relative places hang off, and the agent's working directory",
    ),
    Flag::new("sidecar-env", TEXT, "", "ISTIO_SIDECAR_CONFIG, else ./var/lib/istio/envoy/sidecar.env"),
    Flag::new("cluster-env", TEXT, "", "ISTIO_CLUSTER_CONFIG, else ./var/lib/istio/envoy/cluster.env"),
    Flag::new("mesh", TEXT, "", "mesh file in place of ./etc/istio/config/mesh"),
    Flag::new("certs", TEXT, "", "directory of root-cert.pem and of the workload's certificate; ./etc/certs"),
    Flag::new("token", TEXT, "", "run, check: a token to be used in place of the one that is there"),
    Flag::new("hosts", TEXT, "", "install: in place of ./etc/hosts"),
    Flag::new("unit", TEXT, "", "install: in place of ./etc/systemd/system/istio.service"),
    Flag::new("dir", TEXT, "", "install: what istioctl x workload entry configure wrote"),
    Flag::new("yes", Kind::Bool, "false", "install: overwrite without asking"),
];

/// Runs the command; gives the exit status.
pub(super) fn run(parsed: &Parsed, env: &Env) -> u8 {
    let flag = |name: &str| parsed.get(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let places = Places::new(flag, env.map());
    let action = parsed.positional.first().map(String::as_str).unwrap_or_default();
    if let Some(more) = parsed.positional.get(1) {
        return fail(&format!("vm {action} takes flags only, and {more:?} is none"), None);
    }
    // Named wrongly it would be made, and rules with it; to clean nothing of it is needed.
    if action != "clean"
        && let Err(e) = std::fs::metadata(places.root.join("."))
    {
        return fail(
            &format!("--root={}: {e}; it names a directory that is there", places.root.display()),
            None,
        );
    }
    // What is done to the rules is logged, as istio-iptables does.
    if matches!(action, "run" | "clean")
        && let Err(error) = logging::init(&logging_options(parsed))
    {
        return fail(&error.to_string(), None);
    }
    match action {
        "run" => start(&places, env),
        "clean" => clean::clean(&places, env),
        "check" => look::look(&places, env),
        "install" => put::put(&places, parsed, env),
        other => {
            let all: Vec<&str> = ACTIONS.iter().map(|(name, _)| *name).collect();
            fail(&format!("vm {other:?}: it is one of {}", all.join(", ")), None)
        }
    }
}

fn all(errors: &[String]) -> u8 {
    match errors {
        [one] => fail(one, None),
        many => fail(&format!("{} error(s) occurred:\n\t* {}", many.len(), many.join("\n\t* ")), None),
    }
}

// The plan and the configuration the agent would load, or everything that is wrong.
fn prepare(places: &Places, env: &Env) -> Result<(Plan, Arc<Sources>), Vec<String>> {
    let (mut variables, warnings) = places.environment(env.map())?;
    if let Some(dir) = &places.certs {
        for name in ["PROV_CERT", "OUTPUT_CERTS"] {
            variables.insert(name.to_owned(), dir.to_string_lossy().into_owned());
        }
    }
    let mut plan = plan::plan(variables, &machine(&places.root))?;
    plan.warnings.extend(warnings);
    address(&mut plan);
    // Before ISTIO_AGENT_FLAGS, which may name another.
    plan.words.insert(1, format!("--meshConfig={}", places.mesh.display()));
    let flags: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    let parsed =
        args::parse(&plan.words[1..], &flags, true).map_err(|e| vec![format!("ISTIO_AGENT_FLAGS: {e}")])?;
    let logged = log_fault(places, &plan, &parsed);
    let env = environment(&plan.env);
    // As the agent will: what its user may not read is told now. But no name is looked up, as in `startable`.
    let read = || config::read_within(parsed, &env, &places.root, |_| None, Duration::ZERO);
    let config = rights::become_for(plan.become_user.as_ref(), read)
        .unwrap_or_else(|e| Err(vec![format!("the agent's user cannot be become: {e}")]));
    let mut errors = wrong_rules(&plan, &env);
    errors.extend(logged);
    if let Some(token) = &places.token
        && let Err(e) = std::fs::metadata(places.at(token))
    {
        errors.push(format!("--token={}: {e}", token.display()));
    }
    match config {
        Ok(config) if errors.is_empty() => Ok((plan, config)),
        Ok(_) => Err(errors),
        Err(more) => Err(more.into_iter().chain(errors).collect()),
    }
}

// A line behind `{...}`, or behind a second document, is not read.
fn address(plan: &mut Plan) {
    let (Some(istiod), Some(text)) = (&plan.istiod, plan.env.get_mut("PROXY_CONFIG")) else { return };
    match config::yaml::to_json(text) {
        Ok(serde_json::Value::Object(mut fields))
            if fields.get("discoveryAddress").is_none_or(|read| read != istiod.as_str()) =>
        {
            fields.insert("discoveryAddress".to_owned(), istiod.as_str().into());
            *text = serde_json::Value::Object(fields).to_string();
        }
        // What cannot be read is told when it is.
        _ => {}
    }
}

// Why the agent could not set up its log. What `hand_over` makes, and this process's own output, is another by then.
fn log_fault(places: &Places, plan: &Plan, parsed: &Parsed) -> Option<String> {
    let mut options = logging_options(parsed);
    let whole =
        |path: &Path| std::path::absolute(path).map_or_else(|_| path.to_owned(), |path| cleaned(&path));
    let other = plan.logs.iter().map(PathBuf::as_path).chain(MADE.map(Path::new)).map(|dir| places.at(dir));
    let other = other.chain(["/dev", "/proc"].map(PathBuf::from)).map(|dir| whole(&dir));
    let other: Vec<PathBuf> = other.collect();
    options.targets.retain(|target| {
        let place = whole(&places.root.join(target));
        !other.iter().any(|dir| place.starts_with(dir))
    });
    let look = || logging::check(&options, &places.root);
    let error = rights::become_for(plan.become_user.as_ref(), look).ok()?.err()?;
    Some(format!("ISTIO_AGENT_FLAGS: {}", chain(&error)))
}

// What no rule can be made of, before one is made.
fn wrong_rules(plan: &Plan, env: &Env) -> Vec<String> {
    let Some(flags) = &plan.rules else { return Vec::new() };
    match args::parse(flags, iptables::FLAGS, false) {
        Ok(parsed) => iptables::faults(&iptables::settings(&parsed, env), &parsed, env, &command::host()),
        Err(error) => vec![error.to_string()],
    }
}

fn environment(map: &BTreeMap<String, String>) -> Env {
    Env::from_os(map.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
}

fn machine(root: &Path) -> Machine {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let usable = |ip: &std::net::IpAddr| match ip {
        std::net::IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_unspecified(),
        std::net::IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unspecified() && !ip.is_unicast_link_local(),
    };
    let addresses = Netlink::open().and_then(|netlink| netlink.addresses()).unwrap_or_default();
    Machine {
        hostname: name.trim().split('.').next().unwrap_or_default().to_owned(),
        address: addresses.into_iter().map(|(_, ip)| ip).find(usable).map(|ip| ip.to_string()),
        accounts: Accounts::of(root),
        uid: rustix::process::geteuid().as_raw(),
    }
}

// What else would end the agent's start, read as its user.
fn startable(plan: &Plan, config: &Arc<Sources>) -> Vec<Error> {
    let load = || {
        let loaded = Config::new(config, Vec::new())?;
        loaded.envoy.bootstrap.has_node().map_err(|error| vec![error])
    };
    let loaded = rights::become_for(plan.become_user.as_ref(), load);
    if let Err(refused) = loaded.unwrap_or_else(|e| Err(vec![Error::new(e.to_string())])) {
        return refused;
    }
    // Not as the user: a thread of a look-up that nobody waits for any more would have that one's rights, and the C library
    // ends a process whose threads cannot all become the same user later.
    match runtime::build() {
        Ok(runtime) => {
            let root = plan
                .become_user
                .as_ref()
                .map_or_else(|| rustix::process::getuid().is_root(), |user| user.uid == 0);
            let mut late = runtime.block_on(late::refusals(config, root));
            if late.is_empty() {
                let socket = runtime.block_on(late::taken(config));
                late.extend(socket.and_then(|socket| shut(plan.become_user.as_ref(), &socket)));
            }
            runtime.shutdown_background();
            late
        }
        Err(error) => vec![Error::new(chain(&error))],
    }
}

// Root's look may have found a server that the agent's user does not reach. That one would remove what is there, or end.
fn shut(user: Option<&Account>, socket: &late::Taken) -> Option<Error> {
    let refused = if socket.answers {
        format!("another SDS server is there, and {}", rights::refusal(user, &socket.path, Access::WRITE_OK)?)
    } else {
        "nobody answers there".to_owned()
    };
    let stays =
        rights::no_room(user, socket.path.parent()?).map(|why| format!(", nor may it be removed: {why}"));
    if stays.is_none() && !socket.demanded {
        return None;
    }
    let said = format!(
        "the workload's socket {}: {refused}{}; let the agent's user connect to it, or take it away",
        socket.path.display(),
        stays.unwrap_or_default()
    );
    Some(Error::new(said).of(trouble::Kind::SocketFolder))
}

// Envoy is executed by the agent's user.
fn no_envoy(places: &Places, plan: &Plan, config: &Sources) -> Option<String> {
    if parts::envoy::presence(config).is_ok_and(|presence| presence != Presence::Own) {
        return None;
    }
    check::no_envoy(&places.at(Path::new(config.envoy_binary())), plan.become_user.as_ref())
}

// Everything that would end the start, before rules are made that nobody would serve.
fn ready(places: &Places, env: &Env) -> Result<(Plan, Command), Vec<String>> {
    let (plan, config) = prepare(places, env)?;
    let mut errors: Vec<String> = startable(&plan, &config).into_iter().map(|error| error.text).collect();
    errors.extend(no_envoy(places, &plan, &config));
    if !errors.is_empty() {
        return Err(errors);
    }
    plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    if let Some(error) = unfit(places, &plan) {
        return Err(vec![error]);
    }
    let command = hand_over(places, &plan).map_err(|error| vec![error.to_string()])?;
    Ok((plan, command))
}

fn start(places: &Places, env: &Env) -> u8 {
    let (plan, mut command) = match ready(places, env) {
        Ok(both) => both,
        Err(errors) => return all(&errors),
    };
    if let Some(flags) = &plan.rules {
        // Whoever asks for an end while the rules are made means the agent, too, and what is executed forgets it.
        let ending = match Ending::watched() {
            Ok(ending) => ending,
            Err(error) => return fail(&format!("signals: {error}"), None),
        };
        let status = rules(flags, &environment(&plan.env));
        if status != 0 {
            return status;
        }
        if !ending.asked() {
            continuing(&plan);
        }
        // The log may have had a reader to wait for.
        if ending.asked() {
            tracing::info!(
                "asked to end while the rules were made: the agent is not started; pilot-agent vm clean takes the rules away"
            );
            logging::flush();
            return 0;
        }
    } else {
        continuing(&plan);
    }
    // Only returns when that fails, with the user's rights: root's, which could take the rules away, are gone by then.
    let error = command.exec();
    fail(&format!("the agent cannot be executed: {error}; pilot-agent vm clean takes its rules away"), None)
}

fn continuing(plan: &Plan) {
    if let Some(Account { name, uid, gid }) = &plan.become_user {
        tracing::info!("continuing as {name} (uid {uid}, gid {gid})");
    }
    logging::flush();
}

// The same words, environment, user and folder as the agent's, for a moment: what keeps it from being executed (the
// binary's mode, a folder that is shut, an environment that is too long) shows while root can still leave the rules alone.
fn unfit(places: &Places, plan: &Plan) -> Option<String> {
    let mut command = agent(places, plan);
    command.arg("--help").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.spawn().and_then(ended) {
        Ok(status) if status.success() => None,
        Ok(status) => Some(format!("the agent cannot be executed: a try with --help ended with {status}")),
        Err(error) => {
            let own = std::env::current_exe().unwrap_or_default();
            let user = plan.become_user.as_ref();
            let why = rights::refusal(user, &own, Access::EXEC_OK)
                .or_else(|| rights::refusal(user, &places.root.join("."), Access::EXEC_OK));
            let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
            Some(format!("the agent ({}) cannot be executed: {error}{why}", own.display()))
        }
    }
}

// One that does not end (its pages lie on a disk that stands still) must not keep the machine waiting without a word.
fn ended(mut child: Child) -> io::Result<ExitStatus> {
    let until = Instant::now() + TRIAL;
    while Instant::now() < until {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill()?;
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("a try with --help did not end within {TRIAL:?}")))
}

fn agent(places: &Places, plan: &Plan) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("pilot-agent").args(&plan.words).env_clear().envs(&plan.env).current_dir(&places.root);
    if let Some(Account { uid, gid, .. }) = &plan.become_user {
        command.uid(*uid).gid(*gid);
    }
    command
}

fn rules(flags: &[String], env: &Env) -> u8 {
    match args::parse(flags, iptables::FLAGS, false) {
        Ok(parsed) => istio_iptables::run(&parsed, env),
        Err(error) => fail(&error.to_string(), None),
    }
}

// The agent in this process's place: systemd goes on knowing its number, and nothing of root's is left in it. The
// standard library drops the supplementary groups with the user.
fn hand_over(places: &Places, plan: &Plan) -> Result<Command, AtPath> {
    let user = plan.become_user.as_ref();
    if let Some(user) = user {
        own_sockets(places, user);
    }
    if user.is_some() {
        for path in MADE.map(Path::new) {
            let place = places.at(path);
            if !place.is_dir() {
                folders::make(places, path, user).map_err(AtPath::at(place))?;
            }
        }
    }
    if let Some(token) = &places.token {
        let proxy = user.map(|user| user.uid);
        let content = places.read(token, proxy).map_err(AtPath::at(places.at(token)))?;
        install::Item::secret(places, Path::new(TOKEN), content).put(places, user)?;
    }
    let mut command = agent(places, plan);
    if let (Some(dir), Some(user)) = (&plan.logs, user) {
        let place = places.at(dir);
        let open = |folder: &Folder, name: &str| {
            folders::log_file(folder, name, user).map_err(AtPath::at(place.join(name)))
        };
        let files = folders::make(places, dir, Some(user))
            .map_err(AtPath::at(&place))
            .and_then(|folder| Ok((open(&folder, "istio.err.log")?, open(&folder, "istio.log")?, &place)));
        match files {
            Ok((err, out, dir)) => {
                tracing::info!("the agent's log goes to {} (ISTIO_LOG_DIR)", dir.join("istio.log").display());
                command.stdout(out).stderr(err);
            }
            // A machine stays in the mesh without its log file.
            Err(why) => tracing::warn!("{why}; the agent's log stays here (ISTIO_LOG_DIR names its folder)"),
        }
    }
    Ok(command)
}

// After a boot it may be root's: whoever put a token there made it. What cannot be given away may be of use all the same: the
// folders in it may be there.
fn own_sockets(places: &Places, user: &Account) {
    let path = Path::new(folders::SOCKETS);
    let place = places.at(path);
    if place.is_dir()
        && rights::no_room(Some(user), &place).is_some()
        && let Err(why) = folders::give(places, path, user)
    {
        tracing::warn!("{}: {why}; it cannot be given to {}", place.display(), user.name);
    }
}

fn runner(path: String) -> Real {
    Real { path, sandbox: None, ending: Ending::unwatched() }
}

fn has_iptables(runner: &Real) -> bool {
    ["iptables-nft-save", "iptables-legacy-save", "iptables-save"].iter().any(|name| runner.exists(name))
}
