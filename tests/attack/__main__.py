"""Attacks an agent and says what each did to it: one line each, with figures.

    python3 -m tests.attack --agent target/release/pilot-agent --istiod target/release/mock-istiod [--short] [--only TEXT]
        [--peer <another agent>] [--json FILE]

Needs root (a network namespace). While an attack lasts, a kubelet probes readiness and liveness from an address of its
own, 20 times a second; afterwards a new client must be given the workload's certificate. An agent holds an attack when

- it lives, and 99 of 100 probes were answered within a second;
- it took less than 32 MB of memory above what it had (the attack may say more), and has given back all but 8 MB when it is over
  (the short form, which is for debug builds, does not judge what is given back);
- no descriptor and no thread is left, and the log has grown by less than 64 kB a minute beyond what a line a second is;
- certificates are given during (where the attack is not on the one who gives them) and after it.

In the short form an attack that only lost probes is tried once more: in its two seconds, a machine that stands still for one
loses as many.
"""
import argparse
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass

from . import h2
from . import neighbours, on_answers, on_ca, on_callers, on_dns, on_files, on_frames, on_images, on_istiod, on_kube, on_limits, at_once, on_names, on_shares, on_sockets, on_status, on_the_log, on_tiny_fields, on_tls, on_tokens, on_words  # noqa: F401  (they register their attacks)
from .registry import ATTACKS, Size
from .world import KUBELET, SDS, World, get, sweep

SHORT = Size(seconds=2, connections=600, sockets=500, streams=2000)
LONG = Size(seconds=20, connections=2000, sockets=5000, streams=20_000)
PROBES_LOST = "probes are lost"
PROBES = ("/healthz/ready", "/app-health/app/livez")
PAUSE = 0.05
SHORT_KEPT_KB, KEPT_KB, LOG_BYTES = 32 * 1024, 8 * 1024, 64 * 1024
# How long memory and descriptors may take to come back.
REST = 60


@dataclass
class Result:
    name: str
    held: bool
    why: str
    seconds: float
    probes: int
    answered: int
    slowest_ms: int
    rss_before_kb: int
    rss_peak_kb: int
    rss_after_kb: int
    fds_before: int
    fds_peak: int
    fds_after: int
    log_bytes: int


class Watch(threading.Thread):
    """Probes as the kubelet does, and looks at the process."""

    def __init__(self, world, paths):
        super().__init__(daemon=True)
        self.world, self.paths = world, paths
        self.over = threading.Event()
        self.asked = self.answered = self.slowest = self.rss = self.fds = 0

    def run(self):
        while not self.over.is_set():
            for path in self.paths:
                self.asked += 1
                try:
                    status, took = get(KUBELET, path)
                    self.answered += status == 200
                    self.slowest = max(self.slowest, took)
                except OSError:
                    self.slowest = max(self.slowest, 1.0)
            try:
                rss, fds, _, _ = self.world.figures()
                self.rss, self.fds = max(self.rss, rss), max(self.fds, fds)
            except OSError:
                pass
            time.sleep(PAUSE)


class Worlds:
    """Worlds by what attacks need of them. In the short form an attack finds what the one before has left."""

    def __init__(self, agent, istiod, kept):
        self.agent, self.istiod, self.kept, self.open = agent, istiod, kept, {}

    def take(self, attack):
        key = repr(attack.world)
        if key not in self.open:
            self.close()
            self.open[key] = World(self.agent, self.istiod, **attack.world)
        return self.open[key]

    def done(self, held):
        if not (self.kept and held):
            self.close()

    def close(self):
        for world in self.open.values():
            world.close()
        self.open.clear()


