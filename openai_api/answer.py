"""The last step of endpoints that generate: chunks -> a stream of events, or one reply folded from them."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openai_api.client import unless_gone
from openai_api.fields import HEADER, header_value
from openai_api.protocol import GenerationRequest
from openai_api.run import Run
from openai_api.sse import DONE, EventStream, event


class Stamp(msgspec.Struct, frozen=True):
    """What is equal in all chunks of a reply."""

    id: str
    model: str
    system_fingerprint: str | None
    created: int

    @classmethod
    def new(cls, prefix: str, model: str, system_fingerprint: str | None) -> "Stamp":
        return cls(f"{prefix}{uuid.uuid4().hex}", model, system_fingerprint, int(time.time()))


class UsageWishes(msgspec.Struct, frozen=True):
    """When a stream carries usage."""

    at_end: bool
    always: bool

    @classmethod
    def of(cls, body: GenerationRequest) -> "UsageWishes":
        options = body.stream_options
        if not body.stream or options is None:
            return cls(False, False)
        return cls(bool(options.include_usage), bool(options.continuous_usage_stats))


Chunk = msgspec.Struct


class Reply(Protocol):
    """One reply, in the two ways it can be given. `joined` is made of `chunks`, so they can't disagree."""

    def chunks(self) -> AsyncGenerator[Sequence[Chunk], None]:
        """Chunks in the order of a stream; those that are ready together come together."""

    async def joined(self) -> msgspec.Struct:
        """The fold of all chunks."""


async def answer(
    http: Request,
    reply: Reply,
    run: Run,
    *,
    is_stream: bool,
    ignored: Sequence[str],
    ping_seconds: float,
    end: bytes = DONE,
) -> Response | EventStream:
    """`end`: of a stream, behind its events.

    Raises: ClientDisconnect when the client leaves before the plain reply is whole.
    """
    http.scope["run"] = run  # for traces
    headers = {HEADER: header_value(ignored)} if ignored else {}
    if is_stream:
        return EventStream(_events(reply, end), run, headers=headers, ping_seconds=ping_seconds)
    async with run:
        whole = await unless_gone(http.receive, reply.joined())
    return Response(msgspec.json.encode(whole), headers=headers, media_type="application/json")


async def _events(reply: Reply, end: bytes) -> AsyncGenerator[bytes, None]:
    async with aclosing(reply.chunks()) as batches:
        async for chunks in batches:
            yield event(chunks[0]) if len(chunks) == 1 else b"".join(map(event, chunks))
    if end:
        yield end
