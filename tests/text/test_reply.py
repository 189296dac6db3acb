"""Calls of tools in a reply: the same however the text is cut, and nothing is lost."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.text.chat_format import HERMES, LLAMA3, Thinking, ToolFormat
from service.text.reply import Piece, ReplyParser

NAMES = ("f", "get_weather")
Folded = dict[str, Any]


def fold(pieces: list[Piece]) -> Folded:
    folded: Folded = {"reasoning": "", "content": "", "calls": []}
    for piece in pieces:
        if piece.kind == "call":
            assert piece.call == len(folded["calls"])
            folded["calls"].append((piece.text, ""))
        elif piece.kind == "arguments":
            assert piece.call == len(folded["calls"]) - 1  # calls come one after the other
            name, arguments = folded["calls"][-1]
            folded["calls"][-1] = (name, arguments + piece.text)
        else:
            folded[piece.kind] += piece.text
    return folded


def parse(tools: ToolFormat, *texts: str, thinking: Thinking = Thinking.OFF) -> Folded:
    parser = ReplyParser(thinking, tools, NAMES)
    pieces = [piece for text in texts for piece in parser.feed(text)] + parser.flush()
    assert all(piece.text for piece in pieces)
    return {**fold(pieces), "has_called": parser.has_called}


def wanted(content: str, *calls: tuple[str, str], has_called: bool | None = None) -> Folded:
    whole = bool(calls) if has_called is None else has_called
    return {"reasoning": "", "content": content, "calls": list(calls), "has_called": whole}


TAGGED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
CASES = [
    # Hermes and Qwen
    (HERMES, "", wanted("")),
    (HERMES, "no call\n", wanted("no call\n")),
    (HERMES, TAGGED, wanted("", ("f", '{"a": 1}'))),
    (HERMES, f"Let me see.\n\n{TAGGED}\n", wanted("Let me see.", ("f", '{"a": 1}'))),
    (HERMES, f"{TAGGED}\n{TAGGED}", wanted("", ("f", '{"a": 1}'), ("f", '{"a": 1}'))),
    (HERMES, f"{TAGGED}\n\nDone.\n", wanted("Done.\n", ("f", '{"a": 1}'))),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{"a":"}{\\""}}</tool_call>',
        wanted("", ("f", '{"a":"}{\\""}')),
    ),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool_call>', wanted("", ("f", "{}"))),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{"a":[{"b":[1]}]}}</tool_call>',
        wanted("", ("f", '{"a":[{"b":[1]}]}')),
    ),
    (
        HERMES,
        '<tool_call>{"arguments": {"a": "\u00e9"}, "name": "f"}</tool_call>',
        wanted("", ("f", '{"a": "\u00e9"}')),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        wanted("", ("f", '{"a": 1}')),
    ),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', wanted("", ("f", "{}"))),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "}"}</tool_call>', wanted("", ("f", "{}"))),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        wanted("", ("f", '{"a": "</tool_call>"}')),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', wanted("", ("f", "{}"))),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        wanted("", ("f", '{"a": "b'), has_called=False),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": <b></tool_call> c',
        wanted("<b></tool_call> c", ("f", '{"a": ')),
    ),
    (HERMES, '<tool_call>{"name": "f", "argu', wanted('<tool_call>{"name": "f", "argu')),
    (HERMES, "a <tool_ca", wanted("a <tool_ca")),
    (HERMES, "a\n<tool_call>\nnot JSON</tool_call>", wanted("a\n<tool_call>\nnot JSON</tool_call>")),
    (
        HERMES,
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        wanted('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>'),
    ),
    (HERMES, '<tool_call>{"name": 1}</tool_call>', wanted('<tool_call>{"name": 1}</tool_call>')),
    (HERMES, f"<tool_call>x</tool_call> {TAGGED}", wanted("<tool_call>x</tool_call>", ("f", '{"a": 1}'))),
    (HERMES, '{"name": "f", "arguments": {}}', wanted('{"name": "f", "arguments": {}}')),
    # Llama 3
    (LLAMA3, '{"name": "f", "parameters": {"a": "1"}}', wanted("", ("f", '{"a": "1"}'))),
    (LLAMA3, ' \n{"name": "f", "parameters": {}}', wanted("", ("f", "{}"))),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {}}', wanted("", ("f", "{}"))),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": 1}}', wanted("", ("f", '{"a": 1}'))),
    (LLAMA3, '{"name": "f", "arguments": {"a": 1}}', wanted("", ("f", '{"a": 1}'))),
    (
        LLAMA3,
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"x": null}}',
        wanted("", ("f", "{}"), ("get_weather", '{"x": null}')),
    ),
    (LLAMA3, '{"name": "f", "parameters": {}}\nThere.', wanted("There.", ("f", "{}"))),
    (LLAMA3, '{"name": "f", "parameters": {"a": [', wanted("", ("f", '{"a": ['), has_called=False)),
    (LLAMA3, '{"name": "Bob", "age": 3}', wanted('{"name": "Bob", "age": 3}')),
    (LLAMA3, '{"answer": {"f": 1}}\n', wanted('{"answer": {"f": 1}}\n')),
    (LLAMA3, "{not JSON} at all", wanted("{not JSON} at all")),
    (LLAMA3, '{"name": "f"', wanted('{"name": "f"')),
    (LLAMA3, 'I say {"name": "f", "parameters": {}}', wanted('I say {"name": "f", "parameters": {}}')),
    (LLAMA3, "<|python_tag|>f.call(x=1)", wanted("<|python_tag|>f.call(x=1)")),
    (LLAMA3, " plain ", wanted(" plain ")),
]


@pytest.mark.parametrize(("tools", "text", "want"), CASES)
def test_calls_are_found_wherever_the_text_is_cut(tools: ToolFormat, text: str, want: Folded) -> None:
    assert parse(tools, text) == want
    assert parse(tools, *text) == want
    for cut in range(len(text)):
        assert parse(tools, text[:cut], text[cut:]) == want, cut


PARTS = [
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": ', '{"name":"f","parameters":', "{", "}",
    '{"a": "}<tool_call>"}', "\n", " ", ";", '"', "\\", "x", "<", "<tool_", "<think>", "</think>", "[1,",
    "<|python_tag|>", '"name": "get_weather"', ", ", '"arguments": ',
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA3]),
    st.sampled_from(Thinking),
    st.lists(st.sampled_from(PARTS), max_size=14),
    st.data(),
)
def test_every_way_to_cut_any_text_gives_the_same(
    tools: ToolFormat, thinking: Thinking, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    whole = parse(tools, text, thinking=thinking)

    assert parse(tools, *pieces, thinking=thinking) == whole
    assert parse(tools, *text, thinking=thinking) == whole
    if not whole["calls"] and not whole["reasoning"] and thinking is Thinking.OFF:
        assert whole["content"] == text  # nothing is lost


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.sampled_from([HERMES, LLAMA3]),
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.integers(1, 9),
)
def test_what_is_written_as_calls_is_read_as_calls(
    tools: ToolFormat, calls: list[tuple[str, dict[str, Any]]], is_ascii: bool, length: int
) -> None:
    texts = [
        json.dumps({"name": name, tools.arguments_key: arguments}, ensure_ascii=is_ascii)
        for name, arguments in calls
    ]
    text = tools.separator.join(f"{tools.opening}{each}{tools.closing}" for each in texts)

    read = parse(tools, *(text[at : at + length] for at in range(0, len(text), length)))

    assert [(name, json.loads(arguments)) for name, arguments in read["calls"]] == calls
    assert read["content"] == ""
    assert read["has_called"]


def test_the_name_and_each_part_of_the_arguments_come_as_soon_as_they_are_certain() -> None:
    parser = ReplyParser(Thinking.OFF, HERMES, NAMES)

    seen = [
        parser.feed(text) for text in ("<tool_call>\n", '{"name": "f", "argum', 'ents": {"a"', ": 1", "}}")
    ]

    assert seen == [
        [],
        [],
        [Piece("call", "f"), Piece("arguments", '{"a"')],
        [Piece("arguments", ": 1")],
        [Piece("arguments", "}")],
    ]


def test_thinking_calls_and_an_answer_are_told_apart() -> None:
    text = f"<think>\nShall I <tool_call>?\n</think>\n\nYes.\n{TAGGED}"

    read = parse(HERMES, *text, thinking=Thinking.MAYBE)

    assert read == {**wanted("Yes.", ("f", '{"a": 1}')), "reasoning": "Shall I <tool_call>?"}
