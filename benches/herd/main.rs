//! What a mesh does to istiod when all agents act at once: a simulation with the agent's own back-off and
//! renewal code, since no machine holds 100,000 agents. Writes docs/SCALE.md and its plots.
//!
//! What the model takes for granted stands in [`ASSUMPTIONS`] and so in the page, beside what real agents did ([`check`]). Time is exact, the
//! network takes none, and every number that matters comes from the agent's code: `xds::hold` (when a
//! held stream is tried again) and `secrets::rotation` (when a certificate is renewed, and tried for again).

mod check;
mod model;
mod plot;
mod sizing;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use model::{Arrivals, CONFIG_MB, Herd, Mesh};
use plot::Panel;

const ASSUMPTIONS: &str = "\
- An agent has one configuration stream. When it breaks, Envoy opens the next one after a random time of up to \
0.5 s (Envoy's first back-off); the agent dials at once, and then holds the stream and tries again as `xds::hold` says.
- A connection to an istiod that is away fails at once. One that is there answers at once, or refuses with \
RESOURCE_EXHAUSTED what is over its admission rate (streams a second over all istiods): streams take turns, and one \
whose turn comes within a second waits for it.
- Certificates live 24 h and are renewed at half their life, ± 1 % of the life (`SECRET_GRACE_PERIOD_RATIO_JITTER`).
Those that fall due \
while istiod is away are tried for again as `secrets::rotation` says; a try is one CSR, though the agent makes up to five within \
seconds of each.
- Each attempt is a connection with a TLS handshake. An agent that is admitted is pushed 1 MB of configuration at once: multiply if \
yours is larger (`pilot_xds_config_size_bytes` of istiod).
- After the network was cut, connections are found dead when the network is back: agents are trying all the time.";

const COLUMNS: &str = "\
## How to read the scenarios

- spread: `XDS_RECONNECT_SPREAD`, by the rule above.
- 50 %, 99 %, 100 %: seconds after istiod is there (renewals: after the first) until so many agents have what they came for.
- attempts each: how often an agent tried, on average.
- busiest second: attempts in it. × even share: how many times the average second, up to the last agent served, that is. Where \
fewer than 30 attempts are due
  in a second, several seconds count as one, so that 30 are.
- busiest of second tries: the same, of agents that had been refused with RESOURCE_EXHAUSTED before.
- CSRs, MB: the most of them in a second, MB of configuration as assumed.

Without a spread, first attempts after an outage come within 4 s, since a small mesh wants its configuration back soon, and a refusal is
cheap.
";

struct Story {
    name: &'static str,
    file: &'static str,
    run: fn(usize, Mesh) -> Arrivals,
    /// Whether streams are opened, of which istiod may admit so many a second.
    streams: bool,
}

const STORIES: [Story; 6] = [
    Story {
        name: "istiod restarts (away for 30 s)",
        file: "restart",
        run: |n, mesh| Herd::new(n).after_outage(30.0, mesh),
        streams: true,
    },
    Story {
        name: "a third of the istiods die",
        file: "third",
        run: |n, mesh| Herd::new(n / 3).after_outage(0.0, mesh),
        streams: true,
    },
    Story {
        name: "the network is cut for 10 minutes",
        file: "cut",
        run: |n, mesh| Herd::new(n).after_outage(600.0, mesh),
        streams: true,
    },
    Story {
        name: "a rollout starts all pods (100 a second)",
        file: "rollout",
        run: |n, mesh| Herd::new(n).rollout(100.0, mesh),
        streams: true,
    },
    Story {
        name: "a root rotates: everybody is pushed the new one, and renews in time",
        file: "root",
        run: |n, _| Herd::new(n).renewals(12.0 * 3600.0),
        streams: false,
    },
    Story {
        name: "all certificates were issued within 5 minutes: their renewal",
        file: "renewal",
        run: |n, _| Herd::new(n).renewals(300.0),
        streams: false,
    },
];

/// Streams a second that istiod admits in the rows that have a limit.
const RATE: f64 = 1_000.0;

