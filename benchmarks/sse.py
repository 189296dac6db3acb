"""What an event of a stream costs the event loop, here and in sse-starlette: `python -m benchmarks.sse`."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse

from openai_api.replies import ChatChunk, ChatChunkChoice, ChatDelta
from openai_api.sse import EventStream, event

NUM_EVENTS = 20_000
NUM_ROUNDS = 5
CHUNK = ChatChunk("chatcmpl-0", 0, "model", "fp_0", [ChatChunkChoice(0, ChatDelta(content=" the"))])
SCOPE = {"type": "http", "method": "POST"}


async def _receive() -> dict[str, Any]:
    await asyncio.Event().wait()
    return {}


async def _send(_message: Any) -> None:
    pass


async def _microseconds(respond: Callable[[], Awaitable[None]]) -> float:
    """Of an event, in the best of some rounds."""
    times = []
    for _ in range(NUM_ROUNDS):
        started_at = perf_counter()
        await respond()
        times.append(perf_counter() - started_at)
    return min(times) / NUM_EVENTS * 1e6


async def _own() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        for _ in range(NUM_EVENTS):
            yield event(CHUNK)

    await EventStream(events(), nullcontext(), headers={}, ping_seconds=15)(SCOPE, _receive, _send)


async def _peers() -> None:
    async def events() -> AsyncGenerator[dict[str, str], None]:
        for _ in range(NUM_EVENTS):
            yield {"data": msgspec.json.encode(CHUNK).decode()}

    await EventSourceResponse(events(), sep="\n")(SCOPE, _receive, _send)


async def main() -> None:
    own, peers = await _microseconds(_own), await _microseconds(_peers)
    print(f"an event: {own:.1f} us here, {peers:.1f} us in sse-starlette, {peers / own:.1f} times as much")


if __name__ == "__main__":
    asyncio.run(main())
