"""/v1/responses: what is asked becomes a chat, events add up to the plain response, the SDK reads both."""

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.fields import REFUSED_BY_RESPONSES
from service.errors import GenerationError
from service.text.chat_format import HERMES, ChatFormat, ThinkingTags
from service.text.choice import Delta
from tests.openai_api.scripted import (
    MODEL,
    ScriptedGenerator,
    Steps,
    deltas_of,
    events_of,
    make_api,
    post,
    served,
)
from tests.openai_api.whole_server import TOOLS_TEMPLATE, whole_server

URL = "/v1/responses"
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi"}
QWEN3 = ChatFormat(ThinkingTags(1, 2, True), HERMES)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def saying(*texts: str, finish_reason: str = "stop", form: ChatFormat = QWEN3) -> ScriptedGenerator:
    return ScriptedGenerator(
        lambda ids, params: deltas_of(*texts, finish_reason=finish_reason), chat_format=form
    )


def without_ids(value: Any) -> Any:
    """The same JSON without what is drawn anew for each response."""
    drawn = ("id", "call_id", "created_at", "item_id", "sequence_number")
    if isinstance(value, dict):
        return {key: without_ids(each) for key, each in value.items() if key not in drawn}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


async def streamed(generator: ScriptedGenerator, asked: dict[str, Any]) -> list[Any]:
    reply = await post(generator, URL, {**asked, "stream": True})
    return events_of(reply)


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"role": role, "content": [{"type": kind, "text": text, "annotations": []} for text in texts]}


# what is asked


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"input": "Hi"}, [("user", "Hi")]),
        ({"input": "Hi", "instructions": "Be brief."}, [("system", "Be brief."), ("user", "Hi")]),
        (
            {"input": [{"role": "system", "content": "a"}, {"type": "message", **said("user", "b", "c")}]},
            [("system", "a"), ("user", "b\nc")],
        ),
        (
            {"input": [said("user", "a"), {"id": "1", "status": "completed", **said("assistant", "b")}]},
            [("user", "a"), ("assistant", "b")],
        ),
    ],
)  # fmt: skip
async def test_input_becomes_messages(asked: dict[str, Any], messages: list[tuple[str, str]]) -> None:
    generator = saying("x")

    reply = await post(generator, URL, asked)

    assert reply.status_code == 200, reply.text
    assert [(each["role"], each["content"]) for each in generator.messages] == messages


async def test_a_turn_of_thinking_text_and_calls_becomes_one_message() -> None:
    generator = saying("x")
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"role": "assistant", "content": "b"},
        call,
        {**call, "call_id": "2", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
    ]

    reply = await post(generator, URL, {"input": items})

    assert reply.status_code == 200, reply.text
    _, assistant, *outputs = generator.messages
    assert (assistant["content"], assistant["reasoning_content"]) == ("b", "r")
    assert [(c["id"], c["function"]["arguments"]) for c in assistant["tool_calls"]] == [
        ("1", {"a": 1}),
        ("2", {}),
    ]
    assert [(each["role"], each["tool_call_id"], each["content"]) for each in outputs] == [
        ("tool", "1", "x"),
        ("tool", "2", "y"),
    ]


async def test_fields_reach_the_generation() -> None:
    generator = saying("x")
    schema = {"type": "object"}
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 9,
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    }

    reply = await post(generator, URL, {**ASKED, **asked})

    assert reply.status_code == 200, reply.text
    params = generator.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.25, 9)
    assert params.grammar is not None
    assert json.loads(params.grammar.text) == schema
    assert generator.chat_options["template_kwargs"] == {"enable_thinking": False}
    assert "x-ignored-params" not in reply.headers
    assert {name: reply.json()[name] for name in ("temperature", "top_p", "max_output_tokens")} == {
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 9,
    }


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]},
            "input[0].call_id",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        (
            {"tools": [{**TOOL, "strict": True, "parameters": {"type": "array"}}]},
            "tools[0].parameters.type",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning.effort",
        ),
    ],
)
async def test_what_can_not_be_is_refused_in_its_own_words(asked: dict[str, Any], param: str) -> None:
    generator = saying("x")

    reply = await post(generator, URL, {**ASKED, **asked})

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param
    assert "messages" not in error["message"]
    assert generator.generations == []


