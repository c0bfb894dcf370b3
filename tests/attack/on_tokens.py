"""Attacks on the token service, from within the pod: it listens on localhost."""
import json
import socket
import threading
import time

from .neighbours import applications
from .registry import attack
from .world import APP, inside

PORT = 15463
FORM = b"grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Atoken-exchange&subject_token=a&subject_token_type=urn%3Aietf%3Aparams%3Aoauth%3Atoken-type%3Ajwt"
HEAD = b"POST /token HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n"
WORLD = {"env": {"STS_PORT": str(PORT), "TOKEN_MANAGER_PLUGIN": "Passthrough", "STS_UPSTREAM_URL": f"http://localhost:{APP}/token"}}


def token():
    """Whether a caller is given a token."""
    with socket.create_connection(("127.0.0.1", PORT), timeout=2) as io:
        io.sendall(HEAD % len(FORM) + b"Connection: close\r\n\r\n" + FORM)
        got = b""
        while piece := io.recv(65536):
            got += piece
    return got.startswith(b"HTTP/1.1 200") and json.loads(got.split(b"\r\n\r\n", 1)[1])["access_token"] != ""


class Callers(threading.Thread):
    """Asks again and again while it is attacked."""

    def __init__(self):
        super().__init__(daemon=True)
        self.over, self.asked, self.given, self.why = threading.Event(), 0, 0, ""

    def run(self):
        while not self.over.wait(0.05):
            self.asked += 1
            try:
                self.given += token()
            except (OSError, ValueError) as error:
                self.why = repr(error)


def flood(sent):
    def play(world, size):
        held, end, callers = [], time.monotonic() + size.seconds, Callers()
        if not token():
            raise AssertionError("no token is given before it is attacked")
        callers.start()
        try:
            while time.monotonic() < end:
                if len(held) >= size.connections // (20 if len(sent) > 10_000 else 1):
                    held.pop(0).close()
                    time.sleep(0.005)
                try:
                    held.append(socket.create_connection(("127.0.0.1", PORT), timeout=1))
                    held[-1].setblocking(False)
                    held[-1].send(sent)
                except OSError:
                    time.sleep(0.01)
        finally:
            for io in held:
                io.close()
            callers.over.set()
            callers.join(5)
        if callers.given < 0.99 * callers.asked:
            raise AssertionError(f"{callers.given} of {callers.asked} callers are given a token; {callers.why}")
    return play


for name, sent in {
    "silent": b"", "first byte": b"P", "half a head": HEAD % 10, "half a body": HEAD % 60_000 + b"\r\ngrant_type=",
    "large body": HEAD % 10_000_000 + b"\r\n" + b"a" * 500_000, "pipelined": (HEAD % len(FORM) + b"\r\n" + FORM) * 200,
    "garbage": bytes(range(256)) * 16,
}.items():
    @attack(f"token service {name}", "connections like this to the token service", world=WORLD,
            short=name in ("first byte", "large body", "pipelined"))
    def it(world, size, play=flood(sent)):
        inside(world.name, lambda: play(world, size))


STALLED = 9021


@attack("token service in front of an endpoint that stalls", "exchanges by the thousand, each for another, that never end", short=False,
        world={"env": {**WORLD["env"], "STS_UPSTREAM_URL": f"http://localhost:{STALLED}/token"}})
def stalls(world, size):
    over = applications(world, [STALLED], b"")

    def play():
        held, end, n = [], time.monotonic() + size.seconds, 0
        while time.monotonic() < end:
            form = FORM.replace(b"subject_token=a", b"subject_token=%d" % n)
            n += 1
            if len(held) >= size.connections:
                held.pop(0).close()
            try:
                held.append(socket.create_connection(("127.0.0.1", PORT), timeout=1))
                held[-1].sendall(HEAD % len(form) + b"\r\n" + form)
            except OSError:
                time.sleep(0.01)
            time.sleep(0.001)
        for io in held:
            io.close()

    try:
        inside(world.name, play)
    finally:
        over.set()
