"""`timeout` of a request and of the server: over queue and generation, and whoever reads."""

import asyncio
from typing import Any

import httpx
import pytest

from openai_api.api import Limits
from tests.openai_api.scripted import (
    CHAT,
    ENDPOINTS,
    PROMPT,
    ScriptedGenerator,
    client_of,
    deltas_of,
    events_of,
    make_api,
    make_app,
    post,
    served,
)
from tests.openai_api.test_disconnect import sent
from tests.openai_api.test_with_engine import until
from tests.openai_api.whole_server import whole_server

pytestmark = pytest.mark.timeout(30)

SOON = 0.05
LATE = 600


def never_done(said: str = "") -> ScriptedGenerator:
    """Says a text, if any, and then nothing until it is cancelled."""
    spoken = deltas_of(said)[:1] if said else []
    return ScriptedGenerator(lambda ids, params: [*spoken, asyncio.Event()])


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("said", ["", "a"])
async def test_a_plain_request_that_takes_too_long_is_a_504_that_is_not_tried_again(
    path: str, body: dict[str, Any], said: str
) -> None:
    generator = never_done(said)

    reply = await post(generator, path, {**body, "timeout": SOON})

    error = reply.json()["error"]
    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"
    assert (error["type"], error["code"]) == ("server_error", "deadline_exceeded")
    assert f"{SOON} seconds" in error["message"]
    assert f"after {len(said)} tokens" in error["message"]
    assert generator.generations[0].closed_as[0] == "timeout"


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_stream_that_has_not_begun_is_a_504(path: str, body: dict[str, Any]) -> None:
    reply = await post(never_done(), path, {**body, "timeout": SOON, "stream": True})

    assert reply.status_code == 504
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_stream_that_has_begun_ends_with_an_error_event(path: str, body: dict[str, Any]) -> None:
    reply = await post(never_done("a"), path, {**body, "timeout": SOON, "stream": True})

    *begun, last = events_of(reply)
    assert reply.status_code == 200
    assert begun
    assert last["error"]["code"] == "deadline_exceeded"


async def test_a_request_in_time_is_not_touched() -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, "/v1/chat/completions", {**CHAT, "timeout": LATE})

    assert reply.status_code == 200
    assert "x-ignored-params" not in reply.headers
    assert generator.generations[0].closed_as == []


async def test_a_request_s_own_timeout_goes_before_the_server_s() -> None:
    """The one that waits longer is sent first, and goes on after the other has failed."""
    gate = asyncio.Event()
    generator = ScriptedGenerator(lambda ids, params: [gate, *deltas_of("fine")])
    api = make_api(generator, limits=Limits(timeout_seconds=SOON))
    async with client_of(api) as client:
        patient = asyncio.create_task(client.post("/v1/completions", json={**PROMPT, "timeout": LATE}))
        await until(lambda: len(generator.generations) == 1)
        hasty = await client.post("/v1/completions", json=PROMPT)
        gate.set()
        reply = await patient

    assert hasty.status_code == 504
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["text"] == "fine"


@pytest.mark.parametrize("value", [0, -1, "5", True, 1e12, [1]])
async def test_a_timeout_that_is_no_time_is_refused(value: object) -> None:
    reply = await post(ScriptedGenerator(), "/v1/chat/completions", {**CHAT, "timeout": value})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "timeout"


async def test_a_null_timeout_is_none() -> None:
    assert (
        await post(ScriptedGenerator(), "/v1/completions", {**PROMPT, "timeout": None})
    ).status_code == 200


async def test_a_client_that_does_not_read_holds_nothing_beyond_its_deadline() -> None:
    flood = deltas_of("x" * 2**20)[:1] * 200
    generator = ScriptedGenerator(lambda ids, params: [*flood, asyncio.Event()])
    async with served(make_api(generator)) as port:
        _, writer = await sent(port, "/v1/completions", {**PROMPT, "stream": True, "timeout": SOON})
        await until(lambda: bool(generator.generations))
        await generator.generations[0].closed.wait()
        writer.close()

    assert generator.generations[0].closed_as[0] == "timeout"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_requests_running_and_waiting_give_back_their_blocks_and_are_counted(is_stream: bool) -> None:
    asked = {"prompt": [[5] * 9, [6] * 9], "max_tokens": 20, "n": 3, "timeout": SOON, "stream": is_stream}
    async with whole_server() as server:
        server.runner.auto = False  # no step ends: eight choices of twelve run, the others wait
        app = make_app(server.api)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            replies = await asyncio.gather(*(client.post("/v1/completions", json=asked) for _ in range(2)))
        server.runner.auto = True
        while server.runner.launched:
            server.runner.settle()
        after = await post(server.api, "/v1/completions", {**asked, "timeout": LATE, "stream": False})
        num_blocks_held = server.num_used_blocks

    assert [reply.status_code for reply in replies] == [504, 504]
    metrics = server.api.metrics
    assert metrics.aborted_by_cause["timeout"] == 12
    assert metrics.http["/v1/completions", "POST", "504"] == 2
    assert after.status_code == 200
    assert len(after.json()["choices"]) == 6
    assert num_blocks_held == 0
    assert (metrics.gauges.num_running, metrics.gauges.num_waiting) == (0, 0)
