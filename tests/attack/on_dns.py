"""Attacks on the DNS proxy, over datagrams and over connections."""
import itertools
import socket
import threading
import time

from . import h2
from .h2 import framed, part, pieces
from .on_istiod import ROOM, TYPE, under
from .on_istiod import WORLD as HOSTILE
from .registry import attack
from .world import ATTACKERS, DNS, POD, connect, send_on

CAPTURE = {"ISTIO_META_DNS_CAPTURE": "true", "DNS_PROXY_ADDR": f"0.0.0.0:{DNS}"}
# On this port names are asked of the resolvers while there is no name table. An Envoy would be another user's there.
OWN_PORT = 53
FORWARDING = {"env": {**CAPTURE, "DNS_PROXY_ADDR": f"0.0.0.0:{OWN_PORT}", "ENVOY_EXTERNAL": "true"}, "ready": False,
              "silent_names": True}


def query(number, name):
    labels = b"".join(bytes([len(label)]) + label for label in name.split(b"."))
    return number.to_bytes(2, "big") + b"\1\0\0\1\0\0\0\0\0\0" + labels + b"\0\0\1\0\1"


@attack("DNS garbage", "datagrams that are no queries", world={
    "env": CAPTURE, "ready": False}, readiness=False)
def dns(world, size):
    end = time.monotonic() + size.seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as io:
        io.bind((ATTACKERS[0], 0))
        while time.monotonic() < end:
            for n in range(200):
                io.sendto(h2.noise(n * 7), (POD, DNS))
            time.sleep(0.001)


def ask_elsewhere(size, room=b""):
    """Names of elsewhere by the thousand; `room`: what stands behind each question."""
    end, n = time.monotonic() + size.seconds, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as io:
        io.bind((ATTACKERS[0], 0))
        while time.monotonic() < end:
            for _ in range(200):
                n += 1
                question = bytearray(query(n % 65536, b"n%d.nowhere.test" % n))
                question[11] = bool(room)
                io.sendto(bytes(question) + room, (POD, OWN_PORT))
            time.sleep(0.002)


@attack("DNS queries without an answer", "names of elsewhere by the thousand, and a resolver that never answers",
        world=FORWARDING, readiness=False)
def unanswered(world, size):
    ask_elsewhere(size)


@attack("DNS answers to others", "queries that have room for 64 kB, and a resolver that says as much, with the ID of another",
        world=FORWARDING, readiness=False)
def to_others(world, size):
    over = threading.Event()

    def answer():
        world.hole.settimeout(0.2)
        while not over.is_set():
            try:
                asked, to = world.hole.recvfrom(65536)
                # Its question, as an answer, and bytes that nobody reads.
                head = bytes([asked[0] ^ 1, asked[1], 0x81, 0x80]) + asked[4:10] + b"\0\0"
                world.hole.sendto((head + asked[12:]).ljust(65_000, b"\0"), to)
            except OSError:
                pass

    resolver = threading.Thread(target=answer, daemon=True)
    resolver.start()
    try:
        # OPT, with a size of 65,535.
        ask_elsewhere(size, b"\0\0\x29\xff\xff" + b"\0" * 6)
    finally:
        over.set()
        resolver.join(5)
        world.hole.settimeout(None)


@attack("DNS garbage, TCP", "messages that are no queries, lengths that are none, connections that wait", world={
    "env": CAPTURE, "ready": False}, readiness=False)
