"""An API server in memory, enough for Helm to install into: no cluster, no controllers, no admission.

What is written is held against the schemas of Kubernetes, strictly. Workloads are ready and pods done at
once.
Source of the protocol: Kubernetes API conventions; client-go for the protobuf envelope and the watch list.
"""

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import yaml

from tests.deploy.cluster import KINDS, VERSION, Cluster, Key, Object, RefusalError
from tests.deploy.kubernetes_wire import parsed


class Handler(BaseHTTPRequestHandler):
    """One request. `cluster` is set by `running_cluster`."""

    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *_arguments: Any) -> None:
        pass

    def answer(self, code: int, body: Object) -> None:
        content = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def serve(self) -> None:
        try:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.route(content)
        except RefusalError as error:
            failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(error)}
            self.answer(error.code, {**failure, "reason": error.reason, "code": error.code})
        except (BrokenPipeError, ConnectionResetError):
            pass

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = serve  # noqa: N815  names of http.server

    def route(self, content: bytes) -> None:
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        path = url.path.strip("/")
        if (found := discovery(path)) is not None:
            return self.answer(200, found)
        group = next((each for each in KINDS if path.startswith(f"{each}/")), None)
        if group is None:
            raise RefusalError(404, "NotFound", f"there is no {path}")
        rest = path.removeprefix(f"{group}/").split("/")
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        if rest[0] not in KINDS[group]:
            raise RefusalError(404, "NotFound", f"there is no {rest[0]}")
        name = rest[1] if len(rest) > 1 else ""
        with self.cluster.changed:
            self.act((group, rest[0], namespace, name), query, content)
        return None

    def act(self, key: Key, query: dict[str, str], content: bytes) -> None:
        objects, is_dry = self.cluster.objects, "dryRun" in query
        if self.command == "GET" and not key[3]:
            return self.watch(key, query) if query.get("watch") in ("1", "true") else self.list(key, query)
        if self.command == "POST":
            new = parsed(content)
            key = (*key[:3], new["metadata"]["name"])
            if key in objects:
                raise RefusalError(409, "AlreadyExists", f'{key[1]} "{key[3]}" already exists')
            return self.answer(201, self.cluster.write(key, new, is_dry))
        is_apply = "apply-patch" in self.headers.get("Content-Type", "")
        old = objects.get(key)
        if old is None and not is_apply:
            raise RefusalError(404, "NotFound", f'{key[1]} "{key[3]}" not found')
        if self.command == "GET":
            return self.answer(200, old or {})
        if self.command == "DELETE":
            if not is_dry:
                self.cluster.remove(key)
            return self.answer(200, old or {})
        new = parsed(content)
        if self.command == "PATCH" and old is not None:
            kept = {name: value for name, value in old.items() if name != "status"}
            new = merged(copy.deepcopy(kept), new)
        return self.answer(200, self.cluster.write(key, new, is_dry))

    def matching(self, key: Key, query: dict[str, str]) -> list[Object]:
        def fits(other: Key, each: Object) -> bool:
            labels = each["metadata"].get("labels", {})
            wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
            field = query.get("fieldSelector", "")
            return (
                other[:2] == key[:2]
                and key[2] in ("", other[2])
                and all(labels.get(name) == value.lstrip("=") for name, _, value in wanted)
                and (not field.startswith("metadata.name=") or field.partition("=")[2] == other[3])
            )

        return [each for other, each in self.cluster.objects.items() if fits(other, each)]

    def list(self, key: Key, query: dict[str, str]) -> None:
        kind, version = KINDS[key[0]][key[1]], str(self.cluster.version)
        group = key[0].removeprefix("apis/").removeprefix("api/")
        body = {"kind": f"{kind}List", "apiVersion": group, "metadata": {"resourceVersion": version}}
        self.answer(200, {**body, "items": self.matching(key, query)})

    def watch(self, key: Key, query: dict[str, str]) -> None:
        """What is there, the mark that this was all, then every change, for as long as a client may ask."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        mark = {
            "annotations": {"k8s.io/initial-events-end": "true"},
            "resourceVersion": str(self.cluster.version),
        }
        kind = KINDS[key[0]][key[1]]
        seen: dict[str, Object] = {}
        for turn in range(40):
            now = {each["metadata"]["uid"]: each for each in self.matching(key, query)}
            events = [
                ("ADDED" if uid not in seen else "MODIFIED", each)
                for uid, each in now.items()
                if seen.get(uid) is not each
            ]
            events += [("DELETED", each) for uid, each in seen.items() if uid not in now]
            if turn == 0:
                version = key[0].removeprefix("apis/").removeprefix("api/")
                events.append(("BOOKMARK", {"kind": kind, "apiVersion": version, "metadata": mark}))
            for event, each in events:
                self.wfile.write(json.dumps({"type": event, "object": each}).encode() + b"\n")
            self.wfile.flush()
            seen = now
            self.cluster.changed.wait(0.5)


def discovery(path: str) -> Object | None:
    """What there is, for clients that ask first."""
    groups = [group.removeprefix("apis/") for group in KINDS if group.startswith("apis/")]
    if path == "version":
        major, minor = VERSION.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{VERSION}.0", "platform": "linux/amd64"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        versions = [{"groupVersion": each, "version": each.partition("/")[2]} for each in groups]
        listed = [
            {"name": each["groupVersion"].partition("/")[0], "versions": [each], "preferredVersion": each}
            for each in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    if path == "openapi/v3":
        return {"paths": {group: {"serverRelativeURL": f"/openapi/v3/{group}"} for group in KINDS}}
    if path.startswith("openapi/v3/"):
        return openapi(path.removeprefix("openapi/v3/"))
    if path in KINDS:
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        resources = [
            {
                "name": plural,
                "kind": kind,
                "namespaced": kind != "Namespace",
                "verbs": verbs,
                "singularName": "",
            }
            for plural, kind in KINDS[path].items()
        ]
        version = path.removeprefix("apis/").removeprefix("api/")
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }
    return None


def openapi(group: str) -> Object:
    """That the server itself checks fields: Helm asks for nothing else."""
    names = ("dryRun", "fieldManager", "fieldValidation")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    *_, of_group, version = ["", *group.split("/")]
    paths = {}
    for plural, kind in KINDS.get(group, {}).items():
        scope = "" if kind == "Namespace" else "namespaces/{namespace}/"
        about = {"group": "" if of_group == "api" else of_group, "version": version, "kind": kind}
        patch = {"responses": {}, "parameters": parameters, "x-kubernetes-action": "patch"}
        paths[f"/{group}/{scope}{plural}/{{name}}"] = {
            "patch": patch | {"x-kubernetes-group-version-kind": about}
        }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": VERSION}, "paths": paths}


def merged(old: Object, new: Object) -> Object:
    for name, value in new.items():
        if value is None:
            old.pop(name, None)
        elif isinstance(value, dict) and isinstance(old.get(name), dict):
            merged(old[name], value)
        else:
            old[name] = value
    return old


@contextmanager
def running_cluster(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and a kubeconfig that leads to it."""
    cluster = Cluster()
    handler = type("BoundHandler", (Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "fake", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        "current-context": "fake",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    try:
        yield cluster, path
    finally:
        server.shutdown()
        server.server_close()
