"""Deltas of one choice -> events of /v1/responses, and the response that they add up to."""

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from openai_api.responses_protocol import (
    InputTokensDetails,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from openai_api.run import Run
from service.text.reply import Piece, ReplyParser

_ITEM_OF_PIECE = {"content": "message", "reasoning": "reasoning", "call": "function_call"}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class ResponseReply:
    """Implements answer.Reply. The plain reply is what the events add up to."""

    def __init__(self, run: Run, parser: ReplyParser, empty: ResponseObject) -> None:
        """`empty`: the response before it has any output."""
        self._run = run
        self._parser = parser
        self._response = empty
        self._num_events = 0
        self._item: _Item | None = None  # the one that grows

    async def chunks(self) -> AsyncGenerator[Sequence[ResponseEvent], None]:
        """The first events come with the first delta: what fails before that has a status of its own."""
        events = [
            self._event("response.created", response=self._response),
            self._event("response.in_progress", response=self._response),
        ]
        reason = None
        async with aclosing(self._run.deltas()) as deltas:
            async for delta in deltas:
                pieces = self._parser.feed(delta.text) if delta.text else []
                if delta.finish_reason is not None:
                    reason = delta.finish_reason
                    pieces += self._parser.flush()
                events += [event for piece in pieces for event in self._add(piece)]
                if events:
                    yield events
                events = []
        yield self._end(is_cut=reason == "length")

    async def joined(self) -> ResponseObject:
        async with aclosing(self.chunks()) as batches:
            async for _ in batches:
                pass
        return self._response

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)

    def _add(self, piece: Piece) -> list[ResponseEvent]:
        events = []
        kind = _ITEM_OF_PIECE.get(piece.kind)
        if kind is not None and (self._item is None or piece.kind == "call" or self._item.kind != kind):
            events += self._close("completed")
            events += self._open(kind, name=piece.text if piece.kind == "call" else "")
        if piece.kind != "call" and self._item is not None:
            self._item.texts.append(piece.text)
            where = self._place(self._item)
            events.append(self._event(self._item.delta_event, delta=piece.text, **where))
        return events

    def _open(self, kind: str, name: str) -> list[ResponseEvent]:
        item = self._item = _Item(kind, name)
        index = len(self._response.output)
        added = self._event(
            "response.output_item.added", output_index=index, item=item.snapshot("in_progress")
        )
        if item.part("") is None:
            return [added]
        place = {"item_id": item.id, "output_index": index, "content_index": 0}
        return [added, self._event("response.content_part.added", part=item.part(""), **place)]

    def _place(self, item: "_Item") -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": len(self._response.output)}
        if item.kind != "function_call":
            place["content_index"] = 0
        if item.kind == "message":
            place["logprobs"] = []
        return place

    def _close(self, status: str) -> list[ResponseEvent]:
        item, self._item = self._item, None
        if item is None:
            return []
        whole, place = item.snapshot(status), self._place(item)
        text = "".join(item.texts)
        if item.kind == "function_call":
            events = [self._event(item.done_event, name=item.name, arguments=text, **place)]
        else:
            events = [self._event(item.done_event, text=text, **place)]
            place.pop("logprobs", None)
            events.append(self._event("response.content_part.done", part=item.part(text), **place))
        events.append(
            self._event("response.output_item.done", output_index=place["output_index"], item=whole)
        )
        output = [*self._response.output, whole]
        self._response = msgspec.structs.replace(self._response, output=output)
        return events

    def _end(self, *, is_cut: bool) -> list[ResponseEvent]:
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        self._response = msgspec.structs.replace(
            self._response,
            status=status,
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(self._run),
        )
        return [*events, self._event(f"response.{status}", response=self._response)]


class _Item:
    """An item of the output that grows."""

    def __init__(self, kind: str, name: str) -> None:
        self.kind, self.name = kind, name
        self.id = f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}"
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"
        self.texts: list[str] = []
        stem = {
            "message": "output_text",
            "reasoning": "reasoning_text",
            "function_call": "function_call_arguments",
        }[kind]
        self.delta_event, self.done_event = f"response.{stem}.delta", f"response.{stem}.done"

    def part(self, text: str) -> OutputText | ReasoningText | None:
        """The part of its content that has the text; a call has none."""
        if self.kind == "function_call":
            return None
        return OutputText(text) if self.kind == "message" else ReasoningText(text)

    def snapshot(self, status: str) -> OutputItem:
        """The item as it stands."""
        text = "".join(self.texts)
        item = OutputItem(id=self.id, type=self.kind, status=status)
        part = self.part(text)
        if part is None:
            return msgspec.structs.replace(item, call_id=self._call_id, name=self.name, arguments=text)
        content = [] if status == "in_progress" else [part]
        if self.kind == "reasoning":
            return msgspec.structs.replace(item, content=content, summary=[])
        return msgspec.structs.replace(item, content=content, role="assistant")


def _usage(run: Run) -> ResponseUsage:
    usage = run.usage()
    return ResponseUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
    )
