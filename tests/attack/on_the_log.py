"""Attacks on the log: what can be caused without pause is told so many times a minute."""
import socket
import threading
import time

from . import h2
from .h2 import DATA, END_HEADERS, HEADERS, Conn, frame, message, varint
from .on_istiod import TYPE, WORLD, ask, response, under
from .registry import attack
from .world import ATTACKERS, SDS, STATUS, XDS, get, inside, listener_in, send_on


# What comes some dozen times a second needs so long to be too much.
LEAST = 8


def asked(world, size, path):
    """POSTs from the pod itself, by the hundred on each connection."""
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode() * 10

    def post():
        end, held = time.monotonic() + size.seconds, []
        while time.monotonic() < end:
            try:
                while len(held) < 20:
                    held.append(socket.create_connection(("127.0.0.1", STATUS), timeout=2))
                    held[-1].setblocking(False)
            except OSError:
                time.sleep(0.05)
            send_on(held, request)
            time.sleep(0.001)
        for io in held:
            io.close()
    inside(world.name, post)


@attack("log of drains", "/drain without pause")
def drains(world, size):
    asked(world, size, "/drain")


@attack("log of hot restarts", "hot restarts asked for without pause", world={"env": {"ENVOY_HOT_RESTART": "true"}})
def restarts(world, size):
    asked(world, size, "/debug/hot_restart")


@attack("log of trust bundles", "an istiod that sends another bundle each time, with entries that are none", world=WORLD)
def bundles(world, size):
    root = (world.dir / "var/run/secrets/istio/root-cert.pem").read_bytes()

    def play(call):
        call.accept()
        n = 0
        while call.on():
            entries = [root] * (n % 2) + [b"junk %d" % n]
            # Field 34: ca_certificates_pem.
            body = b"".join(varint(34 << 3 | 2) + varint(len(entry)) + entry for entry in entries)
            call.data(response(n, TYPE + "istio.mesh.v1alpha1.ProxyConfig", body))
            n += 1
            time.sleep(0.0005)
    under(world, size, play)


@attack("log of sockets", "sockets whose files are removed as soon as they are there")
def sockets(world, size):
    end = time.monotonic() + max(size.seconds, LEAST)
    while time.monotonic() < end:
        for name in (SDS, XDS):
            try:
                (world.dir / name).unlink()
            except OSError:
                time.sleep(0.0005)


@attack("log of root files", "a root file that is good and bad in turn, while streams are opened")
def roots(world, size):
    path, end, n = world.dir / "var/run/secrets/istio/root-cert.pem", time.monotonic() + max(size.seconds, LEAST), 0
    good, fresh, over = path.read_bytes(), path.with_name(".fresh"), threading.Event()
    envoy = threading.Thread(target=ask, args=(world, over, 60), daemon=True)
    envoy.start()
    try:
        while time.monotonic() < end:
            n += 1
            fresh.write_bytes(good + b"\n" * (n % 7) if n % 2 else b"none")
            fresh.rename(path)
            time.sleep(0.002)
    finally:
        fresh.write_bytes(good)
        fresh.rename(path)
        over.set()


@attack("log of refused secrets", "refusals with long reasons, each another")
def refusals(world, size):
    end, n = time.monotonic() + size.seconds, 0
    while time.monotonic() < end:
        try:
            with Conn(world.dir / SDS, timeout=1) as conn:
                conn.send(frame(HEADERS, END_HEADERS, 1, h2.request(h2.SDS_PATH)), frame(DATA, 0, 1, h2.secrets()))
                kind = None
                while kind != DATA:
                    kind, _, _, payload = conn.read()
                at = payload.rfind(b"\x2a")
                nonce = payload[at + 2:at + 2 + payload[at + 1]]
                for _ in range(50):
                    n += 1
                    why = b"reason %d " % n + b"why " * 700
                    status = b"\x08\x0d" + varint(2 << 3 | 2) + varint(len(why)) + why
                    conn.send(frame(DATA, 0, 1, message((3, b"default"), (4, h2.SECRET.encode()), (5, nonce), (6, status))))
                time.sleep(0.02)
        except OSError:
            pass


# A file in the place of the list's folder.
NO_FOLDER = "mount -t tmpfs tmpfs /run && mkdir -p /var/run/secrets/istio && touch /var/run/secrets/istio/crl"


@attack("log of a revocation list", "roots that are asked for again and again, where nobody can look for the list", world={"shell": NO_FOLDER})
def revoked(world, size):
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        h2.served(world.dir / SDS, 1, b"ROOTCA")


LONG = {f"/app-health/n{n}/livez": {"httpGet": {"host": "127.0.0.1", "path": "/" + "p" * 3000, "port": 1}, "timeoutSeconds": 1}
        for n in range(20)}


@attack("log of long probes", "probes that fail, whose addresses are long", world={"probers": LONG})
def probes(world, size):
    end, n = time.monotonic() + size.seconds, 0
    while time.monotonic() < end:
        n += 1
        try:
            get(ATTACKERS[n % 64], f"/app-health/n{n % 20}/livez")
        except OSError:
            pass


HEALTH_PORT = 9090
CHECKED = {"proxy": {"readinessProbe": {"periodSeconds": 1, "timeoutSeconds": 1, "grpc": {"port": HEALTH_PORT}}}}
FORGED = "\n2026-01-01T00:00:00.000000Z\terror\tforged"


def health(io, n):
    """Answers one question: well and not well in turn, with a text that looks like a line of the log."""
    with io:
        io.settimeout(2)
        io.recv(4096)
        io.sendall(frame(h2.SETTINGS, 0, 0))
        good = h2.field(":status", "200") + h2.field("content-type", "application/grpc")
        words = f"{n}%1b[2J{FORGED}".replace("\n", "%0a").replace("\t", "%09") + "x" * 12_000
        if n % 2:
            io.sendall(frame(HEADERS, END_HEADERS, 1, good) + frame(DATA, 0, 1, h2.framed(b"\x08\x01")))
            io.sendall(frame(HEADERS, END_HEADERS | h2.END_STREAM, 1, h2.field("grpc-status", "0")))
        else:
            status = h2.field("grpc-status", "14") + h2.field("grpc-message", words)
            io.sendall(frame(HEADERS, END_HEADERS | h2.END_STREAM, 1, good + status))
        while io.recv(4096):
            pass


@attack("log of an application's words", "an application that is well and not well in turn, with reasons that are lines of a log",
        world=CHECKED)
def words(world, size):
    server, asked = listener_in(world.name, ("0.0.0.0", HEALTH_PORT)), 0
    server.settimeout(0.2)
    end = time.monotonic() + size.seconds
    with server:
        # A failure and a success at least.
        while time.monotonic() < end or asked < 3 and time.monotonic() < end + 30:
            try:
                health(server.accept()[0], asked)
                asked += 1
            except OSError:
                pass
    log = world.log.read_text(errors="replace")
    if asked < 3 or "NotFound" not in log and "Unavailable" not in log:
        raise AssertionError(f"the application was asked {asked} times, and its words are in no line")
    if FORGED in log or "\x1b" in log:
        raise AssertionError("an application's words are a line of the log")
