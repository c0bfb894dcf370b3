"""Neighbours that misbehave: the application, istiod, Envoy, the disk, the kernel's limits, who asks for names."""
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from . import h2
from .on_status import hold
from .registry import attack
from .world import ATTACKERS, DNS, SDS, App, connect

for mood in ("silent", "endless head", "endless body", "garbage", "to itself"):
    @attack(f"application {mood}", "an application that answers its probes like this", liveness=False)
    def hostile(world, size, mood=mood):
        App.mood = mood
        try:
            end = time.monotonic() + size.seconds
            while time.monotonic() < end:
                try:
                    with connect(ATTACKERS[0], timeout=3) as io:
                        io.sendall(b"GET /app-health/app/livez HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
                        while io.recv(65536):
                            pass
                except OSError:
                    pass
        finally:
            App.mood = "well"


def stopped(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


@attack("istiod stands still", "SIGSTOP of istiod")
def istiod(world, size):
    stopped(world.istiod.pid, size.seconds)


@attack("Envoy stands still", "SIGSTOP of Envoy", readiness=False)
def envoy(world, size):
    stopped(world.envoy(), size.seconds)


@attack("64 descriptors", "a flood against an agent that may open 64", world={"descriptors": 64}, readiness=False,
        liveness=False, identity=False)
def few(world, size):
    hold(world, 200, b"G", False, size.seconds)


def disk(world):
    folder = world.dir / "out"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=0777", "tmpfs", folder], check=True)
    world.mounted = True
    with (folder / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"\0" * 512)
        except OSError:
            pass


@attack("full disk", "OUTPUT_CERTS and Envoy's folder on a disk without room", world={"env": {"OUTPUT_CERTS": "out"}, "out": True})
def full(world, size):
    disk(world)
    end = time.monotonic() + size.seconds
    while time.monotonic() < end:
        if not h2.served(world.dir / SDS, 5):
            raise AssertionError("a full disk keeps certificates from Envoy")
        time.sleep(0.2)


@attack("DNS garbage", "datagrams that are no queries", world={
    "env": {"ISTIO_META_DNS_CAPTURE": "true", "DNS_PROXY_ADDR": f"0.0.0.0:{DNS}"}, "ready": False}, readiness=False)
def dns(world, size):
    end = time.monotonic() + size.seconds
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as io:
        io.bind((ATTACKERS[0], 0))
        while time.monotonic() < end:
            for n in range(200):
                io.sendto(h2.noise(n * 7), ("10.213.0.2", DNS))
            time.sleep(0.001)
