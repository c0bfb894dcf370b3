"""Runs an agent for long under everyday trouble and says whether it is the same at the end as at the beginning.

    python3 -m tests.soak --agent target/release/pilot-agent --istiod target/release/mock-istiod [--minutes 20] [--out DIR]

Certificates of 30 s, probes and scrapes all the time, a new SDS client every second, a token and a root file swapped in
place, istiod standing still, and every few minutes a flood of the status port or the SDS socket. Samples of resident
memory, descriptors, threads, log bytes and failed requests go into DIR/soak.csv and a plot, DIR/soak.svg. The verdict:
no failed request outside of floods, and over the second half no slope that its own scatter does not explain.
"""
import argparse
import csv
import math
import os
import sys
import threading
import time
from pathlib import Path

from tests.attack import h2
from tests.attack.neighbours import stopped
from tests.attack.on_status import hold
from tests.attack.world import ATTACKERS, KUBELET, SDS, World, get

EVERY = 2.0
NAMES = ("rss_kb", "descriptors", "threads", "log_bytes", "failed")


class Everyday(threading.Thread):
    """Kubelet, Prometheus and Envoy, once a second each."""

    def __init__(self, world):
        super().__init__(daemon=True)
        self.world, self.over, self.failed, self.asked = world, threading.Event(), 0, 0

    def run(self):
        while not self.over.wait(1):
            for path in ("/healthz/ready", "/app-health/app/livez", "/stats/prometheus"):
                self.asked += 1
                try:
                    self.failed += get(KUBELET, path, 5)[0] != 200
                except OSError:
                    self.failed += 1
            self.asked += 1
            self.failed += not h2.served(self.world.dir / SDS, 5)


def swap(world):
    """Files change as a mounted volume does."""
    for name in ("var/run/secrets/istio/root-cert.pem", "var/run/secrets/tokens/istio-token"):
        path = world.dir / name
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(path.read_bytes())
        fresh.rename(path)


def silent(world, seconds):
    held, end = [], time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if len(held) < 1000:
                held.append(h2.socket.socket(h2.socket.AF_UNIX))
                held[-1].settimeout(0.2)
                try:
                    held[-1].connect(str(world.dir / SDS))
                except OSError:
                    time.sleep(0.05)
            else:
                time.sleep(0.1)
    finally:
        for io in held:
            io.close()


TROUBLE = [
    lambda w: swap(w),
    lambda w: stopped(w.istiod.pid, 5),
    lambda w: hold(w, 500, b"G", True, 10),
    lambda w: swap(w),
    lambda w: silent(w, 10),
    lambda w: hold(w, 500, b"", False, 10),
]


def slope(points):
    """Change a minute, and how far from zero that is in its own standard errors."""
    n = len(points)
    if n < 8:
        return 0.0, 0.0
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    sxx = sum((x - mx) ** 2 for x, _ in points)
    b = sum((x - mx) * (y - my) for x, y in points) / sxx
    rest = sum((y - my - b * (x - mx)) ** 2 for x, y in points)
    error = math.sqrt(rest / (n - 2) / sxx)
    return b * 60, abs(b) / error if error else 0.0


def plot(rows, path):
    width, height, out = 900, 130, []
    for k, name in enumerate(NAMES):
        values = [row[k + 1] for row in rows]
        low, high, last = min(values), max(values), rows[-1][0] or 1
        span = (high - low) or 1
        points = " ".join(f"{60 + r[0] / last * (width - 80):.1f},{k * height + 110 - (v - low) / span * 90:.1f}"
                          for r, v in zip(rows, values))
        out.append(f'<text x="4" y="{k * height + 14}">{name}: {low:g} to {high:g}</text>'
                   f'<polyline fill="none" stroke="#247" points="{points}"/>')
    body = "".join(out)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(NAMES)}" '
                    f'font-family="sans-serif" font-size="12">{body}</svg>\n')


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--agent", required=True)
    flags.add_argument("--istiod", required=True)
    flags.add_argument("--minutes", type=float, default=20)
    flags.add_argument("--envoy", help="a real Envoy in the place of the stand-in")
    flags.add_argument("--out", default="soak")
    given = flags.parse_args()
    if os.geteuid():
        print("the soak needs root: it makes a network namespace", file=sys.stderr)
        return 2
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    env = {"SECRET_TTL": "30s"}
    world = World(given.agent, given.istiod, env=env, envoy=given.envoy)
    try:
        everyday = Everyday(world)
        everyday.start()
        start, rows, turn, quiet = time.monotonic(), [], 0, []
        length = given.minutes * 60
        # Every part of the trouble comes several times, with rest between.
        pause = max(15.0, min(120.0, length / 18))
        trouble, next_trouble = None, pause
        while (now := time.monotonic() - start) < length and world.alive():
            rss, descriptors, threads, log = world.figures()
            rows.append((round(now, 1), rss, descriptors, threads, log, everyday.failed))
            busy = trouble is not None and trouble.is_alive()
            # Connections of a flood are gone a moment after it.
            if not busy and now > next_trouble - pause + 12:
                quiet.append(rows[-1])
            if not busy and now >= next_trouble and now < length - pause:
                trouble = threading.Thread(target=TROUBLE[turn % len(TROUBLE)], args=(world,), daemon=True)
                trouble.start()
                turn, next_trouble = turn + 1, now + pause
            time.sleep(EVERY)
        everyday.over.set()
        everyday.join(30)
        with (out / "soak.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("seconds", *NAMES), *rows])
        plot(rows, out / "soak.svg")
        good = world.alive() and everyday.failed == 0
        print(f"{everyday.asked} requests, {everyday.failed} failed; {turn} troubles in {given.minutes:g} minutes")
        late = [row for row in quiet if row[0] > length / 2]
        for k, name in enumerate(NAMES[:3]):
            points = [(row[0], row[k + 1]) for row in late]
            change, errors = slope(points)
            # A page here and there is no leak, and a short run cannot tell one: what it would be over this window.
            window = (points[-1][0] - points[0][0]) / 60 if points else 0
            matters = change * window > {"rss_kb": 512, "descriptors": 1, "threads": 1}[name]
            grows = errors > 3 and matters
            good &= not grows
            print(f"{name}: {points[0][1] if points else 0} to {points[-1][1] if points else 0} in the second half, "
                  f"{change:+.2f} a minute ({errors:.1f} standard errors){': GROWS' if grows else ''}")
        print("the same at the end as at the beginning" if good else "NOT the same at the end")
        return int(not good)
    finally:
        world.close()


if __name__ == "__main__":
    sys.exit(main())
