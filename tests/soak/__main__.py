"""Runs an agent for long under everyday trouble and says whether it is the same at the end as at the beginning.

    python3 -m tests.soak --agent target/release/pilot-agent --istiod target/release/mock-istiod --envoy <Envoy> [--minutes 20] [--out DIR]

A real Envoy speaks mutual TLS with itself with certificates of 30 s (tests/support/loop.yaml). All the time: requests
through it that check the peer's identity, probes, scrapes, a new SDS client every second, a changed route pushed every
ten seconds. In turn, with rest between: token and root file swapped as a volume does it, istiod standing still, istiod
away and back, Envoy killed (`ENVOY_RECOVERY` starts it again), floods of the status port and the SDS socket.

Samples of resident memory, descriptors, threads, log bytes and failed requests go into DIR/soak.csv and a plot,
DIR/soak.svg. The verdict: no request has failed, but for those through an Envoy that was just killed, and over the second
half no slope that its own scatter does not explain.
"""
import argparse
import csv
import http.client
import json
import math
import os
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path

# Beside attacks that may run on this machine.
os.environ.setdefault("ATTACK_NET", "10.214")

from tests.attack import h2  # noqa: E402
from tests.attack.neighbours import stopped
from tests.attack.on_sockets import ids
from tests.attack.on_status import hold
from tests.attack.world import APP, ATTACKERS, KUBELET, POD, ROOT, SDS, World, eventually, get

EVERY = 2.0
OUTBOUND, INBOUND = 18080, 18443
IDENTITY = "spiffe://cluster.local/ns/ns/sa/sa"
NAMES = ("rss_kb", "descriptors", "threads", "log_bytes", "failed", "failed_without_envoy")
# How long requests may fail after Envoy was killed: the agent starts it again, and it asks for everything anew.
BACK = 30.0
# How long a pushed route may take on a machine under load.
PUSHED = 20.0


def resources(value):
    text = (ROOT / "tests/support/loop.yaml").read_text()
    text = text.replace('address: 127.0.0.1, port_value: "{{app}}"', f"address: {POD}, port_value: {APP}")
    text = text.replace('address: 127.0.0.1, port_value: "{{outbound}}"', f"address: {POD}, port_value: {OUTBOUND}")
    return (text.replace('"{{inbound}}"', str(INBOUND)).replace("{{identity}}", IDENTITY).replace("{{config}}", value))


class Soak(World):
    """A world with a real Envoy and configuration for it."""

    def __init__(self, agent, istiod, envoy):
        # Envoy is killed on purpose every few minutes.
        env = {"SECRET_TTL": "30s", "ENVOY_RECOVERY": "true", "PILOT_AGENT_MERGE_ENVOY_STATS": "true"}
        self.turn, self.killed = 0, 0.0
        super().__init__(agent, istiod, env=env, envoy=envoy)

    def start_istiod(self):
        self.push()
        super().start_istiod()

    def push(self):
        self.turn += 1
        self.put("all.yaml", resources(f"v{self.turn}"))
        return f"v{self.turn}"

    def control(self, verb):
        request = urllib.request.Request(f"http://{POD}:15014/{verb}", method="POST")
        with urllib.request.urlopen(request, timeout=10) as reply:
            reply.read()

    def envoy(self):
        """Envoy's process: the agent's child that runs it."""
        with open(f"/proc/{self.pid}/task/{self.pid}/children") as children:
            for pid in children.read().split():
                if os.readlink(f"/proc/{pid}/exe") == os.path.realpath(self.envoy_binary):
                    return int(pid)
        raise OSError("no Envoy runs")


class Asking(threading.Thread):
    """Something that is asked for again and again; a failure is counted, by whether Envoy was just killed."""

    def __init__(self, world, pause, ask, needs_envoy):
        super().__init__(daemon=True)
        self.world, self.pause, self.ask, self.needs_envoy = world, pause, ask, needs_envoy
        self.over, self.asked, self.failed, self.excused, self.last = threading.Event(), 0, 0, 0, ""

    def run(self):
        while not self.over.wait(self.pause):
            self.asked += 1
            begun = time.monotonic()
            try:
                wrong = self.ask(self.world)
            except (OSError, http.client.HTTPException) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                if self.needs_envoy and begun - self.world.killed < BACK:
                    self.excused += 1
                else:
                    self.failed += 1
                    self.last = f"{wrong} ({self.ask.__name__}, after {time.monotonic() - begun:.1f} s)"
                    print(f"  failed: {self.last}", flush=True)


def ready(world):
    status, _ = get(KUBELET, "/healthz/ready", 5)
    return None if status == 200 else f"/healthz/ready: {status}"


def live(world):
    status, _ = get(KUBELET, "/app-health/app/livez", 5)
    return None if status == 200 else f"/app-health/app/livez: {status}"


def scrape(world):
    status, _ = get(KUBELET, "/stats/prometheus", 10)
    return None if status == 200 else f"/stats/prometheus: {status}"


def secret(world):
    return None if h2.served(world.dir / SDS, 10) else "no certificate on the SDS socket"


def through(path="/"):
    conn = http.client.HTTPConnection(POD, OUTBOUND, timeout=10, source_address=(KUBELET, 0))
    try:
        conn.request("GET", path)
        reply = conn.getresponse()
        reply.read()
        return reply.status, reply.headers
    finally:
        conn.close()


def traffic(world):
    status, headers = through()
    if status != 200 or headers.get("x-peer") != IDENTITY:
        return f"through Envoy: {status}, peer {headers.get('x-peer')}"
    return None


def pushed(world):
    wanted, end = world.push(), time.monotonic() + PUSHED
    while time.monotonic() < end:
        try:
            if through()[1].get("x-config") == wanted:
                return None
        except (OSError, http.client.HTTPException):
            pass
        # While istiod is away nothing can be pushed.
        if world.away:
            return None
        time.sleep(0.1)
    return f"the push {wanted} is not in effect within {PUSHED:.0f} s"


