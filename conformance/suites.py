"""How each suite plays one case: `prepare(folder)` once, then `play(case, agent, slot, folder)` gives a transcript.

Every case has a network namespace of its own, named after this process; what runs in it is ended with it.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
LIMIT = 110  # seconds for one case; the longest takes some 40 on an idle machine
POD = ["10.77.0.2/32"]
POD6 = ["fd00:77::2/128", "::6/128"]


def ip(*args):
    subprocess.run(["ip", *args], check=True)


def openssl(folder, *args):
    subprocess.run(["openssl", *args], check=True, cwd=folder, capture_output=True, timeout=60)


EC = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


class Namespaced:
    """A case is walked by `lib/steps.py` of its suite, in a process of its own inside the namespace."""

    def __init__(self, name, addresses=(), tls=False):
        self.name, self.addresses, self.tls = name, list(addresses), tls
        self.pass_certs = name == "ads"

    def prepare(self, folder):
        if self.name == "ads":
            from lib import certs
            certs.write_all(folder)
        elif self.name == "status":
            for name, days, subject in (("root", "30", "/CN=root"), ("self", "30", "/CN=some-other-name"), ("expired", "-1", "/CN=expired")):
                openssl(folder, "req", "-new", *EC, "-subj", subject, "-keyout", name + ".key", "-out", name + ".csr")
                openssl(folder, "x509", "-req", "-in", name + ".csr", "-signkey", name + ".key", "-days", days, "-out", name + ".pem")
        elif self.name == "sts":
            google(folder)

    def play(self, case, agent, slot, folder):
        namespace = f"conf-{self.name[:4]}-{os.getpid()}-{slot}"
        root = tempfile.mkdtemp(prefix="conformance-")
        os.chmod(root, 0o755)
        try:
            if self.tls:
                shutil.copytree(folder, os.path.join(root, "tls"))
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            extra = ["169.254.169.254/32"] if self.name == "sts" and "metadata" in case else []
            for address in self.addresses + extra + (POD6 if self.addresses and case.get("ip6") else []):
                six = ":" in address
                ip("-n", namespace, *(["-6"] if six else []), "addr", "add", address, "dev", "lo", *(["nodad"] if six else []))
            command = ["ip", "netns", "exec", namespace, sys.executable, "-B", os.path.join(HERE, "run"), self.name,
                       "--worker", case["name"], "--agent", agent, "--root", root, "--certs", folder]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                text = child.communicate(timeout=LIMIT)[0]
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 15)
                text = b"the case ran over the limit"
            transcript = os.path.join(root, "transcript.json")
            if not os.path.exists(transcript):
                return [{"harness_error": text.decode(errors="replace")[-900:]}]
            with open(transcript, encoding="utf-8") as file:
                return json.load(file)
        finally:
            listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout
            for pid in listed.split():
                try:
                    os.kill(int(pid), 9)  # only processes inside our own namespace
                except ProcessLookupError:
                    pass
            subprocess.run(["ip", "netns", "del", namespace], stderr=subprocess.DEVNULL)
            shutil.rmtree(root, ignore_errors=True)

    def work(self, case, args):
        """In the namespace: walk the steps, leave the transcript."""
        from lib import steps
        more = (args.certs,) if self.pass_certs else ()
        out = steps.Run(case, args.agent, args.root, *more).run()
        with open(os.path.join(args.root, "transcript.json"), "w", encoding="utf-8") as file:
            json.dump(out, file)
        sys.stdout.flush()
        os._exit(0)


def google(folder):
    """A CA that stands in the system's store; certificates of Google's names by it; and bad ones."""
    for ca in ("ca", "otherca"):
        openssl(folder, "req", "-x509", "-new", *EC, "-days", "30", "-subj", "/CN=" + ca, "-keyout", ca + ".key", "-out", ca + ".pem")
    names = "DNS:sts.googleapis.com,DNS:iamcredentials.googleapis.com"
    for name, ca, san, days in (("google", "ca", names, "30"), ("unknown", "otherca", names, "30"),
                                ("wrongname", "ca", "DNS:www.example.com", "30"), ("expired", "ca", names, "-1")):
        with open(os.path.join(folder, "ext"), "w", encoding="utf-8") as file:
            file.write(f"subjectAltName={san}\nextendedKeyUsage=serverAuth\nbasicConstraints=CA:FALSE\n")
        openssl(folder, "req", "-new", *EC, "-subj", "/CN=" + name, "-keyout", name + ".key", "-out", name + ".csr")
        openssl(folder, "x509", "-req", "-in", name + ".csr", "-CA", ca + ".pem", "-CAkey", ca + ".key", "-CAcreateserial",
                "-days", days, "-extfile", "ext", "-out", name + ".pem")


class Bootstrap:
    """What `pilot-agent proxy` writes and starts for given inputs."""

    EXTRA_SOCKET = "etc/istio/proxy/SDS"  # that of 1.8, which may be there beside the one of 1.30
    IGNORED = ("seconds", "log", "accepted")

    def prepare(self, folder):
        openssl(folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/O=test", "-days", "30",
                "-keyout", "root-key.pem", "-out", "root-cert.pem")
        openssl(folder, "req", "-newkey", "rsa:2048", "-nodes", "-subj", "/O=leaf", "-keyout", "key.pem", "-out", "leaf.csr")
        openssl(folder, "x509", "-req", "-in", "leaf.csr", "-CA", "root-cert.pem", "-CAkey", "root-key.pem",
                "-CAcreateserial", "-days", "30", "-out", "cert-chain.pem")

    def play(self, case, agent, slot, folder):
        from lib import sandbox
        result = sandbox.run_case(case, agent, folder, slot, None)
        return json.loads(json.dumps(self.stripped({k: v for k, v in result.items() if k not in self.IGNORED})))

    def stripped(self, value):
        if isinstance(value, dict):
            return {k: self.stripped(v) for k, v in value.items() if k != self.EXTRA_SOCKET}
        return [self.stripped(v) for v in value if v != self.EXTRA_SOCKET] if isinstance(value, list) else value

    def sane(self, case, got):
        """For a case marked latent: it must run or refuse, and where it runs show what the case calls better."""
        outcome = got["outcome"]
        if outcome == "hang" or (isinstance(outcome, dict) and outcome.get("exit") in (0, 2, 101, 134, 139, -6, -11)):
            return f"/outcome: the agent must run or refuse with an error, not panic or hang, got {outcome}"
        for path, want in case.get("better", {}).items() if outcome == "running" else ():
            node = got
            for key in path.split("|"):
                if isinstance(node, list):
                    node = node[int(key)] if int(key) < len(node) else None
                else:
                    node = node.get(key) if isinstance(node, dict) else None
            if json.dumps(node, sort_keys=True) != json.dumps(want, sort_keys=True):
                return f"/{path}: wanted {want}, got {node}"
        return None


class Iptables:
    """istio-iptables against the kernel; request, wait, version."""

    def prepare(self, folder):
        from lib.world import sweep
        sweep()

    def play(self, case, agent, slot, folder):
        from lib.play import Play
        transcript, _ = Play(case, slot, agent)()
        return json.loads(json.dumps(transcript))


SUITES = {
    "bootstrap": Bootstrap(),
    "identity": Namespaced("identity"),
    "ads": Namespaced("ads"),
    "status": Namespaced("status", POD, tls=True),
    "sts": Namespaced("sts", ["10.77.0.2/32", "10.77.0.3/32", "10.77.0.4/32"], tls=True),
    "iptables": Iptables(),
}
