"""The list of attacks."""
from dataclasses import dataclass, field


@dataclass
class Size:
    """How hard: one set of figures for CI, one for a thorough run."""
    seconds: float
    connections: int
    sockets: int
    streams: int


@dataclass
class Attack:
    name: str
    why: str
    run: object
    # What the world needs: descriptors, variables.
    world: dict = field(default_factory=dict)
    # Probes that are expected to fail: the application itself is the attacker, or Envoy stands still.
    readiness: bool = True
    liveness: bool = True
    # Whether the agent must still give certificates while it lasts; afterwards it always must.
    identity: bool = True
    # Whether the short form plays it, too: of attacks that differ little one is enough.
    short: bool = True
    # Megabytes that the agent may take above what it had.
    memory: int = 32


ATTACKS = []


def attack(name, why, **more):
    def note(run):
        ATTACKS.append(Attack(name, why, run, **more))
        return run
    return note
