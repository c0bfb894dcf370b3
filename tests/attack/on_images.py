"""Registries and images that mean ill, many of them in one push."""
import gzip
import hashlib
import json
import time
from urllib.parse import urlsplit

from . import h2
from .neighbours import ECDS, wasm
from .registry import attack
from .world import POD, XDS, Registry

PORT, MANY = 8082, 40
INDEX, IMAGE = "application/vnd.oci.image.index.v1+json", "application/vnd.oci.image.manifest.v1+json"
LAYER, MODULE = "application/vnd.oci.image.layer.v1.tar+gzip", "application/vnd.module.wasm.content.layer.v1+wasm"


def sha(body):
    return "sha256:" + hashlib.sha256(body).hexdigest()


def manifest(kind, field, entries):
    return json.dumps({"schemaVersion": 2, "mediaType": kind, field: entries}).encode()


def header(name=b"a", size=0, kind=b"0", octal=None):
    head = bytearray(512)
    head[:len(name)] = name
    head[124:136] = octal or b"%011o\0" % size
    head[156:157], head[257:265] = kind, b"ustar\00000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


SPARSE = header(b"plugin.wasm", 0, b"S", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7)
LAYERS = {
    "headers": header() * 400_000, "links": header(b"plugin.wasm", 0, b"2") * 1000, "zeros": b"\0" * 200_000_000,
    "sparse": SPARSE + b"x" * 4096, "long names": (header(b"x", 1 << 20, b"L") + b"n" * (1 << 20)) * 60,
    "records": (header(b"x", 1 << 20, b"x") + b"11 path=ab\n".ljust(1 << 20, b"\n")) * 60,
}
BLOBS = {}
for label, content in LAYERS.items():
    blob = gzip.compress(content, 6)
    BLOBS[sha(blob)] = blob
    LAYERS[label] = manifest(IMAGE, "layers", [{"mediaType": LAYER, "digest": sha(blob), "size": len(blob)}])


class Host(Registry):
    """One image for each case; the rest of a name makes it another one."""

    def whole(self, body, kind="application/octet-stream"):
        self.head(200, f"Content-Type: {kind}", f"Content-Length: {len(body)}")
        self.wfile.write(body)

    def drip(self, first=b""):
        self.head(200, f"Content-Type: {IMAGE}")
        self.wfile.write(first)
        self.endless(b" ", 0.2)

    def answer(self):
        path = urlsplit(self.path).path
        parts = path.split("/")
        if path == "/v2/":
            return self.whole(b"{}")
        if parts[-2] == "blobs":
            return self.whole(BLOBS[parts[-1]]) if parts[-1] in BLOBS else self.drip()
        case = parts[2].replace("-", " ")
        if case == "nested":
            return self.whole(NESTED[parts[-1]] if parts[-1] in NESTED else NESTED["first"], INDEX)
        if case == "redirects":
            n = int(urlsplit(self.path).query or 0)
            return self.head(302, f"Location: {path}?{n + 1}", "Content-Length: 0")
        if case == "trickle":
            return self.drip(b'{"layers":[')
        if case in MANIFESTS:
            return self.whole(MANIFESTS[case], IMAGE if case != "children" else INDEX)
        return self.whole(LAYERS[case], IMAGE)

    def log_message(self, *_):
        pass


INNER = manifest(INDEX, "manifests", [{"digest": "sha256:" + "0" * 64}])
NESTED = {sha(INNER): INNER, "first": manifest(INDEX, "manifests", [{"digest": sha(INNER)}])}
DIGEST = b'{"digest":"sha256:' + b"a" * 64 + b'"}'
MANIFESTS = {
    "layers": b'{"layers":[' + (DIGEST + b",") * 48_000 + b'{"mediaType":"' + LAYER.encode() + b'",' + DIGEST[1:] + b"]}",
    "empty layers": b'{"layers":[' + b'{"digest":""},' * 290_000 + DIGEST + b"]}",
    "children": b'{"mediaType":"' + INDEX.encode() + b'","manifests":[' + b'{"digest":""},' * 290_000 + DIGEST + b"]}",
    "long kind": b'{"layers":[' + DIGEST + b',{"mediaType":"' + MODULE.encode() + b'",' + DIGEST[1:] + b"]," +
                         b'"mediaType":"' + b"k" * 4_000_000 + b'"}',
    "long layer kind": b'{"layers":[{"mediaType":"' + b"k" * 4_000_000 + b'",' + DIGEST[1:] + b"]}",
}
CASES = ["nested", "redirects", "trickle", *MANIFESTS, *LAYERS]


def world_of(case):
    place = case.replace(" ", "-")
    return {"resources": [wasm(f"m{n}", f"oci://{POD}:{PORT}/{place}/m{n}:1") for n in range(MANY)], "modules": True,
            "before": lambda world: world.serve(Host, PORT),
            "env": {"WASM_INSECURE_REGISTRIES": "*", "ISTIO_WASM_MAX_BINARY_SIZE_BYTES": "268435456"}}


for case in CASES:
    @attack(f"images with {case}", "forty such images in one push", world=world_of(case), short=case in ("layers", "empty layers"))
    def images(world, size, case=case):
        names = b"".join(h2.part(3, b"m%d" % n) for n in range(MANY))
        ask = h2.framed(h2.part(2, h2.NODE) + names + h2.part(4, ECDS.encode()))
        end = time.monotonic() + max(size.seconds, 6)
        while time.monotonic() < end:
            try:
                with h2.Conn(world.dir / XDS, timeout=5) as conn:
                    conn.send(h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.request(h2.ADS_PATH)), h2.frame(h2.DATA, 0, 1, ask))
                    while conn.read()[0] != h2.DATA:
                        pass
            except OSError:
                pass
