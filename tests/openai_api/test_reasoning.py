"""Thinking in chats: told from the answer in plain and streamed replies, counted, and turned off."""

import json
import re
from typing import Any

import jsonschema
import pytest

from service.text.chat_format import ChatFormat, ThinkingTags
from service.text.choice import Delta
from tests.openai_api.scripted import CHAT, ScriptedGenerator, deltas_of, events_of, post
from tests.openai_api.whole_server import THINKING_TEMPLATE, chat, whole_server

URL = "/v1/chat/completions"
THINKS = ChatFormat(thinking=ThinkingTags(open_id=1, close_id=2, has_switch=True))
ALWAYS_THINKS = ChatFormat(thinking=ThinkingTags(open_id=1, close_id=2, has_switch=False))
OFF, OPEN = "<think>\n\n</think>\n\n", "<think>\n"


def streamed_message(events: list[Any]) -> dict[str, str]:
    """The message that a client makes of a stream."""
    message: dict[str, str] = {}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            for name, text in choice["delta"].items():
                message[name] = message.get(name, "") + text
    return message


@pytest.mark.parametrize(
    ("prompt_end", "text", "reasoning", "content"),
    [
        ("", "x", None, "x"),
        ("", "<think>\nr\n</think>\n\na", "r", "a"),
        ("", "<think>r", "r", ""),
        (OPEN, "r</think>a", "r", "a"),
        (OPEN, "x", "x", ""),
        (OFF, "x", None, "x"),
        (OFF, "<think>r</think>a", None, "<think>r</think>a"),
        (OFF, "r</think>a", None, "r</think>a"),
    ],
)
@pytest.mark.parametrize("length", [1, 3, 100])
async def test_thinking_and_answer_are_told_apart(
    prompt_end: str, text: str, reasoning: str | None, content: str, length: int
) -> None:
    pieces = [text[at : at + length] for at in range(0, len(text), length)]

    def make() -> ScriptedGenerator:
        return ScriptedGenerator(
            lambda ids, params: deltas_of(*pieces), chat_format=THINKS, prompt_end=prompt_end
        )

    plain = (await post(make(), URL, CHAT)).json()["choices"][0]["message"]
    streamed = streamed_message(events_of(await post(make(), URL, {**CHAT, "stream": True})))

    thought = {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}
    assert plain == {"role": "assistant", "refusal": None, "content": content, **thought}
    assert streamed == {"role": "assistant", "content": content, **thought}


async def test_a_model_that_does_not_think_may_write_tags() -> None:
    generator = ScriptedGenerator(lambda ids, params: deltas_of("<think>r</think>a"))

    message = (await post(generator, URL, CHAT)).json()["choices"][0]["message"]

    assert message["content"] == "<think>r</think>a"
    assert "reasoning_content" not in message


async def test_thinking_is_left_out_on_request_but_counted() -> None:
    script = [
        Delta(text="<think>r</think>", token_ids=[1, 9, 2], num_reasoning_tokens=3),
        *deltas_of("a"),
    ]

    def make() -> ScriptedGenerator:
        return ScriptedGenerator(lambda ids, params: script, chat_format=THINKS)

    asked = {**CHAT, "include_reasoning": False}
    plain = await post(make(), URL, asked)
    streamed = events_of(await post(make(), URL, {**asked, "stream": True}))

    assert "x-ignored-params" not in plain.headers
    assert "reasoning" not in plain.json()["choices"][0]["message"]
    assert plain.json()["choices"][0]["message"]["content"] == "a"
    assert plain.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert streamed_message(streamed) == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("chat_format", "asked", "arguments", "ignored"),
    [
        (THINKS, {}, {}, None),
        (THINKS, {"reasoning_effort": "none"}, {"enable_thinking": False}, None),
        (THINKS, {"reasoning_effort": "high"}, {"enable_thinking": True}, "reasoning_effort"),
        (
            THINKS,
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
            None,
        ),
        (
            THINKS,
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none"},
            {"enable_thinking": False},
            None,
        ),
        (ALWAYS_THINKS, {"reasoning_effort": "low"}, {}, "reasoning_effort"),
        (ChatFormat(), {"reasoning_effort": "none"}, {}, "reasoning_effort"),
        (ChatFormat(knows_effort=True), {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, None),
    ],
)
async def test_effort_becomes_the_templates_switch(
    chat_format: ChatFormat, asked: dict[str, Any], arguments: dict[str, Any], ignored: str | None
) -> None:
    generator = ScriptedGenerator(chat_format=chat_format)

    reply = await post(generator, URL, {**CHAT, **asked})

    assert reply.status_code == 200
    assert generator.chat_options["template_kwargs"] == arguments
    assert reply.headers.get("x-ignored-params") == ignored


@pytest.mark.parametrize(
    ("chat_format", "asked"),
    [
        (ALWAYS_THINKS, {"reasoning_effort": "none"}),
        (THINKS, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}),
        (THINKS, {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}),
        (THINKS, {"reasoning_effort": "much"}),
    ],
)
async def test_what_can_not_be_turned_off_or_disagrees_is_refused(
    chat_format: ChatFormat, asked: dict[str, Any]
) -> None:
    reply = await post(ScriptedGenerator(chat_format=chat_format), URL, {**CHAT, **asked})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "reasoning_effort"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_thinking_in_the_history_reaches_the_template(name: str) -> None:
    generator = ScriptedGenerator()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "a", name: "r"}, *CHAT["messages"]]

    reply = await post(generator, URL, {"messages": messages})

    assert reply.status_code == 200
    assert generator.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


async def test_structured_output_begins_behind_the_thinking_and_its_tokens_are_counted() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    seen = []
    async with whole_server(template=THINKING_TEMPLATE + OPEN, max_model_len=1500) as server:
        for text in "abcdef":
            body = {**chat(text, guided_json=schema), "max_tokens": 1300, "logprobs": True}
            plain = (await post(server.api, URL, body)).json()
            events = events_of(await post(server.api, URL, {**body, "stream": True}))
            seen.append((plain, streamed_message(events)))

    for plain, streamed in seen:
        choice = plain["choices"][0]
        assert choice["finish_reason"] == "stop"
        message = choice["message"]
        jsonschema.validate(json.loads(message["content"]), schema)
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        num_thought = plain["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert tokens.index("</think>") == num_thought - 1
        assert re.sub("[\n]+$", "", message.get("reasoning", "")) == message.get("reasoning", "")
        assert streamed["content"] == message["content"]
        assert streamed.get("reasoning") == message.get("reasoning")
    assert any(plain["choices"][0]["message"].get("reasoning") for plain, _ in seen)


async def test_structured_output_without_thinking_begins_at_once() -> None:
    async with whole_server(template=THINKING_TEMPLATE) as server:
        body = chat("abc", guided_choice=["yes", "no"], reasoning_effort="none")
        reply = (await post(server.api, URL, body)).json()

    assert reply["choices"][0]["message"]["content"] in ("yes", "no")
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
