"""Downloads one file, whole or not at all: `python -m service.fetch URL FILE [SHA256]`."""

import hashlib
import sys
import urllib.request
from pathlib import Path

from service.scratch import scratch_folder

_CHUNK = 1 << 20


def fetch(url: str, target: Path, sha256: str = "") -> None:
    """A file that is there with the right digest, or at all where none is given, stays.

    Raises: ValueError: not HTTPS, or another digest. OSError.
    """
    if not url.startswith("https://"):
        raise ValueError(f"{url}: only https:// is fetched.")
    if target.is_file() and sha256 in ("", _digest(target)):
        return
    digest = hashlib.sha256()
    with scratch_folder(target.parent) as scratch:  # of this process alone: a cache may be shared
        whole = scratch / target.name
        with urllib.request.urlopen(url, timeout=60) as source, whole.open("wb") as file:  # noqa: S310
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if sha256 not in ("", digest.hexdigest()):
            raise ValueError(f"{url} has the SHA-256 {digest.hexdigest()}, not {sha256}.")
        whole.rename(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    try:
        fetch(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:4])
    except (OSError, ValueError) as error:
        sys.exit(f"photoninfer: {error}")
