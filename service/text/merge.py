"""Several asynchronous iterators as one, with their items in the order in which they come."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def merged(sources: Sequence[AsyncIterable[T]]) -> AsyncGenerator[T, None]:
    """Items of all sources. Raises: what the first source that fails raises; the others end then."""
    # one needs no queue and no task, which would cost as much as all else that a token takes here
    return _one(sources[0]) if len(sources) == 1 else _many(sources)


async def _one(source: AsyncIterable[T]) -> AsyncGenerator[T, None]:
    iterator = aiter(source)
    try:
        async for item in iterator:
            yield item
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


async def _many(sources: Sequence[AsyncIterable[T]]) -> AsyncGenerator[T, None]:
    queue: asyncio.Queue[tuple[T] | Exception | None] = asyncio.Queue()

    async def pump(source: AsyncIterable[T]) -> None:
        try:
            async for item in source:
                queue.put_nowait((item,))
            queue.put_nowait(None)
        except Exception as error:  # raised again by whoever reads the queue
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_open -= 1
            else:
                yield entry[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
