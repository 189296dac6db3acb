"""Finds stop strings in text that comes in pieces, and holds back what may be the start of one."""

from collections.abc import Sequence


class StopStrings:
    """State of one choice. Of several stop strings the one that begins first wins, then the longer one.

    Whatever the pieces, the text let through is the whole text up to the match (or its end, if
    `include_stop`).
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain not to be part of a stop string. After a match: nothing more."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        self._held += text
        return self._release(is_last=False)

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        return self._release(is_last=True) if self.matched is None else ""

    def _release(self, is_last: bool) -> str:
        """Let text through up to the first place where a stop string begins, or may."""
        held = self._held
        for start in range(len(held)):
            rest = held[start:]
            found = max((stop for stop in self._stops if rest.startswith(stop)), key=len, default=None)
            may_begin = not is_last and any(len(rest) < len(s) and s.startswith(rest) for s in self._stops)
            if found is None and not may_begin:
                continue
            if found is None or (may_begin and len(rest) == len(found)):
                self._held = rest
                return held[:start]
            self.matched, self._held = found, ""
            return held[:start] + (found if self._include else "")
        self._held = ""
        return held
