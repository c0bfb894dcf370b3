"""A kernel that gives less than usual: no more processes, no /proc."""
import subprocess
import time

from . import h2
from .registry import attack
from .world import ROOT, SDS

# Nobody else's: what its processes may number is counted for the user.
USER = 61_234
OUT = "out/cert-chain.pem"
MOST = 40
AS_USER = (f'cp "$1" agent && shift && cp {ROOT}/tests/support/fake_envoy.py envoy && chown -R {USER} . && '
           f'set -- prlimit --nproc={MOST} setpriv --reuid={USER} --regid={USER} --clear-groups ./agent "$@"')


@attack("no more processes", "a pod whose processes are used up, while certificates of some seconds have to be renewed", world={
    "shell": AS_USER, "proxy": {"binaryPath": "./envoy"}, "out": True, "istiod_flags": ["--ttl", "8s"],
    "env": {"PATH": "/usr/local/bin:/usr/bin:/bin", "OUTPUT_CERTS": "out", "SECRET_TTL": "8s"}})
def processes(world, size):
    file = world.dir / OUT
    end = time.monotonic() + max(size.seconds, 14)
    words = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "sleep", "300"]
    others = [subprocess.Popen(words) for _ in range(MOST)]
    try:
        while time.monotonic() < end:
            if not h2.served(world.dir / SDS, 5):
                raise AssertionError("no certificate is given")
            time.sleep(0.5)
        # Tried again every ten seconds where it was not written with the renewal.
        age = time.time() - file.stat().st_mtime
        if age > 12:
            raise AssertionError(f"the written certificate is of {age:.0f} s ago")
    finally:
        for other in others:
            other.kill()
            other.wait()


@attack("no /proc", "an agent in a bare root file system", world={"shell": "umount -l /proc && mount -t tmpfs -o ro none /proc"})
def bare(world, size):
    time.sleep(size.seconds)
