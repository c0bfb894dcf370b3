"""Messages of a few MB that are millions of tiny fields: decoded they may take fifty times their bytes."""
import time
from itertools import repeat
from pathlib import Path

from . import h2
from .h2 import DATA, END_HEADERS, GOAWAY, HEADERS, PIECE, RST, SECRET, WINDOW, Conn, frame, framed, part, pieces
from .on_istiod import ROOM, TYPE, WORLD, under
from .registry import attack
from .world import POD, SDS

# What a message of the largest size may take for a moment, above the limit that lasts.
PEAK_KB = 64 * 1024
BUNDLE, CONFIG = TYPE + "istio.mesh.v1alpha1.ProxyConfig", TYPE + "envoy.config.core.v3.TypedExtensionConfig"
NAMES, WASM = TYPE + "istio.networking.nds.v1.NameTable", TYPE + "envoy.extensions.filters.http.wasm.v3.Wasm"
# Half of the largest response that the agent gathers, which may take its size twice.
MOST = 12_000_000


def resource(type_url, value):
    return part(1, type_url.encode()) + part(2, value)


def response(type_url, *resources):
    return part(1, b"1") + b"".join(resources) + part(4, type_url.encode()) + part(5, b"n")


def module(n, place):
    """An extension config whose module is fetched from `place`."""
    uri = part(1, place.encode()) + part(3, b"\x08\x1e")
    machine = part(1, b"v%d" % n) + part(3, part(2, part(1, uri) + part(2, b"nil")))
    plugin = part(1, b"p%d" % n) + part(3, machine)
    return part(2, resource(CONFIG, part(1, b"e%d" % n) + part(2, resource(WASM, part(1, plugin)))))


def pushed(message):
    """An istiod that pushes it again and again, as fast as windows are opened."""
    def play(call):
        call.accept()
        call.pour((piece for one in repeat(framed(message)) for piece in pieces(one)), ROOM)
    return play


def bounded(world, play):
    """Plays, and looks at the most that it took, which nobody sees who looks only now and then."""
    def kilobytes(name):
        lines = Path(f"/proc/{world.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

    before = kilobytes("VmRSS")
    Path(f"/proc/{world.pid}/clear_refs").write_text("5")
    play()
    if (most := kilobytes("VmHWM") - before) > PEAK_KB:
        raise AssertionError(f"{most // 1024} MB for a moment")


MODULES = {**WORLD, "modules": True, "env": {**WORLD["env"], "WASM_INSECURE_REGISTRIES": "*"}}
TABLES = {"ready": False, "env": {**WORLD["env"], "ISTIO_META_DNS_CAPTURE": "true", "DNS_PROXY_ADDR": "0.0.0.0:15053"}}
# Each: why, the agent's world, the message. Made when it is needed.
PUSHES = {
    "tiny resources": ("trust bundles of which the first counts, among millions", WORLD,
                       lambda: response(BUNDLE, part(2, resource(BUNDLE, b"")), b"\x12\0" * (MOST // 2))),
    "empty anchors": ("trust bundles of millions of empty texts", WORLD,
                      lambda: response(BUNDLE, part(2, resource(BUNDLE, b"\x92\x02\0" * (MOST // 3))))),
    "many extension configs": ("150,000 of them in a response", MODULES, lambda: response(
        CONFIG, part(2, resource(CONFIG, part(1, b"a") + part(2, resource("x", b"")))) * 150_000)),
    "many modules": ("thousands of modules in a response, which drip", MODULES, lambda: response(
        CONFIG, *(module(n, f"http://{POD}:8081/drip?{n}") for n in range(5000)))),
    "conversions without end": ("responses whose module drips, one after the other", MODULES, lambda: response(
        CONFIG, module(1, f"http://{POD}:8081/drip"), module(2, f"http://{POD}:8081/drip?" + "x" * 3_000_000))),
    "a host of addresses": ("a name table with a host that has millions", TABLES, lambda: response(
        NAMES, part(2, resource(NAMES, part(1, part(1, b"a.b") + part(2, b"\x0a\0" * (MOST // 2))))))),
}

for name, (why, world, make) in PUSHES.items():
    @attack(f"istiod pushes {name}", why, world=world, short=False, readiness=world is not TABLES)
    def hostile(world, size, make=make):
        bounded(world, lambda: under(world, size, pushed(make()), patience=5))


NODE = part(2, h2.NODE)
LISTS = {
    "empty names": ("requests of two million empty names", NODE + b"\x1a\0" * 2_000_000),
    "many names": ("requests of 400,000 names", NODE + b"".join(part(3, b"%x" % n) for n in range(400_000))),
    "parts of a node": ("requests from a node of two million addresses", part(2, b"\x52\0" * 2_000_000) + part(3, b"default")),
    "details of an error": ("refusals of two million details", NODE + part(6, b"\x1a\0" * 2_000_000) + part(3, b"default")),
}


def request(conn, stream, body):
    """As the windows allow; whatever is said about it."""
    conn.send(frame(HEADERS, END_HEADERS, stream, h2.request(h2.SDS_PATH)))
    room, at = dict.fromkeys((0, stream), 64_000), 0
    while at < len(body):
        if piece := min(PIECE, len(body) - at, *room.values()):
            conn.send(frame(DATA, 0, stream, body[at:at + piece]))
            room, at = {of: left - piece for of, left in room.items()}, at + piece
            continue
        kind, _, of, payload = conn.read()
        if kind == WINDOW and of in room:
            room[of] += int.from_bytes(payload, "big")
        elif kind == GOAWAY or (kind == RST and of == stream):
            return
    conn.io.settimeout(0.2)
    while conn.read()[0] not in (RST, GOAWAY):
        pass


for name, (why, message) in LISTS.items():
    @attack(f"SDS {name}", why, short=name == "many names")
    def lists(world, size, message=message):
        message += part(4, SECRET.encode())
        body, end = framed(message), time.monotonic() + size.seconds

        def play():
            while time.monotonic() < end:
                try:
                    with Conn(world.dir / SDS, timeout=2) as conn:
                        request(conn, 1, body)
                except OSError:
                    pass
        bounded(world, play)
