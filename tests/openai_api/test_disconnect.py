"""Over a real socket: clients that leave, pings while waiting, and what the routes leave in the metrics."""

import asyncio
import json
from typing import Any

import pytest

from openai_api.api import Limits
from service.errors import GenerationError
from service.text.choice import Delta
from service.text.generation import GenerationParams
from tests.openai_api.scripted import (
    CHAT,
    ENDPOINTS,
    PROMPT,
    ScriptedGenerator,
    Steps,
    client_of,
    deltas_of,
    make_api,
    served,
)


async def sent(port: int, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which one request was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
    await writer.drain()
    return reader, writer


class Endless(ScriptedGenerator):
    """Every request says one word and then waits until it is cancelled."""

    def __init__(self) -> None:
        self.said = asyncio.Event()
        super().__init__(self._wait)

    def _wait(self, ids: list[int], params: GenerationParams) -> list[Any]:
        self.said.set()
        return [Delta(text="word", token_ids=[1]), asyncio.Event()]


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.timeout(20)
async def test_a_client_that_leaves_cancels_its_request(
    path: str, body: dict[str, Any], is_stream: bool
) -> None:
    generator = Endless()
    api = make_api(generator)
    async with served(api) as port:
        reader, writer = await sent(port, path, {**body, "stream": is_stream})
        await generator.said.wait()
        if is_stream:
            await reader.readuntil(b"word")

        writer.close()

        await generator.generations[0].closed.wait()
        assert generator.generations[0].closed_as[0] == "client_gone"
        generator.script = lambda ids, params: deltas_of("fine")
        async with client_of(api) as client:
            assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.timeout(20)
async def test_a_waiting_stream_gets_comments_that_do_not_split_events() -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(lambda ids, params: [gate, *deltas_of("a")])
    api = make_api(generator, limits=Limits(ping_seconds=0.01))
    async with served(api) as port:
        reader, writer = await sent(port, "/v1/chat/completions", {**CHAT, "stream": True})
        await reader.readuntil(b": ping\n\n")
        await reader.readuntil(b": ping\n\n")
        gate.set()
        rest = await reader.readuntil(b"data: [DONE]\n\n")
        writer.close()

    lines = [
        line for line in rest.split(b"\n") if line.startswith((b"data:", b"id:", b"event:", b"retry:"))
    ]
    *events, done = [line.removeprefix(b"data: ") for line in lines]
    assert done == b"[DONE]"
    assert [json.loads(each)["choices"][0]["delta"] for each in events] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {},
    ]


async def test_a_waiting_stream_gets_no_comments_where_they_are_turned_off() -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(lambda ids, params: [gate, *deltas_of("a")])
    async with client_of(make_api(generator, limits=Limits(ping_seconds=0))) as client:
        asking = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "stream": True}))
        while not generator.generations:  # noqa: ASYNC110  # the script has no event for it
            await asyncio.sleep(0)
        for _ in range(20):  # turns of the loop in which pings without a pause would come
            await asyncio.sleep(0)
        gate.set()
        reply = await asking

    assert reply.text.startswith("data: ")
    assert "\n:" not in reply.text


@pytest.mark.timeout(20)
async def test_the_connection_lives_on_after_a_stream() -> None:
    api = make_api()
    async with served(api) as port:
        reader, writer = await sent(port, "/v1/chat/completions", {**CHAT, "stream": True})
        await reader.readuntil(b"data: [DONE]\n\n")
        await reader.readuntil(b"0\r\n\r\n")
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        status = await reader.readline()
        writer.close()

    assert status == b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("script", [deltas_of("a"), [*deltas_of("a")[:1], GenerationError("No.")]])
async def test_nothing_runs_on_after_a_stream(script: Steps) -> None:
    api = make_api(ScriptedGenerator(lambda ids, params: script))
    before = asyncio.all_tasks()
    async with client_of(api) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})

    assert asyncio.all_tasks() == before


async def test_answers_are_counted_by_route_template() -> None:
    api = make_api()
    async with client_of(api) as client:
        await client.post("/v1/chat/completions/", json=CHAT)
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await client.post("/v1/chat/completions", json={**CHAT, "n": 0})
        await client.get("/v1/models/no/such")
        await client.get("/wp-admin")
        await client.get("/v1/completions")

    assert api.metrics.http == {
        ("/v1/chat/completions", "POST", "200"): 2,
        ("/v1/chat/completions", "POST", "400"): 1,
        ("/v1/models/{id:path}", "GET", "404"): 1,
        ("other", "GET", "404"): 1,
        ("/v1/completions", "GET", "405"): 1,
    }
