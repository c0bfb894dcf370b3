"""The folder of a gateway's secrets, written by somebody who means ill."""
import os
import shutil
import threading
import time

from . import h2
from .h2 import DATA, END_HEADERS, HEADERS, RST, WINDOW, frame
from .registry import attack

SOCKET = "var/run/ingress_gateway/sds"
WORLD = {"flags": ["--gateway-secrets-dir=gateway"], "folders": ["gateway"], "env": {"ENABLE_INGRESS_GATEWAY_SDS": "true"}}


def swapped(world, over):
    """A secret's folder is one thing after the other: a folder, a link in a circle, a pipe, a name that cannot be shown."""
    gateway, n = world.dir / "gateway", 0
    certificate = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    while not over.is_set():
        n += 1
        fresh = gateway / f".fresh{n}"
        fresh.mkdir()
        for field in ("tls.crt", "tls.key", "ca.crt"):
            to = fresh / field
            kind = n % 7
            if kind == 0:
                to.symlink_to(field)
            elif kind == 1:
                os.mkfifo(to)
            elif kind == 2:
                to.mkdir()
            elif kind == 3:
                to.symlink_to("/dev/zero")
            elif kind == 4 and n % 49 == 4:
                os.truncate(os.open(to, os.O_CREAT | os.O_WRONLY), 1 << 40)
            elif kind == 4:
                to.write_bytes(b"\0" * 2_000_000)
            elif kind == 5:
                to.symlink_to("/dev/full")
            else:
                to.write_bytes(certificate * (n % 500))
        (fresh / "\x1b[31m\n\r\0x01".replace("\0", "")).write_bytes(b"")
        old = gateway / f".old{n}"
        try:
            (gateway / "s1").rename(old)
        except OSError:
            pass
        fresh.rename(gateway / "s1")
        shutil.rmtree(old, ignore_errors=True)
        time.sleep(0.01)


@attack("folder of secrets swapped", "a hundred times a second a secret is links in a circle, pipes, devices, holes", world=WORLD)
def swaps(world, size):
    play(world, size, swapped)
    # Whoever waits in a pipe does not see this.
    (world.dir / "gateway/s1").mkdir()
    shutil.copy(world.dir / "var/run/secrets/istio/root-cert.pem", world.dir / "gateway/s1/ca.crt")
    if not h2.served(world.dir / SOCKET, 30, b"s1-cacert"):
        raise AssertionError("a good secret is not served afterwards")


def filled(world, over):
    gateway = world.dir / "gateway"
    (gateway / "s1").mkdir()
    for n in range(100_000):
        if over.is_set():
            break
        (gateway / ("s1" if n % 2 else ".") / f"n{n}\x1b[2J").touch()
    over.wait()


@attack("folder of secrets filled", "100,000 files in the folder and in a secret", world=WORLD, short=False)
def fills(world, size):
    play(world, size, filled)


def play(world, size, job):
    """Beside that a client asks for these secrets, by good names and bad ones."""
    over, errors = threading.Event(), []

    def run():
        try:
            job(world, over)
        except OSError as error:
            errors.append(error)

    writer = threading.Thread(target=run, daemon=True)
    writer.start()
    end = time.monotonic() + size.seconds
    names = [b"s1", b"s1-cacert", b"../s1", b"\x1b[31m", b"s" + b"1" * 3000]
    try:
        while time.monotonic() < end:
            with h2.Conn(world.dir / SOCKET, timeout=0.5) as conn:
                for n, name in enumerate(names):
                    conn.send(frame(HEADERS, END_HEADERS, 2 * n + 1, h2.request(h2.SDS_PATH)), frame(DATA, 0, 2 * n + 1, h2.secrets(name)))
                try:
                    while time.monotonic() < end:
                        kind, _, of, payload = conn.read()
                        if kind == DATA and payload:
                            more = len(payload).to_bytes(4, "big")
                            conn.send(frame(WINDOW, 0, 0, more), frame(WINDOW, 0, of, more))
                        if kind == RST:
                            break
                except OSError:
                    pass
    finally:
        over.set()
        writer.join(20)
        for name in os.listdir(world.dir / "gateway"):
            shutil.rmtree(world.dir / "gateway" / name, ignore_errors=True)
    if errors:
        raise AssertionError(f"the attack itself failed: {errors}")
