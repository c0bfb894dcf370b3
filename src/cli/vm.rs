//! `vm run|clean|check|install`: what Istio's start script does on a virtual machine (see [`crate::vm`]).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::SystemTime;

use super::{FAILED, fail, istio_iptables, logging_options};
use crate::base::error::AtPath;
use crate::base::logging;
use crate::base::netlink::Netlink;
use crate::config::args::{self, Flag, Kind, Parsed};
use crate::config::env::Env;
use crate::config::parts::iptables;
use crate::config::{self, Config, Sources};
use crate::iptables::detect;
use crate::iptables::exec::Ending;
use crate::iptables::interfaces;
use crate::iptables::model::Family;
use crate::iptables::native as nft;
use crate::iptables::run::{Real, Runner};
use crate::vm::accounts::{Account, Accounts};
use crate::vm::check::{self, Grade};
use crate::vm::install::{self, Step};
use crate::vm::places::{Places, TOKEN};
use crate::vm::plan::{self, Machine, Plan};

/// What stands behind `vm`.
pub(super) const ACTIONS: [(&str, &str); 4] = [
    ("run", "redirect traffic, become the proxy's user, run the agent and its Envoy"),
    ("clean", "take all redirection away, whatever settings made it"),
    ("check", "look at files, user, token, clock, istiod's name and port, rules and unit; a line for each"),
    ("install", "put the files that istioctl wrote into --dir, and a unit, in their places"),
];

const TEXT: Kind = Kind::Text;

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
        "clean" => clean(&places, env),
        "check" => look(&places, env),
        "install" => put(&places, parsed),
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
    let mut plan = plan::plan(variables, &machine())?;
    plan.warnings.extend(warnings);
    // Before ISTIO_AGENT_FLAGS, which may name another.
    plan.words.insert(1, format!("--meshConfig={}", places.mesh.display()));
    let flags: Vec<Flag> = args::PROXY.iter().chain(args::LOGGING).copied().collect();
    let parsed =
        args::parse(&plan.words[1..], &flags, true).map_err(|e| vec![format!("ISTIO_AGENT_FLAGS: {e}")])?;
    let env = environment(&plan.env);
    let config = config::read(parsed, &env, &places.root, |_| None)?;
    if let Some(token) = &places.token {
        std::fs::metadata(places.at(token)).map_err(|e| vec![format!("--token={}: {e}", token.display())])?;
    }
    Ok((plan, config))
}

fn environment(map: &BTreeMap<String, String>) -> Env {
    Env::from_os(map.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))))
}

fn machine() -> Machine {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let usable = |ip: &std::net::IpAddr| match ip {
        std::net::IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_unspecified(),
        std::net::IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unspecified() && !ip.is_unicast_link_local(),
    };
    let addresses = Netlink::open().and_then(|netlink| netlink.addresses()).unwrap_or_default();
    Machine {
        hostname: name.trim().split('.').next().unwrap_or_default().to_owned(),
        address: addresses.into_iter().map(|(_, ip)| ip).find(usable).map(|ip| ip.to_string()),
        accounts: Accounts::of(Path::new("/")),
        uid: rustix::process::geteuid().as_raw(),
    }
}

// What else would end the agent's start: now, before rules are made that nobody would serve.
fn startable(config: &Arc<Sources>) -> Result<(), Vec<String>> {
    let wrong = Config::new(config, Vec::new()).err().unwrap_or_default();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.into_iter().map(|error| error.text).collect()) }
}

