"""Finds stop strings in text that comes in pieces, and holds back what may be the start of one."""

import re
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """State of one choice. The stop string that is complete first wins; of several there, the longest.

    Whatever the pieces, the text let through is the whole text up to the match (or its end, if
    `include_stop`). Each stop string has an automaton of its own: a character costs one look at each, and
    nothing where no stop string begins.

    Source: Knuth, Morris and Pratt 1977, "Fast pattern matching in strings", section 2.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = [stop for stop in stops if stop]
        self._include = include_stop
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._depths = [0] * len(
            self._stops
        )  # characters of each stop string at the end of the text so far
        self._first = re.compile("|".join({re.escape(stop[0]) for stop in self._stops}) or r"(?!)")
        self._held = ""  # as long as the greatest depth
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certain not to be part of a stop string. After a match: nothing more."""
        if self.matched is not None:
            return ""
        if not self._held and self._first.search(text) is None:
            return text
        whole = self._held + text
        for end in range(len(self._held) + 1, len(whole) + 1):
            length = self._advance(whole[end - 1])
            if length:
                self.matched, self._held = whole[end - length : end], ""
                return whole[: end if self._include else end - length]
        certain = len(whole) - max(self._depths)
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """What is held back, when no more text comes."""
        held, self._held = self._held, ""
        self._depths = [0] * len(self._stops)
        return held

    def _advance(self, letter: str) -> int:
        """Follow one more character. Length of the longest stop string that it completes, or 0."""
        longest = 0
        for i, stop in enumerate(self._stops):
            depth = self._depths[i]
            while depth and stop[depth] != letter:
                depth = self._fallbacks[i][depth]
            depth += stop[depth] == letter
            if depth == len(stop):
                longest = max(longest, depth)
                depth = 0  # the choice ends here
            self._depths[i] = depth
        return longest


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """At [k]: length of the longest proper suffix of stop[:k] that is a prefix of `stop`."""
    lengths = [0, 0]
    for letter in stop[1:]:
        depth = lengths[-1]
        while depth and stop[depth] != letter:
            depth = lengths[depth]
        lengths.append(depth + (stop[depth] == letter))
    return tuple(lengths)
