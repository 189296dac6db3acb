"""The load generator, against our server and against others' ways to write JSON."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from service.errors import PhotonError
from service.load_generator import Target, first_model, run_load
from tests.openai_api.scripted import MODEL, make_api, served
from tests.openai_api.test_auth import guarded


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Target]:
    """A server that says the same to everybody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def test_streams_are_counted() -> None:
    async with served(make_api()) as port:
        load = await run_load(Target(f"http://127.0.0.1:{port}"), [{"prompt": "Hi"}] * 3)

    assert load["streams"] == 3
    assert load["output_tokens_per_second"] > 0
    assert 0 < load["ttft_ms_median"] <= load["ttft_ms_max"]


async def test_a_key_is_sent_and_the_model_is_found() -> None:
    async with served(guarded()) as port:
        target = Target(f"http://127.0.0.1:{port}", "first")
        name = await asyncio.to_thread(first_model, target)
        load = await run_load(target, [{"prompt": "Hi"}])
        with pytest.raises(PhotonError, match="401"):
            await run_load(Target(target.url), [{"prompt": "Hi"}])
        with pytest.raises(PhotonError, match="401"):
            await asyncio.to_thread(first_model, Target(target.url))

    assert name == MODEL
    assert load["streams"] == 1


async def test_json_may_have_spaces() -> None:
    events = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"usage": {"completion_tokens": 7}}\n\n'
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n" + events) as target:
        load = await run_load(target, [{"prompt": "Hi"}])

    assert load["output_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\ndata: [DONE]\n\n", "without usage"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"usage":{"completion_tokens":0}}\n\n', "no text"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy", "503.*busy"),
    ],
)
async def test_what_is_no_stream_is_told(answer: bytes, told: str) -> None:
    async with answering(answer) as target:
        with pytest.raises(PhotonError, match=told):
            await run_load(target, [{"prompt": "Hi"}])


async def test_a_server_that_is_not_there_is_told() -> None:
    async with served(make_api()) as port:
        target = Target(f"http://127.0.0.1:{port}")

    with pytest.raises(PhotonError, match="can't be reached"):
        await run_load(target, [{"prompt": "Hi"}])
    with pytest.raises(PhotonError, match="can't be reached"):
        await asyncio.to_thread(first_model, target)
