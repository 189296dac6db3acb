"""Calls of tools in chats: what is asked, what comes back, plain and streamed, and what is refused."""

import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text.chat_format import HERMES, LLAMA3, ChatFormat, ThinkingTags
from tests.openai_api.scripted import (
    CHAT,
    MODEL,
    ScriptedGenerator,
    deltas_of,
    events_of,
    make_api,
    post,
    served,
)
from tests.openai_api.whole_server import (
    THINKING_TOOLS_TEMPLATE,
    TOOLS_TEMPLATE,
    chat,
    whole_server,
)

URL = "/v1/chat/completions"
QWEN3 = ChatFormat(ThinkingTags(1, 2, True), HERMES)
LLAMA = ChatFormat(tools=LLAMA3)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str = "get_weather", **fields: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": "Weather", "parameters": PARAMETERS, **fields},
    }


ASKED = {**CHAT, "tools": [tool(), tool("f")]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def saying(*texts: str, finish_reason: str = "stop", form: ChatFormat = QWEN3) -> ScriptedGenerator:
    return ScriptedGenerator(
        lambda ids, params: deltas_of(*texts, finish_reason=finish_reason), chat_format=form
    )


def rebuilt(events: list[Any]) -> dict[str, Any]:
    """The message that a client makes of a stream, and the finish reason; ids of calls left out."""
    message: dict[str, Any] = {"content": "", "calls": [], "reasoning": ""}
    for chunk in events[:-1]:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning", "")
            message["finish_reason"] = choice["finish_reason"]
            for piece in delta.get("tool_calls", ()):
                function = piece["function"]
                if "id" in piece:
                    assert piece["index"] == len(message["calls"])
                    assert piece["type"] == "function"
                    assert piece["id"].startswith("call_")
                    message["calls"].append([function["name"], function["arguments"]])
                else:
                    assert set(function) == {"arguments"}
                    message["calls"][piece["index"]][1] += function["arguments"]
    return message


def plain_message(reply: Any) -> dict[str, Any]:
    """A plain reply in the same form."""
    choice = reply["choices"][0]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    return {
        "content": message["content"] or "",
        "calls": calls,
        "reasoning": message.get("reasoning", ""),
        "finish_reason": choice["finish_reason"],
    }


# replies


async def test_a_call_has_openais_shape() -> None:
    reply = (await post(saying(CALL), URL, ASKED)).json()

    choice = reply["choices"][0]
    call_id = choice["message"]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    }
    assert choice["finish_reason"] == "tool_calls"


async def test_a_streamed_call_is_its_name_and_then_pieces_of_its_arguments() -> None:
    pieces = [CALL[at : at + 6] for at in range(0, len(CALL), 6)]

    events = events_of(await post(saying(*pieces), URL, {**ASKED, "stream": True}))

    assert rebuilt(events) == {
        "content": "",
        "reasoning": "",
        "calls": [["get_weather", '{"city": "Paris"}']],
        "finish_reason": "tool_calls",
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in events[:-1]]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0].pop("id").startswith("call_")
    assert calls[0] == {
        "index": 0,
        "type": "function",
        "function": {"name": "get_weather", "arguments": ""},
    }
    assert len(calls) > 3
    assert all(set(call) == {"index", "function"} for call in calls[1:])


