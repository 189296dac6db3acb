"""Downloads of init containers."""

import hashlib
import io
from pathlib import Path
from typing import Any

import pytest

from service.fetch import fetch

URL = "https://example.org/model.gguf"
CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Addresses that were asked for."""
    asked: list[str] = []

    def urlopen(url: str, **_options: Any) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(CONTENT)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return asked


def test_a_file_is_fetched_once(requests: list[str], tmp_path: Path) -> None:
    for digest in (DIGEST, DIGEST, ""):
        fetch(URL, tmp_path / "model.gguf", digest)

    assert (tmp_path / "model.gguf").read_bytes() == CONTENT
    assert requests == [URL]


def test_another_content_leaves_nothing(requests: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"has the SHA-256 {DIGEST}, not {'0' * 64}"):
        fetch(URL, tmp_path / "model.gguf", "0" * 64)

    assert list(tmp_path.iterdir()) == []


def test_only_https_is_fetched(requests: list[str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only https://"):
        fetch("http://example.org/model.gguf", tmp_path / "model.gguf")

    assert requests == []
