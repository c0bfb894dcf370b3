"""Many client processes at a socket, each within what one may have: Envoy's own places are not theirs.

    python3 -m tests.attack.on_shares <socket> <streams> <bytes> <seconds>

is one of them: it holds so many streams, and so many bytes of a request that never ends on each.
"""
import json
import socket
import subprocess
import sys
import time

from . import h2
from .h2 import DATA, END_HEADERS, HEADERS, Conn, frame, request
from .registry import attack
from .world import ROOT, SDS, eventually

WORLD = {"envoy": str(ROOT / "tests/attack/busy_envoy.py")}
PROCESSES = 24


def told(world):
    try:
        return json.loads((world.dir / "busy-envoy.json").read_text())
    except (OSError, ValueError):
        return {"answered": 0, "lost": []}


def crowd(world, size, processes, streams, unfinished):
    """Processes that hold streams and unfinished requests; what Envoy lost meanwhile."""
    eventually("Envoy has its streams", lambda: told(world)["answered"] > 200, 60)
    before, children = told(world), []
    try:
        for _ in range(processes):
            words = [sys.executable, "-m", "tests.attack.on_shares", world.dir / SDS, streams, unfinished, size.seconds + 5]
            children.append(subprocess.Popen([str(word) for word in words], cwd=ROOT, stdout=subprocess.PIPE))
        for child in children:
            child.stdout.readline()
        time.sleep(size.seconds)
        # The last one under it.
        now = told(world)["answered"]
        eventually("Envoy is answered", lambda: told(world)["answered"] > now + 2 or told(world)["lost"] != before["lost"], 20)
    finally:
        for child in children:
            child.kill()
            child.communicate()
    lost = told(world)["lost"][len(before["lost"]):]
    if lost:
        raise AssertionError(f"Envoy loses its streams: {lost[:3]}, {len(lost)} times")


@attack("SDS streams of many processes", "as many streams as the socket takes, of which no process has many", world=WORLD)
def many(world, size):
    crowd(world, size, PROCESSES, size.streams // PROCESSES, 5)


@attack("SDS unfinished messages of one process", "a client that fills what may be held of unfinished messages", world=WORLD, short=False)
def one(world, size):
    crowd(world, size, 1, 2000, 6000)


@attack("SDS unfinished messages of many processes", "clients that fill it together", world=WORLD)
def some(world, size):
    crowd(world, size, 8, 300, 6000)


def hold(path, streams, unfinished, seconds):
    end, said = time.monotonic() + seconds, False
    while time.monotonic() < end:
        try:
            with Conn(path, timeout=0.3) as conn:
                stream = 1
                while stream < 2 * streams and time.monotonic() < end:
                    conn.send(frame(HEADERS, END_HEADERS, stream, request(h2.SDS_PATH)), frame(DATA, 0, stream, b"\0\0\x3f\xff\xff"))
                    send(conn, stream, unfinished, end)
                    stream += 2
                if not said:
                    said = True
                    print("there", flush=True)
                while time.monotonic() < end:
                    try:
                        conn.read()
                    except socket.timeout:  # TimeoutError since 3.10
                        pass
        except OSError:
            time.sleep(0.05)


def send(conn, stream, unfinished, end):
    """As much as the windows allow, which are opened as bytes are read."""
    sent, room = 5, 60_000
    while sent < unfinished and time.monotonic() < end:
        piece = min(unfinished - sent, 8000)
        if room < piece:
            kind, _, of, payload = conn.read()
            if kind == h2.WINDOW and of == 0:
                room += int.from_bytes(payload, "big")
            elif of == stream and kind in (h2.RST, HEADERS):
                return
            continue
        conn.send(frame(DATA, 0, stream, b"a" * piece))
        sent, room = sent + piece, room - piece


if __name__ == "__main__":
    hold(sys.argv[1], *(int(float(word)) for word in sys.argv[2:]))
