#!/usr/bin/env python3
"""Stands in for a gateway's Envoy: beside what fake_envoy.py does it holds streams on the SDS socket, as one for each of
its secrets, and asks in requests that come in two pieces. Says in busy-envoy.json how it fared.

Its connection must last, its streams too, and each request must be answered.
"""
import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.attack import h2  # noqa: E402
from tests.attack.h2 import ACK, DATA, END_HEADERS, END_STREAM, HEADERS, RST, SETTINGS, WINDOW, frame  # noqa: E402

STREAMS = 200
SOCKET = "var/run/secrets/workload-spiffe-uds/socket"
# Of a node with much metadata.
LARGE = 40_000


def note(**what):
    with open("busy-envoy.fresh", "w") as out:
        json.dump(what, out)
    os.rename("busy-envoy.fresh", "busy-envoy.json")


def answered(conn, stream, ask):
    """Asks in two pieces; returns when there is an answer, and fails when there is none."""
    half = len(ask) // 2
    conn.send(frame(HEADERS, END_HEADERS, stream, h2.request(h2.SDS_PATH)), *pieces(stream, ask[:half]))
    time.sleep(0.05)
    conn.send(*pieces(stream, ask[half:]))
    while True:
        kind, flags, of, payload = conn.read()
        if kind == SETTINGS and not flags & ACK:
            conn.send(frame(SETTINGS, ACK, 0))
        elif kind == h2.PING and not flags & ACK:
            conn.send(frame(h2.PING, ACK, 0, payload))
        elif kind == h2.GOAWAY:
            raise ConnectionError("sent away")
        elif kind == RST or (kind == HEADERS and flags & END_STREAM):
            raise ConnectionError(f"stream {of} has ended")
        elif kind == DATA and payload:
            more = len(payload).to_bytes(4, "big")
            conn.send(frame(WINDOW, 0, 0, more), frame(WINDOW, 0, of, more))
            if of == stream:
                return


def pieces(stream, data):
    return [frame(DATA, 0, stream, data[at:at + 16_000]) for at in range(0, len(data), 16_000)]


def live():
    count, lost = 0, []
    large = h2.message((2, h2.NODE), (3, b"default"), (4, h2.SECRET.encode()), (99, b"n" * LARGE))
    while True:
        try:
            with h2.Conn(SOCKET, timeout=10) as conn:
                # The held ones, then one after the other.
                for n in range(1_000_000):
                    stream = 2 * n + 1
                    held = n < STREAMS
                    answered(conn, stream, h2.secrets() if held else large)
                    count += 1
                    if not held:
                        conn.send(frame(RST, 0, stream, b"\0\0\0\x08"))
                        note(answered=count, lost=lost)
                        time.sleep(0.1)
        except OSError as error:
            # While nothing is served yet nothing is lost.
            if count:
                lost.append(str(error))
                note(answered=count, lost=lost)
            time.sleep(0.1)


if not {"--version", "--hot-restart-version", "validate"} & set(sys.argv):
    threading.Thread(target=live, daemon=True).start()
runpy.run_path(str(ROOT / "tests/support/fake_envoy.py"), run_name="__main__")
