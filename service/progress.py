"""How loading tells what it does."""

from typing import Protocol


class Progress(Protocol):
    """Told by whatever takes long."""

    def phase(self, name: str) -> None:
        """A new phase begins."""

    def update(self, done: int, total: int | None, unit: str) -> None:
        """So much of the phase is done; total None: nobody knows how much there is."""


class NoProgress:
    """Tells nobody."""

    def phase(self, name: str) -> None: ...
    def update(self, done: int, total: int | None, unit: str) -> None: ...