def dns_tcp(world, size):
    end, held = time.monotonic() + size.seconds, []
    while time.monotonic() < end:
        try:
            io = connect(ATTACKERS[len(held) % 64], DNS, timeout=0.5)
            held.append(io)
            for n in range(20):
                io.sendall((n * 300).to_bytes(2, "big") + h2.noise(n * 300 // (1 + n % 3)))
        except OSError:
            time.sleep(0.01)
        if len(held) > size.connections:
            held.pop(0).close()
    for io in held:
        io.close()


QUERY = query(7, b"somebody.test")
FRAMED = len(QUERY).to_bytes(2, "big") + QUERY


def read_answer(io):
    """The next message over a connection."""
    got = b""
    while len(got) < 2 or len(got) < 2 + int.from_bytes(got[:2], "big"):
        piece = io.recv(65536)
        if not piece:
            raise ConnectionError("closed without an answer")
        got += piece
    return got[2:]


def asked():
    """Whether a query over a connection is answered (without a name table: that it failed), from the same address as
    the flood: in a pod all have one. In 5 s, as long as a resolver of libc waits: where the kernel had no place for a
    connection, it is tried again after one second and after three."""
    with connect(ATTACKERS[0], DNS, timeout=5) as io:
        io.sendall(FRAMED)
        return read_answer(io)[:2] == QUERY[:2]


LEAST = 5


def held(sent):
    def play(world, size):
        over, figures, held, end = threading.Event(), [0, 0], [], time.monotonic() + size.seconds
        if not asked():
            raise AssertionError("a query has no answer before anything is attacked")

        def ask():
            while not over.wait(0.05):
                figures[0] += 1
                try:
                    figures[1] += asked()
                except OSError:
                    pass

        asker = threading.Thread(target=ask, daemon=True)
        asker.start()
        try:
            # In a few seconds of a busy machine there may be too few queries to tell.
            while time.monotonic() < end or figures[0] < LEAST and time.monotonic() < end + 30:
                try:
                    held.append(connect(ATTACKERS[0], DNS, timeout=1))
                    held[-1].setblocking(False)
                    held[-1].send(sent)
                except OSError:
                    time.sleep(0.01)
                if len(held) > size.connections:
                    held.pop(0).close()
                    time.sleep(0.005)
        finally:
            over.set()
            asker.join(10)
            for io in held:
                io.close()
        # A busy machine may cost one.
        if figures[0] < LEAST or figures[0] - figures[1] > max(1, 0.01 * figures[0]):
            raise AssertionError(f"{figures[1]} of {figures[0]} queries are answered")
    return play


for name, sent, why in (
    ("silent", b"", "connections that say nothing"),
    ("half a length", b"\0", "connections that send the first byte of a length"),
    ("half a query", b"\xff\xff" + FRAMED, "messages of 64 kB that never end"),
    ("unread", FRAMED * 500, "queries by the hundred whose answers nobody reads"),
):
    @attack(f"DNS over TCP {name}", why, world={"env": CAPTURE, "ready": False}, readiness=False, short=name in ("silent", "unread"))
    def it(world, size, play=held(sent)):
        play(world, size)


@attack("DNS over TCP queries without end", "queries by the hundred on each of hundreds of connections, that come again",
        world={"env": CAPTURE, "ready": False}, readiness=False, short=False)
def endless(world, size):
    held, end = [], time.monotonic() + size.seconds
    while time.monotonic() < end:
        while len(held) < size.connections // 8 and time.monotonic() < end:
            try:
                held.append(connect(ATTACKERS[len(held) % 64], DNS, timeout=0.5))
                held[-1].setblocking(False)
            except OSError:
                break
        send_on(held, FRAMED * 500)
    for io in held:
        io.close()


NAMES = TYPE + "istio.networking.nds.v1.NameTable"
HOSTS, CLIENTS, EVERY = 2000, 20, 0.05


def host(n):
    return b"host-%d.ns.svc.cluster.local" % n


def entry(n, address):
    return part(1, part(1, host(n)) + part(2, part(1, address)))


def tables(call, there):
    """Twenty name tables a second, in each of which the first host has a later address; says when some are there."""
    rest = b"".join(entry(n, b"10.1.%d.%d" % divmod(n, 256)) for n in range(1, HOSTS))

    def stream():
        for n in itertools.count(1):
            table = part(1, NAMES.encode()) + part(2, entry(0, b"10.2.%d.%d" % divmod(n, 256)) + rest)
            yield from pieces(framed(part(1, b"%d" % n) + part(2, table) + part(4, NAMES.encode()) + part(5, b"n")))
            time.sleep(EVERY)
            if n == 5:
                there.set()

    call.accept()
    call.pour(stream(), ROOM)


def exchange(io, over_tcp, asked):
    """What answers it."""
    if not over_tcp:
        io.send(asked)
        return io.recv(65536)
    io.sendall(len(asked).to_bytes(2, "big") + asked)
    return read_answer(io)


def client(number, there, over, figures, wrong):
    """Asks again and again: each name has an address in each table, and that of the first never goes back."""
    over_tcp, last = number % 2, b""
    there.wait()
    while not over.is_set():
        try:
            with connect(ATTACKERS[number % 64], DNS) if over_tcp else socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as io:
                io.settimeout(2)
                if not over_tcp:
                    io.connect((POD, DNS))
                # No connection takes more than 128.
                for n in range(100):
                    if over.is_set():
                        return
                    got = exchange(io, over_tcp, query(n, host(n % 2 * (number + 1))))
                    address, figures[number] = got[-4:], figures[number] + 1
                    if got[3] & 15 or got[6:8] != b"\0\1" or n % 2 == 0 and address < last:
                        wrong.append(got[:8] + address)
                    last = address if n % 2 == 0 else last
                    time.sleep(0.01)
        except OSError as error:
            wrong.append(error)


@attack("DNS tables that change", "twenty name tables a second, while clients ask over both", readiness=False,
        world={"env": {**HOSTILE["env"], **CAPTURE}, "ready": False})
def changing(world, size):
    there, over, figures, wrong = threading.Event(), threading.Event(), [0] * CLIENTS, []
    for n in range(CLIENTS):
        threading.Thread(target=client, args=(n, there, over, figures, wrong), daemon=True).start()
    try:
        under(world, size, lambda call: tables(call, there), patience=60)
    finally:
        over.set()
        there.set()
    if wrong or not sum(figures):
        raise AssertionError(f"{len(wrong)} of {sum(figures)} answers are wrong: {wrong[:3]}")
