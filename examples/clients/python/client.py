"""Takes this workload's certificate from the agent's SDS socket: client.py [SOCKET] (needs grpcio, nothing generated).

Prints the chain and the roots; the key stays in the variable. The stream goes on: the agent pushes each renewal.
"""
import queue
import sys

try:
    import grpc
except ImportError:
    sys.exit("client.py: it needs grpcio: python3 -m pip install grpcio, in a virtual environment")

METHOD = "/envoy.service.secret.v3.SecretDiscoveryService/StreamSecrets"
SECRET = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"


def field(number, data):
    """A length-delimited field of a protobuf message."""
    size, out = len(data), b""
    while size > 127:
        out, size = out + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + out + bytes([size]) + data


def fields(message):
    """The fields of a message: number and bytes (or a number, which nobody here needs)."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 2:
            size = varint()
            yield key >> 3, message[at:at + size]
            at += size
        elif key & 7 == 0:
            yield key >> 3, varint()
        else:
            at += 8 if key & 7 == 1 else 4


def one(message, *path):
    for number in path:
        message = next((value for found, value in fields(message) if found == number), b"")
    return message


def request(name, version=b"", nonce=b""):
    text = field(1, version) if version else b""
    text += field(2, field(1, b"sds-client"))  # the node, which an SDS server asks for
    text += field(3, name.encode()) + field(4, SECRET.encode())
    return text + (field(5, nonce) if nonce else b"")


def secret(channel, name):
    """The first answer for a name, acknowledged."""
    requests = queue.SimpleQueue()
    requests.put(request(name))
    answers = channel.stream_stream(METHOD)(iter(requests.get, None), timeout=30)
    answer = next(answers)
    requests.put(request(name, one(answer, 1), one(answer, 5)))
    requests.put(None)
    return one(answer, 2, 2)  # resources, the value of the Any


def main():
    socket = sys.argv[1] if len(sys.argv) > 1 else "/var/run/secrets/workload-spiffe-uds/socket"
    # An authority that every server takes: the default would be the socket's path.
    with grpc.insecure_channel(f"unix:{socket}", options=[("grpc.default_authority", "localhost")]) as channel:
        identity = secret(channel, "default")
        chain, key = one(identity, 2, 1, 2), one(identity, 2, 2, 2)
        roots = one(secret(channel, "ROOTCA"), 4, 1, 2)
    assert b"PRIVATE KEY" in key
    sys.stdout.write(chain.decode() + roots.decode())


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"client.py: no certificate from the socket: {error.details()}")
