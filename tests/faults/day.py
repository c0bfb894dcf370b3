"""One day of an agent, in a few seconds: it starts, renews its certificate, relays a push, drains and ends.

Its neighbours are mock-istiod and the stand-in for Envoy; Envoy's two streams are played here. Whatever call is made to
fail meanwhile, within `LIMIT` every step has come true, or the agent has ended by itself and said why.
"""
import atexit
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from tests.attack import h2

from .inject import Injector

ROOT = Path(__file__).resolve().parents[2]
SDS, XDS = "var/run/secrets/workload-spiffe-uds/socket", "etc/istio/proxy/XDS"
CLUSTER = "type.googleapis.com/envoy.config.cluster.v3.Cluster"
LIMIT = 60.0
LINES = 3000
PHASES = ("start", "renewal", "push", "drain")


class Hang(Exception):
    """A step has not come true."""


class NoDay(Exception):
    """Istiod does not run, and says why. No fault of the agent's."""


class Wrong(Exception):
    """Something that must not be."""


def fields(data):
    """The fields of a protobuf message that are bytes, as number and value."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 2:
            length = varint()
            yield key >> 3, data[at:at + length]
            at += length
        elif key & 7 == 0:
            varint()
        else:
            at += 8 if key & 7 == 1 else 4


def first(data, *path):
    for number in path:
        data = next((value for n, value in fields(data) if n == number), b"")
    return data


class Stream(threading.Thread):
    """Envoy's side of a stream: asks, confirms, and comes again when the stream ends."""

    def __init__(self, socket_path, method, type_url, names, took):
        super().__init__(daemon=True)
        self.path, self.method, self.type_url, self.names, self.took = socket_path, method, type_url, names, took
        self.over = threading.Event()
        self.start()

    def run(self):
        while not self.over.is_set():
            try:
                with h2.Conn(self.path, timeout=0.5) as conn:
                    self.talk(conn)
            except (OSError, IndexError):
                self.over.wait(0.1)

    def ask(self, *more):
        node = (2, h2.NODE)
        return h2.message(node, *[(3, name) for name in self.names], (4, self.type_url.encode()), *more)

    def talk(self, conn):
        conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(self.method)), h2.frame(h2.DATA, 0, 1, self.ask()))
        got = b""
        while not self.over.is_set():
            try:
                kind, flags, _, payload = conn.read()
            except socket.timeout:  # TimeoutError since 3.10
                continue
            if kind == h2.SETTINGS and not flags & h2.ACK:
                conn.send(h2.frame(h2.SETTINGS, h2.ACK, 0))
            elif kind == h2.PING and not flags & h2.ACK:
                conn.send(h2.frame(h2.PING, h2.ACK, 0, payload))
            elif kind in (h2.RST, h2.GOAWAY) or (kind == h2.HEADERS and flags & h2.END_STREAM):
                raise ConnectionError("ended")
            elif kind == h2.DATA:
                got += payload
                window = len(payload).to_bytes(4, "big")
                if payload:
                    conn.send(h2.frame(h2.WINDOW, 0, 0, window), h2.frame(h2.WINDOW, 0, 1, window))
                while len(got) >= 5 and len(got) >= 5 + int.from_bytes(got[1:5], "big"):
                    length = int.from_bytes(got[1:5], "big")
                    answer, got = got[5:5 + length], got[5 + length:]
                    self.took(answer)
                    conn.send(h2.frame(h2.DATA, 0, 1, self.ask((1, first(answer, 1)), (5, first(answer, 5)))))


def whole(chain, key, where):
    """A chain and its key belong together, or somebody was given half a secret."""
    if not chain or not key:
        raise Wrong(f"half a secret in {where}: {len(chain)} bytes of chain, {len(key)} of key")
    with tempfile.NamedTemporaryFile() as one, tempfile.NamedTemporaryFile() as two:
        one.write(chain)
        two.write(key)
        one.flush()
        two.flush()
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(one.name, two.name)
        except (ssl.SSLError, OSError) as error:
            raise Wrong(f"a chain without its key in {where}: {error}") from None


# Below the range that the kernel hands to clients: one that knocks on a port nobody has may be given just that.
PORTS = range(10_000, 32_000)


def take_share(taken, shares):
    """Days go on beside each other, each in a process of its own: none is given a port that another has chosen."""
    global PORTS
    with taken.get_lock():
        index, taken.value = taken.value, taken.value + 1
    PORTS = PORTS[index % shares::shares]


