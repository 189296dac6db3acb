"""The Helm chart, rendered by real Helm binaries and held against Kubernetes' own schemas."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from service.metrics import DEFINITIONS
from service.settings import OPTIONS
from tests.programs import helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "photoninfer"
KUBERNETES = ["1.29", "1.37"]
FULL: dict[str, Any] = {
    "apiKeys": {"keys": ["first", "second"]},
    "model": {
        "name": "org/model",
        "servedName": "m",
        "downloadFirst": True,
        "tokenSecret": {"name": "hub"},
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "settings": {"max_model_len": 4096, "quantization": "int8", "prefix_cache": False},
    "imagePullSecrets": [{"name": "pull"}],
    "runtimeClassName": "nvidia",
    "priorityClassName": "high",
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "extraEnv": [{"name": "EXTRA", "value": "1"}],
    "ingress": {"enabled": True, "host": "llm.example.org", "tlsSecret": "tls"},
    "monitoring": {"monitor": "service", "rules": True, "dashboard": True, "labels": {"release": "p"}},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["llm.example.org"]},
    "inferencePool": {"enabled": True, "endpointPicker": "picker"},
    "autoscaling": {"type": "hpa"},
    "tracing": {"endpoint": "http://collector.traces:4318", "sampleRatio": 0.1},
}
SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "full": FULL,
    "keda": FULL | {"autoscaling": {"type": "keda", "prometheusAddress": "http://prometheus:9090"}},
    "pods": {"monitoring": {"monitor": "pod"}, "networkPolicy": {"egress": False}, "replicaCount": 3},
    "url": {"model": {"url": "https://example.org/m.gguf", "sha256": "0" * 64}},
    "host path": {"model": {"volume": {"hostPath": {"path": "/srv/models"}}, "name": "/models/m"}},
    "claimed cache": {"cache": {"existingClaim": "cache"}, "apiKeys": {"existingSecret": "keys"}},
    "bare": {
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
        "topologySpread": False,
    },
}
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "InferencePool"}


def run(
    major: int, *arguments: str, values: dict[str, Any] | None = None
) -> subprocess.CompletedProcess[str]:
    more = [] if values is None else ["--values", "-"]
    content = None if values is None else json.dumps(values)
    command = [helm(major), *arguments, *more]
    return subprocess.run(command, capture_output=True, text=True, input=content, check=False)


def render(major: int, values: dict[str, Any], *more: str) -> list[dict[str, Any]]:
    done = run(major, "template", "photon", str(CHART), "--namespace", "llm", *more, values=values)
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(each for each in objects if each["kind"] == kind)


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    return spec


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("values", [[], ["--values", str(CHART / "values-cpu.yaml")]], ids=["gpu", "cpu"])
def test_lint_finds_nothing(major: int, values: list[str]) -> None:
    done = run(major, "lint", "--strict", str(CHART), *values)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("name", SETS)
def test_what_is_rendered_is_what_kubernetes_takes(major: int, name: str) -> None:
    objects = render(major, SETS[name])

    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    for each in objects:
        if each["kind"] not in CUSTOM:
            for version in KUBERNETES:
                kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("name", SETS)
def test_no_container_may_more_than_compute(name: str) -> None:
    objects = render(4, SETS[name])
    specs = [pod_of(objects), of_kind(objects, "Pod")["spec"]]
    for spec in specs:
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            context = container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["runAsUser"] > 0
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            assert re.search(r":(?!latest)[\w.-]+$", container["image"])


def test_slow_loads_and_drains_are_waited_for() -> None:
    pod = pod_of(render(4, {"drainSeconds": 300, "probes": {"startupSeconds": 3600}}))
    server = pod["containers"][0]
    startup = server["startupProbe"]

    assert startup["httpGet"]["path"] == "/startupz"
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 3600
    assert server["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert pod["terminationGracePeriodSeconds"] > 300 + 5
    assert environment(server)["PHOTON_DRAIN_SECONDS"] == "300"
    assert server["lifecycle"]["preStop"]["exec"]["command"]


def test_gpus_are_asked_for_unless_there_are_none() -> None:
    with_gpu = pod_of(render(4, {}))["containers"][0]
    without = pod_of(render(4, {}, "--values", str(CHART / "values-cpu.yaml")))["containers"][0]

    assert with_gpu["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in without["resources"]["limits"]
    assert environment(without)["PHOTON_DEVICE"] == "cpu"
    assert without["image"].endswith("-cpu")


def test_settings_become_variables_that_the_server_knows() -> None:
    server = pod_of(render(4, FULL))["containers"][0]
    variables = environment(server)

    assert variables["PHOTON_MAX_MODEL_LEN"] == "4096"
    assert variables["PHOTON_PREFIX_CACHE"] == "false"
    assert variables["PHOTON_MODEL"] == "org/model"
    assert variables["PHOTON_API_KEYS_FILE"] == "/keys/keys"
    known = {option.variable for option in OPTIONS} | {"PHOTON_HF_TOKEN"}
    assert {name for name in variables if name.startswith("PHOTON_")} <= known


def test_the_schema_knows_every_setting() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    settings = schema["properties"]["settings"]["properties"]
    of_the_chart = {"host", "port", "cache_dir", "log_format", "drain_seconds", "heartbeat_limit_seconds"}
    of_the_chart |= {"model", "served_model_name", "api_keys_file", "trace_endpoint", "trace_sample_ratio"}

    assert set(settings) == {option.name for option in OPTIONS} - of_the_chart
    for option in OPTIONS:
        assert option.name in of_the_chart or settings[option.name]["description"] == option.help


@pytest.mark.parametrize(
    ("endpoint", "egress", "ports"),
    [
        ("", True, [53, 53, 443]),
        ("", False, []),
        ("http://collector:4318", True, [53, 53, 443, 4318]),
        ("http://collector:4318/v1/traces", False, [53, 53, 4318]),
        ("https://collector.example.org", True, [53, 53, 443]),
        ("http://collector", False, [53, 53, 80]),
    ],
)
def test_traces_are_switched_on_by_a_value_and_may_leave(
    endpoint: str, egress: bool, ports: list[int]
) -> None:
    values = {"tracing": {"endpoint": endpoint}, "networkPolicy": {"egress": egress}}
    objects = render(4, values)
    variables = environment(pod_of(objects)["containers"][0])
    rules = of_kind(objects, "NetworkPolicy")["spec"]["egress"]

    assert variables.get("PHOTON_TRACE_ENDPOINT", "") == endpoint
    assert ("PHOTON_TRACE_SAMPLE_RATIO" in variables) == bool(endpoint)
    assert [port["port"] for rule in rules for port in rule["ports"]] == ports


def test_an_autoscaler_alone_sets_the_number_of_replicas() -> None:
    for name, kind in (("full", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")):
        objects = render(4, SETS[name])
        kinds = [each["kind"] for each in objects]
        assert "replicas" not in of_kind(objects, "Deployment")["spec"]
        assert kinds.count("HorizontalPodAutoscaler") + kinds.count("ScaledObject") == 1
        assert kind in kinds
    assert of_kind(render(4, SETS["pods"]), "Deployment")["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"replicaCount": -1}, "replicaCount"),
        ({"image": {"repository": "x", "tag": "latest"}}, "tag"),
        ({"settings": {"max_modl_len": 1}}, "max_modl_len"),
        ({"autoscaling": {"type": "both"}}, "type"),
        ({"autoscaling": {"type": "keda"}}, "prometheusAddress"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"model": {"volume": {"nfs": {}}}}, "nfs"),
        ({"model": {"url": "http://example.org/m.gguf"}}, "url"),
        ({"resources": {"requests": {}, "limits": {"cpu": "2"}}, "gpus": 2}, "gpus"),
        ({"service": {"port": 0}}, "port"),
        ({"tracing": {"endpoint": "collector:4318"}}, "endpoint"),
        ({"tracing": {"sampleRatio": 2}}, "sampleRatio"),
    ],
)
@pytest.mark.parametrize("major", [3, 4])
def test_bad_values_are_refused_by_name(major: int, values: dict[str, Any], told: str) -> None:
    done = run(major, "template", "photon", str(CHART), values=values)

    assert done.returncode != 0
    assert told in done.stderr


def test_alerts_dashboard_and_autoscalers_read_metrics_that_exist() -> None:
    known = {each.name for each in DEFINITIONS}
    known |= {f"{each.name}_bucket" for each in DEFINITIONS if each.kind == "histogram"}
    texts = [path.read_text() for path in (CHART / "files").iterdir()]
    texts += [json.dumps(render(4, SETS[name])) for name in ("full", "keda")]
    used = {name for text in texts for name in re.findall(r"\bphotoninfer_[a-z_0-9]+", text)}

    assert len(used) > 12
    assert used <= known


def test_the_notes_say_how_to_ask() -> None:
    done = run(4, "install", "photon", str(CHART), "--dry-run=client", "--namespace", "llm", values=FULL)

    assert "curl -N http://127.0.0.1:5728/v1/chat/completions" in done.stdout
    assert "Authorization: Bearer $KEY" in done.stdout
    assert 'base_url="http://127.0.0.1:5728/v1"' in done.stdout
    assert "helm test photon --namespace llm" in done.stdout
