"""Attacks at once. Each is bounded, and all bounds together are more than a small container has, or than one core does in a
moment: an agent that knows what it may have (GOMEMLIMIT, as injectors set it) stays there, and those who do no harm are served.
"""
import multiprocessing
import threading

from .registry import ATTACKS, attack
from .world import ROOT, eventually
from .on_dns import CAPTURE
from .on_shares import told

# What each of these holds is of another kind: pages and scrapes for slow readers, streams, messages, names, files, heads.
KINDS = ["status debug/agentz read slowly", "status scrapes without time", "status half a head, one address", "SDS streams",
         "SDS details of an error", "SDS parts of a node", "SDS large files by many names", "XDS refused and unread"]
LIMIT = "40MiB"
# The limit without what it had, and what comes between two looks. All eight without a limit: 60 and more.
MEMORY = 44
# What these take is the processor's time, on each way to it.
BUSY = ["status half a body, many addresses", "SDS refused and unread", "SDS header blocks without end",
        "XDS header blocks without end"]


def chosen(names):
    found = [one for one in ATTACKS if one.name in names]
    if len(found) != len(names):
        raise AssertionError(f"{len(found)} of {names} are there")
    return found


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

    threads = [threading.Thread(target=play, args=(one,)) for one in chosen(KINDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = told(world)["lost"][before:]
    if lost:
        wrong.append(f"Envoy loses its streams: {lost[:3]}, {len(lost)} times")
    if wrong:
        raise AssertionError("; ".join(wrong))


def apart(world, size, names):
    """Plays these attacks, each in a process of its own: none waits for another."""
    # Children of a fork have the world as it is.
    process = multiprocessing.get_context("fork").Process
    processes = [process(name=one.name, target=one.run, args=(world, size)) for name in names for one in chosen([name])]
    try:
        for one in processes:
            one.start()
        for one in processes:
            one.join(size.seconds + 60)
    finally:
        for one in processes:
            one.kill()
            one.join()
    wrong = [one.name for one in processes if one.exitcode != 0]
    if wrong:
        raise AssertionError(f"failed or never ended: {wrong}")


@attack("all that takes time at once", "attacks in processes of their own, none of which waits for another", short=False)
def busy(world, size):
    apart(world, size, BUSY)


@attack("DNS over TCP and half bodies at once", "two who ask for names without end, and one at the status port, in processes of their own",
        world={"env": CAPTURE, "ready": False}, readiness=False, short=False)
def names(world, size):
    apart(world, size, ["DNS over TCP queries without end"] * 2 + ["status half a body, many addresses"])
