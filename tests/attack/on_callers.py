"""Floods at the socket of callers' tokens, while another process is given certificates there.

    python3 -m tests.attack.on_callers <socket> <token> <seconds>

is that process: it asks once in a while, and says how often, and how often it was given one.
"""
import json
import subprocess
import sys
import time

from . import h2
from .h2 import DATA, END_HEADERS, HEADERS, frame
from .on_sockets import connected, hold
from .registry import attack
from .world import ROOT

SOCKET = "callers.sock"
WORLD = {"env": {"SDS_CALLER_TOKENS": "true", "WORKLOAD_SDS": f"./{SOCKET}", "ECC_SIGNATURE_ALGORITHM": "ECDSA"}}
HALF = frame(DATA, 0, 1, h2.secrets()[:9])


def opened(path, *frames):
    conn = h2.Conn(path, timeout=0.2)
    conn.send(*frames)
    return conn


def first_byte(path):
    io = connected(path)
    io.send(b"P")
    return io


def request(token):
    return frame(HEADERS, END_HEADERS, 1, h2.request(h2.SDS_PATH, ("authorization", f"Bearer {token}")))


FLOODS = {
    "silent": ("connections that say nothing", lambda path, _: connected(path)),
    "first byte": ("connections that send one byte and wait", lambda path, _: first_byte(path)),
    "half a header block": ("requests whose header block never ends",
                            lambda path, _: opened(path, frame(HEADERS, 0, 1, h2.request(h2.SDS_PATH)[:40]))),
    "half a request": ("requests with a token, whose message never ends", lambda path, token: opened(path, request(token), HALF)),
    "tokens of nobody": ("requests with tokens that nobody has signed",
                         lambda path, _: opened(path, request("e30.e30.AAAA"), frame(DATA, 0, 1, h2.secrets()))),
}

for name, (why, begin) in FLOODS.items():
    @attack(f"callers' tokens {name}", why, world=WORLD, short=name in ("first byte", "half a request"))
    def it(world, size, begin=begin):
        token = (world.dir / "var/run/secrets/tokens/istio-token").read_text()
        words = [sys.executable, "-m", "tests.attack.on_callers", world.dir / SOCKET, token, size.seconds]
        with subprocess.Popen([str(word) for word in words], cwd=ROOT, stdout=subprocess.PIPE) as caller:
            hold(size, lambda: begin(world.dir / SOCKET, token))
            asked, given = json.loads(caller.communicate(timeout=60)[0])
        if asked < 3 or asked - given > max(1, 0.01 * asked):
            raise AssertionError(f"{given} of {asked} callers are given a certificate")


def ask(path, token, seconds):
    asked = given = 0
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        asked += 1
        # A key is made for each, and signed.
        given += h2.served(path, 5, b"default", ("authorization", f"Bearer {token}"))
        time.sleep(0.2)
    print(json.dumps([asked, given]))


if __name__ == "__main__":
    ask(*sys.argv[1:])
