#!/usr/bin/env python3
"""Doubles of Google's two token endpoints and of a gRPC service, with TLS.

usage: google.py IP DIR. In DIR: ca.pem, service (its address), asked.jsonl (what was asked), ready (empty); and, read
at each request, federated (the token to give) and faults (a line each, taken one after the other).
The gRPC service speaks HTTP/2 only as far as it must to read the headers of a call; it never answers one.
"""
import json
import os
import socket
import ssl
import subprocess
import sys
import threading

IP, DIR = sys.argv[1:]
LOCK = threading.Lock()
COUNT = {}


def note(entry):
    with LOCK, open(os.path.join(DIR, "asked.jsonl"), "a") as f:
        f.write(json.dumps(entry) + "\n")


def certificates():
    run = lambda *a: subprocess.run(["openssl", *a], check=True, capture_output=True, cwd=DIR)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    run("req", "-x509", "-new", *key, "-days", "30", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.pem")
    with open(os.path.join(DIR, "ext"), "w") as f:
        f.write("subjectAltName=DNS:sts.googleapis.com,DNS:iamcredentials.googleapis.com,DNS:localhost\n")
    run("req", "-new", *key, "-subj", "/CN=leaf", "-keyout", "leaf.key", "-out", "leaf.csr")
    run("x509", "-req", "-in", "leaf.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30",
        "-extfile", "ext", "-out", "leaf.pem")


def context(alpn=None):
    c = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    c.load_cert_chain(os.path.join(DIR, "leaf.pem"), os.path.join(DIR, "leaf.key"))
    if alpn:
        c.set_alpn_protocols(alpn)
    return c


def each(listener, tls, talk):
    while True:
        raw, _ = listener.accept()

        def one(raw=raw):
            try:
                with tls.wrap_socket(raw, server_side=True) as c:
                    talk(c)
            except OSError:
                pass
        threading.Thread(target=one, daemon=True).start()


def endpoint(c):
    f = c.makefile("rb")
    while True:
        line = f.readline().decode("latin-1")
        if not line:
            return
        heads = {}
        while True:
            n, _, v = f.readline().decode("latin-1").rstrip("\r\n").partition(":")
            if not n:
                break
            heads[n.lower()] = v.strip()
        body = f.read(int(heads.get("content-length", 0)))
        host = heads.get("host", "")
        with LOCK:
            n = COUNT[host] = COUNT.get(host, 0) + 1
        note({"host": host, "ask": line.strip(), "authorization": heads.get("authorization"), "json": json.loads(body)})
        what = fault()
        if what:
            return misbehave(c, f, what)
        if host.startswith("sts."):
            given = os.path.join(DIR, "federated")
            token = open(given).read().strip() if os.path.exists(given) else "FEDERATED-%d" % n
            answer = {"access_token": token, "expires_in": 3600}
        else:
            answer = {"accessToken": "ACCESS-%d" % n}
        text = json.dumps(answer).encode()
        c.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


def fault():
    """The next line of DIR/faults."""
    path = os.path.join(DIR, "faults")
    with LOCK:
        try:
            with open(path) as f:
                first, *rest = f.read().splitlines()
        except (OSError, ValueError):
            return None
        with open(path, "w") as f:
            f.write("".join(line + "\n" for line in rest))
    return first


def misbehave(c, f, what):
    name, _, value = what.partition(" ")
    whole = lambda status, more, body: b"HTTP/1.1 %s X\r\nContent-Length: %d\r\n%s\r\n%s" % (
        status.encode(), len(body), more.encode(), body)
    if name == "status":
        c.sendall(whole(value, "", b'{"error": "S3CRET-ANSWER"}'))
    elif name == "body":
        c.sendall(whole("200", "", value.encode()))
    elif name == "redirect":
        c.sendall(whole("307", "Location: %s\r\n" % value, b""))
    elif name == "cut":
        c.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"access_tok')
    elif name == "garbage":
        c.sendall(b"\x00\x01 no HTTP\r\n\r\n")
    elif name == "endless":
        c.sendall(b'HTTP/1.1 200 OK\r\n\r\n{"x": "')
        while True:
            c.sendall(b"a" * 16384)
    elif name == "silent":
        while f.read(1):
            pass
    # reset: the end of the connection without a word.


def number(data, at, bits):
    n = data[at] & ((1 << bits) - 1)
    at += 1
    if n == (1 << bits) - 1:
        shift = 0
        while True:
            b = data[at]
            at += 1
            n += (b & 127) << shift
            shift += 7
            if not b & 128:
                break
    return n, at


def text(data, at):
    huffman = data[at] & 128
    n, at = number(data, at, 7)
    return (None if huffman else data[at:at + n].decode("latin-1")), at + n


def service(c):
    f = c.makefile("rb")
    f.read(24)  # the preface
    # Settings: a header table of no size keeps the coding literal where names and values are long.
    c.sendall(bytes([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]))
    while True:
        head = f.read(9)
        if len(head) < 9:
            return
        length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        payload = f.read(length)
        if kind == 4 and not flags & 1:
            c.sendall(bytes([0, 0, 0, 4, 1, 0, 0, 0, 0]))
        if kind == 6 and not flags & 1:
            c.sendall(bytes([0, 0, 8, 6, 1, 0, 0, 0, 0]) + payload)
        if kind == 1:
            at = 0
            if flags & 8:
                at = 1
            if flags & 32:
                at += 5
            fields, data = {}, payload
            while at < len(data):
                b = data[at]
                if b & 128:
                    _, at = number(data, at, 7)
                    continue
                if b & 224 == 32:
                    _, at = number(data, at, 5)
                    continue
                index, at = number(data, at, 6 if b & 64 else 4)
                name = {23: "authorization"}.get(index, index)
                if not index:
                    name, at = text(data, at)
                value, at = text(data, at)
                fields[name] = value
            note({"host": "service", "authorization": fields.get("authorization")})


certificates()
listener = socket.create_server((IP, 443))
grpc = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=each, args=(grpc, context(["h2"]), service), daemon=True).start()
with open(os.path.join(DIR, "service"), "w") as f:
    f.write("localhost:%d" % grpc.getsockname()[1])
open(os.path.join(DIR, "ready"), "w").close()
each(listener, context(), endpoint)
