"""The chart's whole life, by real Helm binaries against an API server in memory."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.cluster import Cluster
from tests.deploy.fake_kubernetes import running_cluster
from tests.deploy.test_chart import CHART
from tests.programs import helm

Place = tuple[Cluster, Path]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with running_cluster(tmp_path) as place:
        yield place


def run(major: int, place: Place, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        helm(major),
        *arguments,
        "--namespace",
        "llm",
        "--timeout",
        "60s",
        "--kubeconfig",
        str(place[1]),
    ]
    environment = {"HOME": str(place[1].parent), "PATH": os.defpath}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def succeed(major: int, place: Place, *arguments: str) -> str:
    done = run(major, place, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def replicas(cluster: Cluster) -> int:
    (deployment,) = cluster.of_kind("Deployment")
    count: int = deployment["spec"]["replicas"]
    return count


@pytest.mark.parametrize("major", [3, 4])
def test_install_upgrade_rollback_test_and_uninstall(place: Place, major: int) -> None:
    cluster, _ = place
    told = succeed(major, place, "install", "photon", str(CHART), "--create-namespace", "--wait")
    assert "curl -N" in told
    assert replicas(cluster) == 1
    succeed(major, place, "upgrade", "photon", str(CHART), "--wait", "--set", "replicaCount=3")
    assert replicas(cluster) == 3
    succeed(major, place, "rollback", "photon", "1", "--wait")
    assert replicas(cluster) == 1
    assert "Succeeded" in succeed(major, place, "test", "photon")
    succeed(major, place, "uninstall", "photon", "--wait")
    assert cluster.of_kind("Deployment") == []
    assert cluster.of_kind("Service") == []


def test_an_upgrade_may_hand_the_replicas_to_an_autoscaler(place: Place) -> None:
    cluster, _ = place
    succeed(4, place, "install", "photon", str(CHART), "--create-namespace")
    succeed(4, place, "upgrade", "photon", str(CHART), "--set", "autoscaling.type=hpa")

    assert len(cluster.of_kind("HorizontalPodAutoscaler")) == 1


def test_the_cluster_of_these_tests_refuses_what_kubernetes_would(place: Place, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    (broken / "templates").mkdir(parents=True)
    (broken / "Chart.yaml").write_text("{apiVersion: v2, name: broken, version: 0.1.0}")
    service = "{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: [{port: 1, prot: 2}]}}"
    (broken / "templates" / "s.yaml").write_text(service)
    done = run(4, place, "install", "broken", str(broken), "--create-namespace")

    assert done.returncode != 0
    assert "prot" in done.stderr
