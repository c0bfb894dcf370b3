"""An API server that means ill, and a gateway's Envoy that asks it for many secrets."""
import asyncio
import base64
import json
import socket
import ssl
import subprocess
import threading
import time

from . import h2
from .h2 import DATA, END_HEADERS, HEADERS, WINDOW, frame
from .registry import attack
from .world import listener_in

PORT = 16443
SOCKET = "var/run/ingress_gateway/sds"
ACCOUNT = "var/run/secrets/kubernetes.io/serviceaccount"
GOOD = "good"
# What answers for all names but the good one.
API = {"mood": None}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


def pem(world, name):
    return (world.dir / name).read_bytes()


def secret(world, name, version=b"1"):
    fields = {"tls.crt": pem(world, "api.crt"), "tls.key": pem(world, "api.key")}
    data = {field: base64.b64encode(value).decode() for field, value in fields.items()}
    return {"metadata": {"name": name, "resourceVersion": version.decode()}, "data": data}


def listed(world, name):
    return json.dumps({"metadata": {"resourceVersion": "1"}, "items": [secret(world, name)]}).encode()


async def answer(world, reader, writer):
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        name = head.split(b"metadata.name%3D")[1].split(b" ")[0].split(b"&")[0].decode()
        watch = b"watch=true" in head
        if API["mood"] and name != GOOD:
            await API["mood"](writer, name, watch)
        elif not watch:
            writer.write(OK + (listed(world, name) if name == GOOD else b'{"metadata":{"resourceVersion":"1"},"items":[]}'))
            await writer.drain()
        else:
            writer.write(OK)
            await writer.drain()
            await reader.read()
    except (OSError, asyncio.IncompleteReadError, ssl.SSLError):
        pass
    finally:
        writer.transport.abort()


def server(world):
    """Its certificate is its own root."""
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                    "-subj", "/CN=api", "-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE",
                    "-keyout", world.dir / "api.key", "-out", world.dir / "api.crt"], check=True, stderr=subprocess.DEVNULL)
    account = world.dir / ACCOUNT
    account.mkdir(parents=True)
    (account / "ca.crt").write_bytes(pem(world, "api.crt"))
    (account / "token").write_text("a-token-of-the-account")
    listener = listener_in(world.name, ("127.0.0.1", PORT))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(world.dir / "api.crt", world.dir / "api.key")

    async def serve():
        started = await asyncio.start_server(lambda r, w: answer(world, r, w), sock=listener, ssl=context, limit=1 << 16)
        async with started:
            await started.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()


WORLD = {"before": server, "env": {"ENABLE_INGRESS_GATEWAY_SDS": "true", "KUBERNETES_SERVICE_HOST": "localhost",
                                   "KUBERNETES_SERVICE_PORT": str(PORT)}}
NOTHING = b'{"metadata":{"resourceVersion":"1"},"items":[]}'


async def send(writer, *pieces, pause=0.0):
    for piece in pieces:
        if writer.transport.is_closing():
            raise ConnectionError("closed")
        writer.write(piece)
        await writer.drain()
        if pause:
            await asyncio.sleep(pause)


async def for_ever(writer, piece, pause=0.0):
    # Not beyond the attack, and so that others have a turn: a connection that is gone takes everything at once.
    while API["mood"]:
        await send(writer, piece, pause=pause)
        await asyncio.sleep(0)


def mood(of_list, of_watch=None):
    """What a list is answered by, and what a watch that follows an empty one."""
    async def play(writer, name, watch):
        if watch:
            await (of_watch or silent)(writer, name)
        elif of_list:
            await of_list(writer, name)
        else:
            await send(writer, OK, NOTHING)
    return play


async def silent(*_):
    await asyncio.sleep(3600)


async def unfinished_list(writer, _):
    await send(writer, OK, b'{"items":[{"x":"', b"a" * 4_000_000)
    await silent()


async def unfinished_event(writer, _):
    await send(writer, OK, b'{"type":"', b"a" * 4_000_000)
    await silent()


ITEMS = b'{"items":[' + b"{}," * 1_380_000 + b"{}]}"
FIELDS = b",".join(b'"%x":""' % n for n in range(380_000))