def play(attack, worlds, size, rest):
    # A debug build's memory says nothing of what is shipped, and a short rest is none.
    kept = SHORT_KEPT_KB if worlds.kept else KEPT_KB
    world = worlds.take(attack)
    held = False
    try:
        h2.served(world.dir / SDS)
        time.sleep(0.5)
        rss, fds, threads, log = world.figures()
        wanted = [attack.readiness, attack.liveness]
        watch = Watch(world, [path for path, is_wanted in zip(PROBES, wanted) if is_wanted])
        watch.start()
        start, trouble = time.monotonic(), []
        try:
            attack.run(world, size)
        except AssertionError as error:
            trouble.append(str(error))
        seconds = time.monotonic() - start
        watch.over.set()
        watch.join(10)
        if not world.alive():
            return Result(attack.name, False, "the agent has ended", seconds, watch.asked, watch.answered,
                          int(watch.slowest * 1000), rss, watch.rss, 0, fds, watch.fds, 0, 0)
        if not h2.served(world.dir / SDS):
            trouble.append("no certificate afterwards")
        end = time.monotonic() + rest
        while True:
            after, left, running, grown = world.figures()
            over = after - rss < kept and left <= fds + 4 and running <= threads + 4
            if over or time.monotonic() > end:
                break
            time.sleep(0.2)
        grown -= log
        if watch.asked and watch.answered < 0.99 * watch.asked:
            trouble.append(PROBES_LOST)
        if watch.rss - rss > attack.memory * 1024:
            trouble.append("memory grows")
        if after - rss >= kept:
            trouble.append("memory stays")
        if left > fds + 4:
            trouble.append("descriptors stay")
        if running > threads + 4:
            trouble.append(f"{running} threads, {threads} before")
        if grown > LOG_BYTES * max(1, seconds / 60):
            trouble.append("the log grows")
        held = not trouble
        return Result(attack.name, held, "; ".join(trouble), round(seconds, 1), watch.asked, watch.answered,
                      int(watch.slowest * 1000), rss, watch.rss, after, fds, watch.fds, left, grown)
    finally:
        worlds.done(held)


def line(result):
    mb = [f"{kb / 1024:.1f}" for kb in (result.rss_before_kb, result.rss_peak_kb, result.rss_after_kb)]
    return (f"{'held' if result.held else 'LOST':4}  {result.name:42} probes {result.answered}/{result.probes}, slowest "
            f"{result.slowest_ms} ms; MB {mb[0]} > {mb[1]} > {mb[2]}; descriptors {result.fds_before} > "
            f"{result.fds_peak} > {result.fds_after}; log {result.log_bytes} B" + (f"; {result.why}" if result.why else ""))


def all_of(chosen, both, size, rest):
    """Every attack against each of both; gives the figures, and how many the first has not held."""
    results, lost = [], 0
    for attack in chosen:
        for which, worlds in both:
            result = play(attack, worlds, size, rest)
            if size is SHORT and result.why == PROBES_LOST:
                print(f"{line(result)}; tried again", flush=True)
                result = play(attack, worlds, size, rest)
            result.name = which + result.name
            print(line(result), flush=True)
            lost += not result.held and not which
            results.append(asdict(result))
    return results, lost


def end(number, _frame):
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--agent", required=True)
    flags.add_argument("--istiod", required=True)
    flags.add_argument("--peer", help="another agent, attacked the same way beside it; what it loses does not count")
    flags.add_argument("--short", action="store_true", help="a few seconds each, for CI")
    flags.add_argument("--only", default="", help="attacks whose name contains this")
    flags.add_argument("--rest", type=float, default=REST, help="seconds that memory may take to come back")
    flags.add_argument("--json", help="write all figures here")
    flags.add_argument("--list", action="store_true")
    given = flags.parse_args()
    chosen = [a for a in ATTACKS if given.only in a.name and (a.short or not given.short or given.only)]
    # Those that share a world come one after the other.
    chosen.sort(key=lambda a: repr(a.world))
    if not chosen:
        print(f"no attack has {given.only!r} in its name; --list tells those there are", file=sys.stderr)
        return 2
    if given.list:
        for attack in chosen:
            print(f"{attack.name:44} {attack.why}")
        return 0
    if os.geteuid():
        print("the attacks need root: they make a network namespace", file=sys.stderr)
        return 2
    device = sweep()
    if device:
        print(f"{KUBELET} is on {device}: another run is under way; wait for its end, or give this one another network "
              "(ATTACK_NET=10.214)", file=sys.stderr)
        return 2
    # As after SIGINT, the network that was made is taken away.
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, end)
    size = SHORT if given.short else LONG
    both = [(which, Worlds(agent, given.istiod, given.short and not given.peer))
            for which, agent in (("", given.agent), ("peer: ", given.peer)) if agent]
    try:
        results, lost = all_of(chosen, both, size, given.rest)
    finally:
        for _, worlds in both:
            worlds.close()
    if given.json:
        with open(given.json, "w") as out:
            json.dump(results, out, indent=1)
    print(f"{len(chosen) - lost} of {len(chosen)} held")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
