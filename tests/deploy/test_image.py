"""The Dockerfile, without a Docker engine."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.settings import OPTIONS
from tests.server.server_process import running_server

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
COMPOSE = ROOT / "deploy" / "docker-compose.yml"


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout


def test_the_image_runs_as_nobody_and_holds_no_compiler() -> None:
    stages = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]
    run = next(stage for stage in stages if "AS run\n" in stage)

    assert re.search(r"^USER (?!0\b)\d+$", run, re.MULTILINE)
    assert 'ENTRYPOINT ["photoninfer"]' in run  # no shell between, so that signals arrive
    for stage in stages:
        assert ":latest" not in stage
        assert "gcc" not in stage
        assert "devel" not in stage
        if "AS cpu\n" in stage or "AS gpu\n" in stage:
            assert "RUN " not in stage  # only what is copied from the build
            assert "USER " not in stage


def test_variables_are_those_of_the_server() -> None:
    known = {option.variable for option in OPTIONS} | {
        "PHOTON_HF_TOKEN",
        "PHOTON_API_KEYS",
        "PHOTON_TARGET",
    }
    for text in (TEXT, COMPOSE.read_text()):
        assert set(re.findall(r"\bPHOTON_[A-Z_]+", text)) <= known


def test_what_is_built_from_is_there_and_nothing_else(tmp_path: Path) -> None:
    """The wheel of the files that .dockerignore lets through is that of the checkout."""
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(source, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    assert len(list((tmp_path / "out").glob("*.whl"))) == 1


@pytest.mark.usefixtures("default_model")
def test_the_health_check_tells_a_living_server_from_none() -> None:
    found = re.search(r'CMD \["python", "-c", "(.*)"\]$', TEXT, re.MULTILINE)
    assert found is not None

    def check(port: int) -> int:
        command = [sys.executable, "-c", found[1]]
        return subprocess.run(command, env={"PORT": str(port)}, capture_output=True, check=False).returncode

    with running_server("--offline", "--kv-cache-gib", "0.1") as server:
        assert check(server.port) == 0
    assert check(server.port) != 0


def test_compose_starts_what_it_says() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]

    assert set(services) == {"photoninfer", "prometheus", "grafana"}
    for each in services.values():
        assert all(port.startswith("127.0.0.1:") for port in each["ports"])
        for volume in each["volumes"]:
            if volume.startswith("./"):
                assert (COMPOSE.parent / volume.split(":")[0]).exists()
