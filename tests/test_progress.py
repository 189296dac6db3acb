"""service/progress.py: bars on a terminal, few plain lines elsewhere."""

from functools import partial
from io import StringIO

import pytest
from tqdm import tqdm

from service import progress as progress_module
from service.progress import Fanout, TerminalProgress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [0.0]
    monkeypatch.setattr(progress_module, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def _draws_every_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm skips updates that follow one another within 0.1 s."""
    monkeypatch.setattr(progress_module, "tqdm", partial(tqdm, mininterval=0, miniters=1))


def test_elsewhere_than_on_a_terminal_lines_are_whole_and_few(clock: list[float]) -> None:
    stream = StringIO()
    progress = TerminalProgress(stream)

    progress.phase("loading")
    for done in range(1, 1001):
        clock[0] += 0.02  # 20 seconds in all
        progress.update(done, 1000, "layers")
    progress.close()

    lines = stream.getvalue().splitlines()
    assert "\r" not in stream.getvalue()
    assert lines[0] == "loading ..."
    assert all(line.startswith("loading: ") and line.endswith(" of 1000 layers") for line in lines[1:])
    assert 2 <= len(lines) <= 6


def test_a_short_phase_elsewhere_is_one_line(clock: list[float]) -> None:
    stream = StringIO()
    progress = TerminalProgress(stream)

    progress.phase("opening")
    progress.update(1, None, "files")
    progress.phase("loading")

    assert stream.getvalue() == "opening ...\nloading ...\n"


@pytest.mark.usefixtures("_draws_every_update")
def test_on_a_terminal_a_bar_moves_and_goes_with_its_phase() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream)

    progress.phase("loading")
    progress.update(5, 10, "layers")
    progress.update(10, 10, "layers")
    progress.phase("starting")
    progress.close()

    text = stream.getvalue()
    assert "loading:  50%" in text
    assert "\r" in text
    assert text.endswith("starting ...\n")


@pytest.mark.usefixtures("_draws_every_update")
def test_a_phase_of_unknown_length_has_a_counter_instead_of_a_bar() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream)

    progress.phase("downloading")
    progress.update(3_000_000, None, "bytes")
    progress.close()

    assert "3.00M bytes" in stream.getvalue()
    assert "%" not in stream.getvalue()


def test_several_listeners_are_told_the_same() -> None:
    streams = StringIO(), StringIO()
    fanout = Fanout(*(TerminalProgress(stream) for stream in streams))

    fanout.phase("loading")
    fanout.update(1, 2, "layers")

    assert streams[0].getvalue() == streams[1].getvalue() == "loading ...\n"
