"""The image in a plain directory: its wheel, model, kernels, entry point and health check."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from service.model.default_model import default_model_path
from tests.checkpoints import make_checkpoint
from tests.deploy.image import ROOT, Image

SECONDS = 120


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that the image's user may enter, too."""
    folder = Path(tempfile.mkdtemp(prefix="photoninfer-image-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def files(root: Path) -> dict[str, int]:
    """All but what a container may write: name -> time of change."""
    found = {}
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in ("cache", "tmp")]
        for name in names:
            path = Path(folder, name)
            found[str(path)] = path.lstat().st_mtime_ns
    return found


def check(image: Image, port: int) -> int:
    with image.start(image.health_check, PORT=str(port)) as process:
        process.communicate(timeout=SECONDS)
        return process.returncode


def answer(port: int) -> dict[str, object]:
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    body = json.dumps({"prompt": "Hi", "max_tokens": 3, "ignore_eos": True})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    found: dict[str, object] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_the_cpu_image_is_built_serves_its_model_and_writes_nowhere_else(
    root: Path, default_model: Path
) -> None:
    inside = default_model_path(root / "opt" / "photoninfer" / "cache")
    inside.parent.mkdir(parents=True)
    shutil.copyfile(default_model, inside)  # `photoninfer pull` would download it
    os.utime(inside, (0, 0))
    image = Image(root, "cpu", {})
    assert (root / "opt/photoninfer/bin/photoninfer").is_file()
    assert len(list((inside.parents[1] / "weights").iterdir())) == 1
    (root / "cache").chmod(0o777)  # for `chown`, which was left out
    before, port = files(root), free_port()

    options = {"PORT": str(port), "PHOTON_KV_CACHE_GIB": "0.1", "PHOTON_OFFLINE": "true"}
    with image.start([*image.entrypoint, *image.command], **options) as process:
        try:
            assert process.stdout is not None
            log = []
            for line in process.stdout:
                log.append(line)
                if line.startswith("Ready: "):
                    break
            assert process.poll() is None, log
            healthy = check(image, port)
            reply = answer(port)
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=SECONDS)
        finally:
            process.kill()

    assert healthy == 0
    assert reply["usage"]["completion_tokens"] == 3  # type: ignore[index]
    assert process.returncode == 0
    assert check(image, port) != 0
    assert "not cached" not in "".join(log)  # the prepared weights of the image were used
    assert {each.name for each in (root / "cache").iterdir()} <= {"cupy"}  # if CuPy is among what is lent
    assert files(root) == before
    assert {reason.split()[0] for reason in image.left_out} == {"useradd", "chown", "dependencies"}


def test_the_gpu_image_holds_the_kernels_that_were_asked_for(root: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy and NVRTC are not installed: pip install photoninfer[nvrtc]")
    model = make_checkpoint(root / "model")
    image = Image(root, "gpu", {"CUDA": "13", "MODEL": str(model), "ARCHS": "sm_80 sm_90a"})

    shared = Path(image.environment["PHOTON_SHARED_CACHE_DIR"])
    assert len(list((shared / "cubin").glob("*.cubin"))) > 20
    assert image.environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    with image.start([*image.entrypoint, *image.command, "--help"]) as process:
        told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert str(shared) not in told
    assert "--model" in told


def test_an_architecture_that_is_none_ends_the_build(root: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy and NVRTC are not installed: pip install photoninfer[nvrtc]")
    model = make_checkpoint(root / "model")

    with pytest.raises(AssertionError, match="sm_1"):
        Image(root, "gpu", {"CUDA": "13", "MODEL": str(model), "ARCHS": "sm_1 sm_80"})


def test_extras_that_the_image_installs_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    for name in ("otel", "cuda12", "cuda13"):
        assert name in extras
    asked = subprocess.run(
        ["grep", "-o", r"\.\[[^]]*\]", str(ROOT / "Dockerfile")], capture_output=True, text=True, check=True
    ).stdout.split()
    assert asked == [".[otel]", ".[cuda${CUDA},otel]"]
