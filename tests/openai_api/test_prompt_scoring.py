"""What a reply holds of its prompt, and choices that are picked among more."""

from typing import Any

import pytest

from service.text.choice import Delta
from service.text.generation import GenerationParams
from tests.openai_api.scripted import (
    CHAT,
    PROMPT,
    ScriptedGenerator,
    deltas_of,
    events_of,
    logprobs_of,
    post,
)

URL, CHAT_URL = "/v1/completions", "/v1/chat/completions"


def scored(ids: list[int], params: GenerationParams) -> list[Delta]:
    """Choice i says i; its logprob is -(i + 1), but of the last -0.5."""
    found = []
    for i in range(params.n):
        text, logprob = str(i), -0.5 if i == params.n - 1 else -1.0 - i
        scores = [logprobs_of(token_id, -2.0, (120, -1.0)) for token_id in ids[1:]]
        first = Delta(
            index=i,
            text=text,
            token_ids=[ord(text)],
            prompt_logprobs=[] if params.prompt_logprobs is None else scores,
            logprobs=[] if params.logprobs is None else [logprobs_of(ord(text), logprob)],
        )
        found += [first, Delta(index=i, finish_reason="stop")]
    return found


async def ask(url: str = URL, **fields: Any) -> dict[str, Any]:
    reply = await post(ScriptedGenerator(scored), url, {**(CHAT if url == CHAT_URL else PROMPT), **fields})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def test_echo_without_logprobs_asks_for_none() -> None:
    generator = ScriptedGenerator(scored)

    body = (await post(generator, URL, {**PROMPT, "echo": True, "n": 2})).json()

    assert [choice["text"] for choice in body["choices"]] == ["Hi0", "Hi1"]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert generator.params.prompt_logprobs is None


async def test_echo_with_logprobs_begins_with_those_of_the_prompt() -> None:
    body = await ask(echo=True, logprobs=1, n=1)

    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H", "i", "0"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"x": -1.0, "i": -2.0}, {"0": -0.5}],
        "text_offset": [0, 1, 2],
    }


async def test_an_echo_is_streamed_first() -> None:
    fields = {**PROMPT, "echo": True, "logprobs": 1, "return_token_ids": True}
    plain = (await post(ScriptedGenerator(scored), URL, fields)).json()["choices"][0]

    *chunks, _ = events_of(await post(ScriptedGenerator(scored), URL, {**fields, "stream": True}))

    pieces = [chunk["choices"][0] for chunk in chunks]
    assert pieces[0]["text"] == "Hi"
    assert pieces[0]["prompt_token_ids"] == plain["prompt_token_ids"] == [72, 105]
    assert "".join(piece["text"] for piece in pieces) == plain["text"] == "Hi0"
    token_ids = [each for piece in pieces for each in piece.get("token_ids", [])]
    assert token_ids == plain["token_ids"] == [48]
    for name in plain["logprobs"]:
        joined = [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"][name]]
        assert joined == plain["logprobs"][name]


async def test_ids_are_echoed_as_text() -> None:
    body = await ask(prompt=[[72, 111], [105]], echo=True, max_tokens=0)

    assert [choice["text"] for choice in body["choices"]] == ["Ho0", "i0"]


@pytest.mark.parametrize("url", [URL, CHAT_URL])
async def test_prompt_logprobs_are_by_id(url: str) -> None:
    body = await ask(url, prompt_logprobs=1)

    found = (body["choices"][0] if url == URL else body)["prompt_logprobs"]
    own = {"logprob": -2.0, "rank": 1, "decoded_token": "i"}
    assert found[0] is None
    assert {"105": own, "120": {"logprob": -1.0, "rank": 1, "decoded_token": "x"}} in found
    refused = await post(
        ScriptedGenerator(scored),
        url,
        {**(CHAT if url == CHAT_URL else PROMPT), "prompt_logprobs": 1, "stream": True},
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_best_of_keeps_the_likeliest_and_counts_all() -> None:
    body = await ask(n=2, best_of=4)

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "3"), (1, "0")]
    assert [choice["logprobs"] for choice in body["choices"]] == [None, None]
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 129}, {"best_of": 0}]
)
async def test_a_best_of_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    reply = await post(ScriptedGenerator(scored), URL, {**PROMPT, **fields})

    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "best_of")


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_of_a_chat(stream: bool) -> None:
    asked = {**CHAT, "return_token_ids": True, "stream": stream}
    reply = await post(ScriptedGenerator(lambda ids, params: deltas_of("Hel", "lo")), CHAT_URL, asked)

    if stream:
        *chunks, _ = events_of(reply)
        assert [c for chunk in chunks for c in chunk.get("prompt_token_ids", [])] == [
            *map(ord, "user: Hi\n")
        ]
        ids = [each for c in chunks for each in c["choices"][0].get("token_ids", [])]
    else:
        assert reply.json()["prompt_token_ids"] == [*map(ord, "user: Hi\n")]
        ids = reply.json()["choices"][0]["token_ids"]
    assert ids == [*map(ord, "Hello"), 0]
