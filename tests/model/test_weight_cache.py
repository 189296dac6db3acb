"""The cache of prepared weights: quick when whole, made anew when not, and safe with several processes."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from service.errors import ModelError
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.model.gguf import open_gguf
from service.model.weight_cache import MAX_ENTRIES, open_gguf_cached
from tests.gguf_files import make_gguf

MODULE = "service.model.weight_cache"
HOLD_LOCK = """
import fcntl, os, sys
os.makedirs(sys.argv[1])
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    make_gguf(path, kinds={"blk.0.ffn_up.weight": "Q4_1"})
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The GGUF files that were parsed, in order."""
    calls: list[Path] = []

    def counted(path: Path) -> Checkpoint:
        calls.append(path)
        return open_gguf(path)

    monkeypatch.setattr(f"{MODULE}.open_gguf", counted)
    return calls


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "weights").iterdir())


def touch(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def assert_same(found: Checkpoint, wanted: Checkpoint) -> None:
    """Bit by bit, whether parts are fused or not."""
    assert found.config == wanted.config
    assert found.tokenizer == wanted.tokenizer
    assert found.num_parameters == wanted.num_parameters
    assert found.fingerprint == wanted.fingerprint
    np.testing.assert_array_equal(found.weights.embedding(), wanted.weights.embedding())
    np.testing.assert_array_equal(found.weights.final_norm(), wanted.weights.final_norm())
    np.testing.assert_array_equal(np.asarray(found.weights.head()), np.asarray(wanted.weights.head()))
    for index in range(wanted.config.num_layers):
        ours, theirs = found.weights.layer(index), wanted.weights.layer(index)
        for name in theirs.__slots__:
            one, other = getattr(ours, name), getattr(theirs, name)
            if isinstance(other, tuple):
                one, other = np.concatenate(one), np.concatenate(other)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_cached_model_is_the_same_and_is_not_parsed_again(
    architecture: str, source: Path, cache: Path, parsed: list[Path]
) -> None:
    make_gguf(source, architecture)

    first, second = open_gguf_cached(source, cache), open_gguf_cached(source, cache)

    assert parsed == [source]
    for checkpoint in (first, second):
        assert_same(checkpoint, open_checkpoint(source))


def test_an_entry_of_another_user_is_used_though_it_can_not_be_marked_as_used(
    source: Path, cache: Path, parsed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gguf_cached(source, cache)

    def refuse(*_arguments: object) -> None:
        raise PermissionError

    monkeypatch.setattr(f"{MODULE}.os.utime", refuse)
    open_gguf_cached(source, cache)

    assert parsed == [source]


def test_a_tied_head_is_not_stored(source: Path, cache: Path) -> None:
    make_gguf(source, tensors={"output.weight": None})
    open_gguf_cached(source, cache)
    assert open_gguf_cached(source, cache).weights.head() is None


def test_a_changed_source_is_prepared_anew(source: Path, cache: Path, parsed: list[Path]) -> None:
    old = open_gguf_cached(source, cache).weights.final_norm()
    size = source.stat().st_size
    make_gguf(source, kinds={"blk.0.ffn_up.weight": "Q4_1"}, tensors={"output_norm.weight": old + 1})
    assert source.stat().st_size == size

    new = open_gguf_cached(source, cache)

    assert len(parsed) == 2
    np.testing.assert_array_equal(new.weights.final_norm(), old + 1)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def rename_a_tensor(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"embedding"', b'"embeddinh"'))


def change_a_dtype(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"', 1))


def empty(file: Path) -> None:
    file.write_bytes(b"")


def fill_with_zeros(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("weights.safetensors", cut),
        ("weights.safetensors", rename_a_tensor),
        ("weights.safetensors", change_a_dtype),
        ("weights.safetensors", fill_with_zeros),
        ("weights.safetensors", Path.unlink),
        ("checkpoint.json", cut),
        ("checkpoint.json", empty),
        ("checkpoint.json", Path.unlink),
    ],
)
def test_a_damaged_entry_is_made_anew(
    name: str, damage: Callable[[Path], None], source: Path, cache: Path, parsed: list[Path]
) -> None:
    open_gguf_cached(source, cache)
    (entry,) = entries(cache)
    damage(entry / name)

    again, after = open_gguf_cached(source, cache), open_gguf_cached(source, cache)

    assert len(parsed) == 2
    assert entries(cache) == [entry]
    for checkpoint in (again, after):
        assert_same(checkpoint, open_checkpoint(source))


def test_a_source_that_can_not_be_opened_leaves_nothing_in_the_cache(source: Path, cache: Path) -> None:
    cut(source)
    with pytest.raises(ModelError, match="cut off"):
        open_gguf_cached(source, cache)
    assert not cache.exists()


def test_weights_are_read_even_if_their_entry_was_deleted_meanwhile(source: Path, cache: Path) -> None:
    open_gguf_cached(source, cache)
    checkpoint = open_gguf_cached(source, cache)
    (entry,) = entries(cache)
    for file in entry.iterdir():
        file.unlink()

    assert_same(checkpoint, open_checkpoint(source))


def test_weights_cut_off_after_opening_are_refused(source: Path, cache: Path) -> None:
    checkpoint = open_gguf_cached(source, cache)
    (entry,) = entries(cache)
    size = (entry / "weights.safetensors").stat().st_size

    os.truncate(entry / "weights.safetensors", size - 1)

    with pytest.raises(ModelError, match=r"weights\.safetensors was cut off"):
        checkpoint.weights.embedding()


def while_saving(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Run `action` when the first entry's weights are written and it is not in its place yet."""
    actions = [action]

    def save(tensors: Any, path: Path) -> None:
        save_file(tensors, path)
        if actions:
            actions.pop()()

    monkeypatch.setattr(f"{MODULE}.save_file", save)


