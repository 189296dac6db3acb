"""Reads the JSON of one call of a tool as its text comes: first the name, then the arguments."""

import enum
import json
import re
from collections.abc import Collection

_MAX_HEAD = 700  # characters up to the arguments, if the name comes first
_HEAD = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}("(?:[^"\\]|\\.){1,256}")\s{0,64},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_OUTSIDE_STRINGS = re.compile(r"[\s\w{}\[\]:,+.\-]*")
_IN_STRING = re.compile(r'[^"\\]*')


class Stage(enum.Enum):
    HEAD = "head"  # no telling yet whether this is a call
    ARGUMENTS = "arguments"  # it is, of the tool `name`
    REST = "rest"  # the arguments are whole, the object is not
    DONE = "done"
    REFUSED = "refused"  # it is none: `raw` is plain text


class CallScanner:
    """State of one call. A call it is from the moment that a known name and `{` of its arguments are there.

    What a model writes with the arguments first is read when the object is whole.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._object = _Nesting()
        self._arguments = _Nesting()
        self._head_is_late = False
        self.stage = Stage.HEAD
        self.raw = ""  # what was read while in HEAD
        self.name = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(arguments that are certain, text behind the object); behind what was refused, too."""
        arguments = ""
        if self.stage is Stage.HEAD:
            arguments, text = self._read_head(text)
        if self.stage is Stage.ARGUMENTS:
            end = self._arguments.end_in(text)
            arguments += text[:end]
            text = text[end:]
            if self._arguments.is_over:
                self.stage = Stage.DONE if self._arguments.is_broken else Stage.REST
                self._object = _Nesting(depth=1)
        if self.stage is Stage.REST:
            text = text[self._object.end_in(text) :]
            if self._object.is_over:
                self.stage = Stage.DONE
        return arguments, text

    def _read_head(self, text: str) -> tuple[str, str]:
        """(arguments that are whole already, text to read on)."""
        whole = self.raw + text
        if not self._head_is_late:
            head = _HEAD.match(whole[: 2 * _MAX_HEAD])
            if head is not None:
                return self._take_head(whole, head)
            self._head_is_late = len(whole) >= 2 * _MAX_HEAD
        first = whole.lstrip()[:1]
        if first not in ("", "{"):
            return self._refuse(whole, len(whole) - len(whole.lstrip()))
        if not first:
            self.raw = whole
            return "", ""
        end = self._object.end_in(text)
        if not self._object.is_over:
            self.raw = whole
            return "", ""
        return self._take_whole(whole[: len(self.raw) + end], text[end:])

    def _take_head(self, whole: str, head: "re.Match[str]") -> tuple[str, str]:
        name = _json_or_none(head[1])
        if not isinstance(name, str) or name not in self._names:
            return self._refuse(whole, head.end())
        self.name, self.stage = name, Stage.ARGUMENTS
        return "", whole[head.end() :]

    def _take_whole(self, text: str, behind: str) -> tuple[str, str]:
        call = _json_or_none(text)
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(call, dict) or not isinstance(name, str) or name not in self._names:
            return self._refuse(text + behind, len(text))
        arguments: object = next((call[key] for key in ("arguments", "parameters") if key in call), {})
        if isinstance(arguments, str):  # JSON in a string
            arguments = _json_or_none(arguments)
        if not isinstance(arguments, dict):
            return self._refuse(text + behind, len(text))
        self.name, self.stage = name, Stage.DONE
        return json.dumps(arguments, ensure_ascii=False), behind

    def _refuse(self, whole: str, end: int) -> tuple[str, str]:
        self.stage = Stage.REFUSED
        self.raw = whole[:end]
        return "", whole[end:]


class _Nesting:
    """Finds the end of a JSON object, strings minded."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False
        self.is_over = False
        self.is_broken = False  # a character that no JSON has there

    def end_in(self, text: str) -> int:
        """Characters of `text` that belong to the object."""
        at = 0
        while at < len(text) and not self.is_over:
            at = self._in(text, at) if self._in_string else self._out(text, at)
        return at

    def _in(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        at = _end(_IN_STRING, text, at)
        if at < len(text):
            self._is_escaped = text[at] == "\\"
            self._in_string = self._is_escaped
            at += 1
        return at

    def _out(self, text: str, at: int) -> int:
        letter = text[at]
        if letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.is_over = self._depth <= 0
        elif not _OUTSIDE_STRINGS.fullmatch(letter):
            self.is_over = self.is_broken = True
            return at
        return at + 1


def _end(pattern: "re.Pattern[str]", text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _json_or_none(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
