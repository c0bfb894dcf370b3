"""Attacks at once. Each is bounded, and all bounds together are more than a small container has: an agent that knows what it
may have (GOMEMLIMIT, as injectors set it) stays there, and goes on serving those who do no harm.
"""
import threading

from .registry import ATTACKS, attack
from .world import ROOT, eventually
from .on_shares import told

# What each of these holds is of another kind: pages and scrapes for slow readers, streams, messages, names, files, heads.
KINDS = ["status debug/agentz read slowly", "status scrapes without time", "status half a head, one address", "SDS streams",
         "SDS details of an error", "SDS parts of a node", "SDS large files by many names", "XDS refused and unread"]
LIMIT = "40MiB"
# The limit without what it had, and what comes between two looks. All eight without a limit: 60 and more.
MEMORY = 44


@attack("everything at once", "eight attacks, each of another kind", memory=MEMORY, world={
    "env": {"GOMEMLIMIT": LIMIT}, "envoy": str(ROOT / "tests/attack/busy_envoy.py")})
def everything(world, size):
    eventually("Envoy has its streams", lambda: told(world)["answered"] > 10, 60)
    before, wrong = len(told(world)["lost"]), []

    def play(one):
        try:
            one.run(world, size)
        except AssertionError as error:
            wrong.append(f"{one.name}: {error}")

    threads = [threading.Thread(target=play, args=(one,)) for one in ATTACKS if one.name in KINDS]
    if len(threads) != len(KINDS):
        raise AssertionError(f"{len(threads)} of {KINDS} are there")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = told(world)["lost"][before:]
    if lost:
        wrong.append(f"Envoy loses its streams: {lost[:3]}, {len(lost)} times")
    if wrong:
        raise AssertionError("; ".join(wrong))