def test_two_preparations_of_one_model_at_once_both_succeed(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[Path]
) -> None:
    inner: list[Checkpoint] = []
    made: list[int] = []

    def prepare() -> None:
        inner.append(open_gguf_cached(source, cache))
        made.extend(entry.stat().st_ino for entry in entries(cache) if entry.name[:4] != "tmp-")

    while_saving(monkeypatch, prepare)

    outer = open_gguf_cached(source, cache)

    assert len(parsed) == 2
    assert [entry.stat().st_ino for entry in entries(cache)] == made  # the quicker one's stays
    for checkpoint in (outer, *inner):
        assert_same(checkpoint, open_checkpoint(source))


def test_a_preparation_leaves_that_of_another_model_alone(
    source: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parsed: list[Path]
) -> None:
    other = tmp_path / "other.gguf"
    make_gguf(other, "qwen3")
    while_saving(monkeypatch, lambda: open_gguf_cached(other, cache))

    open_gguf_cached(source, cache)

    assert parsed == [source, other]
    assert len(entries(cache)) == 2
    assert_same(open_gguf_cached(source, cache), open_checkpoint(source))
    assert parsed == [source, other]


@pytest.fixture
def half_written(cache: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A folder that another process is still writing, and that process."""
    folder = cache / "weights" / "tmp-other"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD_LOCK, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield folder, process
        process.kill()


def test_a_folder_half_written_is_deleted_once_its_process_is_dead(
    source: Path, cache: Path, half_written: tuple[Path, subprocess.Popen[str]]
) -> None:
    folder, process = half_written
    (folder / "weights.safetensors").write_bytes(b"half")

    open_gguf_cached(source, cache)
    assert folder.exists()

    process.kill()
    process.wait()
    touch(source, 1)  # another fingerprint
    open_gguf_cached(source, cache)
    assert not folder.exists()


def test_the_least_recently_used_entries_are_deleted(source: Path, cache: Path, parsed: list[Path]) -> None:
    for seconds in range(1, MAX_ENTRIES + 1):
        touch(source, seconds)
        open_gguf_cached(source, cache)
        for entry in entries(cache):
            touch(entry, int(entry.stat().st_mtime) - 100)
    touch(source, 1)
    open_gguf_cached(source, cache)  # the oldest has been used now
    del parsed[:]

    touch(source, 99)
    open_gguf_cached(source, cache)

    assert len(entries(cache)) == MAX_ENTRIES
    touch(source, 1)
    open_gguf_cached(source, cache)
    assert len(parsed) == 1  # that of 99 seconds alone
    touch(source, 2)
    open_gguf_cached(source, cache)
    assert len(parsed) == 2


def test_a_cache_that_can_not_be_written_costs_a_warning_only(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    with caplog.at_level(logging.WARNING):
        checkpoint = open_gguf_cached(source, tmp_path / "file" / "cache")

    assert_same(checkpoint, open_checkpoint(source))
    (record,) = caplog.records
    assert "weights are not cached" in record.getMessage()
    assert "Not a directory" in record.getMessage()


def test_a_full_disk_costs_a_warning_and_leaves_nothing_behind(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def save(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(f"{MODULE}.save_file", save)

    with caplog.at_level(logging.WARNING):
        checkpoint = open_gguf_cached(source, cache)

    assert_same(checkpoint, open_checkpoint(source))
    assert "No space left on device" in caplog.text
    assert entries(cache) == []
