"""An istiod whose TLS means ill, while the certificate has to be renewed and Envoy asks for its configuration."""
import json
import time

from . import h2
from .on_ca import CA, between, hostile_for
from .registry import attack
from .world import ADMIN, ROOT, SDS, STATUS, XDS

# On 15010 no TLS is spoken.
PORT = 15022
WORLD = {"istiod_flags": ["--ttl", "20s"], "before": lambda world: between(world, PORT), "env": {
    "CA_ADDR": f"localhost:{PORT}", "SECRET_TTL": "20s", "PROXY_CONFIG": json.dumps({
        "discoveryAddress": f"localhost:{PORT}", "statusPort": STATUS, "proxyAdminPort": ADMIN,
        "binaryPath": str(ROOT / "tests/support/fake_envoy.py"), "terminationDrainDuration": "1s"})}}
ALERT, CHANGE, HANDSHAKE, APPLICATION = 21, 20, 22, 23


def record(kind, body, version=b"\3\3"):
    return bytes([kind]) + version + len(body).to_bytes(2, "big") + body


def for_ever(piece, first=b"", pause=0.0):
    """Says `first` to a greeting, and then this piece again and again."""
    def play(io):
        io.recv(65536)
        io.sendall(first)
        while not CA["over"].is_set():
            io.sendall(piece)
            time.sleep(pause)
    return play


def silent(io):
    CA["over"].wait(60)


# A message of a handshake that says it has 16 MB, and comes.
ENDLESS = b"\2\xff\xff\xff" + b"a" * 16_000
MOODS = {
    "silence": silent, "plain HTTP": for_ever(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "a message without end": for_ever(
        record(HANDSHAKE, b"a" * 16_000), record(HANDSHAKE, ENDLESS)),
    "a message byte by byte": for_ever(record(HANDSHAKE, b"a") * 2000, record(HANDSHAKE, b"\2\0\xff\xff")),
    "empty records": for_ever(record(HANDSHAKE, b"") * 2000), "warnings": for_ever(record(ALERT, b"\1\x5a") * 2000),
    "changes of cipher": for_ever(record(CHANGE, b"\1") * 2000), "application data": for_ever(record(APPLICATION, b"a" * 16_000)),
    "a record that drips": for_ever(b"a", b"\x16\3\3\x3f\xff", 0.1), "longest records": for_ever(record(HANDSHAKE, b"\2" * 65_535)),
}

for name, mood in MOODS.items():
    @attack(f"istiod's TLS sends {name}", "a greeting that is answered so, by an istiod that is the CA, too", world=WORLD, identity=False,
            short=name == "empty records")
    def hostile(world, size, mood=mood):
        def play():
            end = time.monotonic() + max(size.seconds, 12)
            while time.monotonic() < end:
                h2.served(world.dir / SDS, 0.5)
                try:
                    with h2.Conn(world.dir / XDS, timeout=0.5) as conn:
                        conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, h2.secrets()))
                        conn.read()
                        time.sleep(0.3)
                except OSError:
                    pass

        hostile_for(world, mood, play)