async def many_items(writer, _):
    await send(writer, OK, ITEMS)


async def many_fields(writer, name):
    await send(writer, OK, b'{"items":[{"metadata":{"name":"%s"},"data":{' % name.encode(), FIELDS, b"}}]}")


async def deep(writer, _):
    await send(writer, OK, b'{"items":' + b"[" * 2_000_000)


async def no_end(writer, _):
    await send(writer, OK)
    await for_ever(writer, b" " * 60_000)


async def drip(writer, _):
    await send(writer, OK)
    await for_ever(writer, b" ", 0.2)


async def endless_head(writer, _):
    await for_ever(writer, b"X-Pad: " + b"x" * 1000 + b"\r\n")


async def garbage(writer, _):
    await send(writer, OK, h2.noise(3000), b"\n")


def event(kind, name, more=b""):
    return b'{"type":"%s","object":{"metadata":{"name":"%s","resourceVersion":"2"}%s}}\n' % (kind, name.encode(), more)


async def gone(writer, name):
    await send(writer, OK, event(b"ERROR", name, b',"code":410'))


async def bookmarks(writer, name):
    await send(writer, OK)
    await for_ever(writer, event(b"BOOKMARK", name) * 500)


async def flaps(writer, name):
    await send(writer, OK)
    await for_ever(writer, (event(b"MODIFIED", name, b',"data":{"tls.crt":"YQ==","tls.key":"YQ=="}') + event(b"DELETED", name)) * 200)


async def ends(writer, _):
    await send(writer, OK)
    await for_ever(writer, b"\n" * 16_000)


async def many_fields_watched(writer, name):
    await send(writer, OK)
    await for_ever(writer, event(b"MODIFIED", name, b',"data":{' + FIELDS + b"}"), 0.1)


MOODS = {
    "silent": mood(silent), "lists of 4 MB without their end": mood(unfinished_list), "a million items": mood(many_items),
    "fields by the hundred thousand": mood(many_fields), "a deep list": mood(deep), "a list without end": mood(no_end),
    "lists that drip": mood(drip), "a head without end": mood(endless_head), "garbage": mood(garbage),
    "events of 4 MB without their end": mood(None, unfinished_event), "410 again and again": mood(None, gone),
    "bookmarks": mood(None, bookmarks), "secrets that come and go": mood(None, flaps), "empty lines": mood(None, ends),
    "watches that drip": mood(None, drip), "events of garbage": mood(None, garbage),
    "events of many fields": mood(None, many_fields_watched),
}

for label, play in MOODS.items():
    @attack(f"API server sends {label}", "an API server that means ill, and an Envoy that asks it for 80 secrets", world=WORLD,
            short=label in ("a million items", "events of 4 MB without their end"))
    def hostile(world, size, play=play):
        if not h2.served(world.dir / SOCKET, 10, GOOD.encode()):
            raise AssertionError("the good secret is not served before it is attacked")
        API["mood"] = play
        end = time.monotonic() + size.seconds
        try:
            asks(world, end)
        finally:
            API["mood"] = None
        if not h2.served(world.dir / SOCKET, 10, GOOD.encode()):
            raise AssertionError("the good secret is not served afterwards")


def asks(world, end):
    names = [b"s%d" % n for n in range(80)]
    while time.monotonic() < end:
        with h2.Conn(world.dir / SOCKET, timeout=0.5) as conn:
            try:
                for n in range(16):
                    conn.send(frame(HEADERS, END_HEADERS, 2 * n + 1, h2.request(h2.SDS_PATH)))
                    for name in names[5 * n:5 * n + 5]:
                        conn.send(frame(DATA, 0, 2 * n + 1, h2.secrets(name)))
                while time.monotonic() < end:
                    try:
                        kind, _, of, payload = conn.read()
                    except socket.timeout:  # TimeoutError since 3.10
                        if not h2.served(world.dir / SOCKET, 5, GOOD.encode()):
                            raise AssertionError("the good secret is not served beside it") from None
                        continue
                    if kind == DATA and payload:
                        more = len(payload).to_bytes(4, "big")
                        conn.send(frame(WINDOW, 0, 0, more), frame(WINDOW, 0, of, more))
            except OSError:
                time.sleep(0.05)
