"""An istiod that means ill: what the relay must bear from the other side of its stream."""
import json
import os
import threading
import time

from . import h2
from .h2 import ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, RST, SETTINGS, WINDOW, Conn, frame, message, number
from .registry import attack
from .world import ADMIN, ROOT, STATUS, XDS, listener_in

PORT = 15010
TYPE = "type.googleapis.com/"
CLUSTER = TYPE + "envoy.config.cluster.v3.Cluster"
HEAD = b"\x88" + h2.field("content-type", "application/grpc")
# Without TLS, as every mesh may have it; the CA is the good neighbour's.
WORLD = {"env": {"CA_ADDR": "localhost:15012", "PROXY_CONFIG_XDS_AGENT": "true", "PROXY_CONFIG": json.dumps({
    "discoveryAddress": f"localhost:{PORT}", "controlPlaneAuthPolicy": "NONE", "statusPort": STATUS, "proxyAdminPort": ADMIN,
    "binaryPath": str(ROOT / "tests/support/fake_envoy.py"), "terminationDrainDuration": "1s"})}}


def response(n, type_url=CLUSTER, value=b""):
    body = message((1, type_url.encode()), (2, value))[5:]
    return message((1, b"1"), (2, body), (4, type_url.encode()), (5, b"n%d" % n))


class Call:
    """One call that istiod has accepted."""

    def __init__(self, io, over):
        self.io, self.over, self.buffer = io, over, b""
        while len(self.buffer) < len(h2.PREFACE):
            self.buffer += self.piece()
        self.buffer = self.buffer[len(h2.PREFACE):]
        self.send(frame(SETTINGS, 0, 0))
        while True:
            kind, flags, self.stream = self.frame()
            if kind == SETTINGS and not flags & ACK:
                self.send(frame(SETTINGS, ACK, 0))
            if kind == HEADERS:
                return

    def piece(self):
        piece = self.io.recv(65536)
        if not piece:
            raise ConnectionError("closed")
        return piece

    def frame(self):
        while len(self.buffer) < 9 or len(self.buffer) < 9 + int.from_bytes(self.buffer[:3], "big"):
            self.buffer += self.piece()
        length, head = int.from_bytes(self.buffer[:3], "big"), self.buffer[:9]
        self.payload, self.buffer = self.buffer[9:9 + length], self.buffer[9 + length:]
        return head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF

    def send(self, *frames):
        self.io.sendall(b"".join(frames))

    def accept(self):
        self.send(frame(HEADERS, END_HEADERS, self.stream, HEAD))

    def data(self, *messages):
        self.send(*(frame(DATA, 0, self.stream, one) for one in messages))

    def on(self):
        return not self.over.is_set()

    def pour(self, pieces, room):
        """Sends them as the agent opens its windows, which begin with `room`; whether it still wants more."""
        room = dict.fromkeys((0, self.stream), room)
        for piece in pieces:
            while min(room.values()) < h2.PIECE:
                kind, _, of = self.frame()
                if kind == WINDOW and of in room:
                    room[of] += int.from_bytes(self.payload, "big")
                elif kind in (RST, GOAWAY):
                    return False
            if not self.on():
                break
            self.data(piece)
            room = {of: left - len(piece) for of, left in room.items()}
        return True


def pings(call):
    call.accept()
    while call.on():
        call.send(*[frame(PING, 0, 0, b"12345678")] * 200)


def settings(call):
    call.accept()
    while call.on():
        call.send(*[frame(SETTINGS, 0, 0, b"\0\x03\0\0\0\x64")] * 200)


def endless_head(call):
    call.send(frame(HEADERS, 0, call.stream, HEAD))
    while call.on():
        call.send(frame(CONTINUATION, 0, call.stream, h2.field("x", b"y" * 16_000)))


