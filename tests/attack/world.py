"""An agent with its neighbours in a network namespace of its own, so that attackers have addresses that are not its.

The agent sees: an istiod (mock-istiod), an Envoy (tests/support/fake_envoy.py), an application, a kubelet that probes
from an address of its own, and attackers from 64 others. Everything ends with `close`.
"""
import ctypes
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
POD = "10.213.0.2"
KUBELET = "10.213.255.254"
ATTACKERS = [f"10.213.1.{n}" for n in range(1, 65)]
STATUS, ADMIN, APP, DNS = 15020, 15000, 8080, 15053
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
        mood = type(self).mood
        try:
            if self.path == "/metrics":
                self.reply(200, METRICS)
            elif mood == "silent":
                time.sleep(3600)
            elif mood == "endless head":
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while True:
                    self.wfile.write(b"X-Pad: " + b"x" * 1000 + b"\r\n")
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


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_):
        pass


def listener_in(namespace, address):
    """A listening socket inside the namespace: a thread enters it, the socket stays there."""
    made = []

    def make():
        with open(f"/var/run/netns/{namespace}") as handle:
            # os.setns is there from Python 3.12 on.
            if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), 0x40000000):
                raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
        made.append(socket.create_server(address, backlog=1024))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]


class World:
    def __init__(self, agent, istiod, descriptors=None, env=None, ready=True, envoy=None):
        self.envoy_binary = envoy or str(ROOT / "tests/support/fake_envoy.py")
        self.name = f"attack-{os.getpid()}"
        self.outer = None
        self.dir = Path(tempfile.mkdtemp(prefix="attack-"))
        os.chmod(self.dir, 0o755)
        self.processes = []
        self.mounted = self.serving = False
        soft = min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
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
        for address in [KUBELET, *ATTACKERS]:
            run("ip", "addr", "add", f"{address}/16", "dev", self.outer)

    def inside(self, words, **options):
        child = subprocess.Popen(["ip", "netns", "exec", self.name, *map(str, words)], cwd=self.dir, **options)
        self.processes.append(child)
        return child

    def start(self, agent, istiod, descriptors, env, ready):
        self.app = Quiet(("", 0), App, bind_and_activate=False)
        self.app.socket.close()
        self.app.socket = listener_in(self.name, (POD, APP))
        self.app.server_address, self.app.server_name, self.app.server_port = (POD, APP), POD, APP
        threading.Thread(target=self.app.serve_forever, daemon=True).start()
        self.serving = True
        for folder in ("var/run/secrets/istio", "var/run/secrets/tokens"):
            (self.dir / folder).mkdir(parents=True)
        root = self.dir / "var/run/secrets/istio/root-cert.pem"
        token = self.dir / "var/run/secrets/tokens/istio-token"
        self.istiod = self.inside(
            [istiod, "--listen", "127.0.0.1:15012", "--write-root", root, "--write-token", f"{token}=ns/sa"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        eventually("istiod writes its root", lambda: root.exists() and token.exists())
        config = {
            "discoveryAddress": "localhost:15012", "statusPort": STATUS, "proxyAdminPort": ADMIN,
            "binaryPath": self.envoy_binary, "terminationDrainDuration": "1s",
        }
        probers = {"/app-health/app/livez": {"httpGet": {"path": "/", "port": APP}, "timeoutSeconds": 1}}
        all_env = {
            "PATH": os.environ["PATH"], "POD_NAME": "pod", "POD_NAMESPACE": "ns", "SERVICE_ACCOUNT": "sa",
            "INSTANCE_IP": POD, "TRUST_DOMAIN": "cluster.local", "ISTIO_META_CLUSTER_ID": "Kubernetes",
            "PROXY_CONFIG": json.dumps(config), "ISTIO_KUBE_APP_PROBERS": json.dumps(probers), "FAKE_ENVOY": "{}",
            "ISTIO_PROMETHEUS_ANNOTATIONS": json.dumps({"scrape": "true", "path": "/metrics", "port": str(APP)}),
            "PILOT_AGENT_MERGE_ENVOY_STATS": "false", **env,
        }
        words = [agent, "proxy", "sidecar"]
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
        if self.mounted:
            subprocess.run(["umount", "-l", self.dir / "out"], check=False)
        if self.serving:
            self.app.shutdown()
            self.app.socket.close()
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
