"""Scratch folders: gone at the end, kept while their process lives, and removed once it is dead."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from service.scratch import delete_abandoned, scratch_folder

WAIT_INSIDE = """
import sys
from pathlib import Path
from service.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_bytes(b"half")
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_what_is_not_renamed_is_gone_at_the_end(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        (folder / "file").touch()
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []

    with scratch_folder(tmp_path) as folder:
        folder.rename(tmp_path / "whole")
    assert list(tmp_path.iterdir()) == [tmp_path / "whole"]


def test_a_folder_stays_while_its_process_lives_and_goes_with_the_next_once_it_was_killed(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WAIT_INSIDE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        delete_abandoned(tmp_path)
        assert (folder / "half").exists()

        process.kill()
        process.wait()
    assert (folder / "half").exists()
    with scratch_folder(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_other_names_are_left_alone(tmp_path: Path) -> None:
    others = [tmp_path / "entry", tmp_path / ".out[1]-mine.partial", tmp_path / "tmp-file"]
    for other in others[:2]:
        other.mkdir()
    others[2].touch()

    delete_abandoned(tmp_path, prefix=".other-", suffix=".partial")
    delete_abandoned(tmp_path)
    delete_abandoned(tmp_path / "nowhere")

    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_a_folder_that_was_taken_for_abandoned_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def taken(**options: Any) -> str:
        made.append(make(**options))
        if len(made) == 1:
            delete_abandoned(tmp_path)  # as another process may, before there is a lock
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with scratch_folder(tmp_path) as folder:
        assert [str(folder)] == made[1:]
        assert folder.is_dir()
