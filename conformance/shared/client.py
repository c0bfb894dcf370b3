"""A small HTTP/1.1 client that shows what came over the wire. A suite's own adds how it asks and what it keeps."""
import socket


class Conn:
    KEEP, PORT = (), 0  # headers that are part of the contract; where to connect if nothing is said

    def __init__(self, host="127.0.0.1", port=None, source=None, timeout=15):
        self.s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.s.settimeout(timeout)
        if source:
            self.s.bind((source, 0))
        self.s.connect((host, port or self.PORT))
        self.f = self.s.makefile("rb")

    def close(self):
        self.f.close()
        self.s.close()

    def send(self, method, path, heads, body, raw=None):
        if raw is None:
            raw = "%s %s HTTP/1.1\r\n" % (method, path) + "".join("%s: %s\r\n" % (n, v) for n, v in heads) + "\r\n"
            raw = raw.encode("latin-1") + body
        self.s.sendall(raw)

    def head(self):
        """-> (status line, [(name, value)])."""
        line = self.f.readline(65536).decode("latin-1").rstrip("\r\n")
        pairs = []
        while line:
            h = self.f.readline(65536).decode("latin-1").rstrip("\r\n")
            if not h:
                break
            n, _, v = h.partition(":")
            pairs.append((n.lower(), v.strip()))
        return line, pairs

    def read(self, method):
        """-> {status, headers, data}, data without its transfer coding, and all headers; {dropped: true} when no answer came,
        {no_answer: true} when none came in time."""
        try:
            line, pairs = self.head()
            if line.startswith("HTTP/1.1 100"):
                line, pairs = self.head()
        except ConnectionError:
            return {"dropped": True}, {}
        except socket.timeout:  # TimeoutError since 3.10
            return {"no_answer": True}, {}
        if not line:
            return {"dropped": True}, {}
        h, status = dict(pairs), int(line.split(" ")[1])
        try:
            data = b"" if method == "HEAD" or status in (204, 304) else self.body(h)
        except (ConnectionError, socket.timeout):
            return {"status": status, "cut": True}, h
        kept = [n for n, _ in pairs if n in self.KEEP]
        out = {"status": status, "headers": {n: v for n, v in sorted(pairs) if n in self.KEEP}}
        if len(kept) != len(out["headers"]):
            out["doubled"] = sorted(kept)
        if h.get("connection", "").lower() == "close":
            out["closes"] = True
        if 300 <= status < 400:  # the little page about the redirect is not part of the contract
            out["headers"].pop("content-type", None)
            data = b""
        out["data"] = data
        return out, h

    def body(self, h):
        if "chunked" in h.get("transfer-encoding", ""):
            data = b""
            while True:
                size = int(self.f.readline().split(b";")[0].strip() or b"0", 16)
                if not size:
                    self.f.readline()
                    return data
                data += self.f.read(size)
                self.f.readline()
        if "content-length" in h:
            return self.f.read(int(h["content-length"]))
        return self.f.read()
