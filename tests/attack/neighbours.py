"""Neighbours that misbehave: the application, istiod, Envoy, the disk, the kernel's limits, who asks for names."""
import json
import os
import signal
import subprocess
import threading
import time

from . import h2
from .hung import hung
from .on_status import hold
from .registry import attack
from .world import ATTACKERS, POD, SDS, XDS, App, connect, listener_in, run

for mood in ("silent", "endless head", "endless body", "garbage", "to itself"):
    @attack(f"application {mood}", "an application that answers its probes like this", liveness=False)
    def hostile(world, size, mood=mood):
        App.mood = mood
        try:
            end = time.monotonic() + size.seconds
            while time.monotonic() < end:
                try:
                    with connect(ATTACKERS[0], timeout=3) as io:
                        io.sendall(b"GET /app-health/app/livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                        while io.recv(65536):
                            pass
                except OSError:
                    pass
        finally:
            App.mood = "well"


for mood in ("silent", "drip", "endless", "endless line", "endless head", "garbage", "bomb"):
    @attack(f"application's metrics {mood}", "an application that answers scrapes like this, and scrapers from many addresses",
            short=mood in ("endless", "endless line"))
    def metrics(world, size, mood=mood):
        App.mood = f"metrics {mood}"
        crowd(size, b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", half_read=True)


def crowd(size, request, half_read=False):
    """Connections from many addresses that send `request` and stay; the application is well again afterwards."""
    held, end = [], time.monotonic() + size.seconds
    try:
        while time.monotonic() < end:
            try:
                held.append(connect(ATTACKERS[len(held) % 64], timeout=0.5))
                held[-1].sendall(request)
                held[-1].setblocking(not half_read)
            except OSError:
                pass
            for io in held[::2] if half_read else ():
                try:
                    io.recv(1 << 20)
                except OSError:
                    pass
            # As fast as it can be it were a flood of requests, and nothing of the application's.
            time.sleep(0.02)
            if len(held) > size.connections // 10:
                held.pop(0).close()
    finally:
        App.mood = "well"
        for io in held:
            io.close()


HANGS = {"probers": {"/app-health/slow/livez": {"httpGet": {"path": "/", "port": 9020}, "timeoutSeconds": 30}}}


def applications(world, ports, answer):
    """Applications on these ports of the pod; each says `answer` to whoever asks, and stays."""
    listeners = [listener_in(world.name, ("0.0.0.0", port)) for port in ports]
    over = threading.Event()

    def serve(listener):
        listener.settimeout(0.2)
        held = []
        while not over.is_set():
            try:
                io, _ = listener.accept()
            except OSError:
                continue
            held.append(io)
            threading.Thread(target=tell, args=(io,), daemon=True).start()
        for io in [*held, listener]:
            io.close()

    def tell(io):
        try:
            io.recv(65536)
            io.sendall(answer)
        except OSError:
            pass

    for listener in listeners:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    return over


for descriptors in (256, 1024):
    @attack(f"slow probes, {descriptors} descriptors", "probes by the thousand of an application that does not answer",
            world={**HANGS, "descriptors": descriptors}, short=descriptors == 1024)
    def slow(world, size):
        over = applications(world, [9020], b"")
        try:
            hold(world, size.connections, b"GET /app-health/slow/livez HTTP/1.1\r\nHost: a\r\n\r\n", True, size.seconds)
        finally:
            over.set()


for name, sent in (("silent", b""), ("half a head", b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\nX-A: ")):
    @attack(f"status {name}, 256 descriptors", "the same against an agent that may open few", world={"descriptors": 256},
            short=False)
    def few_places(world, size, sent=sent):
        hold(world, size.connections, sent, True, size.seconds)


@attack("probes with heads of a megabyte", "probes of an application whose answers are nearly all head", world=HANGS, short=False)
def large_heads(world, size):
    over = applications(world, [9020], b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 1_000_000)
    try:
        hold(world, 400, b"GET /app-health/slow/livez HTTP/1.1\r\nHost: a\r\n\r\n", True, size.seconds)
    finally:
        over.set()


PLACES = [{"path": "/m", "port": str(port)} for port in range(9010, 9014)]


@attack("four applications' metrics of 10 MB", "scrapes from many addresses that hold what cannot be passed on at once",
        world={"env": {"ISTIO_PROMETHEUS_ANNOTATIONS": json.dumps({"scrape": "true", "targets": PLACES})}}, short=False)
def four(world, size):
    lines = b"a_series 1\n" * 900_000
    over = applications(world, range(9010, 9014), b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(lines) + lines)
    try:
        crowd(size, b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", half_read=True)
    finally:
        over.set()


@attack("log of scrapers' limits", "a header that is no number, long, once a request", short=False)
def limits(world, size):
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        try:
            with connect(ATTACKERS[0], timeout=2) as io:
                io.sendall(b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                           b"X-Prometheus-Scrape-Timeout-Seconds: " + b"x" * 60_000 + b"\r\n\r\n")
                while io.recv(65536):
                    pass
        except OSError:
            pass


def stopped(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@attack("istiod stands still", "SIGSTOP of istiod")
def istiod(world, size):
    stopped(world.istiod.pid, size.seconds)


@attack("Envoy stands still", "SIGSTOP of Envoy", readiness=False)
def envoy(world, size):
    stopped(world.envoy(), size.seconds)


@attack("application stands still", "an application whose listener is full", liveness=False)
def application(world, size):
    App.mood = "silent"
    crowd(size, b"GET /app-health/app/livez HTTP/1.1\r\nHost: a\r\n\r\n")


MODULES = {
    "garbage": f"http://{POD}:8081/garbage", "endless module": f"http://{POD}:8081/endless",
    "drip": f"http://{POD}:8081/drip", "to itself": f"http://{POD}:8081/again", "bomb": f"http://{POD}:8081/bomb",
    "endless head": f"http://{POD}:8081/head", "hostile challenge": f"oci://{POD}:8081/a/b:1",
    "endless manifest": f"oci://{POD}:8081/endless/b:1", "deep manifest": f"oci://{POD}:8081/deep/b:1",
}


def wasm(name, place):
    """A filter whose module is fetched from `place`, as mock-istiod reads it."""
    remote = {"http_uri": {"uri": place, "timeout": "3s"}, "sha256": "nil"}
    filter_ = {"@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm", "config": {
        "name": name, "fail_open": True, "vm_config": {"vm_id": name, "code": {"remote": remote}}}}
    return {"@type": ECDS, "name": name, "typed_config": filter_}


ECDS = "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"


@attack("hostile registries", "modules without end, bombs, drips, circles, challenges and manifests that mean ill", world={
    "resources": [wasm(name, place) for name, place in MODULES.items()], "modules": True,
    "env": {"WASM_INSECURE_REGISTRIES": "*", "ISTIO_WASM_MAX_BINARY_SIZE_BYTES": "8388608", "WASM_HTTP_REQUEST_TIMEOUT": "2s"}})
def registries(world, size):
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        for name in MODULES:
            if time.monotonic() > end:
                break
            try:
                with h2.Conn(world.dir / XDS, timeout=2) as conn:
                    ask = h2.message((2, h2.NODE), (3, name.encode()), (4, ECDS.encode()))
                    conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, ask))
                    while conn.read()[0] != h2.DATA:
                        pass
            except OSError:
                pass


@attack("64 descriptors", "a flood against an agent that may open 64", world={"descriptors": 64}, readiness=False,
        liveness=False, identity=False)
def few(world, size):
    hold(world, 200, b"G", False, size.seconds)


# In the agent's own namespace: where mounts are private, nothing that is mounted elsewhere gets there.
FULL = ('cp -a "$1" "$1.kept" && mount -t tmpfs -o size=64k,mode=0777 tmpfs "$1" && cp -a "$1.kept/." "$1" && '
        'cat /dev/zero > "$1/filler"; test -s "$1/filler"')


def disk(world):
    """What is in the folder of OUTPUT_CERTS, on a disk without room, as the agent sees it."""
    run("nsenter", f"--mount=/proc/{world.pid}/ns/mnt", "sh", "-c", FULL, "sh", str(world.dir / "out"))


@attack("full disk", "OUTPUT_CERTS on a disk without room, while certificates are renewed", world={
    "env": {"OUTPUT_CERTS": "out", "SECRET_TTL": "8s"}, "out": True, "istiod_flags": ["--ttl", "8s"]})
def full(world, size):
    disk(world)
    # At half its life a certificate is renewed.
    end = time.monotonic() + max(size.seconds, 7)
    while time.monotonic() < end:
        if not h2.served(world.dir / SDS, 5):
            raise AssertionError("a full disk keeps certificates from Envoy")
        time.sleep(0.2)
    if "No space left" not in world.log.read_text(errors="replace"):
        raise AssertionError("the agent has not met the full disk")


FOLDERS = ["var/run/secrets/tokens", "var/run/secrets/istio", "var/run/secrets/workload-spiffe-uds", "etc/istio/proxy", "out"]


# Readiness too: Envoy's answers do not come from a disk.
@attack("disks stand still", "a file system that never answers over token, root, sockets, Envoy's folder and OUTPUT_CERTS",
        world={"env": {"OUTPUT_CERTS": "out", "SECRET_TTL": "30s"}, "out": True}, identity=False)
def disks(world, size):
    # An open connection needs no folder.
    with h2.Conn(world.dir / SDS, timeout=10) as conn, hung(world.pid, *(world.dir / folder for folder in FOLDERS)):
        # A certificate of 30 s is renewed meanwhile; looks come every few seconds.
        end, streams = time.monotonic() + max(size.seconds, 6), iter(range(1, 2**31, 2))
        while time.monotonic() < end:
            s = next(streams)
            conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, s, h2.request(h2.SDS_PATH)), h2.frame(h2.DATA, 0, s, h2.secrets()))
            try:
                while (got := conn.read())[0] != h2.DATA or got[2] != s:
                    pass
            except OSError as error:
                raise AssertionError(f"a client that is there is given no certificate: {error}") from error
            conn.send(h2.frame(h2.WINDOW, 0, 0, len(got[3]).to_bytes(4, "big")))
            conn.send(h2.frame(h2.RST, 0, s, b"\0\0\0\x08"))
            time.sleep(0.2)


def read_only(pid, folder, undo=False):
    """Lays the folder over itself, as the process sees it, so that nothing in it can be changed."""
    enter = ["nsenter", f"--mount=/proc/{pid}/ns/mnt"]
    if undo:
        run(*enter, "umount", "--lazy", str(folder))
        return
    run(*enter, "mount", "--bind", str(folder), str(folder))
    run(*enter, "mount", "-o", "remount,bind,ro", str(folder))


@attack("read-only disks", "OUTPUT_CERTS, Envoy's folder and that of the modules take nothing any more", world={
    "resources": [wasm("well", f"http://{POD}:8081/module")], "modules": True, "out": True,
    "env": {"OUTPUT_CERTS": "out", "SECRET_TTL": "30s", "ISTIO_WASM_INSECURE_REGISTRIES": "*"}})
def unwritable(world, size):
    ask = h2.message((2, h2.NODE), (3, b"well"), (4, ECDS.encode()))
    folders, end = [world.dir / "out", world.dir / "etc/istio/proxy", "/var/lib/istio/data"], time.monotonic() + max(size.seconds, 6)
    for folder in folders:
        read_only(world.pid, folder)
    try:
        while time.monotonic() < end:
            if not h2.served(world.dir / SDS, 5):
                raise AssertionError("a read-only disk keeps certificates from Envoy")
            try:
                with h2.Conn(world.dir / XDS, timeout=10) as conn:
                    conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, ask))
                    while conn.read()[0] != h2.DATA:
                        pass
            except OSError as error:
                raise AssertionError(f"a read-only disk keeps configuration from Envoy: {error}") from error
            time.sleep(0.2)
    finally:
        for folder in folders:
            read_only(world.pid, folder, undo=True)