fn start(places: &Places, env: &Env) -> u8 {
    let prepared = prepare(places, env).and_then(|(plan, config)| startable(&config).map(|()| plan));
    let plan = match prepared {
        Ok(plan) => plan,
        Err(errors) => return all(&errors),
    };
    plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    if let Some(flags) = &plan.rules {
        let status = rules(flags, &environment(&plan.env));
        if status != 0 {
            return status;
        }
    }
    let error = match hand_over(places, &plan) {
        Ok(mut command) => {
            logging::flush();
            // Only returns when that fails.
            format!("the agent cannot be executed: {}", command.exec())
        }
        Err(error) => error.to_string(),
    };
    fail(&error, None)
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
    let ready = |path: &str| {
        let place = places.at(Path::new(path));
        install::folders(&place, user).map_err(AtPath::at(&place)).map(|()| place)
    };
    if user.is_some() {
        for path in ["./etc/istio/proxy", "./var/run/secrets", "./var/lib/istio/data"] {
            ready(path)?;
        }
    }
    if let Some(token) = &places.token {
        let place = places.at(token);
        let content = std::fs::read(&place).map_err(AtPath::at(&place))?;
        install::Item::secret(places.at(Path::new(TOKEN)), content).put(user)?;
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg0("pilot-agent").args(&plan.words).env_clear().envs(&plan.env).current_dir(&places.root);
    if let (Some(dir), Some(user)) = (&plan.logs, user) {
        let open = |dir: &Path, name: &str| {
            let path = dir.join(name);
            install::log_file(&path, user).map_err(AtPath::at(&path))
        };
        let files = ready(&dir.to_string_lossy())
            .and_then(|dir| Ok((open(&dir, "istio.err.log")?, open(&dir, "istio.log")?, dir)));
        match files {
            Ok((err, out, dir)) => {
                tracing::info!("the agent's log goes to {} (ISTIO_LOG_DIR)", dir.join("istio.log").display());
                command.stdout(out).stderr(err);
            }
            // A machine stays in the mesh without its log file.
            Err(why) => tracing::warn!("{why}; the agent's log stays here (ISTIO_LOG_DIR names its folder)"),
        }
    }
    if let Some(Account { name, uid, gid }) = user {
        tracing::info!("continuing as {name} (uid {uid}, gid {gid})");
        command.uid(*uid).gid(*gid);
    }
    Ok(command)
}

// Whatever made them, with or without the files that said how: Istio's script then leaves the DNS rules.
fn clean(places: &Places, env: &Env) -> u8 {
    let variables = places.environment(env.map()).unwrap_or_else(|errors| {
        errors.iter().for_each(|error| tracing::warn!("{error}; the rules are removed without it"));
        (env.map().clone(), Vec::new())
    });
    // Other settings might be refused, and then nothing would be removed.
    let keep =
        ["PATH", "ISTIO_INBOUND_TPROXY_MARK", "ISTIO_INBOUND_TPROXY_ROUTE_TABLE", "KUBE_VIRT_INTERFACES"];
    let mut env: BTreeMap<String, String> =
        variables.0.into_iter().filter(|(n, _)| keep.contains(&n.as_str())).collect();
    // Rules for single interfaces are found only by who knows them; the file may be gone, or say something else by now.
    let mut apart = interfaces::look(&mut runner(env.get("PATH").cloned().unwrap_or_default()));
    let told = env.remove("KUBE_VIRT_INTERFACES").unwrap_or_default();
    apart.kube_virt.extend(told.split(',').filter(|name| !name.is_empty()).map(str::to_owned));
    let mut flags: Vec<String> =
        ["--cleanup-only", "--reconcile", "--redirect-dns", "--istio-inbound-interception-mode=TPROXY"]
            .map(str::to_owned)
            .into();
    // Where only nft is, only nft can have made them.
    let programs = runner(env.get("PATH").cloned().unwrap_or_default());
    if !has_iptables(&programs) && programs.exists("nft") {
        flags.push("--native-nftables".to_owned());
    }
    if apart.ranges.is_empty() {
        apart.ranges.insert("*".to_owned());
    }
    for (flag, values) in [
        ("kube-virt-interfaces", &apart.kube_virt),
        ("istio-service-cidr", &apart.ranges),
        ("istio-exclude-interfaces", &apart.excluded),
    ] {
        if !values.is_empty() {
            let values: Vec<&str> = values.iter().map(String::as_str).collect();
            flags.push(format!("--{flag}={}", values.join(",")));
        }
    }
    rules(&flags, &environment(&env))
}

fn has_iptables(runner: &Real) -> bool {
    ["iptables-nft-save", "iptables-legacy-save", "iptables-save"].iter().any(|name| runner.exists(name))
}

// Whether the rules are to be made by nft itself.
fn native(variables: &BTreeMap<String, String>) -> bool {
    args::parse(&[], iptables::FLAGS, false)
        .is_ok_and(|none| iptables::settings(&none, &environment(variables)).native_nftables)
}

fn runner(path: String) -> Real {
    Real { path, sandbox: None, ending: Ending::unwatched() }
}

fn look(places: &Places, env: &Env) -> u8 {
    let told = |grade, said| check::Line { grade, what: "settings", said };
    let now = SystemTime::now();
    let mut lines: Vec<check::Line>;
    let mut own_rules = false;
    let by_nft;
    // As the agent's own: right under the unit, a surprise in somebody's home.
    let here = std::env::current_dir().unwrap_or_default();
    let elsewhere = (places.root == Path::new(".") && here != Path::new("/")).then(|| {
        format!(
            "places hang off {}, the working directory: --root / looks at this machine's own",
            here.display()
        )
    });
    match prepare(places, env) {
        Ok((plan, config)) => {
            let (envoy, istiod) = (config.envoy_binary().to_owned(), config.discovery_address().to_owned());
            lines = plan.warnings.iter().map(|warning| told(Grade::Warn, warning.clone())).collect();
            own_rules = plan.rules.is_none();
            by_nft = native(&plan.env);
            let facts = check::Facts { envoy, istiod };
            lines.extend(check::look(places, &plan.env, Some((&plan, &facts)), now));
        }
        Err(errors) => {
            lines = errors.into_iter().map(|error| told(Grade::Fail, error)).collect();
            let variables = places.environment(env.map());
            let mut variables = variables.map_or_else(|_| env.map().clone(), |(variables, _)| variables);
            let named = places.certs.as_ref().map(|dir| dir.to_string_lossy().into_owned());
            let certs = named.or_else(|| variables.get("PROV_CERT").cloned());
            variables.insert("PROV_CERT".to_owned(), certs.unwrap_or_else(|| "./etc/certs".to_owned()));
            lines.extend(check::look(places, &variables, None, now));
            by_nft = native(&variables);
        }
    }
    lines.extend(elsewhere.map(|said| check::Line { grade: Grade::Warn, what: "places", said }));
    // Others than root cannot see the rules; that it needs root was said.
    if own_rules || rustix::process::geteuid().is_root() {
        lines.push(redirected(own_rules, by_nft, env));
    }
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    super::request::print(text.as_bytes());
    u8::from(lines.iter().any(|line| line.grade == Grade::Fail))
}

fn redirected(own_rules: bool, by_nft: bool, env: &Env) -> check::Line {
    let rules = |grade, said: &str| check::Line { grade, what: "rules", said: said.to_owned() };
    if own_rules {
        return rules(Grade::Ok, "somebody else's business (ISTIO_CUSTOM_IP_TABLES)");
    }
    let path = env.get("PATH").unwrap_or_default().to_owned();
    let mut runner = runner(path);
    let lack = match (by_nft, has_iptables(&runner), runner.exists("nft")) {
        (true, _, false) => {
            Some("NATIVE_NFTABLES=true, and no nft on the PATH: install the package nftables")
        }
        (false, false, false) => Some("no iptables on the PATH: install the package iptables"),
        (false, false, true) => Some(
            "no iptables on the PATH: install the package iptables, or set NATIVE_NFTABLES=true in sidecar.env, \
             since nft is there",
        ),
        _ => None,
    };
    if let Some(lack) = lack {
        return rules(Grade::Fail, lack);
    }
    let there = nft::there(&mut runner)
        || [Family::V4, Family::V6].into_iter().any(|family| {
            detect::leftovers(&mut runner, family, None).is_some_and(|c| c.backend.state.has_ours())
        });
    let said = if there { "traffic is redirected" } else { "nothing is redirected yet; vm run does it" };
    rules(Grade::Ok, said)
}

fn put(places: &Places, parsed: &Parsed) -> u8 {
    let Some(dir) = parsed.get("dir").filter(|dir| !dir.is_empty()) else {
        return fail(
            "vm install needs --dir: the folder that istioctl x workload entry configure wrote",
            None,
        );
    };
    let mut errors = Vec::new();
    let root = rustix::process::geteuid().is_root();
    // A root file system that is being prepared has users of its own.
    let accounts = Accounts::of(&places.root);
    let owner = if root { accounts.user(plan::USER) } else { None };
    if root && owner.is_none() {
        errors.push(format!(
            "the user {user} does not exist: useradd --system --home-dir /var/lib/istio {user}",
            user = plan::USER
        ));
    }
    let items = install::items(Path::new(dir), places).unwrap_or_else(|faults| {
        errors.extend(faults);
        Vec::new()
    });
    let mesh = Path::new(dir).join("mesh.yaml");
    if let Ok(Err(e)) = std::fs::read_to_string(&mesh).map(|text| config::yaml::to_json(&text)) {
        errors.push(format!("{}: {e}", mesh.display()));
    }
    let other: Vec<_> = items.iter().filter(|item| item.step() == Step::Overwrite).collect();
    let sure = parsed.is_true(FLAGS, "yes");
    let asks = !sure && std::io::stdin().is_terminal();
    if !sure && !asks {
        errors.extend(other.iter().map(|item| {
            format!("{} is there with other content: --yes overwrites it", item.place.display())
        }));
    }
    if !errors.is_empty() {
        return all(&errors);
    }
    for item in &items {
        let place = item.place.display();
        let step = item.step();
        let said = match step {
            Step::Keep => format!("unchanged   {place}\n"),
            Step::Overwrite if asks && !yes(&format!("overwrite {place}? [y/N] ")) => {
                format!("left alone  {place}\n")
            }
            _ => match item.put(owner.as_ref()) {
                Ok(()) => format!("written     {place}\n"),
                Err(error) => return fail(&error.to_string(), None),
            },
        };
        if super::request::print(said.as_bytes()) != 0 {
            return FAILED;
        }
    }
    // The unit may write below it and not make it.
    let logs = places.at(Path::new(plan::LOGS));
    if let Err(e) = install::folders(&logs, owner.as_ref()) {
        return fail(&format!("{}: {e}", logs.display()), None);
    }
    let root = if places.root == Path::new(".") {
        String::new()
    } else {
        format!(" --root {}", places.root.display())
    };
    let next = format!("next: pilot-agent vm check{root}, then systemctl enable --now istio\n");
    super::request::print(next.as_bytes())
}

fn yes(question: &str) -> bool {
    eprint!("{question}");
    // A question nobody sees is answered with no.
    if std::io::stderr().flush().is_err() {
        return false;
    }
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).is_ok() && matches!(answer.trim(), "y" | "Y" | "yes")
}
