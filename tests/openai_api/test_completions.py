"""/v1/completions: prompts of all kinds, the legacy logprobs, chunk grammar."""

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_api.api import Limits
from service.errors import GenerationError, OverloadedError
from service.text.choice import Delta
from service.text.generation import GenerationParams
from tests.openai_api.scripted import (
    MODEL,
    PROMPT,
    ScriptedGeneration,
    ScriptedGenerator,
    Steps,
    deltas_of,
    events_of,
    logprobs_of,
    make_api,
    post,
    strict_json,
)

URL = "/v1/completions"


def choices_of_n(ids: list[int], params: GenerationParams) -> list[Delta]:
    """Every choice repeats the prompt's first character and says which one it is."""
    return [
        delta
        for i in range(params.n)
        for delta in deltas_of(chr(ids[0]), str(i), index=i, num_cached_tokens=1)
    ]


async def test_a_plain_reply_has_openais_shape() -> None:
    reply = await post(ScriptedGenerator(), URL, PROMPT)

    body = reply.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("script", "texts"),
    [
        (deltas_of("Hel", "lo"), ["Hel", "lo", ""]),
        (deltas_of(), [""]),  # EOS first
        ([Delta(token_ids=[1], text="all at once", finish_reason="length")], ["all at once", ""]),
    ],
    ids=["normal", "eos-first", "one-delta"],
)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}], ids=str)
async def test_a_stream_is_text_then_one_finish_reason_then_done(
    script: list[Delta], texts: list[str], options: dict[str, Any]
) -> None:
    generator = ScriptedGenerator(lambda ids, params: script)

    *chunks, done = events_of(await post(generator, URL, {**PROMPT, **options, "stream": True}))

    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == texts
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(texts) - 1)
    assert choices[-1]["finish_reason"] == script[-1].finish_reason
    assert all("role" not in choice and "delta" not in choice for choice in choices)
    assert all("usage" not in chunk for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1


async def test_usage_comes_last_without_choices_when_asked_for() -> None:
    plain = (await post(ScriptedGenerator(), URL, PROMPT)).json()
    body = {**PROMPT, "stream": True, "stream_options": {"include_usage": True}}

    *_, last, done = events_of(await post(ScriptedGenerator(), URL, body))

    assert (last["choices"], last["usage"], done) == ([], plain["usage"], "[DONE]")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", [[72, 105]]),
        (["Hi", "a"], [[72, 105], [97]]),
        ([72, 105], [[72, 105]]),
        ([[72, 105], [97]], [[72, 105], [97]]),
    ],
)
async def test_a_prompt_is_text_or_ids_one_or_many(prompt: Any, prompts: list[list[int]]) -> None:
    generator = ScriptedGenerator(choices_of_n)

    reply = await post(generator, URL, {"prompt": prompt, "n": 2})

    assert generator.prompts == prompts
    body = reply.json()
    wanted = [f"{chr(ids[0])}{i}" for ids in prompts for i in range(2)]
    assert [choice["text"] for choice in body["choices"]] == wanted
    assert [choice["index"] for choice in body["choices"]] == list(range(len(wanted)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": len(prompts)}
    assert len(set(generator.request_ids)) == len(prompts)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", "prompt"),
        (["a", ""], "prompt[1]"),
        (7, "prompt"),
        (None, "prompt"),
        ({}, "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([[1, 2], []], "prompt[1]"),
        ([[1, 2], "a"], "prompt[1]"),
        ([[1, 2], [3, None]], "prompt[1][1]"),
        ([[1, 2], [-1]], "prompt[1]"),
        ([1, 2**80], "prompt"),
    ],
)
async def test_a_bad_prompt_is_named(prompt: Any, param: str) -> None:
    generator = ScriptedGenerator()

    reply = await post(generator, URL, {"prompt": prompt})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert generator.generations == []


async def test_max_tokens_is_16_by_default() -> None:
    generator = ScriptedGenerator()

    await post(generator, URL, PROMPT)

    assert generator.params.max_tokens == 16


async def test_only_a_limit_that_was_asked_for_is_reported_as_clamped() -> None:
    generator = ScriptedGenerator(max_model_len=10)

    silent = await post(generator, URL, PROMPT)
    told = await post(generator, URL, {**PROMPT, "max_tokens": 50})

    assert "x-ignored-params" not in silent.headers
    assert told.headers["x-ignored-params"] == "max_tokens;clamped=8"


async def test_prompts_times_n_is_bounded() -> None:
    api = make_api(ScriptedGenerator(choices_of_n), limits=Limits(max_choices=8))

    fitting = await post(api, URL, {"prompt": ["a"] * 4, "n": 2})
    too_many = await post(api, URL, {"prompt": ["a"] * 3, "n": 3})

    assert len(fitting.json()["choices"]) == 8
    assert too_many.status_code == 400
    assert too_many.json()["error"]["param"] == "prompt"


class SecondRefused(ScriptedGenerator):
    async def start(self, *args: Any, **options: Any) -> ScriptedGeneration:
        if self.generations:
            self.refusal = OverloadedError("The queue is full.", retry_after_seconds=1)
        return await super().start(*args, **options)


async def test_when_one_of_many_prompts_is_refused_the_others_are_cancelled() -> None:
    generator = SecondRefused()

    reply = await post(generator, URL, {"prompt": ["a", "b"]})

    assert reply.status_code == 503
    assert [each.closed_as for each in generator.generations] == [["error"]]


async def test_when_one_of_many_prompts_fails_the_others_are_cancelled() -> None:
    def script(ids: list[int], params: GenerationParams) -> list[Any]:
        return [GenerationError("No.")] if ids == [98] else deltas_of(*"long enough")

    generator = ScriptedGenerator(script)

    reply = await post(generator, URL, {"prompt": ["a", "b"]})

    assert reply.status_code == 500
    assert [each.closed_as[0] for each in generator.generations] == ["error", "error"]


async def test_when_one_of_many_prompts_fails_no_task_waits_for_the_others() -> None:
    def script(ids: list[int], params: GenerationParams) -> Steps:
        return [GenerationError("No.")] if ids == [98] else [asyncio.Event()]

    before = asyncio.all_tasks()

    reply = await post(ScriptedGenerator(script), URL, {"prompt": ["a", "b"]})

    assert reply.status_code == 500
    assert asyncio.all_tasks() == before


async def test_logprobs_have_the_legacy_layout_and_are_finite() -> None:
    generator = ScriptedGenerator()
    generator.token_bytes = {1: b"\xe2\x82", 2: b"\xac", 3: b" go"}
    euro = [
        logprobs_of(1, -0.25, (1, -0.25), (2, -math.inf)),
        logprobs_of(2, math.nan, (3, -0.5)),
    ]
    script = [
        Delta(text="\u20ac", token_ids=[1, 2], logprobs=euro),
        Delta(text=" go", token_ids=[3], logprobs=[logprobs_of(3, 1e-9)]),
        *deltas_of(),
    ]
    generator.script = lambda ids, params: script

    reply = await post(generator, URL, {**PROMPT, "logprobs": 2})

    assert strict_json(reply.content)["choices"][0]["logprobs"] == {
        "tokens": ["bytes:\\xe2\\x82", "bytes:\\xac", " go"],
        "token_logprobs": [-0.25, -9999.0, 0.0],
        "top_logprobs": [
            {"bytes:\\xe2\\x82": -0.25, "bytes:\\xac": -9999.0},
            {" go": -0.5, "bytes:\\xac": -9999.0},
            {" go": 0.0},
        ],
        "text_offset": [0, 0, 1],
    }


async def test_a_tokens_own_logprob_stands_where_another_token_has_the_same_text() -> None:
    generator = ScriptedGenerator()
    generator.token_bytes = {1: b"x", 2: b"x"}
    entry = logprobs_of(2, -3.0, (1, -0.5), (2, -3.0))
    generator.script = lambda ids, params: [Delta(token_ids=[2], logprobs=[entry]), *deltas_of("x")]

    plain = (await post(generator, URL, {**PROMPT, "logprobs": 2})).json()
    *chunks, _ = events_of(await post(generator, URL, {**PROMPT, "logprobs": 2, "stream": True}))

    assert plain["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -3.0}]
    assert chunks[0]["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.text("ab\u20ac\U0001fae0\n", max_size=4)),
        max_size=30,
    )
)
async def test_a_stream_folds_to_the_plain_reply(pieces: list[tuple[int, int, str]]) -> None:
    def script(ids: list[int], params: GenerationParams) -> list[Delta]:
        own = [
            Delta(
                index=index,
                text=text,
                token_ids=[ord(c) for c in text],
                logprobs=[logprobs_of(ord(c), -1.0, (98, -2.0)) for c in text],
            )
            for prompt, index, text in pieces
            if prompt == ids[0] - ord("0")
        ]
        return own + [Delta(index=i, finish_reason="length") for i in range(2)]

    asked = {"prompt": ["0", "1"], "n": 2, "logprobs": 1}
    plain = (await post(ScriptedGenerator(script), URL, asked)).json()
    *chunks, _ = events_of(await post(ScriptedGenerator(script), URL, {**asked, "stream": True}))

    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2, 3]
    for choice in plain["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in own) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"][name]]
            assert entries == (choice["logprobs"] or {}).get(name, [])
        if choice["logprobs"]:
            starts = choice["logprobs"]["text_offset"]
            assert [choice["text"][at] for at in starts] == list(choice["text"])
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
