"""A CA that means ill: it answers with too much, too slowly, or without end."""
import contextlib
import json
import socket
import threading
import time

from . import h2
from .h2 import DATA, END_HEADERS, END_STREAM, HEADERS, frame, framed, part, pieces
from .on_istiod import Call, endless_head, farewells, interim, padding, pings, settings, unknown_frames
from .on_tiny_fields import bounded
from .registry import attack
from .world import ADMIN, ROOT, SDS, STATUS, inside, listener_in

PORT, GOOD = 15010, 15012
# Where the agent finds its CA; what answers there, and the good one when it is None.
CA = {"mood": None, "over": threading.Event()}


def between(world, port=PORT):
    """Stands before the good CA."""
    listener = listener_in(world.name, ("127.0.0.1", port))

    def pump(one, other):
        with contextlib.suppress(OSError):
            while piece := one.recv(65536):
                other.sendall(piece)
        for io in (one, other):
            with contextlib.suppress(OSError):
                io.shutdown(socket.SHUT_RDWR)

    def answer(io):
        with io, contextlib.suppress(OSError):
            if CA["mood"]:
                io.settimeout(20)
                CA["mood"](io)
                return
            with inside(world.name, lambda: socket.create_connection(("127.0.0.1", GOOD))) as good:
                threading.Thread(target=pump, args=(io, good), daemon=True).start()
                pump(good, io)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                io, _ = listener.accept()
                threading.Thread(target=answer, args=(io,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


# Without TLS, and certificates of a few seconds.
WORLD = {"istiod_flags": ["--plaintext-auth", "--ttl", "20s"], "before": between, "env": {
    "CA_ADDR": f"localhost:{PORT}", "SECRET_TTL": "20s", "PROXY_CONFIG": json.dumps({
        "discoveryAddress": f"localhost:{GOOD}", "controlPlaneAuthPolicy": "NONE", "statusPort": STATUS, "proxyAdminPort": ADMIN,
        "binaryPath": str(ROOT / "tests/support/fake_envoy.py"), "terminationDrainDuration": "1s"})}}
# Below the 4 MB that an answer may have; HTTP/2's first window.
MOST, ROOM = 4_000_000, 65_000


def answered(entries, upto=None):
    """This chain, or so many bytes of it and then nothing."""
    def play(call):
        call.accept()
        if not call.pour(pieces(framed(entries())[:upto]), ROOM):
            return
        if upto:
            call.over.wait(60)
        call.send(frame(HEADERS, END_HEADERS | END_STREAM, call.stream, h2.field("grpc-status", "0")))
        call.frame()
    return play


def drip(call):
    call.accept()
    while call.on():
        call.send(frame(DATA, 0, call.stream, b"\0"))
        time.sleep(0.1)


PEM = b"-----BEGIN CERTIFICATE-----\n" + b"A" * 500 + b"\n-----END CERTIFICATE-----\n"
MOODS = {
    "empty entries": answered(lambda: b"\x0a\0" * (MOST // 2)),
    "more than 4 MB": answered(lambda: part(1, b"x" * 4 * MOST)),
    "thousands of certificates": answered(lambda: part(1, PEM) * (MOST // len(part(1, PEM)))),
    "one long text": answered(lambda: part(1, PEM * (MOST // len(PEM))) + part(1, b"x")),
    "half an answer": answered(lambda: part(1, b"x" * MOST), upto=3_000_000),
    "drip": drip, "endless header block": endless_head, "interim answers": interim, "padding": padding, "PING": pings,
    "SETTINGS": settings, "farewells": farewells, "unknown frames": unknown_frames,
}


def asked_for(world, seconds):
    """Asks for a certificate for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        h2.served(world.dir / SDS, 1)
        time.sleep(0.2)


def hostile_for(world, mood, play):
    """Answers each connection so as long as this is played."""
    CA["over"], CA["mood"] = threading.Event(), mood
    try:
        bounded(world, play)
    finally:
        CA["over"].set()
        CA["mood"] = None
    # The next try may be some seconds away.
    if not h2.served(world.dir / SDS, 60):
        raise AssertionError("no certificate after it")


for name, mood in MOODS.items():
    @attack(f"CA sends {name}", "a CA that means ill, while the certificate has to be renewed", world=WORLD, identity=False,
            short=name == "PING")
    def hostile(world, size, mood=mood):
        hostile_for(world, lambda io: mood(Call(io, CA["over"])), lambda: asked_for(world, max(size.seconds, 15)))
