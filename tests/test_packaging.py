"""The wheel: what is in it, and that it serves from somewhere else."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_product_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"service", "openai_api"}
    for wanted in (
        "service/cli.py",
        "openai_api/routes.py",
        "openai_api/static/index.html",
        "openai_api/static/vendor/purify.js",
        "service/kernels/sample.cu",
        "service/config/default.toml",
    ):
        assert wanted in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name or name.endswith((".pyc", ".cubin"))]


def test_an_installed_wheel_serves_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of the running interpreter, so that no network is needed."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    packages = next(home.glob("lib/python*/site-packages"))
    zipfile.ZipFile(wheel).extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    model = make_checkpoint(tmp_path / "tiny")
    python = [str(home / "bin" / "python"), "-I", "-m", "service"]
    where = subprocess.run(
        [*python[:2], "-c", "import service; print(service.__file__)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert str(packages) in where.stdout

    helped = subprocess.run(
        [*python, "serve", "--help"], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert "--served-model-name" in helped.stdout
    command = [
        *python,
        "serve",
        "--port",
        "0",
        "--model",
        str(model),
        "--kv-cache-gib",
        "0.01",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ},  # noqa: TID251
    ) as process:
        try:
            assert process.stderr is not None
            ready = next(line for line in process.stderr if line.startswith("Ready: "))
            body = json.dumps({"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}).encode()
            url = ready.split(" at ")[1].strip() + "/completions"
            request = Request(url, body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as answer:
                reply = json.loads(answer.read())
        finally:
            process.terminate()
            process.stderr.close() if process.stderr else None
    assert reply["usage"]["completion_tokens"] == 3
