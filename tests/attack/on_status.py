"""Attacks on the status port."""
import multiprocessing
import socket
import threading
import time
from pathlib import Path

from .registry import attack
from .world import ATTACKERS, KUBELET, POD, STATUS, connect, eventually, inside, send_on


def hold(world, amount, sent, many, seconds, refresh=True):
    """Keeps `amount` connections that have sent `sent`; what is closed comes again."""
    held, end = [], time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            kept = []
            for io in held:
                try:
                    if io.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK):
                        kept.append(io)
                        continue
                    io.close()
                except BlockingIOError:
                    kept.append(io)
                except OSError:
                    io.close()
            held = kept
            while len(held) < amount and refresh and time.monotonic() < end:
                try:
                    io = connect(ATTACKERS[len(held) % len(ATTACKERS)] if many else ATTACKERS[0], timeout=1)
                    io.sendall(sent)
                    # Else Python waits for the socket before it asks the kernel.
                    io.setblocking(False)
                    held.append(io)
                except OSError:
                    break
            time.sleep(0.02)
    finally:
        for io in held:
            io.close()


def holding(name, sent, why):
    for many in (False, True):
        @attack(f"status {name}, {'many addresses' if many else 'one address'}", why, short=many)
        def it(world, size, many=many):
            hold(world, size.connections // (10 if len(sent) > 10_000 else 1), sent, many, size.seconds)


holding("silent", b"", "connections that say nothing")
holding("first byte", b"G", "connections that send one byte and wait")
holding("half a head", b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\nX-A: ", "heads that never end")
# As long as a head may be, nearly; each client needs the network's whole width, so there are fewer.
holding("large heads", b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 980_000, "heads of nearly a megabyte that never end")
holding("large heads, answered", b"GET / HTTP/1.1\r\nHost: a\r\nX-A: " + b"a" * 980_000 + b"\r\n\r\n",
        "heads of nearly a megabyte on connections that stay")
holding("unread scrape", b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", "scrapes that nobody reads")
holding("half a body", b"POST /quitquitquit2 HTTP/1.1\r\nHost: a\r\nContent-Length: 60000\r\n\r\nx", "bodies that never end")


# The application's probe keeps its own pace; from elsewhere these pages are refused, which costs no less.
for page in ("debug/agentz", "debug/", "stats/prometheus?x=" + "y" * 3000):
    holding(f"unread {page.split('?')[0]}, pipelined", b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % page.encode() * 50,
            "pages by the dozen that nobody reads")


@attack("status heads byte by byte", "a byte every 20 ms on each connection")
def drip(world, size):
    text, held = b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\n" + b"X-Pad: y\r\n" * 1000, []
    for n in range(size.connections // 4):
        try:
            held.append(connect(ATTACKERS[n % 64], timeout=1))
            held[-1].setblocking(False)
        except OSError:
            break
    end, at = time.monotonic() + size.seconds, 0
    while time.monotonic() < end:
        for io in held:
            try:
                io.send(text[at % len(text):][:1], socket.MSG_DONTWAIT)
            except OSError:
                pass
        at += 1
        time.sleep(0.02)
    for io in held:
        io.close()


@attack("status pipelined", "requests by the thousand whose answers nobody reads")
def pipeline(world, size):
    request, end = b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n" * 200, time.monotonic() + size.seconds
    held = []
    while time.monotonic() < end and len(held) < size.connections // 4:
        try:
            io = connect(ATTACKERS[len(held) % 64], timeout=0.2)
            held.append(io)
            io.sendall(request)
        except OSError:
            time.sleep(0.05)
    time.sleep(max(0, end - time.monotonic()))
    for io in held:
        io.close()


@attack("status pipelined, a head a read", "requests of 4 kB that are there before others are answered, without end")
def reads(world, size):
    head = b"GET /x HTTP/1.1\r\nHost: a\r\nX-Pad: "
    text = (head + b"a" * (4092 - len(head)) + b"\r\n\r\n") * 16
    held, end = [], time.monotonic() + size.seconds
    while time.monotonic() < end:
        while len(held) < 400 and time.monotonic() < end:
            try:
                held.append([connect(ATTACKERS[len(held) % 64], timeout=0.5), b""])
                held[-1][0].setblocking(False)
            except OSError:
                break
        for one in list(held):
            try:
                rest = one[1] or text
                one[1] = rest
                one[1] = rest[one[0].send(rest):]
                if not one[0].recv(1 << 20):
                    raise ConnectionError("closed")
            except BlockingIOError:
                pass
            except OSError:
                one[0].close()
                held.remove(one)
    for io, _ in held:
        io.close()


def peak(world):
    """The most kilobytes that were resident."""
    status = Path(f"/proc/{world.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


@attack("status half heads given up at once", "thousands of clients in the midst of a head, which end in one moment")
def given_up(world, size):
    # The peak counts from here on.
    Path(f"/proc/{world.pid}/clear_refs").write_text("5")
    before, few, end = peak(world), world.figures()[1] + 50, time.monotonic() + size.seconds
    while time.monotonic() < end:
        # Its end closes all of them.
        client = multiprocessing.get_context("fork").Process(
            target=hold, args=(world, 2 * size.connections, b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\nX-A: ", True, 60))
        client.start()
        try:
            eventually("its connections are there", lambda: world.figures()[1] > few + size.connections)
            time.sleep(1)
        finally:
            client.kill()
            client.join()
        eventually("they are gone", lambda: world.figures()[1] < few)
    if peak(world) - before > 16 * 1024:
        raise AssertionError(f"memory has grown by {(peak(world) - before) >> 10} MB for a moment")


def slow_to_ask():
    """Whether a probe is answered that is sent 30 ms after its connection was there: its sender had no turn before."""
    try:
        with connect(KUBELET, timeout=1) as io:
            time.sleep(0.03)
            io.sendall(b"GET /app-health/app/livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return io.recv(100).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def newcomers(name, sent):
    @attack(f"status newcomers {name}, 256 descriptors", "two thousand a second where there are few places, and a prober that is slow to ask",
            world={"descriptors": 256}, short=not sent)
    def it(world, size):
        asked = answered = 0
        held, begun, count = [], time.monotonic(), 0
        over = threading.Event()

        def flood():
            nonlocal count
            while not over.is_set():
                time.sleep(max(0, begun + count / 2000 - time.monotonic()))
                count += 1
                try:
                    io = socket.socket()
                    io.setblocking(False)
                    io.bind((ATTACKERS[count % 64], 0))
                    io.connect_ex((POD, STATUS))
                    held.append(io)
                    if sent:
                        io.send(sent)
                except OSError:
                    pass
                if len(held) > 400:
                    held.pop(0).close()

        flooder = threading.Thread(target=flood, daemon=True)
        flooder.start()
        try:
            while time.monotonic() < begun + size.seconds:
                asked += 1
                answered += slow_to_ask()
        finally:
            over.set()
            flooder.join(5)
            for io in held:
                io.close()
        if answered < 0.99 * asked:
            raise AssertionError(f"{answered} of {asked} slow probes are answered")


for name, sent in (("silent", b""), ("half a head", b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\nX-A: ")):
    newcomers(name, sent)


def local(name, request, why, many=600):
    """Clients of this pod that read a byte now and then."""
    @attack(f"status {name}", why)
    def it(world, size):
        held, end = [], time.monotonic() + size.seconds

        def begin():
            while time.monotonic() < end and len(held) < many:
                try:
                    io = socket.socket()
                    io.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                    io.settimeout(2)
                    io.connect(("127.0.0.1", STATUS))
                    io.sendall(request)
                    io.setblocking(False)
                    held.append(io)
                except OSError:
                    time.sleep(0.01)

        beginning = threading.Thread(target=inside, args=(world.name, begin), daemon=True)
        beginning.start()
        while time.monotonic() < end:
            for io in list(held):
                try:
                    io.recv(64)
                except OSError:
                    pass
            time.sleep(0.05)
        beginning.join(5)
        for io in held:
            io.close()


for page, fields in (("debug/pprof/allocs", b""), ("debug/", b""), ("debug/agentz", b"Accept-Encoding: gzip\r\n")):
    local(f"{page} read slowly", b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (page.encode(), fields),
          "a page for people, by 600 clients of this pod that read a byte now and then")


@attack("status scrapes without time", "scrapes by the hundred on each connection, whose limit is over when they come")
def no_time(world, size):
    request = b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\nX-Prometheus-Scrape-Timeout-Seconds: 0\r\n\r\n" * 100
    hold(world, 500, request, True, size.seconds)


SMUGGLED = [
    ("CL and TE", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    ("two CL", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 30\r\n\r\n"),
    ("TE spelled oddly", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n"),
    ("TE twice", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, identity\r\n\r\n"),
    ("blank before the colon", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 3\r\n\r\nabc"),
    ("folded", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length:\r\n 3\r\n\r\nabc"),
    ("negative length", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"),
    ("huge chunk", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n"),
    ("NUL", b"GET /\0 HTTP/1.1\r\nHost: a\r\n\r\n"),
]
HIDDEN = b"GET /healthz/ready HTTP/1.1\r\nHost: hidden\r\nConnection: close\r\n\r\n"


@attack("status smuggling", "a second request hidden in the first one's body is never answered")
def smuggle(world, size):
    for name, raw in SMUGGLED:
        with connect(ATTACKERS[0], timeout=3) as io:
            io.sendall(raw + HIDDEN)
            got = b""
            try:
                while piece := io.recv(65536):
                    got += piece
            except OSError:
                pass
            if b"HTTP/1.1 200" in got:
                raise AssertionError(f"{name}: the hidden request was answered")


def streamed(name, head, more, why):
    """A body without an end, of which nothing is a piece."""
    @attack(f"status {name}", why)
    def it(world, size):
        request = b"POST /healthz/ready HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + head
        held, end = [], time.monotonic() + size.seconds
        while time.monotonic() < end:
            while len(held) < size.sockets // 50 and time.monotonic() < end:
                try:
                    held.append(connect(ATTACKERS[len(held) % 64], timeout=0.5))
                    held[-1].setblocking(False)
                    held[-1].send(request)
                except OSError:
                    break
            send_on(held, more)
            time.sleep(0.002)
        for io in held:
            io.close()


streamed("trailers without end", b"0\r\n", b"X-T: " + b"t" * 1000 + b"\r\n", "trailers as long as a head may be, on many connections")
streamed("lengths of zeros", b"", b"0" * 60_000, "lengths of chunks that are zeros without end")
