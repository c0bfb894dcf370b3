"""What accepts connections for the doubles: a thread for each, and an end for all of them."""
import socket
import threading


class Server:
    """Accepts on (host, port) and runs `self.serve(conn, peer, n)` in a thread for each connection."""

    BROKEN = (OSError, ValueError)  # what a peer can cause

    def __init__(self, host, port, backlog=64):
        self.family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.port, self.backlog = host, port, backlog
        self.conns, self.accepted, self.lsock = set(), 0, None

    def up(self):
        if self.lsock is not None:
            return
        s = socket.socket(self.family)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        s.bind((self.host, self.port))
        s.listen(self.backlog)
        self.lsock = s
        threading.Thread(target=self.loop, args=(s,), daemon=True).start()

    def loop(self, s):
        while True:
            try:
                c, peer = s.accept()
            except OSError:
                return
            self.accepted += 1
            self.conns.add(c)
            threading.Thread(target=self.guard, args=(c, peer[0], self.accepted), daemon=True).start()

    def guard(self, c, peer, n):
        try:
            self.serve(c, peer, n)
        except self.BROKEN:
            pass
        finally:
            self.conns.discard(c)
            c.close()

    def refuse(self):
        """No more connections; those that are open stay. False where there is no listener."""
        if self.lsock is None:
            return False
        s, self.lsock = self.lsock, None
        try:
            s.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        s.close()
        return True

    def down(self):
        if not self.refuse():
            return
        for c in list(self.conns):
            try:
                c.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def request(f):
    """Request line and headers from a file, as (method, target, pairs); None at its end."""
    line = f.readline(65536).decode("latin-1").rstrip("\r\n")
    if not line:
        return None
    pairs = []
    while h := f.readline(65536).decode("latin-1").rstrip("\r\n"):
        name, _, value = h.partition(":")
        pairs.append((name, value.strip()))
    method, target = (line.split(" ") + ["", ""])[:2]
    return method, target, pairs
