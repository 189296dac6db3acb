"""The real tokenizer and chat template of Qwen3, from the messages to the parts of a reply."""

import json
from typing import Any

import pytest

from service.model.config import SamplingDefaults
from service.text.chat_format import HERMES, Thinking
from service.text.generation import TextGenerator
from service.text.matcher import Grammars
from service.text.reply import ReplyParser
from service.text.tool_grammar import ToolSpec, tools_grammar
from tests.openai_api.scripted import events_of, make_api, post
from tests.qwen3 import qwen3_spec, qwen3_template, qwen3_tokenizer
from tests.text.grammars import accepts, allowed_ids
from tests.text.scripted import ScriptedEngine

URL = "/v1/chat/completions"
VOCAB = 151_936  # rows of the model, more than the tokenizer has ids
USER: dict[str, Any] = {"role": "user", "content": "Weather in Paris?"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par\u00eds \U0001fae0"}}\n</tool_call>'
THOUGHT = "<think>\nOkay, the user <wants> it.\n\nSo I call.\n</think>\n\n"


def eos() -> int:
    (token_id,) = qwen3_tokenizer().encode("<|im_end|>")
    return token_id


def api_saying(text: str) -> Any:
    """An API over a script of exactly the tokens of `text`."""
    ids = [*qwen3_tokenizer().encode(text), eos()]
    engine = ScriptedEngine(ids, eos_token_ids=[eos()], vocab_size=VOCAB)
    defaults = SamplingDefaults()
    generator = TextGenerator(engine, qwen3_tokenizer(), qwen3_template(), defaults)
    return make_api(generator)


def test_tools_and_their_history_are_rendered_as_qwen3_was_trained_on_them() -> None:
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    messages = [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]

    text, ids = qwen3_template().encode(messages, tools=[TOOL])

    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert rest == (
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert qwen3_tokenizer().decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("is_thinking", [None, True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_prompts_are_those_of_transformers(is_thinking: bool | None, tools: Any) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    arguments = {} if is_thinking is None else {"enable_thinking": is_thinking}
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "\u00e9"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "warm"},
    ]
    wanted = utils.render_jinja_template(
        conversations=[messages],
        chat_template=qwen3_spec().chat_template,
        tools=tools,
        add_generation_prompt=True,
        **arguments,
    )[0][0]

    text, _ = qwen3_template().encode(messages, tools=tools, template_kwargs=arguments)

    assert text == wanted


def test_what_the_template_writes_of_a_call_is_read_as_that_call() -> None:
    function = {"name": "get_weather", "arguments": {"city": 'a"}\n\u00e9'}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": function}] * 2}]
    text, _ = qwen3_template().encode(messages, add_generation_prompt=False)
    parser = ReplyParser(Thinking.OFF, HERMES, ["get_weather"])

    reply = text.rpartition("</think>\n\n")[2].removesuffix("<|im_end|>\n")
    pieces = parser.feed(reply) + parser.flush()

    assert [piece.text for piece in pieces if piece.kind == "call"] == ["get_weather"] * 2
    assert [json.loads(piece.text) for piece in pieces if piece.kind == "arguments"] == [
        function["arguments"]
    ] * 2
    assert {piece.kind for piece in pieces} == {"call", "arguments"}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_reply_is_told_apart_token_by_token(is_stream: bool) -> None:
    asked = {"messages": [USER], "tools": [TOOL], "stream": is_stream}
    asked |= {"stream_options": {"include_usage": True}} if is_stream else {}

    reply = await post(api_saying(f"{THOUGHT}I look.\n{CALL}"), URL, asked)

    if is_stream:
        *chunks, last, _ = events_of(reply)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        reasoning, content = (
            "".join(d.get(k, "") for d in deltas) for k in ("reasoning_content", "content")
        )
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        name, arguments = pieces[0]["name"], "".join(piece["arguments"] for piece in pieces)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
        assert len(pieces) > 5  # token by token
    else:
        choice, usage = reply.json()["choices"][0], reply.json()["usage"]
        message, reason = choice["message"], choice["finish_reason"]
        reasoning, content = message["reasoning_content"], message["content"]
        name, arguments = message["tool_calls"][0]["function"].values()
    assert reasoning == "Okay, the user <wants> it.\n\nSo I call."
    assert content == "I look."
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Par\u00eds \U0001fae0"})
    assert reason == "tool_calls"
    num_thought = len(qwen3_tokenizer().encode(THOUGHT.rstrip()))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_thought}


async def test_with_thinking_off_all_text_is_content() -> None:
    asked = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}

    message = (await post(api_saying("Sunny."), URL, asked)).json()["choices"][0]["message"]

    assert message == {"role": "assistant", "content": "Sunny.", "refusal": None}


def test_a_call_that_must_come_can_be_spelt_with_the_models_own_tokens() -> None:
    tokenizer = qwen3_tokenizer()
    grammars = Grammars(tokenizer, VOCAB, [eos()])
    tools = [ToolSpec("get_weather", TOOL["function"]["parameters"], "tools")]
    matcher = grammars._compile(
        tools_grammar(tools, HERMES, must_call=True, is_parallel=True, field="tools")
    )

    at_start = allowed_ids(matcher, VOCAB)

    assert tokenizer.encode("<tool_call>")[0] in at_start
    assert all(b"<tool_call>\n".startswith(tokenizer.token_bytes(each)) for each in at_start)
    assert accepts(matcher, tokenizer, eos(), f"{CALL}\n{CALL}")
    assert not accepts(matcher, tokenizer, eos(), CALL.replace('"city"', '"town"'))
    assert not accepts(matcher, tokenizer, eos(), "Sunny.")
