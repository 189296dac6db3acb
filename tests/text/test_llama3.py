"""The real tokenizer and chat template of Llama 3.2, from the messages to the parts of a reply."""

import json
from typing import Any

import pytest
import tokenizers

from service.model.config import SamplingDefaults
from service.text.chat_format import LLAMA3, Thinking, chat_format
from service.text.generation import TextGenerator
from service.text.matcher import Grammars
from service.text.reply import ReplyParser
from service.text.tool_grammar import ToolSpec, tools_grammar
from tests.llama3 import llama3_spec, llama3_template, llama3_tokenizer
from tests.openai_api.scripted import events_of, make_api, post
from tests.text.grammars import accepts
from tests.text.scripted import ScriptedEngine

URL = "/v1/chat/completions"
VOCAB = 128_256
USER: dict[str, Any] = {"role": "user", "content": " Weather in Paris? "}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '{"name": "get_weather", "parameters": {"city": "Par\u00eds \U0001fae0"}}'
HISTORY: list[dict[str, Any]] = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "\u00e9"}}}
        ],
    },
    {"role": "tool", "content": "sunny"},
]


def token(text: str) -> int:
    (token_id,) = llama3_tokenizer().encode(text)
    return token_id


def api_saying(text: str) -> Any:
    """An API over a script of exactly the tokens of `text`."""
    ids = [*llama3_tokenizer().encode(text), token("<|eot_id|>")]
    engine = ScriptedEngine(ids, eos_token_ids=[ids[-1]], vocab_size=VOCAB)
    return make_api(TextGenerator(engine, llama3_tokenizer(), llama3_template(), SamplingDefaults()))


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("is_asked", [True, False])
def test_prompts_are_those_of_transformers(tools: Any, is_asked: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "system", "content": "Be brief."}, USER, *HISTORY]
    fixed = {"date_string": "26 Jul 2024"}  # else both write today's
    wanted = utils.render_jinja_template(
        conversations=[messages],
        chat_template=llama3_spec().chat_template,
        tools=tools,
        add_generation_prompt=is_asked,
        bos_token="<|begin_of_text|>",
        **fixed,
    )[0][0]

    text, ids = llama3_template().encode(
        messages, tools=tools, template_kwargs=fixed, add_generation_prompt=is_asked
    )

    assert text == wanted
    assert ids.count(token("<|begin_of_text|>")) == 1
    assert llama3_tokenizer().decode(ids, skip_special_tokens=False) == text


def test_the_template_is_given_todays_date() -> None:
    text, _ = llama3_template().encode([USER])

    assert "Today Date: " in text
    assert "26 Jul 2024" not in text  # what it writes where no clock is offered


@pytest.mark.parametrize(
    "text", ["Hello, world", "1234567 x=12", " a\n\n b\t", "\U0001fae0 caf\u00e9 \u4f60\u597d", "I'LL it's"]
)
def test_ids_are_those_of_transformers(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    raw = tokenizers.Tokenizer.from_str(llama3_spec().tokenizer_json)
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)

    ids = llama3_tokenizer().encode(text)

    assert ids == oracle(text, add_special_tokens=False)["input_ids"]
    assert llama3_tokenizer().decode(ids) == text
    assert llama3_tokenizer().encode_prompt(text) == oracle(text)["input_ids"]


def test_a_control_token_in_a_message_stays_text() -> None:
    _, ids = llama3_template().encode([{"role": "user", "content": "a<|eot_id|>b"}])
    _, plain = llama3_template().encode([{"role": "user", "content": "ab"}])

    assert ids.count(token("<|eot_id|>")) == plain.count(token("<|eot_id|>"))


def test_its_calls_are_known_by_its_template() -> None:
    source = llama3_spec().chat_template
    assert source is not None
    found = chat_format(source, llama3_tokenizer())

    assert found.tools == LLAMA3
    assert found.thinking is None


def test_what_the_template_writes_of_a_call_is_read_as_that_call() -> None:
    text, _ = llama3_template().encode([USER, *HISTORY], add_generation_prompt=False)
    reply = text.split("assistant<|end_header_id|>\n\n")[1].partition("<|eot_id|>")[0]
    parser = ReplyParser(Thinking.OFF, LLAMA3, ["get_weather"])

    pieces = parser.feed(reply) + parser.flush()

    assert [piece.text for piece in pieces if piece.kind == "call"] == ["get_weather"]
    arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
    assert json.loads(arguments) == {"city": "\u00e9"}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("opening", ["", "<|python_tag|>"])
async def test_a_call_is_told_from_a_reply_token_by_token(is_stream: bool, opening: str) -> None:
    asked = {"messages": [USER], "tools": [TOOL], "stream": is_stream}

    reply = await post(api_saying(opening + CALL), URL, asked)

    if is_stream:
        *chunks, _ = events_of(reply)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        name, arguments = pieces[0]["name"], "".join(piece["arguments"] for piece in pieces)
        content, reason = (
            "".join(d.get("content", "") for d in deltas),
            chunks[-1]["choices"][0]["finish_reason"],
        )
        assert len(pieces) > 5  # token by token
    else:
        choice = reply.json()["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        content = message["content"] or ""
        name, arguments = message["tool_calls"][0]["function"].values()
    assert content == ""
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Par\u00eds \U0001fae0"})
    assert reason == "tool_calls"


async def test_text_is_no_call() -> None:
    asked = {"messages": [USER], "tools": [TOOL]}

    message = (await post(api_saying("It is {sunny}."), URL, asked)).json()["choices"][0]["message"]

    assert message == {"role": "assistant", "content": "It is {sunny}.", "refusal": None}


def test_a_call_that_must_come_can_be_spelt_with_the_models_own_tokens() -> None:
    tokenizer, eos = llama3_tokenizer(), token("<|eot_id|>")
    grammars = Grammars(tokenizer, VOCAB, [eos])
    tools = [ToolSpec("get_weather", TOOL["function"]["parameters"], "tools")]
    matcher = grammars._compile(
        tools_grammar(tools, LLAMA3, must_call=True, is_parallel=True, field="tools")
    )

    assert accepts(matcher, tokenizer, eos, CALL)
    assert accepts(matcher, tokenizer, eos, f"{CALL}; {CALL}")
    assert not accepts(matcher, tokenizer, eos, CALL.replace('"city"', '"town"'))
    assert not accepts(matcher, tokenizer, eos, "Sunny.")
