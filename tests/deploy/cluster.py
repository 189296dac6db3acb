"""The objects of the API server in memory, held against the schemas, and as controllers leave them."""

import copy
import threading
import uuid
from typing import Any

import kubernetes_validate

Object = dict[str, Any]
Key = tuple[str, str, str, str]  # path of group and version, plural, namespace, name

VERSION = "1.37"
KINDS = {  # by path of group and version: plural -> kind
    "api/v1": {
        "namespaces": "Namespace",
        "pods": "Pod",
        "services": "Service",
        "secrets": "Secret",
        "configmaps": "ConfigMap",
        "serviceaccounts": "ServiceAccount",
    },
    "apis/apps/v1": {"deployments": "Deployment", "replicasets": "ReplicaSet"},
    "apis/autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "apis/policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "apis/networking.k8s.io/v1": {"ingresses": "Ingress", "networkpolicies": "NetworkPolicy"},
}


class RefusalError(Exception):
    """Becomes a Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Cluster:
    """The objects."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.changed = threading.Condition()
        self.version = 1
        for name in ("default", "kube-system"):
            self.objects["api/v1", "namespaces", "", name] = {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {"name": name, "uid": name, "resourceVersion": "1"},
                "status": {"phase": "Active"},
            }

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects.values() if each["kind"] == kind]

    def write(self, key: Key, new: Object, is_dry: bool) -> Object:
        old = self.objects.get(key)
        new = {**copy.deepcopy(new), "kind": KINDS[key[0]][key[1]]}
        new.setdefault("apiVersion", key[0].removeprefix("apis/").removeprefix("api/"))
        self._check(key, new, old)
        if is_dry:
            return new
        self.version += 1
        metadata = new["metadata"]
        if key[2]:
            metadata["namespace"] = key[2]
        metadata["uid"] = old["metadata"]["uid"] if old else str(uuid.uuid4())
        metadata["resourceVersion"] = str(self.version)
        metadata["generation"] = (old["metadata"].get("generation", 0) if old else 0) + 1
        new["status"] = status_of(new)
        self.objects[key] = new
        if new["kind"] == "Deployment":
            self._control(key, new)
        if new["kind"] == "Service":
            new["spec"].setdefault("clusterIP", "10.0.0.1")
        self.changed.notify_all()
        return new

    def remove(self, key: Key) -> None:
        """An object, and what a controller has made for it."""
        gone = self.objects.pop(key)["metadata"]["uid"]
        for other, each in list(self.objects.items()):
            if any(owner["uid"] == gone for owner in each["metadata"].get("ownerReferences", ())):
                del self.objects[other]
        self.changed.notify_all()

    def _control(self, key: Key, deployment: Object) -> None:
        """The ReplicaSet that a Deployment comes down to; Helm 3 waits for its pods."""
        metadata, spec = deployment["metadata"], deployment["spec"]
        owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": key[3], "uid": metadata["uid"]}
        self.objects[key[0], "replicasets", key[2], key[3]] = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": key[3],
                "namespace": key[2],
                "uid": str(uuid.uuid4()),
                "resourceVersion": metadata["resourceVersion"],
                "labels": spec["template"]["metadata"]["labels"],
                "ownerReferences": [{**owner, "controller": True}],
            },
            "spec": {each: spec[each] for each in ("selector", "template") if each in spec}
            | {"replicas": spec.get("replicas", 1)},
            "status": {each: spec.get("replicas", 1) for each in ("replicas", "readyReplicas")},
        }

    def _check(self, key: Key, new: Object, old: Object | None) -> None:
        bare = {name: value for name, value in new.items() if name != "status"}
        name = f"{new['kind']} {key[3]!r}"
        try:
            kubernetes_validate.validate(bare, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            raise RefusalError(422, "Invalid", f"{name} is invalid: {error.message} at {where}") from None
        if key[2] and ("api/v1", "namespaces", "", key[2]) not in self.objects:
            raise RefusalError(404, "NotFound", f'namespaces "{key[2]}" not found')
        if new["kind"] == "Deployment":
            selector = new["spec"]["selector"]["matchLabels"]
            labels = new["spec"]["template"]["metadata"]["labels"]
            if not selector.items() <= labels.items():
                raise RefusalError(
                    422, "Invalid", f"{name}: the selector does not match the template's labels"
                )
            if old and old["spec"]["selector"] != new["spec"]["selector"]:
                raise RefusalError(422, "Invalid", f"{name}: spec.selector is immutable")


def status_of(new: Object) -> Object:
    """As if controllers had done their work."""
    if new["kind"] == "Deployment":
        count = new["spec"].get("replicas", 1)
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        done = [{"type": "Available", "status": "True"}]
        return {"observedGeneration": new["metadata"]["generation"], "conditions": done, **counts}
    if new["kind"] == "Pod":
        return {"phase": "Succeeded", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"phase": "Active"} if new["kind"] == "Namespace" else {}
