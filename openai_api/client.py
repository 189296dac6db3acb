"""Work on behalf of a client, stopped when the client goes away."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; cancel it, and wait for its clean-up, once the client has closed the connection.

    The request's body must have been read, so that what `receive` gives next is the disconnect.
    Raises: ClientDisconnect, and what `work` raises.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()  # a receive that failed is no disconnect
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait((working, watching))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
