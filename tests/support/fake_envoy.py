#!/usr/bin/env python3
"""Stands in for Envoy where a test needs only its process and its admin port.

FAKE_ENVOY (JSON) says how it behaves:
  ready        false: no config accepted and no workers      (default true)
  unready_by   path: not ready while there is such a file
  exit         {"after": seconds, "status": n}: ends by itself
  ignore_term  true: SIGTERM does nothing
  hang         [paths]: admin paths that never answer
  stats        text: answers /stats with this
  ill          {path: mood}: answers with half a head, or an endless head, body or drip of one
Everything it is asked is noted in fake-envoy.jsonl in the working directory.
"""
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOW = json.loads(os.environ.get("FAKE_ENVOY") or "{}")
LOCK = threading.Lock()


def note(**what):
    with LOCK, open("fake-envoy.jsonl", "a") as out:
        out.write(json.dumps(what) + "\n")


def bootstrap():
    with open(sys.argv[sys.argv.index("-c") + 1]) as config:
        return json.load(config)


STATS = {
    True: "cluster_manager.cds.update_success: 1\nlistener_manager.lds.update_success: 1\n"
          "server.state: 0\nlistener_manager.workers_started: 1\n",
    False: "cluster_manager.cds.update_success: 0\nlistener_manager.lds.update_success: 0\n"
           "server.state: 2\nlistener_manager.workers_started: 0\n",
}


class Admin(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def misbehave(self, mood):
        self.close_connection = True
        piece, pause = {"half head": (b"", 3600), "endless head": (b"X-Pad: " + b"x" * 1000 + b"\r\n", 0),
                        "endless body": (b"envoy_ill{} 1\n" * 5000, 0), "drip": (b"e", 0.1)}[mood]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
        try:
            self.wfile.write(head if mood.endswith("head") else head + b"\r\n")
            while True:
                self.wfile.write(piece)
                time.sleep(pause)
        except OSError:
            pass

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.rfile.read(length)
        note(request=f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        if path in HOW.get("hang", []):
            while True:
                time.sleep(3600)
        if path in HOW.get("ill", {}):
            return self.misbehave(HOW["ill"][path])
        body = "OK\n"
        if path == "/stats":
            unready = os.path.exists(HOW.get("unready_by") or "/no/such/file")
            body = HOW.get("stats") or STATS[HOW.get("ready", True) and not unready]
        elif path == "/server_info":
            body = json.dumps({"version": "0000000/1.40.0/Clean/RELEASE/none", "state": "LIVE",
                               "uptime_current_epoch": "1s"})
        data = body.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


def ended(number, _frame):
    note(signal=signal.Signals(number).name)
    if not HOW.get("ignore_term"):
        os._exit(0)


def main():
    if "--version" in sys.argv:
        print("fake_envoy.py  version: 0000000/1.40.0/Clean/RELEASE/none")
        return
    if "--hot-restart-version" in sys.argv:
        print("11.104")
        return
    if "validate" in sys.argv:
        return
    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, ended)
    note(args=sys.argv[1:], pid=os.getpid(), uid=os.getuid())
    address = bootstrap()["admin"]["address"]["socket_address"]
    ThreadingHTTPServer.address_family = 10 if ":" in address["address"] else 2
    server = ThreadingHTTPServer((address["address"], address["port_value"]), Admin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    note(serving=address["port_value"])
    end = HOW.get("exit")
    if end:
        time.sleep(end.get("after", 0))
        note(exit=end.get("status", 0))
        os._exit(end.get("status", 0))
    while True:
        signal.pause()


main()
