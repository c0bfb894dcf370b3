"""An istiod and a CA that mean ill by what they write: names of megabytes, ever new ones, statuses without measure."""
import itertools
from dataclasses import replace

from . import h2
from .h2 import CONTINUATION, END_HEADERS, END_STREAM, HEADERS, frame, framed, part, pieces
from .on_ca import CA, asked_for, hostile_for
from .on_ca import WORLD as OF_CA
from .on_istiod import HEAD, ROOM, TYPE, WORLD, Call, under
from .on_tiny_fields import BUNDLE, CONFIG, MODULES, WASM, bounded
from .registry import attack
from .world import POD

LONG = 10_000_000
HOST = b"http://%s:8081/" % POD.encode()
DELTA = h2.ADS_PATH.replace("StreamAggregated", "DeltaAggregated")


def response(type_url, *fields):
    """The type comes first, so that nobody has to guess it."""
    return part(4, type_url.encode()) + b"".join(fields) + part(1, b"1") + part(5, b"n")


def extension(name, type_url, value):
    return part(1, CONFIG.encode()) + part(2, part(1, name) + part(2, part(1, type_url.encode()) + part(2, value)))


def machine(*fields):
    return part(1, part(1, b"p") + part(3, part(1, b"v") + b"".join(fields)))


def module(name, place, seconds=30):
    uri = part(1, place) + part(3, b"\x08" + h2.varint(seconds))
    return extension(name, WASM, machine(part(3, part(2, part(1, uri) + part(2, b"nil")))))


def long(n, letter=b"\1"):
    """Of letters that are five times as long where a text is quoted."""
    return b"%d" % n + letter * LONG


def configs(*all_of_them):
    return response(CONFIG, *(part(2, one) for one in all_of_them))


VALUES = part(1, part(1, b"a") + part(2, part(6, b"\x0a\0" * (LONG // 2))))
GONE = [b"n" * 900 + b"%d" % k for k in range(3000)]
# Each: why, the agent's world, the message number n.
PUSHES = {
    "resources of long types": ("types of 10 MB in a response of trust bundles", WORLD, lambda n: response(BUNDLE, part(2, part(1, long(n))))),
    "extension configs of long types": ("types of 10 MB", MODULES, lambda n: configs(part(1, long(n)))),
    "extension configs of long names": ("names of 10 MB of what has no filter", MODULES, lambda n: configs(
        part(1, CONFIG.encode()) + part(2, part(1, long(n))))),
    "modules of long names": ("names of 10 MB, whose modules cannot be had", MODULES, lambda n: configs(module(long(n), HOST[:-5] + b"1/"))),
    "modules of long names that are there": ("names of 10 MB that all have the same module", MODULES, lambda n: configs(
        module(long(n, b"n"), HOST + b"module"))),
    "modules of ever new names": ("thousands of new names for one module", MODULES, lambda n: configs(
        *(module(b"%d.%d." % (n, k) + b"n" * 200, HOST + b"module") for k in range(8000)))),
    "modules at long places": ("URLs of 10 MB, which are all there", MODULES, lambda n: configs(
        module(b"m%d" % n, HOST + b"module?" + long(n, b"a")))),
    "structs of millions of values": ("a filter as a struct whose one field is a list of millions", MODULES, lambda _: configs(
        extension(b"e", TYPE + "udpa.type.v1.TypedStruct", part(1, WASM.encode()) + part(2, VALUES)))),
    "modules with millions of variables": ("a filter whose module is given millions of variables", MODULES, lambda _: configs(
        extension(b"e", WASM, machine(part(7, b"\x0a\0" * (LONG // 2)))))),
}


def series(*first, make):
    """One after the other, as fast as windows are opened."""
    def play(call):
        call.accept()
        every = itertools.chain(first, map(make, itertools.count()))
        call.pour((piece for one in every for piece in pieces(framed(one))), ROOM)
    return play


for name, (why, world, make) in PUSHES.items():
    @attack(f"istiod pushes {name}", why, world=world, short=name == "modules of long names")
    def hostile(world, size, make=make):
        bounded(world, lambda: under(world, size, series(make=make), patience=5))


@attack("istiod pushes removals beside a slow module", "ever new names of what is no more, while a module drips", world=MODULES, short=False)
def removals(world, size):
    slow = response(CONFIG, part(2, part(3, b"slow") + part(2, module(b"slow", HOST + b"drip", 3600))))
    play = series(slow, make=lambda n: response(CONFIG, *(part(6, b"%d" % n + name) for name in GONE)))
    bounded(world, lambda: under(world, size, play, patience=30, path=DELTA))


def ended(code, message, each):
    """With a status as long as frames of this size may hold."""
    def play(call):
        block = HEAD + h2.field("grpc-status", code) + h2.field("grpc-message", message)
        parts = [block[at:at + each] for at in range(0, len(block), each)]
        call.send(frame(HEADERS, END_STREAM, call.stream, parts[0]), *(
            frame(CONTINUATION, END_HEADERS if one is parts[-1] else 0, call.stream, one) for one in parts[1:]))
        call.over.wait(0.2)
    return play


for code, name in (("7", "a refusal"), ("13", "an error")):
    @attack(f"CA sends {name} of megabytes", "a status as long as it may be", world=OF_CA, identity=False, short=False)
    def refused(world, size, play=ended(code, "w" * 3_000_000, h2.PIECE)):
        hostile_for(world, lambda io: play(Call(io, CA["over"])), lambda: asked_for(world, max(size.seconds, 40)))


@attack("log of long statuses", "an istiod that ends each stream with a status as long as it may be", world=WORLD, short=False)
def statuses(world, size):
    # What lasts is told twice a minute.
    lasting = replace(size, seconds=max(size.seconds, 70))
    under(world, lasting, ended("14", b"%ff" * 70_000, 60_000))