for mood in ("half head", "endless head", "endless body", "drip"):
    @attack(f"Envoy's statistics {mood}", "an Envoy that answers scrapes like this, and scrapers that read half", short=mood == "endless body",
            world={"env": {"PILOT_AGENT_MERGE_ENVOY_STATS": "true", "FAKE_ENVOY": json.dumps({"ill": {"/stats/prometheus": mood}})}})
    def statistics(world, size):
        crowd(size, b"GET /stats/prometheus HTTP/1.1\r\nHost: a\r\n\r\n", half_read=True)


@attack("folder of modules stands still", "a file system that never answers over the modules, while modules are asked for", world={
    "resources": [wasm("well", f"http://{POD}:8081/module")], "modules": True,
    "env": {"WASM_PURGE_INTERVAL": "1s", "WASM_MODULE_EXPIRY": "1s", "ISTIO_WASM_INSECURE_REGISTRIES": "*"}})
def modules(world, size):
    def ask(name=b"well"):
        with h2.Conn(world.dir / XDS, timeout=2) as conn:
            ask = h2.message((2, h2.NODE), (3, name), (4, ECDS.encode()))
            conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, ask))
            while conn.read()[0] != h2.DATA:
                pass
    # One is there, and is purged when it is not asked for.
    ask()
    with hung(world.pid, "/var/lib/istio/data"):
        end = time.monotonic() + max(size.seconds, 6)
        while time.monotonic() < end:
            try:
                ask()
            except OSError:
                pass


