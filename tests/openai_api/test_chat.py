"""/v1/chat/completions: chunk grammar, usage, n, messages, logprobs, failures."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_api.api import Limits
from service.errors import GenerationError, KernelError, OverloadedError
from service.text.choice import Delta
from service.text.generation import GenerationParams
from tests.openai_api.scripted import (
    CHAT,
    MODEL,
    ScriptedGenerator,
    Steps,
    deltas_of,
    events_of,
    logprobs_of,
    make_api,
    post,
    strict_json,
)

URL = "/v1/chat/completions"
STREAM = {**CHAT, "stream": True}


async def test_a_plain_reply_has_openais_shape() -> None:
    reply = await post(ScriptedGenerator(), URL, CHAT)

    assert reply.status_code == 200
    body = reply.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 6,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    "script",
    [
        deltas_of("Hel", "lo"),
        deltas_of(finish_reason="stop"),  # EOS first
        [Delta(token_ids=[1], text="all at once", finish_reason="length")],
        [Delta(token_ids=[1]), Delta(token_ids=[2]), *deltas_of("x")],  # tokens without text yet
    ],
    ids=["normal", "eos-first", "one-delta", "held-back"],
)
async def test_a_stream_is_role_then_text_then_one_finish_reason_then_done(script: list[Delta]) -> None:
    reply = await post(ScriptedGenerator(lambda ids, params: script), URL, STREAM)

    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(reply)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks[1:-1])
    assert chunks[-1]["choices"][0]["delta"] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + [script[-1].finish_reason]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "".join(
        delta.text for delta in script
    )


async def test_usage_comes_last_without_choices_when_asked_for() -> None:
    plain = (await post(ScriptedGenerator(), URL, CHAT)).json()
    with_usage = {**STREAM, "stream_options": {"include_usage": True}}

    *chunks, last, done = events_of(await post(ScriptedGenerator(), URL, with_usage))

    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == plain["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


async def test_no_usage_chunk_when_it_is_declined() -> None:
    body = {**STREAM, "stream_options": {"include_usage": False}}

    *chunks, _ = events_of(await post(ScriptedGenerator(), URL, body))

    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_continuous_usage_counts_up_in_every_chunk() -> None:
    body = {**STREAM, "stream_options": {"continuous_usage_stats": True}}

    *chunks, _ = events_of(await post(ScriptedGenerator(), URL, body))

    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 3, 5, 6]


async def test_cached_tokens_are_those_of_the_first_choice() -> None:
    def script(ids: list[int], params: GenerationParams) -> list[Delta]:
        return deltas_of("a", num_cached_tokens=4) + deltas_of("b", index=1, num_cached_tokens=8)

    reply = await post(ScriptedGenerator(script), URL, {**CHAT, "n": 2})

    assert reply.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def interleaved(ids: list[int], params: GenerationParams) -> list[Delta]:
    """Choice 1 ends first, choice 0 starts last."""
    two, one, zero = (deltas_of(*texts, index=i) for i, texts in [(2, "xyz"), (1, "p"), (0, "ab")])
    return [two[0], *one, zero[0], two[1], *zero[1:], *two[2:]]


async def test_every_choice_of_n_is_there_in_order_and_the_prompt_counts_once() -> None:
    reply = await post(ScriptedGenerator(interleaved), URL, {**CHAT, "n": 3})

    body = reply.json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [
        (0, "ab"),
        (1, "p"),
        (2, "xyz"),
    ]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop"] * 3
    assert body["usage"]["prompt_tokens"] == 9
    assert body["usage"]["completion_tokens"] == 9


async def test_every_choice_of_a_stream_has_its_own_role_and_finish_reason() -> None:
    *chunks, _ = events_of(await post(ScriptedGenerator(interleaved), URL, {**STREAM, "n": 3}))

    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]


async def test_n_is_bounded_by_the_server() -> None:
    api = make_api(ScriptedGenerator(interleaved), limits=Limits(max_choices=3))

    fitting = await post(api, URL, {**CHAT, "n": 3})
    too_many = await post(api, URL, {**CHAT, "n": 4})

    assert fitting.status_code == 200
    assert too_many.status_code == 400
    assert too_many.json()["error"]["param"] == "n"


LOGPROB = logprobs_of(ord("a"), -0.5, (ord("a"), -0.5), (ord("b"), -math.inf))


async def test_logprobs_are_finite_and_in_the_layout_of_chat() -> None:
    script = [Delta(text="a", token_ids=[97], logprobs=[LOGPROB]), *deltas_of()]
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}

    reply = await post(ScriptedGenerator(lambda ids, params: script), URL, asked)

    assert strict_json(reply.content)["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -9999.0, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }


async def test_without_top_logprobs_the_list_of_them_is_empty() -> None:
    script = [Delta(text="a", token_ids=[97], logprobs=[logprobs_of(97, -0.5)]), *deltas_of()]

    reply = await post(ScriptedGenerator(lambda ids, params: script), URL, {**CHAT, "logprobs": True})

    (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


async def test_logprobs_of_held_back_text_are_sent() -> None:
    script = [Delta(token_ids=[97], logprobs=[LOGPROB]), *deltas_of("a")]
    asked = {**STREAM, "logprobs": True}

    *chunks, _ = events_of(await post(ScriptedGenerator(lambda ids, params: script), URL, asked))

    first = chunks[1]["choices"][0]
    assert (first["delta"], first["logprobs"]["content"][0]["token"]) == ({"content": ""}, "a")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True, "top_logprobs": 5}, 5),
    ],
)
async def test_what_logprobs_ask_of_the_engine(asked: dict[str, Any], wanted: int | None) -> None:
    generator = ScriptedGenerator()

    await post(generator, URL, {**CHAT, **asked})

    assert generator.params.logprobs == wanted


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("system", "text"),
        ("user", "text"),
        ("assistant", "text"),
        ("tool", "text"),
        ("assistant", "refusal"),
    ],
)
async def test_one_text_part_equals_the_plain_string(text: str, part: str) -> None:
    plain, parts = ScriptedGenerator(), ScriptedGenerator()

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {"role": "assistant", "tool_calls": [call]}
    more = {"tool_call_id": "1"} if text == "tool" else {}

    for generator, content in ((plain, "2+2?"), (parts, [{"type": part, part: "2+2?"}])):
        await post(generator, URL, {"messages": [asked, {"role": text, "content": content, **more}]})

    assert parts.prompts == plain.prompts
    assert len(plain.prompts) == 1


async def test_text_parts_are_joined_by_a_line_break() -> None:
    generator = ScriptedGenerator()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    await post(generator, URL, {"messages": [{"role": "user", "content": parts}]})

    assert generator.messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [None]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "messages[0].content[0].type"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ],
)
async def test_a_bad_message_is_named_by_its_path(message: dict[str, Any], param: str) -> None:
    reply = await post(ScriptedGenerator(), URL, {"messages": [message]})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_developer_messages_reach_the_template_beside_system_ones() -> None:
    generator = ScriptedGenerator()
    messages = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": None},
    ]

    await post(generator, URL, {"messages": messages})

    assert generator.messages == [*messages[:3], {"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("asked", "adds", "continues"),
    [
        ({}, True, False),
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True),
    ],
)
async def test_how_the_prompt_ends(asked: dict[str, Any], adds: bool, continues: bool) -> None:
    generator = ScriptedGenerator()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    await post(generator, URL, {"messages": messages, "chat_template_kwargs": {"k": 1}, **asked})

    assert generator.chat_options == {
        "tools": [],
        "add_generation_prompt": adds,
        "continue_final_message": continues,
        "template_kwargs": {"k": 1},
    }


@pytest.mark.parametrize(
    "asked",
    [
        {"continue_final_message": True},  # the last message is the user's
        {
            "continue_final_message": True,
            "add_generation_prompt": True,
            "messages": [{"role": "assistant", "content": "x"}],
        },
    ],
)
async def test_a_final_message_that_can_not_be_continued_is_refused(asked: dict[str, Any]) -> None:
    reply = await post(ScriptedGenerator(), URL, {**CHAT, **asked})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "continue_final_message"


async def test_max_tokens_is_open_by_default_and_has_two_names() -> None:
    generator = ScriptedGenerator()

    await post(generator, URL, CHAT)
    by_default = generator.params.max_tokens
    await post(generator, URL, {**CHAT, "max_completion_tokens": 7, "max_tokens": 7})
    same = generator.params.max_tokens
    differing = await post(generator, URL, {**CHAT, "max_completion_tokens": 7, "max_tokens": 8})

    assert (by_default, same) == (None, 7)
    assert differing.status_code == 400
    assert differing.json()["error"]["param"] == "max_completion_tokens"


async def test_a_failure_within_a_stream_is_its_last_event() -> None:
    script: Steps = [*deltas_of("Hel")[:1], GenerationError("The logits hold a NaN.")]
    generator = ScriptedGenerator(lambda ids, params: script)

    reply = await post(generator, URL, STREAM)

    assert reply.status_code == 200
    *_, last = events_of(reply)
    assert last == {
        "error": {
            "message": "The logits hold a NaN.",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }
    assert generator.generations[0].closed_as[0] == "error"


async def test_a_reply_that_the_server_ends_early_does_not_look_whole() -> None:
    generator = ScriptedGenerator(lambda ids, params: deltas_of("Hel", "lo")[:-1])

    plain = await post(generator, URL, CHAT)
    *chunks, last = events_of(await post(generator, URL, STREAM))

    assert plain.status_code == 500
    assert len(chunks) == 3
    assert last["error"]["code"] == "generation_failed"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failure_before_the_first_token_has_a_status(is_stream: bool) -> None:
    generator = ScriptedGenerator(lambda ids, params: [GenerationError("No.")])

    reply = await post(generator, URL, {**CHAT, "stream": is_stream})

    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "No."


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("error", [KeyError("secret"), KernelError("secret")])
async def test_an_unexpected_exception_tells_nothing_and_the_next_request_works(
    error: Exception, is_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    api = make_api(ScriptedGenerator(lambda ids, params: [error]))

    reply = await post(api, URL, {**CHAT, "stream": is_stream})
    api.generator = ScriptedGenerator()  # type: ignore[assignment]
    after = await post(api, URL, CHAT)

    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert "Traceback" not in reply.text
    assert reply.json()["error"]["code"] == "internal_error"
    assert caplog.text.count("Error: ") == 1
    assert after.status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_server_says_when_to_come_back_before_any_event(is_stream: bool) -> None:
    generator = ScriptedGenerator()
    generator.refusal = OverloadedError("The queue is full.", retry_after_seconds=2.1)

    reply = await post(generator, URL, {**CHAT, "stream": is_stream})

    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "3"
    assert "x-should-retry" not in reply.headers
    assert reply.json()["error"]["code"] == "server_is_overloaded"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_overlong_prompt_is_refused_by_code_and_nothing_is_started(is_stream: bool) -> None:
    generator = ScriptedGenerator(max_model_len=8)

    reply = await post(generator, URL, {**CHAT, "stream": is_stream})

    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert reply.headers["x-should-retry"] == "false"
    assert generator.generations == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_clamped_limit_is_reported_under_the_name_it_was_given(name: str, is_stream: bool) -> None:
    generator = ScriptedGenerator(max_model_len=15)

    reply = await post(generator, URL, {**CHAT, name: 50, "stream": is_stream})

    assert reply.status_code == 200
    assert reply.headers["x-ignored-params"] == f"{name};clamped=6"


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 3), st.text(st.characters(exclude_categories=["Cs"]), max_size=4)),
        max_size=30,
    ),
    with_logprobs=st.booleans(),
)
async def test_a_stream_folds_to_the_plain_reply(
    pieces: list[tuple[int, str]], with_logprobs: bool
) -> None:
    def script(ids: list[int], params: GenerationParams) -> list[Delta]:
        deltas = [
            Delta(
                index=index,
                text=text,
                token_ids=[ord(c) for c in text],
                logprobs=[logprobs_of(ord(c), -1.0) for c in text] if with_logprobs else [],
            )
            for index, text in pieces
        ]
        return deltas + [Delta(index=i, finish_reason="stop") for i in range(4)]

    asked = {**CHAT, "n": 4, "logprobs": with_logprobs}
    plain = (await post(ScriptedGenerator(script), URL, asked)).json()
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events_of(await post(ScriptedGenerator(script), URL, {**asked, **streamed}))

    for choice in plain["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == ((choice["logprobs"] or {}).get("content") or [])
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
    assert last["usage"] == plain["usage"]
