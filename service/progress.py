"""How loading tells what it does: bars on a terminal, plain lines elsewhere."""

import sys
from contextlib import suppress
from time import monotonic
from typing import NoReturn, Protocol, TextIO

from tqdm import tqdm

_LINE_SECONDS = 5.0  # at most one plain line in this time


def say(line: str, stream: TextIO | None = None) -> None:
    """A line to standard error. Where it can't be written, as on a full disk, it is lost and no more."""
    with suppress(OSError):
        print(line, file=stream or sys.stderr, flush=True)


class Progress(Protocol):
    """Told by whatever takes long. May be called from any one thread at a time."""

    def phase(self, name: str) -> None:
        """A new phase begins; the one before it is over."""

    def update(self, done: int, total: int | None, unit: str) -> None:
        """So much of the phase is done; total None: nobody knows how much there is."""


class NoProgress:
    """Tells nobody."""

    def phase(self, name: str) -> None: ...
    def update(self, done: int, total: int | None, unit: str) -> None: ...


class Fanout:
    """Tells several."""

    def __init__(self, *listeners: Progress) -> None:
        self._listeners = listeners

    def phase(self, name: str) -> None:
        for listener in self._listeners:
            listener.phase(name)

    def update(self, done: int, total: int | None, unit: str) -> None:
        for listener in self._listeners:
            listener.update(done, total, unit)


class TerminalProgress:
    """A bar a phase, on a terminal; elsewhere a line a phase, and one every few seconds while it lasts."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._name = ""
        self._bar: tqdm[NoReturn] | None = None
        self._told_at = 0.0

    def phase(self, name: str) -> None:
        self.close()
        self._name = name
        self._told_at = monotonic()
        say(f"{name} ...", self._stream)

    def update(self, done: int, total: int | None, unit: str) -> None:
        if self._stream.isatty():
            bar = self._bar
            if bar is None:
                bar = self._bar = tqdm(
                    total=total,
                    unit=f" {unit}",
                    unit_scale=unit == "bytes",
                    desc=self._name,
                    file=self._stream,
                    leave=False,
                )
            bar.update(done - bar.n)
        elif monotonic() - self._told_at >= _LINE_SECONDS:
            self._told_at = monotonic()
            of_total = f" of {total}" if total else ""
            say(f"{self._name}: {done}{of_total} {unit}", self._stream)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