def bomb(call):
    entry = b"\x40" + number(1, 7) + b"x" + number(3900, 7) + b"y" * 3900
    call.send(frame(HEADERS, END_HEADERS, call.stream, HEAD + entry + b"\xbe" * 8000))
    call.over.wait(0.2)


def huge_length(call):
    call.accept()
    call.data(b"\0\xff\xff\xff\xff\x0a\x01")
    while call.on():
        call.data(b"\x12" + b"a" * 16_000)
        time.sleep(0.002)


def empty_data(call):
    call.accept()
    while call.on():
        call.data(*[b""] * 500)


def interim(call):
    while call.on():
        call.send(*[frame(HEADERS, END_HEADERS, call.stream, b"\x08\x03103")] * 2000)


def endless_trailers(call):
    call.accept()
    call.send(frame(HEADERS, END_STREAM, call.stream, h2.field("x", b"y")))
    while call.on():
        call.send(frame(CONTINUATION, 0, call.stream, h2.field("x", b"y" * 16_000)))


def padding(call):
    call.accept()
    while call.on():
        call.send(frame(DATA, 8, call.stream, b"\0") * 4000)


def farewells(call):
    call.accept()
    while call.on():
        call.send(frame(GOAWAY, 0, 0, b"\x7f\xff\xff\xff\0\0\0\0") * 2000)


def unknown_frames(call):
    call.accept()
    while call.on():
        call.send(frame(0x42, 0xff, 0) * 4000)


def empty_continuations(call):
    call.send(frame(HEADERS, 0, call.stream, HEAD))
    while call.on():
        call.send(frame(CONTINUATION, 0, call.stream) * 4000)


def window_games(call):
    """All streams' windows are closed and opened as wide as can be, and opened by a byte."""
    call.accept()
    closed, wide = (frame(SETTINGS, 0, 0, b"\0\4" + size.to_bytes(4, "big")) for size in (0, 2**31 - 1 - 65_535))
    byte = frame(WINDOW, 0, 0, b"\0\0\0\1")
    while call.on():
        call.send((closed + byte + wide) * 200)
        time.sleep(0.001)


def reset_again(call):
    call.accept()
    while call.on():
        call.send(frame(RST, 0, call.stream, b"\0\0\0\x08") * 4000)


def reset(call):
    call.send(frame(RST, 0, call.stream, b"\0\0\0\x07"))


def away(call):
    call.send(frame(GOAWAY, 0, 0, b"\0\0\0\0\0\0\0\x0b" + b"x" * 16_000))


