"""Tells a reply's thinking, `<think>...</think>`, from its answer as the text comes; counts its tokens."""

from collections.abc import Sequence

from service.text.chat_format import THINK_CLOSE, THINK_OPEN, Thinking, ThinkingTags


class ReasoningParser:
    """State of one choice. However the text is cut, the pieces join to the same thinking and answer.

    Tags and the line breaks beside them are part of neither.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._may_open = thinking is not Thinking.OFF  # an opening tag may still come
        self._is_thinking = thinking is Thinking.OPEN
        self._is_at_start = False  # line breaks are dropped
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(thinking, answer) that are certain with this text."""
        if self._may_open:
            text = self._look_for_opening(text)
        if not self._is_thinking:
            return "", self._without_start(text)
        return self._split(text)

    def flush(self) -> tuple[str, str]:
        """(thinking, answer) that were held back, when no more text comes."""
        held, self._held = self._held, ""
        return (held, "") if self._is_thinking else ("", held)

    def _look_for_opening(self, text: str) -> str:
        """The text behind the tag, or all of it if it does not begin with one; "" while that is open."""
        whole = self._held + text
        start = whole.lstrip()
        if THINK_OPEN.startswith(start):  # or blank so far
            if start != THINK_OPEN:
                self._held = whole
                return ""
        elif not start.startswith(THINK_OPEN):
            self._may_open, self._held = False, ""
            self._is_at_start = self._is_thinking
            return whole
        self._may_open, self._held = False, ""
        self._is_thinking = self._is_at_start = True
        return start.removeprefix(THINK_OPEN)

    def _split(self, text: str) -> tuple[str, str]:
        if self._may_open:
            return "", ""
        whole = self._held + self._without_start(text)
        thought, tag, answer = whole.partition(THINK_CLOSE)
        if tag:
            self._is_thinking, self._held = False, ""
            self._is_at_start = True
            return thought.rstrip("\n"), self._without_start(answer)
        certain = len(whole[: len(whole) - len_of_beginning(whole, THINK_CLOSE)].rstrip("\n"))
        self._held = whole[certain:]
        return whole[:certain], ""

    def _without_start(self, text: str) -> str:
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        return text


def len_of_beginning(text: str, tag: str) -> int:
    """Characters at the end of `text` that may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class ReasoningCounter:
    """Counts the ids of a choice's thinking, tags included."""

    def __init__(self, thinking: Thinking, tags: ThinkingTags) -> None:
        self._tags = tags
        self._is_thinking = thinking is Thinking.OPEN
        self._may_open = thinking is Thinking.MAYBE

    def count(self, ids: Sequence[int]) -> int:
        """How many of the next ids are thinking."""
        if self._may_open and ids:
            self._may_open = False
            self._is_thinking = ids[0] == self._tags.open_id
        if not self._is_thinking:
            return 0
        if self._tags.close_id not in ids:
            return len(ids)
        self._is_thinking = False
        return list(ids).index(self._tags.close_id) + 1
