"""Bodies that Helm sends: JSON, YAML, or protobuf in the envelope of Kubernetes."""

import base64

import yaml

from tests.deploy.cluster import Object


def parsed(content: bytes) -> Object:
    """JSON, YAML or, for the Secrets in which Helm keeps releases, protobuf."""
    if content[:4] != b"k8s\x00":
        loaded: Object = yaml.safe_load(content)
        return loaded
    envelope = fields(content[4:])
    kind = fields(envelope[1][0])[2][0].decode()
    body = fields(envelope[2][0])
    raw = fields(body[1][0])
    metadata: Object = {"name": raw[1][0].decode()}
    for number, name in ((11, "labels"), (12, "annotations")):
        if number in raw:
            metadata[name] = {key: value.decode() for key, value in map(entry, raw[number])}
    new: Object = {"apiVersion": "v1", "kind": kind, "metadata": metadata}
    if kind == "Secret":
        new["data"] = {key: base64.b64encode(value).decode() for key, value in map(entry, body.get(2, []))}
        new["type"] = body[3][0].decode() if 3 in body else "Opaque"
    return new


def entry(content: bytes) -> tuple[str, bytes]:
    """Of a map."""
    found = fields(content)
    return found[1][0].decode(), found.get(2, [b""])[0]


def fields(content: bytes) -> dict[int, list[bytes]]:
    """A protobuf message's fields of bytes by number; integers are left out."""
    found: dict[int, list[bytes]] = {}
    place = 0

    def integer() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = content[place]
            place += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while place < len(content):
        tag = integer()
        if tag & 7 == 2:
            length = integer()
            found.setdefault(tag >> 3, []).append(content[place : place + length])
            place += length
        else:
            integer()
    return found