def free_port():
    while True:
        port = random.choice(PORTS)
        with socket.socket() as io:
            try:
                io.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Day:
    """`plan`: which calls fail; `steps`: seconds the wall clock jumps, by phase, in place of failing calls."""

    def __init__(self, agent, istiod, plan=(), steps=None):
        self.dir = Path(tempfile.mkdtemp(prefix="faults-"))
        self.processes, self.injector, self.streams, self.wrong = [], None, [], []
        self.chains, self.pushed, self.fds, self.steps = [], set(), 0, steps or {}
        self.agent_binary, self.istiod_binary, self.plan = Path(agent).resolve(), Path(istiod).resolve(), plan

    def put(self, name, text):
        path = self.dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".fresh")
        fresh.write_text(text)
        fresh.rename(path)

    def cluster(self, name):
        self.put("resources/cluster.yaml", f'{{"@type": {CLUSTER}, name: {name}, type: STATIC, connect_timeout: 1s}}\n')

    def start(self):
        ports = {}
        for name in ("istiod", "status", "admin", "ready", "prometheus"):
            # Nobody has bound the others yet.
            while (port := free_port()) in ports.values():
                pass
            ports[name] = port
        self.ports = ports
        self.cluster("one")
        (self.dir / "home/out").mkdir(parents=True)
        (self.dir / "home/var/run/secrets/istio").mkdir(parents=True)
        (self.dir / "home/var/run/secrets/tokens").mkdir(parents=True)
        root, token = "home/var/run/secrets/istio/root-cert.pem", "home/var/run/secrets/tokens/istio-token"
        if self.steps:
            self.put("clock-offset", str(self.steps.get("start", 0)))
        # One machine, one clock: what istiod signs is of the same time.
        clock = {"LD_PRELOAD": clock_library(), "CLOCK_OFFSET_FILE": str(self.dir / "clock-offset")} if self.steps else {}
        with (self.dir / "istiod.log").open("wb") as log:
            self.istiod = subprocess.Popen(
                [self.istiod_binary, "--listen", f"127.0.0.1:{ports['istiod']}", "--ttl", "60s", "--resources", self.dir / "resources",
                 "--write-root", self.dir / root, "--write-token", f"{self.dir / token}=ns/sa"],
                stdout=subprocess.DEVNULL, stderr=log, env={**os.environ, **clock})
        self.processes.append(self.istiod)
        try:
            self.until("istiod runs", lambda: self.istiod.poll() is not None or (
                (self.dir / root).exists() and (self.dir / token).exists() and open_port(ports["istiod"])))
        except Hang as error:
            raise NoDay(self.istiod_says(str(error))) from error
        if self.istiod.poll() is not None:
            raise NoDay(self.istiod_says(f"istiod has ended with status {self.istiod.returncode}"))
        config = {"discoveryAddress": f"localhost:{ports['istiod']}", "statusPort": ports["status"], "proxyAdminPort": ports["admin"],
                  "binaryPath": str(ROOT / "tests/support/fake_envoy.py"), "terminationDrainDuration": "0.2s"}
        env = {"PATH": os.environ["PATH"], "POD_NAME": "pod", "POD_NAMESPACE": "ns", "SERVICE_ACCOUNT": "sa",
               "INSTANCE_IP": "127.0.0.1", "TRUST_DOMAIN": "cluster.local", "ISTIO_META_CLUSTER_ID": "Kubernetes",
               "PROXY_CONFIG": json.dumps(config), "FAKE_ENVOY": "{}", "OUTPUT_CERTS": "out", "SECRET_TTL": "60s",
               "ENVOY_STATUS_PORT": str(ports["ready"]), "ENVOY_PROMETHEUS_PORT": str(ports["prometheus"]),
               # A renewal within two seconds, and most of a minute for another try.
               "SECRET_GRACE_PERIOD_RATIO": "0.965", "SECRET_GRACE_PERIOD_RATIO_JITTER": "0.001"}
        before = None
        if self.steps:
            env |= clock
        else:
            self.injector = Injector(self.dir / "home", {port: name for name, port in ports.items()}, self.plan)
            before = self.injector.before
        self.log = self.dir / "agent.log"
        self.began = time.monotonic()
        with self.log.open("wb") as log:
            self.agent = subprocess.Popen([self.agent_binary, "proxy", "sidecar"], cwd=self.dir / "home", env=env, stdout=log,
                                          stderr=log, close_fds=False, preexec_fn=before)
        self.processes.append(self.agent)
        home = self.dir / "home"
        self.streams = [Stream(home / SDS, h2.SDS_PATH, h2.SECRET, [b"default"], self.secret),
                        Stream(home / XDS, h2.ADS_PATH, CLUSTER, [], self.config)]

    def istiod_says(self, what):
        said = (self.dir / "istiod.log").read_text(errors="replace").strip().splitlines()
        return f"{what}, and says: {said[-1][-300:] if said else 'nothing'}"

    def secret(self, answer):
        for number, resource in fields(answer):
            if number == 2 and first(resource, 2, 1) == b"default":
                certificate = first(resource, 2, 2)
                chain, key = first(certificate, 1, 2), first(certificate, 2, 2)
                try:
                    whole(chain, key, "SDS")
                except Wrong as error:
                    self.wrong.append(str(error))
                self.chains.append(chain)

    def config(self, answer):
        self.pushed |= {first(resource, 2, 1) for number, resource in fields(answer) if number == 2}

    def until(self, what, check, limit=LIMIT):
        """Whether it came true; `False` when the agent has ended."""
        end = time.monotonic() + limit
        while True:
            try:
                if check():
                    return True
            except OSError:
                pass
            if hasattr(self, "agent") and self.agent.poll() is not None:
                return False
            if time.monotonic() > end:
                raise Hang(f"never within {limit:.0f} s: {what}")
            time.sleep(0.02)

    def ready(self):
        with socket.create_connection(("127.0.0.1", self.ports["status"]), timeout=5) as io:
            io.sendall(b"GET /healthz/ready HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            return io.recv(4096).startswith(b"HTTP/1.1 200")

    def phase(self, name):
        if self.injector:
            self.injector.phase = name
        if name in self.steps:
            self.put("clock-offset", str(self.steps[name]))
            if self.steps[name] < 0:
                # Before its istiod's certificate was signed nothing can be trusted: until somebody sets the clock.
                back = threading.Timer(3, self.put, ("clock-offset", "0"))
                back.daemon = True
                back.start()

    def live(self):
        """Start, renewal and push; `False` when the agent has ended meanwhile."""
        if not (self.until("ready", self.ready) and self.until("a certificate", lambda: self.chains)
                and self.until("configuration", lambda: b"one" in self.pushed)):
            return False
        self.phase("renewal")
        had = len(set(self.chains))
        if not self.until("a renewed certificate", lambda: len(set(self.chains)) > had):
            return False
        # The roots as a mounted volume changes them.
        root = self.dir / "home/var/run/secrets/istio/root-cert.pem"
        self.put("home/var/run/secrets/istio/root-cert.pem", root.read_text() + "\n")
        self.phase("push")
        self.cluster("two")
        if not self.until("a push", lambda: b"two" in self.pushed):
            return False
        if not self.until("still ready", self.ready):
            return False
        self.fds = len(os.listdir(f"/proc/{self.agent.pid}/fd"))
        return True

    def drain(self):
        self.phase("drain")
        self.agent.send_signal(signal.SIGTERM)
        try:
            return self.agent.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Hang(f"it does not end within {LIMIT:.0f} s of SIGTERM") from None

    def said(self):
        return self.log.read_text(errors="replace")

    def check_rest(self):
        """What must be so however the day ended."""
        self.wrong += [f"process {pid} is left" for pid in self.left()]
        home = self.dir / "home"
        chain, key = home / "out/cert-chain.pem", home / "out/key.pem"
        if chain.exists() and key.exists():
            try:
                whole(chain.read_bytes(), key.read_bytes(), "OUTPUT_CERTS")
            except Wrong as error:
                self.wrong.append(str(error))
        for path in home.rglob("*"):
            if re.search(r"\.(new|tmp)$|\.tmp", path.name):
                self.wrong.append(f"{path.relative_to(home)} is left")
        said = self.said()
        if "PRIVATE KEY" in said:
            self.wrong.append("a key is in the log")
        if said.count("\n") > LINES:
            self.wrong.append(f"{said.count(chr(10))} lines of log")
        if "panicked" in said:
            self.wrong.append("a panic: " + next(line for line in said.splitlines() if "panicked" in line)[:200])

    # Guards and Envoys end a moment after their agent.
    def left(self):
        end = time.monotonic() + 10
        while True:
            found = []
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and int(entry.name) not in (self.istiod.pid, os.getpid()):
                    try:
                        if os.readlink(entry / "cwd").startswith(str(self.dir)) and (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                            found.append(int(entry.name))
                    except OSError:
                        pass
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def close(self):
        for stream in self.streams:
            stream.over.set()
        for child in self.processes:
            if child.poll() is None:
                child.kill()
                child.wait()
        for pid in self.left() if self.processes else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if self.injector:
            self.injector.close()
        shutil.rmtree(self.dir, ignore_errors=True)


def open_port(port):
    with socket.create_connection(("127.0.0.1", port), timeout=1):
        return True


def clock_library():
    """Compiled once; every machine that builds the agent has a C compiler."""
    built = Path(tempfile.gettempdir()) / f"faults-clock-{os.getpid()}.so"
    if not built.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, ROOT / "tests/support/clock.c"], check=True)
        atexit.register(built.unlink, missing_ok=True)
    return str(built)