@pytest.mark.parametrize(
    ("form", "text", "finish_reason", "wanted"),
    [
        (QWEN3, "No need.", "stop", ("No need.", [], "stop")),
        (QWEN3, f"Both.\n{CALL}\n{CALL}", "stop", ("Both.", ["get_weather"] * 2, "tool_calls")),
        (QWEN3, CALL[:-30], "length", ("", ["get_weather"], "length")),
        (QWEN3, CALL[:-30], "stop", ("", ["get_weather"], "stop")),  # by a stop string, say
        (QWEN3, CALL[:20], "length", (CALL[:20], [], "length")),
        (QWEN3, CALL, "length", ("", ["get_weather"], "length")),
        (QWEN3, "<tool_call>\n{not JSON", "stop", ("<tool_call>\n{not JSON", [], "stop")),
        (QWEN3, CALL.replace("get_weather", "g"), "stop", (CALL.replace("get_weather", "g"), [], "stop")),
        (LLAMA, '{"name": "f", "parameters": {"city": "x"}}', "stop", ("", ["f"], "tool_calls")),
        (LLAMA, '{"name": "Bob"}', "stop", ('{"name": "Bob"}', [], "stop")),
    ],
)
async def test_what_a_text_comes_back_as(
    form: ChatFormat, text: str, finish_reason: str, wanted: tuple[str, list[str], str]
) -> None:
    def make() -> ScriptedGenerator:
        return saying(*text, finish_reason=finish_reason, form=form)

    plain = plain_message((await post(make(), URL, ASKED)).json())
    streamed = rebuilt(events_of(await post(make(), URL, {**ASKED, "stream": True})))

    assert plain == streamed
    assert (plain["content"], [name for name, _ in plain["calls"]], plain["finish_reason"]) == wanted


PARTS = [
    CALL, "<think>", "</think>", "\n", "hi", "<tool_call>", '{"name": "f", "arguments": {', '"a": 1', "}",
    "<", "</tool_call>", '{"name": "f", "parameters": {}}', "; ", "\u00e9",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([QWEN3, LLAMA]),
    parts=st.lists(st.sampled_from(PARTS), max_size=7),
    length=st.integers(1, 12),
    finish_reason=st.sampled_from(["stop", "length"]),
)
async def test_a_stream_folds_to_the_plain_reply_however_the_text_is_cut(
    form: ChatFormat, parts: list[str], length: int, finish_reason: str
) -> None:
    text = "".join(parts)
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    whole = saying(text, finish_reason=finish_reason, form=form)
    cut = saying(*pieces, finish_reason=finish_reason, form=form)

    plain = plain_message((await post(whole, URL, ASKED)).json())
    streamed = rebuilt(events_of(await post(cut, URL, {**ASKED, "stream": True})))

    assert streamed == plain


