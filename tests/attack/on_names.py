"""Name tables with hosts that no mesh has, and queries for them."""
import socket
import time

from .h2 import framed, part, pieces
from .on_dns import query
from .on_istiod import ROOM, under
from .on_tiny_fields import NAMES, TABLES, bounded, resource, response
from .registry import attack
from .world import ATTACKERS, POD

PORT = 15053


def table(name, *fields):
    """Of one host."""
    info = part(2, b"Kubernetes") + b"".join(fields)
    return response(NAMES, part(2, resource(NAMES, part(1, part(1, name) + part(2, info)))))


def pushed(message, then=lambda: None):
    """An istiod that pushes it three times, which takes a while each, and does nothing more."""
    def play(call):
        call.accept()
        call.pour((piece for _ in range(3) for piece in pieces(framed(message))), ROOM)
        then()
        while call.on():
            call.frame()
    return play


HOST = b"a.ns.svc.cluster.local"
LONG = {
    "other names": lambda: [part(5, b"%06d" % n + b"x" * 224) for n in range(98_000)],
    "a long name": lambda: [part(3, b"s" * 11_000_000), part(4, b"n" * 11_000_000)],
}

for name, fields in LONG.items():
    @attack(f"istiod pushes a host of {name}", "a name table whose one host has 23 MB of names", world=TABLES, short=False, readiness=False)
    def hostile(world, size, fields=fields):
        bounded(world, lambda: under(world, size, pushed(table(HOST, *fields())), patience=5))


@attack("DNS queries for a host of 90,000 addresses", "two thousand a second", world=TABLES, short=False, readiness=False)
def queries(world, size):
    addresses = [part(1, b"10.%d.%d.%d" % (n >> 16, n >> 8 & 255, n & 255)) for n in range(90_000)]
    asked = query(7, HOST)

    def flood():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as io:
            io.bind((ATTACKERS[0], 0))
            end = time.monotonic() + size.seconds
            while time.monotonic() < end:
                for _ in range(20):
                    io.sendto(asked, (POD, PORT))
                time.sleep(0.01)

    under(world, size, pushed(table(HOST, *addresses), flood), patience=5)
