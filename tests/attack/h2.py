"""HTTP/2 by hand: frames that no library would send."""
import os
import socket
import struct
import time

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SDS_PATH = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"
ADS_PATH = "/envoy.service.discovery.v3.AggregatedDiscoveryService/StreamAggregatedResources"
SECRET = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"
# A node with nothing but its ID.
NODE = b"\x0a\x1fsidecar~10.213.0.2~pod.ns~ns.sv"
# Bytes of a frame: less than the 16,384 that everybody takes.
PIECE = 16_000


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def number(value, bits):
    """An HPACK integer."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def field(name, value):
    name, value = name.encode(), value.encode() if isinstance(value, str) else value
    return b"\0" + number(len(name), 7) + name + number(len(value), 7) + value


def request(path, *more):
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "a"),
              ("content-type", "application/grpc"), ("te", "trailers"), *more]
    return b"".join(field(*f) for f in fields)


def varint(value):
    out = b""
    while value >= 128:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def part(number, body):
    """A field of a protobuf message that holds bytes."""
    return varint(number << 3 | 2) + varint(len(body)) + body


def framed(body):
    """A gRPC message."""
    return b"\0" + struct.pack(">I", len(body)) + body


def pieces(body):
    """Of a size that fits into a frame."""
    return (body[at:at + PIECE] for at in range(0, len(body), PIECE))


def message(*fields):
    """A protobuf message of byte fields, as a gRPC message."""
    return framed(b"".join(part(*field) for field in fields))


def secrets(name=b"default"):
    return message((2, NODE), (3, name), (4, SECRET.encode()))


class Conn:
    """One connection to a unix socket, past the preface."""

    def __init__(self, path, settings=b"", timeout=5.0):
        self.io = socket.socket(socket.AF_UNIX)
        self.io.settimeout(timeout)
        self.io.connect(str(path))
        self.io.sendall(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.buffer = b""

    def send(self, *frames):
        self.io.sendall(b"".join(frames))

    def read(self):
        """The next frame: kind, flags, stream, payload."""
        while len(self.buffer) < 9 or len(self.buffer) < 9 + int.from_bytes(self.buffer[:3], "big"):
            piece = self.io.recv(65536)
            if not piece:
                raise ConnectionError("closed")
            self.buffer += piece
        length = int.from_bytes(self.buffer[:3], "big")
        head, payload = self.buffer[:9], self.buffer[9:9 + length]
        self.buffer = self.buffer[9 + length:]
        return head[3], head[4], int.from_bytes(head[5:9], "big") & 0x7FFFFFFF, payload

    def close(self):
        self.io.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def served(path, seconds=10.0, name=b"default", *more):
    """Whether a new client is given the workload's certificate, or what has this name; `more`: header fields."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with Conn(path, timeout=seconds) as conn:
                conn.send(frame(HEADERS, END_HEADERS, 1, request(SDS_PATH, *more)), frame(DATA, 0, 1, secrets(name)))
                got = b""
                while b"END CERTIFICATE" not in got:
                    kind, flags, _, payload = conn.read()
                    if kind == DATA:
                        got += payload
                        # No window updates: a secret fits the first window.
                    elif kind == SETTINGS and not flags & ACK:
                        conn.send(frame(SETTINGS, ACK, 0))
                    elif kind in (RST, GOAWAY) or (kind == HEADERS and flags & END_STREAM):
                        raise ConnectionError("refused")
                return True
        except OSError:
            time.sleep(0.1)
    return False


def noise(length):
    return os.urandom(length)