async def test_every_choice_has_calls_and_ids_of_its_own() -> None:
    script = deltas_of(CALL) + deltas_of("none", index=1) + deltas_of(CALL, index=2)
    generator = ScriptedGenerator(lambda ids, params: script, chat_format=QWEN3)

    choices = (await post(generator, URL, {**ASKED, "n": 3})).json()["choices"]

    assert [choice["finish_reason"] for choice in choices] == ["tool_calls", "stop", "tool_calls"]
    ids = [call["id"] for choice in choices for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == 2


# requests


async def test_tools_reach_the_template_as_they_were_sent() -> None:
    generator = saying("x")
    bare = {"type": "function", "function": {"name": "now", "strict": True}}

    reply = await post(generator, URL, {**CHAT, "tools": [tool(), bare]})

    assert reply.status_code == 200
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    assert generator.chat_options["tools"] == [
        tool(),
        {"type": "function", "function": {"name": "now", "parameters": no_arguments}},
    ]


@pytest.mark.parametrize("form", [QWEN3, ChatFormat()])
async def test_with_choice_none_tools_are_not_shown_and_not_looked_for(form: ChatFormat) -> None:
    generator = saying(CALL, form=form)

    reply = await post(
        generator, URL, {**ASKED, "tool_choice": "none", "response_format": {"type": "text"}}
    )

    assert reply.json()["choices"][0]["message"]["content"] == CALL
    assert generator.chat_options["tools"] == []
    assert generator.params.grammar is None


@pytest.mark.parametrize(
    ("asked", "is_bound", "names"),
    [
        ({}, False, []),
        ({"tool_choice": "auto"}, False, []),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, False, []),
        ({"parallel_tool_calls": False}, True, ["get_weather", "f"]),
        ({"tool_choice": "required"}, True, ["get_weather", "f"]),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True, ["f"]),
        ({"tool_choice": allowed("f")}, True, ["f"]),
        ({"tool_choice": allowed("f", mode="required")}, True, ["f"]),
        ({"tool_choice": allowed("f", "get_weather")}, False, []),
        ({"tools": [tool(strict=True)]}, True, ["get_weather"]),
        ({"response_format": {"type": "json_object"}}, True, ["get_weather", "f"]),
    ],
)
async def test_what_binds_the_reply_to_a_grammar(
    asked: dict[str, Any], is_bound: bool, names: list[str]
) -> None:
    generator = saying("x")

    reply = await post(generator, URL, {**ASKED, **asked})

    assert reply.status_code == 200, reply.text
    assert "x-ignored-params" not in reply.headers
    grammar = generator.params.grammar
    assert (grammar is not None) == is_bound
    text = "" if grammar is None else grammar.text
    assert [name for name in ("get_weather", "f") if f'\\"{name}\\"' in text] == names


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(strict=True, parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": allowed("f", "g")}, "tool_choice.allowed_tools.tools[1].function.name"),
        ({"tool_choice": allowed()}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(asked: dict[str, Any], param: str) -> None:
    generator = saying("x")

    reply = await post(generator, URL, {**ASKED, **asked})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    assert generator.generations == []


async def test_a_model_without_tools_says_so() -> None:
    reply = await post(saying("x", form=ChatFormat()), URL, ASKED)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"
    assert reply.json()["error"]["code"] == "unsupported_parameter"


async def test_llamas_calls_and_a_schema_of_the_answer_exclude_each_other() -> None:
    asked = {**ASKED, "response_format": {"type": "json_object"}}

    refused = await post(saying("x", form=LLAMA), URL, asked)
    required = await post(saying("x", form=LLAMA), URL, {**asked, "tool_choice": "required"})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "response_format"
    assert required.status_code == 200


# history


def call(call_id: str = "1", arguments: Any = '{"city": "x"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def answer(call_id: str = "1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "sunny"}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"city": "x"}', {"city": "x"}), ("", {}), ('{"city": "x', '{"city": "x')],
)
async def test_calls_and_their_answers_reach_the_template(arguments: str, shown: Any) -> None:
    generator = saying("x")
    asked = {"role": "assistant", "content": None, "tool_calls": [call(arguments=arguments)]}

    reply = await post(generator, URL, {"messages": [*CHAT["messages"], asked, answer()]})

    assert reply.status_code == 200
    function = {"name": "f", "arguments": shown}
    assert generator.messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        answer(),
    ]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([answer()], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([calling(call()), answer("2")], "messages[1].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_calls": [call()]}], "messages[0].tool_calls"),
        ([calling(call(), call())], "messages[0].tool_calls[1].id"),
        ([calling({**call(), "type": "custom"})], "messages[0].tool_calls[0].type"),
        ([calling(call(""))], "messages[0].tool_calls[0].id"),
        ([calling(call(arguments={}))], "messages[0].tool_calls[0].function.arguments"),
        ([calling(call()), {"role": "tool", "tool_call_id": "1"}], "messages[1].content"),
    ],
)  # fmt: skip
async def test_calls_of_the_history_must_fit_together(messages: list[Any], param: str) -> None:
    reply = await post(saying("x"), URL, {"messages": messages})

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


# the SDK


