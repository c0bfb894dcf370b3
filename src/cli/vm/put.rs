//! `vm install`: says what is wrong, asks, writes.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use super::{FLAGS, all};
use crate::cli::{FAILED, fail, request};
use crate::config;
use crate::config::args::Parsed;
use crate::config::env::Env;
use crate::vm::accounts::Accounts;
use crate::vm::folders;
use crate::vm::install::{self, Step};
use crate::vm::places::Places;
use crate::vm::plan;

pub(super) fn put(places: &Places, parsed: &Parsed, env: &Env) -> u8 {
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
    if let Err(e) = places.source(&places.sidecar_env) {
        // It may name another user.
        errors.push(format!("{}: {e}", places.at(&places.sidecar_env).display()));
    }
    let set = settings(places, Path::new(dir), env);
    let named = set("EXEC_USER");
    let places = &Places { certs: certs(places, set("PROV_CERT")), ..places.clone() };
    let owner = if root { accounts.user(named.as_deref().unwrap_or(plan::USER)) } else { None };
    if root && owner.is_none() {
        errors.push(match &named {
            Some(user) => accounts.lack(user, " (EXEC_USER)"),
            None => accounts.lack(plan::USER, ""),
        });
    }
    let items = install::items(Path::new(dir), places).unwrap_or_else(|faults| {
        errors.extend(faults);
        Vec::new()
    });
    let mesh = Path::new(dir).join("mesh.yaml");
    if let Ok(Err(e)) = std::fs::read_to_string(&mesh).map(|text| config::yaml::to_json(&text)) {
        errors.push(format!("{}: {e}", mesh.display()));
    }
    let other: Vec<_> = items.iter().filter(|item| item.step(owner.as_ref()) == Step::Overwrite).collect();
    let sure = parsed.is_true(FLAGS, "yes");
    let asks = !sure && std::io::stdin().is_terminal();
    if !sure && !asks {
        errors.extend(
            other
                .iter()
                .map(|item| format!("{} {}: --yes overwrites it", item.place.display(), item.other())),
        );
    }
    if !errors.is_empty() {
        return all(&errors);
    }
    for item in &items {
        let place = item.place.display();
        let step = item.step(owner.as_ref());
        let said = match step {
            Step::Keep => format!("unchanged   {place}\n"),
            Step::Overwrite if asks && !yes(&format!("{place} {}: overwrite it? [y/N] ", item.other())) => {
                format!("left alone  {place}\n")
            }
            _ => match item.put(places, owner.as_ref()) {
                Ok(()) => format!("written     {place}\n"),
                Err(error) => {
                    let hint = if root { "" } else { ": run this as root" };
                    return fail(&format!("{error}{hint}"), None);
                }
            },
        };
        if request::print(said.as_bytes()) != 0 {
            return FAILED;
        }
    }
    // The unit may write below it and not make it.
    if let Err(e) = folders::make(places, Path::new(plan::LOGS), owner.as_ref()) {
        return fail(&format!("{}: {e}", places.at(Path::new(plan::LOGS)).display()), None);
    }
    let root = if places.root == Path::new(".") {
        String::new()
    } else {
        format!(" --root {}", places.root.display())
    };
    let next = format!("next: pilot-agent vm check{root}, then systemctl enable --now istio\n");
    request::print(next.as_bytes())
}

// What `vm run` will find set, by the settings that are there and those that are put there.
fn settings<'a>(places: &Places, dir: &Path, env: &'a Env) -> impl Fn(&str) -> Option<String> + use<'a> {
    let cluster = std::path::absolute(dir.join("cluster.env")).unwrap_or_default();
    let installed = Places { cluster_env: (cluster, false), ..places.clone() };
    let [(_, sidecar), (_, cluster)] = installed.settings();
    move |name| {
        let given = [cluster.get(name), sidecar.get(name), env.map().get(name)];
        given.into_iter().flatten().next().filter(|value| !value.is_empty()).cloned()
    }
}

// The folder of certificates: the flag's, else that of the settings, which speak of the machine as it will run: inside a
// root file system in the making.
fn certs(places: &Places, set: Option<String>) -> Option<PathBuf> {
    let here = places.root == Path::new(".");
    let set = set.map(PathBuf::from).map(|dir| {
        match dir.strip_prefix(&places.root).or_else(|_| dir.strip_prefix("/")) {
            Ok(below) if !here => below.to_owned(),
            _ => dir,
        }
    });
    places.certs.clone().or(set)
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
