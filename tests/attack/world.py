"""An agent with its neighbours in a network namespace of its own, so that attackers have addresses that are not its.

The agent sees: an istiod (mock-istiod), an Envoy (tests/support/fake_envoy.py), an application, a kubelet that probes
from an address of its own, and attackers from 64 others. Everything ends with `close`.
"""
import ctypes
import gzip
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORLDS = itertools.count()
ROOT = Path(__file__).resolve().parents[2]
# Two at a time need two networks.
NET = os.environ.get("ATTACK_NET", "10.213")
POD = f"{NET}.0.2"
KUBELET = f"{NET}.255.254"
ATTACKERS = [f"{NET}.1.{n}" for n in range(1, 65)]
SILENT = f"{NET}.254.1"
STATUS, ADMIN, APP, MODULES, DNS = 15020, 15000, 8080, 8081, 15053
SDS = "var/run/secrets/workload-spiffe-uds/socket"
XDS = "etc/istio/proxy/XDS"
METRICS = b"".join(b"attack_series{n=\"%06d\"} 1\n" % n for n in range(120_000))


def run(*words):
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


class App(BaseHTTPRequestHandler):
    """The application: healthy unless `mood` says otherwise; /metrics is a large scrape."""
    protocol_version = "HTTP/1.1"
    mood = "well"

    def do_GET(self):
        mood, of_metrics = type(self).mood.removeprefix("metrics "), type(self).mood.startswith("metrics ")
        try:
            if of_metrics != (self.path == "/metrics"):
                mood = "well"
            if self.path == "/metrics" and mood == "well":
                self.reply(200, METRICS)
            elif mood == "silent":
                time.sleep(3600)
            elif mood == "endless head":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while True:
                    self.wfile.write(b"X-Pad: " + b"x" * 1000 + b"\r\n")
            elif mood == "endless line":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while True:
                    self.wfile.write(b"x" * 65536)
            elif mood == "endless":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while True:
                    self.wfile.write(METRICS)
            elif mood == "drip":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
                while True:
                    self.wfile.write(b"a")
                    time.sleep(0.1)
            elif mood == "bomb":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Type: text/plain\r\n\r\n" + BOMB)
                self.close_connection = True
            elif mood == "endless body":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    self.wfile.write(b"x" * 65536)
            elif mood == "to itself":
                self.reply(302, b"", Location=f"http://{POD}:{STATUS}/app-health/app/livez")
            elif mood == "garbage":
                self.wfile.write(os.urandom(4096))
                self.close_connection = True
            else:
                self.reply(200, b"ok")
        except OSError:
            self.close_connection = True

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = {"access_token": "t", "token_type": "Bearer", "expires_in": 3600,
                 "issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
        self.reply(200, json.dumps(token).encode())

    def reply(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Registry(BaseHTTPRequestHandler):
    """Gives modules and images as nobody should."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        try:
            self.answer()
        except OSError:
            pass
        self.close_connection = True

    do_HEAD = do_POST = do_GET

    def head(self, status, *lines):
        self.wfile.write("\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    def endless(self, piece, pause=0.0):
        while True:
            self.wfile.write(piece)
            time.sleep(pause)

    def answer(self):
        path = self.path
        if path.startswith("/v2/endless"):
            self.head(200, "Content-Type: application/vnd.oci.image.manifest.v1+json")
            self.endless(b'{"layers":[' * 1000)
        elif path.startswith("/v2/deep"):
            body = b'{"layers":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
            self.head(200, "Content-Type: application/vnd.oci.image.manifest.v1+json", f"Content-Length: {len(body)}")
            self.wfile.write(body)
        elif path.startswith("/v2/"):
            # A token server inside the pod's machine, and a challenge that is longer than anything.
            self.head(401, 'WWW-Authenticate: Bearer realm="http://169.254.169.254/' + "a" * 50_000 + '",service="s",scope="x"',
                      "Content-Length: 0")
        elif path == "/garbage":
            self.wfile.write(os.urandom(8192))
        elif path == "/module":
            self.head(200, "Content-Length: 8")
            self.wfile.write(b"\0asm\1\0\0\0")
        elif path == "/endless":
            self.head(200)
            self.endless(b"\0asm\1\0\0\0" + b"x" * 65_000)
        elif path == "/drip":
            self.head(200, "Content-Length: 100000")
            self.endless(b"x", 0.2)
        elif path == "/again":
            self.head(302, "Location: /again", "Content-Length: 0")
        elif path == "/bomb":
            self.head(200, "Content-Type: application/gzip", f"Content-Length: {len(BOMB)}")
            self.wfile.write(BOMB)
        else:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            self.endless(b"X-Pad: " + b"x" * 1000 + b"\r\n")

    def log_message(self, *_):
        pass


# 200 MB in 200 kB.
BOMB = gzip.compress(b"\0" * 200_000_000, 9)


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_):
        pass


def inside(namespace, job):
    """Does it on a thread that has entered the namespace: what it opens stays there. Its result, or what it has raised."""
    done = []

    def enter():
        try:
            with open(f"/var/run/netns/{namespace}") as handle:
                # os.setns is there from Python 3.12 on.
                if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):
                    raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
            done.append((job(), None))
        except Exception as error:  # noqa: BLE001 (it is raised below)
            done.append((None, error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    result, error = done[0]
    if error:
        raise error
    return result


def listener_in(namespace, address):
    """A listening socket inside the namespace."""
    return inside(namespace, lambda: socket.create_server(address, backlog=1024))


def sweep():
    """Takes away what runs that were killed have left, and gives the device that has this run's addresses, if there is one."""
    for place in Path("/run/netns").glob("attack-*"):
        owner = place.name.removeprefix("attack-")
        if not owner.isdigit() or Path(f"/proc/{owner}").exists():
            continue
        print(f"taking away {place.name}, which a run that was killed has left", file=sys.stderr)
        inside_it = subprocess.run(["ip", "netns", "pids", place.name], check=False, capture_output=True, text=True)
        for pid in inside_it.stdout.split():
            os.kill(int(pid), signal.SIGKILL)
        for device in Path("/sys/class/net").glob(f"ao{int(owner) % 100000}x*"):
            subprocess.run(["ip", "link", "del", device.name], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "netns", "del", place.name], check=False, stderr=subprocess.DEVNULL)
    held = subprocess.run(["ip", "-o", "addr", "show", "to", KUBELET], check=False, capture_output=True, text=True)
    return held.stdout.split()[1] if held.stdout else None


class World:
    def __init__(self, agent, istiod, descriptors=None, env=None, ready=True, envoy=None, resources=None, modules=False,
                 out=False, silent_names=False, probers=None, flags=(), folders=(), istiod_flags=(), before=None, proxy=None,
                 shell=None):
        self.envoy_binary = envoy or str(ROOT / "tests/support/fake_envoy.py")
        self.name = f"attack-{os.getpid()}"
        self.outer = None
        self.dir = Path(tempfile.mkdtemp(prefix="attack-"))
        os.chmod(self.dir, 0o755)
        self.processes = []
        self.servers = []
        self.resources, self.modules = resources, modules
        self.silent_names, self.probers = silent_names, probers or {}
        self.flags, self.istiod_flags, self.before = flags, istiod_flags, before
        self.proxy, self.shell = proxy or {}, shell
        soft = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            for folder in [*folders, *(["out"] if out else [])]:
                (self.dir / folder).mkdir()
            self.network()
            self.start(Path(agent).resolve(), Path(istiod).resolve(), descriptors, env or {}, ready)
        except BaseException:
            self.close()
            raise

    def network(self):
        run("ip", "netns", "add", self.name)
        # A removed namespace takes its devices away a moment later: each world has names of its own.
        unique = f"{os.getpid() % 100000}x{next(WORLDS) % 1000}"
        self.outer, inner = f"ao{unique}", f"ai{unique}"
        run("ip", "link", "add", self.outer, "type", "veth", "peer", "name", inner)
        run("ip", "link", "set", inner, "netns", self.name)
        run("ip", "-n", self.name, "addr", "add", f"{POD}/16", "dev", inner)
        for device in ("lo", inner):
            run("ip", "-n", self.name, "link", "set", device, "up")
        run("ip", "link", "set", self.outer, "up")
        for address in [KUBELET, SILENT, *ATTACKERS]:
            run("ip", "addr", "add", f"{address}/16", "dev", self.outer)

    def inside(self, words, **options):
        child = subprocess.Popen(["ip", "netns", "exec", self.name, *map(str, words)], cwd=self.dir, **options)
        self.processes.append(child)
        return child

    def serve(self, handler, port):
        server = Quiet(("", 0), handler, bind_and_activate=False)
        server.socket.close()
        # On every address: probes come to the pod's, scrapes to localhost.
        server.socket = listener_in(self.name, ("0.0.0.0", port))
        server.server_address, server.server_name, server.server_port = (POD, port), POD, port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.servers.append(server)

    def put(self, name, text):
        """A file of istiod's resources, replaced as a whole."""
        path = self.dir / "resources" / name
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name(f".{path.name}.fresh")
        fresh.write_text(text)
        fresh.rename(path)

    def start_istiod(self):
        """The one neighbour that is configured from a folder, `resources`."""
        root = self.dir / "var/run/secrets/istio/root-cert.pem"
        token = self.dir / "var/run/secrets/tokens/istio-token"
        more = ["--resources", self.dir / "resources"] if (self.dir / "resources").exists() else []
        self.istiod = self.inside(
            [self.istiod_binary, "--listen", "127.0.0.1:15012", "--control", f"{POD}:15014", "--write-root", root,
             "--write-token", f"{token}=ns/sa", *more, *self.istiod_flags], stdout=subprocess.DEVNULL, stderr=self.istiod_log)
        try:
            eventually("istiod writes its root", lambda: root.exists() and token.exists())
        except TimeoutError:
            print((self.dir / "istiod.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise

    def start(self, agent, istiod, descriptors, env, ready):
        self.serve(App, APP)
        if self.modules:
            self.serve(Registry, MODULES)
        for folder in ("var/run/secrets/istio", "var/run/secrets/tokens"):
            (self.dir / folder).mkdir(parents=True)
        if self.resources:
            self.put("all.json", json.dumps(self.resources))
        self.istiod_binary, self.istiod_log = istiod, (self.dir / "istiod.log").open("wb")
        self.start_istiod()
        if self.before:
            self.before(self)
        config = {
            "discoveryAddress": "localhost:15012", "statusPort": STATUS, "proxyAdminPort": ADMIN,
            "binaryPath": self.envoy_binary, "terminationDrainDuration": "1s", **self.proxy,
        }
        probers = {"/app-health/app/livez": {"httpGet": {"path": "/", "port": APP}, "timeoutSeconds": 1},
                   **self.probers}
        all_env = {
            "PATH": os.environ["PATH"], "POD_NAME": "pod", "POD_NAMESPACE": "ns", "SERVICE_ACCOUNT": "sa",
            "INSTANCE_IP": POD, "TRUST_DOMAIN": "cluster.local", "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "PROXY_CONFIG": json.dumps(config), "ISTIO_KUBE_APP_PROBERS": json.dumps(probers), "FAKE_ENVOY": "{}",
            "ISTIO_PROMETHEUS_ANNOTATIONS": json.dumps({"scrape": "true", "path": "/metrics", "port": str(APP)}),
            "PILOT_AGENT_MERGE_ENVOY_STATS": "false", **env,
        }
        words = [agent, "proxy", "sidecar", *self.flags]
        if self.modules:
            # Modules go to one folder of the machine; here it is one of this mount namespace.
            words = ["sh", "-c", "mount -t tmpfs tmpfs /var/lib && mkdir -p /var/lib/istio/data && exec \"$@\"", "sh", *words]
        if self.silent_names:
            # Its port takes packets, and nobody reads them.
            self.hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self.hole.bind((SILENT, 53))
            (self.dir / "resolv.conf").write_text(f"nameserver {SILENT}\noptions timeout:5 attempts:5\n")
            words = ["sh", "-c", f"mount --bind {self.dir}/resolv.conf /etc/resolv.conf && exec \"$@\"", "sh", *words]
        if self.shell:
            # Before the agent, in its mount namespace.
            words = ["sh", "-c", f"{self.shell} && exec \"$@\"", "sh", *words]
        if descriptors:
            words = ["sh", "-c", f"ulimit -n {descriptors}; exec \"$@\"", "sh", *words]
        self.log = self.dir / "agent.log"
        with self.log.open("wb") as log:
            self.agent = self.inside(words, env=all_env, stdout=log, stderr=log)
        try:
            eventually("the agent is ready", lambda: get(KUBELET, "/healthz/ready" if ready else "/app-health/app/livez")[0] == 200, 60)
        except TimeoutError:
            print(self.log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        self.pid = self.agent.pid

    def figures(self):
        """Resident kilobytes, open descriptors, threads, bytes of log."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        value = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
        descriptors = len(os.listdir(f"/proc/{self.pid}/fd"))
        return int(value["VmRSS"]), descriptors, int(value["Threads"]), self.log.stat().st_size

    def alive(self):
        return self.agent.poll() is None

    def envoy(self):
        notes = (self.dir / "fake-envoy.jsonl").read_text().splitlines()
        return next(json.loads(n)["pid"] for n in notes if "pid" in n)

    def close(self):
        for child in reversed(self.processes):
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.terminate()
        for child in self.processes:
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if hasattr(self, "hole"):
            self.hole.close()
        if hasattr(self, "istiod_log"):
            self.istiod_log.close()
        for server in self.servers:
            server.shutdown()
            server.socket.close()
        if self.outer:
            subprocess.run(["ip", "link", "del", self.outer], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "netns", "del", self.name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.dir, ignore_errors=True)


def eventually(what, check, seconds=20):
    end = time.monotonic() + seconds
    while True:
        try:
            if check():
                return
        except OSError:
            pass
        if time.monotonic() > end:
            raise TimeoutError(f"never came true: {what}")
        time.sleep(0.05)


def connect(source, port=STATUS, timeout=5.0):
    return socket.create_connection((POD, port), timeout=timeout, source_address=(source, 0))


def send_on(held, more):
    """Writes `more` to each of these connections, as far as there is room; those that ended are let go."""
    for io in list(held):
        try:
            io.send(more)
            if not io.recv(1 << 16):
                raise ConnectionError("closed")
        except BlockingIOError:
            pass
        except OSError:
            io.close()
            held.remove(io)


def get(source, path, timeout=1.0):
    """Status and seconds of one GET on a connection of its own."""
    start = time.monotonic()
    with connect(source, timeout=timeout) as io:
        io.sendall(f"GET {path} HTTP/1.1\r\nHost: {POD}\r\nConnection: close\r\n\r\n".encode())
        head = b""
        while b"\r\n" not in head:
            piece = io.recv(4096)
            if not piece:
                raise ConnectionError("closed without an answer")
            head += piece
    return int(head.split(b" ", 2)[1]), time.monotonic() - start
