"""Text of a chat's choices -> parts of a message: thinking, content and calls of tools."""

import uuid
from collections.abc import Callable

from openai_api.replies import ChatDelta, ChatMessage, FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from service.text.choice import Delta
from service.text.reply import Piece, ReplyParser


class ReplyParts:
    """State of all choices of one request."""

    def __init__(self, make_parser: Callable[[], ReplyParser], *, has_reasoning: bool) -> None:
        """`has_reasoning`: thinking is sent; otherwise it is left out."""
        self._make_parser = make_parser
        self._has_reasoning = has_reasoning
        self._parsers: dict[int, ReplyParser] = {}  # by choice

    def of(self, delta: Delta) -> list[ChatDelta]:
        """What a delta of text adds to its message."""
        parser = self._parser(delta.index)
        pieces = parser.feed(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            pieces += parser.flush()
        return [part for piece in pieces if (part := self._part(piece)) is not None]

    def finish_reason(self, delta: Delta) -> str | None:
        """Of a choice that ends with this delta, when its parts were taken."""
        if delta.finish_reason == "stop" and self._parser(delta.index).has_called:
            return "tool_calls"
        return delta.finish_reason

    def _parser(self, index: int) -> ReplyParser:
        if index not in self._parsers:
            self._parsers[index] = self._make_parser()
        return self._parsers[index]

    def _part(self, piece: Piece) -> ChatDelta | None:
        if piece.kind == "content":
            return ChatDelta(content=piece.text)
        if piece.kind == "call":
            call = ToolCallDelta(
                piece.call, FunctionDelta(piece.text, ""), f"call_{uuid.uuid4().hex[:24]}", "function"
            )
            return ChatDelta(tool_calls=[call])
        if piece.kind == "arguments":
            return ChatDelta(tool_calls=[ToolCallDelta(piece.call, FunctionDelta(arguments=piece.text))])
        if not self._has_reasoning:
            return None
        return ChatDelta(reasoning_content=piece.text, reasoning=piece.text)


class MessageFold:
    """Joins the parts of one choice to its message."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []

    def add(self, part: ChatDelta) -> None:
        if isinstance(part.content, str):
            self._content.append(part.content)
        if isinstance(part.reasoning, str):
            self._reasoning.append(part.reasoning)
        for call in part.tool_calls or ():
            self._add_call(call)

    def _add_call(self, call: ToolCallDelta) -> None:
        if isinstance(call.id, str) and isinstance(call.function.name, str):
            self._calls.append(ToolCall(call.id, FunctionCall(call.function.name, "")))
            self._arguments.append([])
        if isinstance(call.function.arguments, str):
            self._arguments[call.index].append(call.function.arguments)

    def message(self) -> ChatMessage:
        message = ChatMessage("".join(self._content))
        if self._reasoning:
            message.reasoning = message.reasoning_content = "".join(self._reasoning)
        if self._calls:
            message.content = message.content or None
            for call, arguments in zip(self._calls, self._arguments, strict=True):
                call.function.arguments = "".join(arguments)
            message.tool_calls = self._calls
        return message
