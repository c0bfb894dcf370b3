//! What a mesh does to istiod when all agents act at once: a simulation with the agent's own back-off and
//! renewal code, since no machine holds 100,000 agents. Writes docs/SCALE.md and its plots.
//!
//! What the model takes for granted stands in [`ASSUMPTIONS`] and so in the page. Time is exact, the
//! network takes none, and every number that matters comes from the agent's code: `xds::hold` (when a
//! held stream is tried again), `ca::waits` and `secrets::rotation` (when a certificate is renewed).

mod model;
mod plot;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use model::{Arrivals, Herd};

const ASSUMPTIONS: &str = "\
- An agent has one configuration stream. When it breaks, Envoy opens the next one after a random time of up to \
0.5 s (Envoy's first back-off); the agent dials at once, and then holds the stream and tries again as `xds::hold` says.
- A connection to an istiod that is away fails at once. One that is there answers at once, or refuses with \
RESOURCE_EXHAUSTED what is over its admission rate (streams a second over all istiods; a burst of a tenth of a second).
- Certificates live 24 h and are renewed at half their life, ± 1 % of the life (`SECRET_GRACE_PERIOD_RATIO_JITTER`).
- After the network was cut, connections are found dead when the network is back: agents are trying all the time.
- Compared with 200 real agents and a mock istiod away for 30 s (`bench --only herd`, 2026-11-22): half of them were back \
after 1.1 s, 99 % after 3.5 s, all after 3.9 s, and 93 came within one second; the model says 1.2, 3.6, 4.0 and 84.";

struct Story {
    name: &'static str,
    file: &'static str,
    run: fn(usize, Option<f64>) -> Arrivals,
    /// Admission rates worth a row: none, and one.
    rates: &'static [Option<f64>],
}

const STORIES: [Story; 6] = [
    Story {
        name: "istiod restarts (away for 30 s)",
        file: "restart",
        run: |n, rate| Herd::new(n).after_outage(30.0, rate),
        rates: &[None, Some(1_000.0)],
    },
    Story {
        name: "a third of the istiods die",
        file: "third",
        run: |n, rate| Herd::new(n / 3).after_outage(0.0, rate),
        rates: &[None, Some(1_000.0)],
    },
    Story {
        name: "the network is cut for 10 minutes",
        file: "cut",
        run: |n, rate| Herd::new(n).after_outage(600.0, rate),
        rates: &[None, Some(1_000.0)],
    },
    Story {
        name: "a rollout starts all pods (100 a second)",
        file: "rollout",
        run: |n, rate| Herd::new(n).rollout(100.0, rate),
        rates: &[None],
    },
    Story {
        name: "a root rotates: everybody is pushed the new one, and renews in time",
        file: "root",
        run: |n, _| Herd::new(n).renewals(12.0 * 3600.0),
        rates: &[None],
    },
    Story {
        name: "all certificates were issued within 5 minutes: their renewal",
        file: "renewal",
        run: |n, _| Herd::new(n).renewals(300.0),
        rates: &[None],
    },
];

fn main() -> ExitCode {
    // Cargo adds a flag of its own.
    let Some(docs) = std::env::args().skip(1).find(|argument| !argument.starts_with("--")) else {
        eprintln!("herd: name the folder that SCALE.md is written into");
        return ExitCode::FAILURE;
    };
    if let Err(why) = write(Path::new(&docs)) {
        eprintln!("herd: {why}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn write(docs: &Path) -> Result<(), String> {
    let said = |e: std::io::Error| format!("{}: {e}", docs.display());
    std::fs::create_dir_all(docs.join("scale")).map_err(said)?;
    let mut page = format!(
        "# What a mesh does to istiod\n\nWritten by `make scale`; not edited by hand. A simulation with the agent's own back-off and \
         renewal code.\n\nThe model:\n\n{ASSUMPTIONS}\n\nHow to read the columns:\n\n- 50 %, 99 %, 100 %: seconds after istiod is there (renewals: after the first) \
         until so many agents have what they came for.\n- attempts each: how often an agent tried, on average.\n- \
         busiest second: attempts in it. × even share: how many times the average second that is. Where fewer than \
         30 attempts are due\n  in a second, several seconds count as one, so that 30 are.\n- busiest of second \
         tries: the same, of agents that had been refused with RESOURCE_EXHAUSTED before.\n\nFirst attempts after \
         an outage come within 4 s, since a small mesh wants its configuration back soon; a refusal is cheap. How \
         the\nattempts after it are spread is the agents' work.\n"
    );
    for story in &STORIES {
        let _ = write!(
            page,
            "\n## {}\n\n| agents | admitted a second | 50 % | 99 % | 100 % | attempts each | busiest second | × even share | busiest of second tries | × even share |\n|---|---|---|---|---|---|---|---|---|---|\n",
            capital(story.name)
        );
        for agents in [1_000, 10_000, 100_000] {
            for rate in story.rates {
                let arrivals = (story.run)(agents, *rate);
                let admitted = rate.map_or_else(|| "all".to_owned(), |rate| format!("{rate:.0}"));
                let _ = writeln!(page, "| {agents} | {admitted} | {} |", arrivals.row());
                if agents == 10_000 && rate.is_none() {
                    let file = format!("scale/{}.svg", story.file);
                    std::fs::write(docs.join(&file), plot::bars(story.name, &arrivals)).map_err(said)?;
                }
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