def swap(world):
    """Files change as a mounted volume does."""
    for name in ("var/run/secrets/istio/root-cert.pem", "var/run/secrets/tokens/istio-token"):
        path = world.dir / name
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(path.read_bytes())
        fresh.rename(path)


def away(world, seconds):
    world.away = True
    try:
        world.control("down")
        time.sleep(seconds)
        world.control("up")
        # Streams come back within the agent's longest pause between two dials.
        time.sleep(15)
    finally:
        world.away = False


def still(world, seconds):
    world.away = True
    try:
        stopped(world.istiod.pid, seconds)
        time.sleep(5)
    finally:
        world.away = False


def kill_envoy(world):
    world.killed = time.monotonic()
    # Not SIGKILL: that is a death for lack of memory, which the agent answers once in ten minutes.
    os.kill(world.envoy(), signal.SIGABRT)
    time.sleep(BACK)


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


def resets(world, seconds):
    end, head = time.monotonic() + seconds, h2.request(h2.SDS_PATH)
    while time.monotonic() < end:
        try:
            with h2.Conn(world.dir / SDS, timeout=1) as conn:
                for s in ids():
                    conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, s, head), h2.frame(h2.RST, 0, s, b"\0\0\0\x08"))
                    if time.monotonic() > end:
                        break
        except OSError:
            time.sleep(0.05)


TROUBLE = {
    "files swapped": swap,
    "istiod stands still": lambda w: still(w, 5),
    "a flood of first bytes": lambda w: hold(w, 500, b"G", True, 10),
    "istiod away": lambda w: away(w, 5),
    "a flood of the SDS socket": lambda w: silent(w, 10),
    "Envoy killed": kill_envoy,
    "a flood of unread scrapes": lambda w: hold(w, 100, b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", True, 10),
    "rapid resets": lambda w: resets(w, 5),
}


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
    out.append(f'<text x="{width - 140}" y="{height * len(NAMES) - 4}">{rows[-1][0] / 60:.0f} minutes</text>')
    body = "".join(out)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(NAMES)}" '
                    f'font-family="sans-serif" font-size="12">{body}</svg>\n')


def run(world, length, out):
    asking = [Asking(world, 1, ready, True), Asking(world, 1, live, False), Asking(world, 5, scrape, False), Asking(world, 1, secret, False),
              Asking(world, 0.2, traffic, True), Asking(world, 10, pushed, True)]
    for one in asking:
        one.start()
    start, rows, turn, quiet = time.monotonic(), [], 0, []
    # Every part of the trouble comes several times, with rest between.
    pause = max(15.0, min(120.0, length / (3 * len(TROUBLE))))
    trouble, ended, next_trouble = None, 0.0, pause
    while (now := time.monotonic() - start) < length and world.alive():
        rss, descriptors, threads, log = world.figures()
        failed, excused = sum(a.failed for a in asking), sum(a.excused for a in asking)
        rows.append((round(now, 1), rss, descriptors, threads, log, failed, excused))
        busy = trouble is not None and trouble.is_alive()
        ended = now if busy else ended
        # Connections of a flood are gone a moment after it.
        if now > ended + 8:
            quiet.append(rows[-1])
        if not busy and now >= next_trouble and now < length - pause:
            name, what = list(TROUBLE.items())[turn % len(TROUBLE)]
            print(f"{now / 60:6.1f} min  {rss / 1024:.1f} MB, {descriptors} descriptors, {threads} threads, log {log} B, {failed} failed; {name}", flush=True)
            trouble = threading.Thread(target=what, args=(world,), daemon=True)
            trouble.start()
            turn, next_trouble = turn + 1, now + pause
        time.sleep(EVERY)
    for one in asking:
        one.over.set()
    for one in asking:
        one.join(30)
    with (out / "soak.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("seconds", *NAMES), *rows])
    plot(rows, out / "soak.svg")
    return asking, rows, quiet, turn


def verdict(world, length, asking, rows, quiet, turn):
    failed = sum(a.failed for a in asking)
    good = world.alive() and failed == 0
    for one in asking:
        print(f"{one.ask.__name__}: {one.asked} asked, {one.failed} failed, {one.excused} while a killed Envoy was away"
              + (f"; last: {one.last}" if one.last else ""))
    print(f"{sum(a.asked for a in asking)} requests, {failed} failed; {turn} troubles in {length / 60:g} minutes; "
          f"{'the agent lives' if world.alive() else 'the agent has ENDED'}")
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
    print(f"log: {rows[-1][4] * 60 / length:.0f} B a minute")
    print("the same at the end as at the beginning" if good else "NOT the same at the end")
    return good


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--agent", required=True)
    flags.add_argument("--istiod", required=True)
    flags.add_argument("--envoy", required=True)
    flags.add_argument("--minutes", type=float, default=20)
    flags.add_argument("--out", default="soak")
    given = flags.parse_args()
    if os.geteuid():
        print("the soak needs root: it makes a network namespace", file=sys.stderr)
        return 2
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    length = given.minutes * 60
    world = Soak(given.agent, given.istiod, given.envoy)
    world.away = False
    try:
        # Envoy says that it is ready before the listener's route is there.
        eventually("a request through Envoy", lambda: traffic(world) is None, 60)
        good = verdict(world, length, *run(world, length, out))
        (out / "agent.log").write_bytes(world.log.read_bytes())
        (out / "verdict.json").write_text(json.dumps({"held": good, "minutes": given.minutes}) + "\n")
        return int(not good)
    finally:
        world.close()


if __name__ == "__main__":
    sys.exit(main())
