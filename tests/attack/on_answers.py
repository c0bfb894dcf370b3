"""Applications whose answers are well formed and have no end: interim ones, chunks of a byte."""
import json
import threading

from .h2 import END_HEADERS, HEADERS, PING, SETTINGS, field, frame
from .neighbours import crowd
from .on_status import hold
from .registry import attack
from .world import listener_in

PORT, METRICS = 9020, 9021
PROBED = {"probers": {"/app-health/slow/livez": {"httpGet": {"path": "/", "port": PORT}, "timeoutSeconds": 1}}}
PROBE = b"GET /app-health/slow/livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
SCRAPED = {"env": {"ISTIO_PROMETHEUS_ANNOTATIONS": json.dumps({"scrape": "true", "path": "/m", "port": str(METRICS)})}}
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
# Each: why, what is said first, what is said again and again. Eighteen bytes are an interim answer, six a chunk.
ANSWERS = {
    "interim": ("answers that announce another one", b"", b"HTTP/1.1 100 A\r\n\r\n" * 20_000),
    "early hints": ("the same, with what is to be fetched meanwhile", b"",
                    b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n" * 10_000),
    "chunks of a byte": ("bodies in chunks of a byte", CHUNKED, b"1\r\na\r\n" * 50_000),
    "chunks with extensions": ("bodies in chunks that bring a kB of extensions each", CHUNKED, b"1;" + b"x" * 1000 + b"\r\na\r\n"),
    "lengths of zeros": ("chunks whose length is zeros without end", CHUNKED, b"0" * 60_000),
    "trailers": ("fields without end behind a body", CHUNKED + b"1\r\na\r\n0\r\n", b"X-A: b\r\n" * 10_000),
}


def application(world, port, first, again):
    """Says so to whoever asks at this port of the pod, until it is over."""
    listener, over = listener_in(world.name, ("0.0.0.0", port)), threading.Event()
    listener.settimeout(0.2)

    def tell(io):
        with io:
            try:
                io.settimeout(5)
                io.recv(65536)
                io.sendall(first)
                while not over.is_set():
                    io.sendall(again)
            except OSError:
                pass

    def serve():
        with listener:
            while not over.is_set():
                try:
                    io, _ = listener.accept()
                except OSError:
                    continue
                threading.Thread(target=tell, args=(io,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return over


for name, (why, first, again) in ANSWERS.items():
    @attack(f"probes answered by {name}", why, world=PROBED, short=name in ("interim", "lengths of zeros"))
    def probed(world, size, first=first, again=again):
        over = application(world, PORT, first, again)
        try:
            hold(world, 20, PROBE, True, size.seconds)
        finally:
            over.set()

    @attack(f"scrapes answered by {name}", why, world=SCRAPED, short=False)
    def scraped(world, size, first=first, again=again):
        over = application(world, METRICS, first, again)
        try:
            crowd(size, b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", half_read=True)
        finally:
            over.set()


ASKED = {"probers": {"/app-health/slow/livez": {"grpc": {"port": PORT}, "timeoutSeconds": 1}}}
FRAMES = {
    "interim answers": ("answers that announce another one", frame(HEADERS, END_HEADERS, 1, field(":status", "103")) * 500),
    "settings": ("settings without end", frame(SETTINGS, 0, 0) * 500),
    "pings": ("pings without end", frame(PING, 0, 0, b"12345678") * 500),
}

for name, (why, again) in FRAMES.items():
    @attack(f"gRPC probes answered by {name}", why, world=ASKED, short=name == "interim answers")
    def framed(world, size, again=again):
        over = application(world, PORT, frame(SETTINGS, 0, 0), again)
        try:
            hold(world, 200, PROBE, True, size.seconds)
        finally:
            over.set()