impl Story {
    // Without a limit; with one, as unset and with the spread for a mesh of this size.
    fn meshes(&self, agents: usize) -> Vec<Mesh> {
        let mut all = vec![Mesh::default()];
        if self.streams {
            all.push(Mesh { rate: Some(RATE), spread: None });
            all.extend(
                sizing::spread(agents, RATE).map(|over| Mesh { rate: Some(RATE), spread: Some(over) }),
            );
        }
        all
    }

    fn plot(&self, all: &[(Mesh, Arrivals)]) -> String {
        let mut panels = Vec::new();
        let [(_, free), rest @ ..] = all else { return String::new() };
        let panel = |label: String, at, each| Panel { label, at, each };
        for (mesh, arrivals) in rest {
            let set = mesh.spread.map_or_else(|| "unset".to_owned(), |over| format!("{over:.0}s"));
            let label = format!("connects, {RATE:.0} a second admitted, XDS_RECONNECT_SPREAD {set}");
            panels.push(panel(label, &arrivals.attempts, 1.0));
        }
        if let Some((_, last)) = rest.last() {
            #[expect(clippy::cast_precision_loss, reason = "a small number")]
            let each = CONFIG_MB as f64;
            panels.push(panel(
                "MB of configuration, as in the histogram above".to_owned(),
                &last.served,
                each,
            ));
            panels.push(panel("CSRs, as in the histogram above".to_owned(), &last.csrs, 1.0));
        } else {
            panels.push(panel("CSRs".to_owned(), &free.csrs, 1.0));
        }
        plot::bars(self.name, &panels)
    }
}

fn main() -> ExitCode {
    // Cargo adds a flag of its own.
    let mut named = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    let (Some(docs), Some(measured)) = (named.next(), named.next()) else {
        eprintln!("herd: name the folder that SCALE.md is written into, and what `make herd` measured");
        return ExitCode::FAILURE;
    };
    if let Err(why) = write(Path::new(&docs), Path::new(&measured)) {
        eprintln!("herd: {why}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn write(docs: &Path, measured: &Path) -> Result<(), String> {
    let said = |e: std::io::Error| format!("{}: {e}", docs.display());
    std::fs::create_dir_all(docs.join("scale")).map_err(said)?;
    let (check, plot) = check::section(measured)?;
    std::fs::write(docs.join("scale/check.svg"), plot).map_err(said)?;
    let mut page = format!(
        "# What a mesh does to istiod\n\nWritten by `make scale`; not edited by hand. A simulation with the agent's own back-off and \
         renewal code.\n\n{}\n## The model\n\n{ASSUMPTIONS}\n\n{check}\n{COLUMNS}",
        sizing::page()
    );
    for story in &STORIES {
        let _ = write!(
            page,
            "\n## {}\n\n| agents | admitted a second | spread | 50 % | 99 % | 100 % | attempts each | busiest second | × even share | \
             busiest of second tries | × even share | CSRs | MB |\n|{}\n",
            capital(story.name),
            "---|".repeat(13)
        );
        for agents in [1_000, 10_000, 100_000] {
            let all: Vec<_> =
                story.meshes(agents).into_iter().map(|mesh| (mesh, (story.run)(agents, mesh))).collect();
            for (mesh, arrivals) in &all {
                let admitted = mesh.rate.map_or_else(|| "all".to_owned(), |rate| format!("{rate:.0}"));
                let spread = mesh.spread.map_or_else(|| "unset".to_owned(), |over| format!("{over:.0}s"));
                let _ = writeln!(page, "| {agents} | {admitted} | {spread} | {} |", arrivals.row());
            }
            if agents == 10_000 {
                let file = format!("scale/{}.svg", story.file);
                std::fs::write(docs.join(&file), story.plot(&all)).map_err(said)?;
            }
        }
        let _ = writeln!(page, "\n![arrivals a second, 10,000 agents](scale/{}.svg)", story.file);
    }
    std::fs::write(docs.join("SCALE.md"), page).map_err(said)
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}