def window(call):
    call.send(*[frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff")] * 2)


def pushed(call):
    call.send(frame(5, END_HEADERS, call.stream, b"\0\0\0\2\x82\x84\x86"))


def small(call):
    call.accept()
    n = 0
    while call.on():
        call.data(*(response(n + k) for k in range(100)))
        n += 100


# What the agent allows istiod to send before it is asked.
ROOM = 262_000


def beginning(type_url, size):
    """Of a response with one resource of so many bytes, which are to follow."""
    resource = h2.part(1, type_url.encode()) + h2.varint(2 << 3 | 2) + h2.varint(size)
    body = h2.varint(2 << 3 | 2) + h2.varint(len(resource) + size) + resource
    return b"\0" + (len(body) + size).to_bytes(4, "big") + body


def large(type_url, size):
    """One response of so many bytes, as fast as the agent's windows are opened."""
    def play(call):
        call.accept()
        call.data(beginning(type_url, size))
        if call.pour(h2.pieces(bytes(size)), ROOM - 200):
            call.over.wait(1)
    return play


def bytewise(call):
    """A window full of frames of one byte."""
    call.accept()
    call.data(beginning(CLUSTER, 1_000_000))
    for _ in range(ROOM // 5000):
        call.send(frame(DATA, 0, call.stream, b"\0") * 5000)
    call.over.wait(20)


def compressed(call):
    call.accept()
    call.data(b"\1" + response(1)[1:])


def large_status(call):
    call.accept()
    trailers = h2.field("grpc-status", "8") + h2.field("grpc-message", b"%ff" * 5000)
    call.send(frame(HEADERS, END_HEADERS | END_STREAM, call.stream, trailers))


def many(type_url, size):
    def play(call):
        call.accept()
        n = 0
        while call.on():
            call.data(response(n, type_url(n), os.urandom(size)))
            n += 1
    return play


def silence(call):
    call.over.wait(8)


MOODS = {
    "PING": pings, "SETTINGS": settings, "endless header block": endless_head, "HPACK bomb": bomb, "huge length": huge_length,
    "empty DATA": empty_data, "resets": reset, "GOAWAY": away, "window overflow": window, "PUSH_PROMISE": pushed,
    "small responses": small, "bytes": bytewise, "a large trust bundle": large(TYPE + "istio.mesh.v1alpha1.ProxyConfig", 120_000_000), "compressed": compressed, "large status": large_status,
    "unknown types": many(lambda n: f"type/{n}" + "z" * 3000, 0),
    "trust bundles": many(lambda _: TYPE + "istio.mesh.v1alpha1.ProxyConfig", 9000),
    "extension configs": many(lambda _: TYPE + "envoy.config.core.v3.TypedExtensionConfig", 5000), "silent": silence,
    "interim answers": interim, "endless trailers": endless_trailers, "padding": padding, "farewells": farewells,
    "unknown frames": unknown_frames, "empty CONTINUATION": empty_continuations, "window games": window_games,
    "RST_STREAM": reset_again,
}
# The others differ little from these.
SHORT = ("small responses", "bytes", "unknown types", "extension configs", "large status", "resets", "SETTINGS")


def serve(listener, play, over, called):
    def one(io):
        with io:
            try:
                io.settimeout(20)
                call = Call(io, over)
                called.set()
                play(call)
            except OSError:
                pass

    while not over.is_set():
        try:
            io, _ = listener.accept()
        except OSError:
            continue
        threading.Thread(target=one, args=(io,), daemon=True).start()


def ask(world, over, patience, path=h2.ADS_PATH):
    """Envoy, which comes again whenever its stream has ended, or nothing has come for so many seconds."""
    first = message((1, b"\x0a\x20sidecar~10.213.0.2~pod.ns~ns.svc"), (4, CLUSTER.encode()))
    while not over.is_set():
        try:
            with Conn(world.dir / XDS, timeout=patience) as conn:
                conn.send(frame(HEADERS, END_HEADERS, 1, h2.request(path)), frame(DATA, 0, 1, first))
                while not over.is_set():
                    kind, flags, _, payload = conn.read()
                    if kind == DATA and payload:
                        more = len(payload).to_bytes(4, "big")
                        conn.send(frame(WINDOW, 0, 0, more), frame(WINDOW, 0, 1, more))
                    if kind in (RST, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
                        break
        except OSError:
            time.sleep(0.05)


def under(world, size, mood, patience=1, path=h2.ADS_PATH):
    """While this lasts istiod is like that."""
    over, called = threading.Event(), threading.Event()
    listener = listener_in(world.name, ("127.0.0.1", PORT))
    listener.settimeout(0.2)
    threads = [threading.Thread(target=serve, args=(listener, mood, over, called), daemon=True),
               threading.Thread(target=ask, args=(world, over, patience, path), daemon=True)]
    for thread in threads:
        thread.start()
    try:
        # After the one before the agent dials in its own time.
        if not called.wait(90):
            raise AssertionError("istiod is not called again")
        time.sleep(size.seconds)
    finally:
        over.set()
        for thread in threads:
            thread.join(5)
        listener.close()


for name, mood in MOODS.items():
    @attack(f"istiod sends {name}", "an istiod that means ill, and an Envoy that comes again and again", world=WORLD, short=name in SHORT)
    def hostile(world, size, mood=mood):
        under(world, size, mood)
