"""The official Python SDK against a real server."""

import asyncio
from typing import Any

import openai
import pytest

from openai_api.api import Limits
from service.errors import GenerationError, OverloadedError
from service.text.choice import Delta
from tests.openai_api.scripted import (
    MODEL,
    ScriptedGenerator,
    Steps,
    deltas_of,
    logprobs_of,
    make_api,
    served,
)

pytestmark = pytest.mark.timeout(60)

HI: Any = [{"role": "user", "content": "Hi"}]


def sdk(port: int, path: str = "/v1", max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{port}{path}", api_key="none", max_retries=max_retries
    )


@pytest.mark.conformance("openai", "chat and text, plain and streamed; models")
@pytest.mark.parametrize("base", ["/v1", "/v1/"])
async def test_plain_streamed_and_listed(base: str) -> None:
    async with served(make_api()) as port, sdk(port, base) as client:
        plain = await client.chat.completions.create(model=MODEL, messages=HI)
        stream: Any = await client.chat.completions.create(
            model=MODEL,
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model=MODEL, prompt="Hi")
        pieces = [
            piece async for piece in await client.completions.create(model=MODEL, prompt="Hi", stream=True)
        ]
        names = [model.id async for model in client.models.list()]
        one = await client.models.retrieve(MODEL)

    assert plain.choices[0].message.content == text.choices[0].text == "Hello"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello"
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello"
    assert chunks[-1].usage == plain.usage
    assert names == [MODEL, "alias"]
    assert one.id == MODEL


@pytest.mark.conformance("openai", "chat.completions.stream, with logprobs")
async def test_the_streaming_helper_rebuilds_the_whole_reply() -> None:
    entries = [logprobs_of(ord(c), -0.5, (ord(c), -0.5)) for c in "ok"]
    script = [Delta(text="ok", token_ids=[111, 107], logprobs=entries), *deltas_of()]
    generator = ScriptedGenerator(lambda ids, params: script)
    async with served(make_api(generator)) as port, sdk(port) as client:
        asked: Any = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 1}
        async with client.chat.completions.stream(**asked) as stream:
            whole = await stream.get_final_completion()

    assert whole.choices[0].message.content == "ok"
    assert whole.choices[0].finish_reason == "stop"
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or []] == ["o", "k"]


@pytest.mark.conformance("openai", "errors become its exceptions, and are not tried again in vain")
async def test_errors_become_the_sdks_exceptions_and_are_not_retried() -> None:
    api = make_api()
    async with served(api) as port, sdk(port, max_retries=2) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=HI, temperature=3)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=HI)

    assert bad.value.param == "temperature"
    assert missing.value.code == "model_not_found"
    assert missing.value.request_id
    assert api.metrics.http == {
        ("/v1/chat/completions", "POST", "400"): 1,
        ("/v1/chat/completions", "POST", "404"): 1,
    }


@pytest.mark.conformance("openai", "a full server is asked again, after Retry-After")
async def test_a_full_server_is_asked_again_after_the_time_it_names() -> None:
    generator = ScriptedGenerator()
    generator.refusal = OverloadedError("The queue is full.", retry_after_seconds=0.1)
    api = make_api(generator)
    async with served(api) as port, sdk(port, max_retries=1) as client:
        with pytest.raises(openai.InternalServerError) as full:
            await client.chat.completions.create(model=MODEL, messages=HI)

    assert full.value.code == "server_is_overloaded"
    assert api.metrics.http == {("/v1/chat/completions", "POST", "503"): 2}


@pytest.mark.conformance("openai", "a failure within a stream is an exception")
async def test_a_failure_within_a_stream_is_an_exception_not_an_end() -> None:
    script: Steps = [*deltas_of("Hel")[:1], GenerationError("The logits hold a NaN.")]
    generator = ScriptedGenerator(lambda ids, params: script)
    seen: list[str | None] = []

    async def read(stream: Any) -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content)

    async with served(make_api(generator)) as port, sdk(port) as client:
        stream: Any = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        with pytest.raises(openai.APIError, match="NaN"):
            await read(stream)

    assert seen == ["", "Hel"]


@pytest.mark.conformance("openai", "comments in a stream that waits")
async def test_pings_do_not_disturb_the_sdk() -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(lambda ids, params: [*deltas_of("a")[:1], gate, *deltas_of("b")])
    limits = Limits(ping_seconds=0.01)
    async with served(make_api(generator, limits=limits)) as port, sdk(port) as client:
        stream: Any = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        asyncio.get_running_loop().call_later(0.1, gate.set)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == "ab"
