"""The text of one choice -> thinking, answer and calls of tools, as it comes."""

from collections.abc import Collection

import msgspec

from service.text.call_scanner import CallScanner, Stage
from service.text.chat_format import PYTHON_TAG, Thinking, ToolFormat
from service.text.reasoning import ReasoningParser, len_of_beginning


class Piece(msgspec.Struct, frozen=True):
    """A part of a reply, of one kind."""

    kind: str  # "reasoning", "content", "call" (text: the tool's name) or "arguments"
    text: str
    call: int = 0  # which call it belongs to


class ReplyParser:
    """State of one choice. However the text is cut, the pieces of each kind join to the same text.

    White space beside a call is dropped; what looks like a call and is none is content, as it stands.
    """

    def __init__(self, thinking: Thinking, tools: ToolFormat | None, names: Collection[str] = ()) -> None:
        """`tools`: the format to look for; None: there are no calls. `names` of the tools."""
        self._reasoning = None if thinking is Thinking.OFF else ReasoningParser(thinking)
        self._calls = None if tools is None else _CallParser(tools, names)

    @property
    def has_called(self) -> bool:
        """There are calls, and the last of them is whole."""
        calls = self._calls
        return calls is not None and calls.num_calls > 0 and not calls.is_within_call

    def feed(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._answer(text)
        thought, answer = self._reasoning.feed(text)
        return [*([Piece("reasoning", thought)] if thought else ()), *self._answer(answer)]

    def flush(self) -> list[Piece]:
        """What is held back, when no more text comes."""
        thought, answer = ("", "") if self._reasoning is None else self._reasoning.flush()
        pieces = [*([Piece("reasoning", thought)] if thought else ()), *self._answer(answer)]
        return pieces if self._calls is None else pieces + self._calls.flush()

    def _answer(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Piece("content", text)] if self._calls is None else self._calls.feed(text)


class _CallParser:
    """Looks for calls in the answer."""

    def __init__(self, tools: ToolFormat, names: Collection[str]) -> None:
        self._tag = tools.opening.strip()
        self._closing = tools.closing.strip()
        self._names = names
        self._scanner: CallScanner | None = None
        self._is_closing = False  # between the call's object and its closing tag
        self._is_behind_call = False  # only white space came since
        self._is_first = True  # nothing but white space came at all
        self._held = ""
        self._opening = ""  # the text that began the call, to be given back if it is none
        self.num_calls = 0

    @property
    def is_within_call(self) -> bool:
        scanner = self._scanner
        return scanner is not None and scanner.stage in (Stage.ARGUMENTS, Stage.REST)

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        rest: str | None = text
        while rest is not None:
            if self._scanner is None:
                rest = self._read_content(rest, pieces)
            elif self._is_closing:
                rest = self._read_closing(rest)
            else:
                rest = self._read_call(rest, self._scanner, pieces)
        return _joined(pieces)

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        scanner = self._scanner
        if scanner is None:
            held = "" if self._is_behind_call and not self._held.strip() else self._held
            self._content(held, pieces)
        elif scanner.stage is Stage.HEAD:
            self._scanner = None
            self._content(self._opening + scanner.raw, pieces)
        self._held = ""
        return _joined(pieces)

    def _read_content(self, text: str, pieces: list[Piece]) -> str | None:
        """Read up to the next call; None: all is read."""
        whole = self._held + text
        certain, opening_end = self._find_tag(whole) if self._tag else self._find_object(whole)
        self._content(whole[:certain], pieces)
        self._held = whole[certain:]
        if opening_end is None:
            return None
        self._opening, self._held = whole[certain:opening_end], ""
        self._scanner = CallScanner(self._names)
        return whole[opening_end:]

    def _content(self, text: str, pieces: list[Piece]) -> None:
        if self._is_behind_call:
            text = text.lstrip()
        if text:
            self._is_behind_call = self._is_first = False
            pieces.append(Piece("content", text))

    def _read_call(self, text: str, scanner: CallScanner, pieces: list[Piece]) -> str | None:
        was_head = scanner.stage is Stage.HEAD
        arguments, rest = scanner.feed(text)
        if scanner.stage is Stage.HEAD:
            return None
        if scanner.stage is Stage.REFUSED:
            self._scanner = None
            self._content(self._opening + scanner.raw, pieces)
            return rest
        if was_head:
            pieces.append(Piece("call", scanner.name, self.num_calls))
            self.num_calls += 1
        if arguments:
            pieces.append(Piece("arguments", arguments, self.num_calls - 1))
        if scanner.stage is not Stage.DONE:
            return None
        self._is_closing = True
        return rest

    def _read_closing(self, text: str) -> str | None:
        whole = (self._held + text).lstrip()
        if self._closing.startswith(whole) and whole != self._closing:
            self._held = whole
            return None
        self._held = ""
        self._scanner, self._is_closing = None, False
        self._is_behind_call, self._is_first = True, False
        return whole.removeprefix(self._closing)

    def _find_tag(self, text: str) -> tuple[int, int | None]:
        """(characters that are content for certain, where the call's object begins if there is one)."""
        at = text.find(self._tag)
        if at >= 0:
            return len(text[:at].rstrip()), at + len(self._tag)
        return len(text[: len(text) - len_of_beginning(text, self._tag)].rstrip()), None

    def _find_object(self, text: str) -> tuple[int, int | None]:
        """The same where a call has no tag: only at the beginning, and behind another call."""
        if not (self._is_first or self._is_behind_call):
            return len(text), None
        start = text.lstrip()
        if self._is_behind_call:
            start = start.removeprefix(";").lstrip()
        start = start.removeprefix(PYTHON_TAG).lstrip()
        if start.startswith("{"):
            return 0, len(text) - len(start)
        is_open = PYTHON_TAG.startswith(start)
        return (0 if is_open else len(text)), None


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        if (
            joined
            and piece.kind != "call"
            and (joined[-1].kind, joined[-1].call) == (piece.kind, piece.call)
        ):
            piece = Piece(piece.kind, joined.pop().text + piece.text, piece.call)
        joined.append(piece)
    return joined
