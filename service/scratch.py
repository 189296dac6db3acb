"""Folders in which files are written until they are whole, and what killed processes leave of them."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "tmp-"


@contextmanager
def scratch_folder(parent: Path, prefix: str = PREFIX, suffix: str = "") -> Iterator[Path]:
    """A new folder in `parent`, deleted at the end unless it has been renamed; abandoned ones go first.

    It is locked until this process ends, however it does. Not marked by pid: containers share a cache, not
    pids.
    Raises: OSError
    """
    delete_abandoned(parent, prefix, suffix)
    path, lock = _make_locked(parent, prefix, suffix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def delete_abandoned(parent: Path, prefix: str = PREFIX, suffix: str = "") -> None:
    """Delete scratch folders that no living process holds. What can't be deleted stays."""
    with suppress(OSError):
        for path in parent.iterdir():
            if path.name.startswith(prefix) and path.name.endswith(suffix):
                with suppress(OSError):
                    _delete_unless_held(path)


def _delete_unless_held(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def _make_locked(parent: Path, prefix: str, suffix: str) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=parent))
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                return path, lock
            os.close(lock)  # before it was locked, another process took it for abandoned
