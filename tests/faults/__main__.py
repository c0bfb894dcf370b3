"""Lets every call of an agent fail once, and looks at what becomes of it.

    python3 -m tests.faults --agent target/debug/pilot-agent --istiod target/debug/mock-istiod [--short] [--only TEXT] [-j N]

First a day without faults is listened to (`day.py`: start, renewal, push, drain): which file, socket and process calls
the agent makes, what each is about, and how often. Then the day is lived again, and one of them fails (`inject.py`);
and again, until each has failed. `--short` lets one call of each kind and phase fail, several in one day. The clock
jumps forth and back in each phase. An agent passes when

- it goes on, with everything that a day has; or it ends by itself, not with status 0, and its log names the error;
- nothing takes longer than 60 s, and no task panics;
- no process, temporary file or descriptor is left over;
- whoever is given a certificate, on the socket or in a file, is given the key that belongs to it.
"""
import argparse
import collections
import concurrent.futures
import multiprocessing
import os
import re
import sys
import time
import traceback

from .day import PHASES, Day, Hang, NoDay, take_share
from .inject import CALLS

# Seconds that the wall clock jumps: an hour forth and back is a machine that slept, or whose clock was set.
JUMPS = (3600, -3600)
SPARE_FDS = 6
# How long before a day that could not begin is begun again, in seconds: somebody else may use up what this machine has.
AGAIN = (0.5, 2, 5, 10)
OURS = re.compile("[.]/|tcp:istiod|tcp:admin")
# How often these are called depends on the machine, and on how often we ask.
OFTEN, AT_MOST = re.compile("/proc/N/|tcp:status|unix:|netlink|tcp:[?]"), 3


def live(agent, istiod, plan=(), steps=None, usual_fds=None):
    """What became of a day: a verdict, what was called, and what was hit."""
    day = Day(agent, istiod, plan, steps)
    try:
        ended = None
        day.start()
        if day.live():
            status = day.drain()
            if status:
                ended = f"ended with status {status} while it drained"
        else:
            status = day.agent.returncode
            ended = f"ended with status {status}"
            if status == 0:
                day.wrong.append("it ended by itself as if all were well")
        day.check_rest()
        struck = list(day.injector.struck) if day.injector else []
        said = day.said()
        named = [key for key in struck if names(said, dict(plan)[key])]
        # The runtime's own set-up knows no other way to end; nothing is served yet.
        early = [w for w in day.wrong if w.startswith("a panic") and "tokio" in w and named and ended and not day.chains]
        day.wrong = [w for w in day.wrong if w not in early]
        if ended and struck and not named:
            day.wrong.append("its log does not name the error: " + (said.strip().splitlines() or [""])[-1][-200:])
        if usual_fds and day.fds > usual_fds + SPARE_FDS:
            day.wrong.append(f"{day.fds} descriptors, {usual_fds} are usual")
        how = ended or ("went on, and told" if named else "went on")
        order = list(day.injector.order) if day.injector else []
        return how, day.wrong, order, struck, day.fds, said if day.wrong else ""
    except Hang as error:
        return "HANGS", [str(error)], [], list(day.injector.struck) if day.injector else [], 0, day.said()
    except NoDay:
        raise
    except Exception:  # A defect of this program must not look like a pass.
        return "BROKEN", [traceback.format_exc()], [], [], 0, ""
    finally:
        day.close()


def names(said, code):
    import errno
    number = getattr(errno, code)
    return f"os error {number})" in said or os.strerror(number).lower() in said.lower() or code in said


def one(job):
    for pause in (*AGAIN, None):
        try:
            return job, live(*job)
        except NoDay as error:
            if pause is None:
                return job, ("NO DAY", [f"it could not begin {len(AGAIN) + 1} times: {error}"], [], [], 0, "")
            time.sleep(pause)


def chosen(order, short):
    """Which calls fail, and which of them on the same day."""
    keys = [key for key in dict.fromkeys(order) if int(key.split()[-1]) <= AT_MOST or not OFTEN.search(key)]
    error = {key: CALLS[key.split()[1]][2] for key in keys}
    if not short:
        return [{key: error[key]} for key in keys]
    # One of each kind in each phase; never two of a phase on one day, since the first may end it.
    kinds = {}
    for key in sorted(keys, key=lambda key: not OURS.search(key)):
        # Each thread is for something else.
        kinds.setdefault(key if "clone3" in key else " ".join(key.split()[:2]), key)
    by_phase = collections.defaultdict(list)
    for kind, key in kinds.items():
        by_phase[kind.split()[0]].append(key)
    days = max(map(len, by_phase.values()))
    return [{by_phase[p][n]: error[by_phase[p][n]] for p in PHASES if n < len(by_phase[p])} for n in range(days)]


def main():
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--agent", required=True)
    flags.add_argument("--istiod", required=True)
    flags.add_argument("--short", action="store_true", help="one call of each kind and phase, a minute or two")
    flags.add_argument("--only", default="", help="calls whose key contains this")
    flags.add_argument("--list", action="store_true", help="list the calls of a day")
    flags.add_argument("-j", type=int, default=os.cpu_count() or 1, help="days at a time")
    flags.add_argument("--log", action="store_true", help="show the agent's log of each day that went wrong")
    given = flags.parse_args()
    _, (how, wrong, order, _, fds, said) = one((given.agent, given.istiod, (), None, None))
    if how != "went on" or wrong:
        print(f"a day without faults goes wrong: {how}; {'; '.join(wrong)}\n{said}")
        return 1
    if given.list:
        print("\n".join(order))
        return 0
    plans = [(plan, None) for plan in chosen(order, given.short)]
    plans += [((), {phase: jump}) for phase in (PHASES[1:3] if given.short else PHASES) for jump in JUMPS]
    jobs = [(given.agent, given.istiod, plan, steps, fds) for plan, steps in plans
            if given.only in (" ".join(plan) if plan else f"clock {steps}")]
    if not jobs:
        print(f"no call of a day has {given.only!r} in its name; --list tells those there are", file=sys.stderr)
        return 2
    bad, tally, missed = 0, collections.Counter(), 0
    shares = (multiprocessing.Value("i", 0), given.j)
    with concurrent.futures.ProcessPoolExecutor(given.j, initializer=take_share, initargs=shares) as pool:
        for (_, _, plan, steps, _), (how, wrong, _, struck, _, said) in pool.map(one, jobs):
            what = "; ".join(f"{key} {code}" for key, code in plan.items()) if plan else f"clock {steps}"
            missed += len(plan) - len(struck) if plan else 0
            tally[how] += 1
            bad += bool(wrong)
            print(f"{'WRONG' if wrong else 'held':5}  {what}: {how}{'; ' + '; '.join(wrong) if wrong else ''}", flush=True)
            if wrong and given.log:
                print(said)
    print(f"{len(jobs) - bad} of {len(jobs)} days held, {len(order)} calls in a day; " + ", ".join(f"{n} {how}" for how, n in tally.most_common())
          + (f"; {missed} faults did not come up again" if missed else ""))
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