async def test_what_is_not_done_is_refused_by_name_and_null_never_is() -> None:
    for name, rule in REFUSED_BY_RESPONSES.items():
        refused = await post(saying("x"), URL, {**ASKED, name: {"a": "b"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        for value in (None, *rule.allowed):
            neutral = await post(saying("x"), URL, {**ASKED, name: value})
            assert neutral.status_code == 200, name
            assert "x-ignored-params" not in neutral.headers


async def test_what_changes_nothing_is_reported() -> None:
    asked = {"store": True, "user": "x", "zz": 1, "reasoning": {"effort": "high", "summary": "auto"}}

    reply = await post(saying("x"), URL, {**ASKED, **asked, "metadata": {"a": "b"}})

    ignored = "reasoning.effort, reasoning.summary, store, user, zz"
    assert reply.headers["x-ignored-params"] == ignored
    assert reply.json()["metadata"] == {"a": "b"}
    assert reply.json()["store"] is False


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_stored_responses_are_not_found_with_the_reason(method: str) -> None:
    async with (
        served(make_api()) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        call = client.responses.retrieve if method == "GET" else client.responses.delete
        with pytest.raises(openai.NotFoundError, match="not stored"):
            await call("resp_1")


# what comes back


async def test_a_plain_response_has_openais_shape() -> None:
    reply = await post(saying("Hel", "lo"), URL, ASKED)

    body = reply.json()
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["model"]) == ("response", "completed", MODEL)
    assert body["output"][0].pop("id").startswith("msg_")
    assert body["output"] == [
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert body["usage"] == {
        "input_tokens": 9,
        "output_tokens": 6,
        "total_tokens": 15,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    assert body["error"] is body["incomplete_details"] is None


async def test_events_come_in_openais_order() -> None:
    events = await streamed(saying("<think>r</think>", "a", CALL), {**ASKED, "tools": [TOOL]})

    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = events[-1]["response"]["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    for index, item in enumerate(items):
        own = [event for event in events if event.get("output_index") == index]
        assert {event.get("item_id", event.get("item", {}).get("id")) for event in own} == {item["id"]}
    assert items[2]["arguments"] == '{"city": "Paris"}'
    assert items[2]["call_id"].startswith("call_")


PARTS = [
    CALL,
    "<think>",
    "</think>",
    "\n",
    "hi",
    "<tool_call>",
    '{"name": "get_weather", "arguments": {',
    "}",
]


@settings(max_examples=50, deadline=None)
@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=6),
    length=st.integers(1, 12),
    reason=st.sampled_from(["stop", "length"]),
)
async def test_events_add_up_to_the_plain_response_however_the_text_is_cut(
    parts: list[str], length: int, reason: str
) -> None:
    text = "".join(parts)
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    asked = {**ASKED, "tools": [TOOL]}

    plain = (await post(saying(text, finish_reason=reason), URL, asked)).json()
    events = await streamed(saying(*pieces, finish_reason=reason), asked)

    *_, last = events
    assert last["type"] == f"response.{plain['status']}"
    assert without_ids({**last["response"], "usage": None}) == without_ids({**plain, "usage": None})
    joined: dict[int, str] = {}
    for event in events:
        if "delta" in event:
            index = event["output_index"]
            joined[index] = joined.get(index, "") + event["delta"]
    for index, item in enumerate(plain["output"]):
        assert joined.get(index, "") == item.get(
            "arguments", "".join(p["text"] for p in item.get("content", ()))
        )


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    body = (await post(saying("Hel", finish_reason="length"), URL, ASKED)).json()

    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_failure_before_the_first_delta_has_its_own_status_and_later_ones_are_events() -> None:
    async def failing(*deltas: Delta) -> Any:
        script: Steps = [*deltas, GenerationError("NaN")]
        return await post(ScriptedGenerator(lambda ids, params: script), URL, {**ASKED, "stream": True})

    at_once, later = await failing(), await failing(deltas_of("x")[0])

    assert at_once.status_code == 500
    assert later.status_code == 200
    assert events_of(later)[-1]["error"]["message"] == "NaN"


# the SDK


class City(pydantic.BaseModel):
    name: str
    size: Literal["small", "large"]


@pytest.mark.conformance("openai", "responses, plain, streamed and parsed")
async def test_the_sdk_reads_responses_plain_streamed_and_parsed() -> None:
    generator = ScriptedGenerator(
        lambda ids, params: deltas_of("<think>r</think>", '{"name":"Paris",', '"size":"large"}'),
        chat_format=QWEN3,
    )
    async with (
        served(make_api(generator)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        plain = await client.responses.create(model=MODEL, input="Hi")
        async with client.responses.stream(model=MODEL, input="Hi") as stream:
            events = [event async for event in stream]
            whole = await stream.get_final_response()
        parsed = await client.responses.parse(model=MODEL, input="Hi", text_format=City)

    assert plain.output_text == whole.output_text == '{"name":"Paris","size":"large"}'
    assert plain.output[0].type == "reasoning"
    assert plain.status == "completed"
    assert events[-1].type == "response.completed"
    assert parsed.output_parsed == City(name="Paris", size="large")


@pytest.mark.conformance("openai", "responses with tools")
async def test_the_sdk_sends_calls_and_their_outputs_back() -> None:
    generator = ScriptedGenerator(
        lambda ids, params: deltas_of(*CALL) if len(generator.generations) < 1 else deltas_of("Sunny."),
        chat_format=QWEN3,
    )
    tools: Any = [{**TOOL, "strict": True}]
    async with (
        served(make_api(generator)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        history: Any = [{"role": "user", "content": "Weather?"}]
        first = await client.responses.create(model=MODEL, input=history, tools=tools)
        (called,) = first.output
        assert called.type == "function_call"
        output = {"type": "function_call_output", "call_id": called.call_id, "output": "sunny"}
        history += [called, output]
        second = await client.responses.create(model=MODEL, input=history, tools=tools)

    assert json.loads(called.arguments) == {"city": "Paris"}
    assert second.output_text == "Sunny."
    assert [message["role"] for message in generator.messages] == ["user", "assistant", "tool"]


async def test_a_bad_schema_is_a_400_in_its_own_words() -> None:
    async with whole_server(template=TOOLS_TEMPLATE, max_model_len=2000) as server:
        bad = {
            **TOOL,
            "strict": True,
            "parameters": {"type": "object", "properties": {"a": {"type": "foo"}}},
        }
        tools = await post(server.api, URL, {"input": "a", "tools": [bad]})
        text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}}
        answer = await post(server.api, URL, {"input": "a", "text": text})

    assert [each.status_code for each in (tools, answer)] == [400, 400]
    assert tools.json()["error"]["param"] == "tools[0].parameters"
    assert answer.json()["error"]["param"] == "text.format.schema"
    assert answer.json()["error"]["message"].startswith("text.format.schema: ")