@pytest.mark.conformance("openai", "chat with tools, plain and streamed")
async def test_the_sdk_reads_calls_plain_and_streamed_and_sends_them_back() -> None:
    tools: Any = ASKED["tools"]
    messages: Any = list(CHAT["messages"])
    generator = ScriptedGenerator(
        lambda ids, params: deltas_of(*CALL) if len(generator.generations) < 2 else deltas_of("Sunny."),
        chat_format=QWEN3,
    )
    async with (
        served(make_api(generator)) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client,
    ):
        plain = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_completion()
        asked: Any = plain.choices[0].message
        messages += [asked, {"role": "tool", "tool_call_id": asked.tool_calls[0].id, "content": "sunny"}]
        last = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)

    for whole in (plain, streamed):
        called: Any = whole.choices[0].message.tool_calls
        assert [(each.function.name, json.loads(each.function.arguments)) for each in called] == [
            ("get_weather", {"city": "Paris"})
        ]
        assert whole.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in {event.type for event in events}
    assert last.choices[0].message.content == "Sunny."
    assert generator.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}


# the whole way, over the engine with random ids


def letters_tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"alpha", "beta"}),
        ({"type": "function", "function": {"name": "beta"}}, {"beta"}),
        (allowed("beta", mode="required"), {"beta"}),
    ],
)
async def test_calls_that_must_come_do_and_keep_to_the_schema(choice: Any, names: set[str]) -> None:
    seen = []
    async with whole_server(template=TOOLS_TEMPLATE, max_model_len=2000) as server:
        for text in "abcd":
            asked = {
                **chat(text, tools=[letters_tool("alpha"), letters_tool("beta")], tool_choice=choice),
                "max_tokens": 1500,
                "parallel_tool_calls": False,
            }
            plain = plain_message((await post(server.api, URL, asked)).json())
            streamed = rebuilt(events_of(await post(server.api, URL, {**asked, "stream": True})))
            seen.append(plain)
            assert streamed == plain

    for message in seen:
        ((name, arguments),) = message["calls"]
        assert name in names
        assert set(json.loads(arguments)) == {"ok"}
        assert message["content"] == ""
        assert message["finish_reason"] == "tool_calls"


async def test_a_call_that_must_come_comes_behind_the_thinking() -> None:
    seen = []
    async with whole_server(template=THINKING_TOOLS_TEMPLATE, max_model_len=3000) as server:
        for text in "abc":
            asked = {
                **chat(text, tools=[letters_tool("alpha")], tool_choice="required"),
                "max_tokens": 2500,
                "parallel_tool_calls": False,
            }
            plain = plain_message((await post(server.api, URL, asked)).json())
            assert rebuilt(events_of(await post(server.api, URL, {**asked, "stream": True}))) == plain
            seen.append(plain)

    assert any(message["reasoning"] for message in seen)
    assert [[name for name, _ in message["calls"]] for message in seen] == [["alpha"]] * 3
    assert [message["content"] for message in seen] == [""] * 3


async def test_half_of_a_surrogate_pair_in_tools_and_past_calls_is_replaced() -> None:
    template = TOOLS_TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | default('') }}")
    described = {"type": "function", "function": {"name": "f", "description": "\ud83c"}}
    history = [calling(call(arguments='{"a": "\\ud83c"}')), answer()]  # JSON within the body's JSON
    async with whole_server(template=template, max_model_len=2000) as server:
        for asked in (chat("a", tools=[described]), {"messages": history, "max_tokens": 3}):
            shown = await post(server.api, f"{URL}/render", asked)
            reply = await post(server.api, URL, asked)

            assert (shown.status_code, reply.status_code) == (200, 200)
            assert "\ufffd" in shown.json()["prompt"]
            assert reply.json()["usage"]["prompt_tokens"] == shown.json()["count"]


async def test_a_schema_that_can_not_be_kept_to_is_a_400_before_admission() -> None:
    bad = letters_tool("alpha")
    bad["function"]["parameters"]["properties"]["ok"] = {"type": "foo"}
    async with whole_server(template=TOOLS_TEMPLATE, max_model_len=2000) as server:
        reply = await post(server.api, URL, chat("a", tools=[letters_tool("beta"), bad]))
        num_submitted = server.engine._num_submitted

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools[1].function.parameters"
    assert num_submitted == 0