@attack("resolver stands still", "a name server that never answers, while probes and modules ask for names", world={
    "resources": [wasm(f"n{n}", f"http://n{n}.nowhere.test/m") for n in range(20)], "silent_names": True,
    "probers": {f"/app-health/n{n}/livez": {"httpGet": {"host": f"n{n}.nowhere.test", "path": "/", "port": 1}, "timeoutSeconds": 1}
                for n in range(40)}})
def resolver(world, size):
    end, held, n = time.monotonic() + max(size.seconds, 6), [], 0
    while time.monotonic() < end:
        try:
            held.append(connect(ATTACKERS[n % 64], timeout=0.5))
            held[-1].sendall(b"GET /app-health/n%d/livez HTTP/1.1\r\nHost: a\r\n\r\n" % (n % 40))
            with h2.Conn(world.dir / XDS, timeout=0.2) as conn:
                ask = h2.message((2, h2.NODE), (3, b"n%d" % (n % 20)), (4, ECDS.encode()))
                conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, ask))
        except OSError:
            pass
        n += 1
        threads = world.figures()[2]
        if threads > 20:
            raise AssertionError(f"{threads} threads wait for names")
        time.sleep(0.02)
        if len(held) > 60:
            held.pop(0).close()
    for io in held:
        io.close()
