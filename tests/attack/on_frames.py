"""Frames that cost a server much and their sender little: what HTTP/2 allows, without end."""
import itertools
import time

from . import h2
from .h2 import DATA, END_HEADERS, GOAWAY, HEADERS, RST, SETTINGS, WINDOW, Conn, frame, request
from .on_sockets import EACH, PATHS, ids, many
from .registry import attack

PRIORITY = 2
# As many as one process may have, but for a few.
CONNECTIONS = 230


def held(world, socket, size, streams, more):
    """A connection with so many open streams, on which `more` is sent as long as it is taken; all answers are read."""
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        try:
            with Conn(world.dir / socket, timeout=2) as conn:
                opened = list(itertools.islice(ids(), streams))
                # Requests that are not complete: the streams stay.
                for s in opened:
                    conn.send(frame(HEADERS, END_HEADERS, s, request(PATHS[socket])), frame(DATA, 0, s, b"\0\0\0\1\0"))
                conn.io.setblocking(False)
                text, rest = more(opened), b""
                while time.monotonic() < end:
                    moved = 0
                    try:
                        rest = rest or text
                        moved = conn.io.send(rest)
                        rest = rest[moved:]
                    except BlockingIOError:
                        pass
                    try:
                        if not (got := conn.io.recv(1 << 20)):
                            raise ConnectionError("closed")
                        moved += len(got)
                    except BlockingIOError:
                        pass
                    if not moved:
                        time.sleep(0.001)
        except OSError:
            time.sleep(0.01)


def window(n):
    return frame(SETTINGS, 0, 0, b"\0\x04" + n.to_bytes(4, "big"))


FRAMES = {
    "windows of all streams": ("settings that change the window of each of a thousand open streams", 1000,
                               lambda _: b"".join(window(60_000 + n % 2) for n in range(2000))),
    "GOAWAY": ("farewells by the thousand beside a thousand open streams", 1000,
               lambda _: frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff\0\0\0\0") * 2000),
    "WINDOW_UPDATE": ("windows opened by a byte, of a thousand streams in turn", 1000, lambda opened: b"".join(
        frame(WINDOW, 0, s, b"\0\0\0\1") for s in opened)),
    "RST_STREAM": ("resets of a stream that has been reset", 1, lambda opened: frame(RST, 0, opened[0], b"\0\0\0\x08") * 4000),
    "table sizes": ("settings that change the size of the header table", 0, lambda _: b"".join(
        frame(SETTINGS, 0, 0, b"\0\1" + (n % 2 * 4096).to_bytes(4, "big")) for n in range(2000))),
    "padding": ("DATA of nothing but padding", 1, lambda opened: frame(DATA, 8, opened[0], b"\0") * 4000),
}
# What is answered with nothing.
CHEAP = {
    "PRIORITY": frame(PRIORITY, 0, 1, b"\0\0\0\0\x10") * 2000,
    "unknown frames": frame(0x42, 0xff, 0) * 4000,
    "small windows": frame(WINDOW, 0, 0, b"\0\0\0\1") * 2000,
    "PING, unread": frame(h2.PING, 0, 0, b"12345678") * 2000,
}

for label, socket in EACH.items():
    for name, (why, streams, more) in FRAMES.items():
        @attack(f"{label} {name}", why, short=label == "SDS" and name.startswith("windows"))
        def it(world, size, socket=socket, streams=streams, more=more):
            held(world, socket, size, streams, more)

    for name, frames in CHEAP.items():
        # Each costs 9 to 17 bytes, and as many are on their way as the kernel holds for a connection.
        @attack(f"{label} {name} on hundreds of connections", "frames that ask for nothing, as fast as they are taken",
                short=label == "XDS" and name == "PRIORITY")
        def crowd(world, size, socket=socket, frames=frames):
            many(world, size, socket, CONNECTIONS, b"", lambda _: frames)
