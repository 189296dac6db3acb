"""Replies that may, or must, call tools: exactly the right ones are possible, and they are read back."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import RequestError
from service.text.chat_format import HERMES, LLAMA3, Thinking, ToolFormat
from service.text.grammar import GrammarSpec
from service.text.matcher import Grammars, Matcher
from service.text.reply import ReplyParser
from service.text.tool_grammar import ToolSpec, tools_grammar
from tests.text.grammars import accepts, random_text, spec
from tests.text.samples import make_tokenizer

TOKENIZER = make_tokenizer("chatml")
(EOS,) = TOKENIZER.encode("<|im_end|>")
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, [EOS])
CITY: dict[str, Any] = {
    "$defs": {"name": {"type": "string", "maxLength": 5}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/name"}},
    "required": ["city"],
    "additionalProperties": False,
}
ANY: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}
TOOLS = [ToolSpec("get", CITY, "tools[0].function.parameters"), ToolSpec("get_it", ANY, "tools[1]")]
ANSWER = spec("json", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                       "additionalProperties": False})  # fmt: skip


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def matcher_of(form: ToolFormat, **options: Any) -> Matcher:
    given: dict[str, Any] = {"must_call": False, "is_parallel": True, "field": "tools", **options}
    return GRAMMARS._compile(tools_grammar(TOOLS, form, **given))


GET, IT = hermes("get", '{"city": "x"}'), hermes("get_it", '{"a":true}')
WRONG = [
    hermes("get", '{"city": 1}'),
    hermes("get", '{"city": "x", "more": 1}'),
    hermes("get", '{"c\\u0069ty": "x"}'),
    hermes("other", "{}"),
    "<tool_call>",
    "<tool_call>\nhello\n</tool_call>",
    f"hi {GET} <tool_call>",
]
LGET, LIT = llama("get", '{"city": "x"}'), llama("get_it", "{}")
LWRONG = [llama("get", '{"city": 1}'), llama("other", "{}"), "{", '{"x": 1}', f"{LGET}; ", f"{LGET} bye"]


@pytest.mark.parametrize(
    ("form", "options", "good", "bad"),
    [
        (HERMES, {}, ["", "hi", "a <tool", GET, f"hi\n{GET}\n{IT}\nbye"], WRONG),
        (HERMES, {"is_parallel": False}, ["", "hi", GET, f"a {IT}"], [*WRONG, f"{GET}\n{IT}", f"{GET} b"]),
        (HERMES, {"must_call": True}, [GET, f"{GET}\n{IT}"], [*WRONG, "", "hi", f"hi {GET}", f"{GET} bye"]),
        (HERMES, {"must_call": True, "is_parallel": False}, [GET, IT], [*WRONG, f"{GET}\n{IT}", "hi"]),
        (HERMES, {"answer": ANSWER}, ['{"x": 1}', GET, f"{GET}\n{IT}"], [*WRONG, "hi", "{}", f"a {GET}"]),
        (LLAMA3, {}, ["", "hi", "\nhi {", LGET, f"{LGET}; {LIT}", f"say {LGET}"], LWRONG),
        (LLAMA3, {"is_parallel": False}, ["hi", LIT], [*LWRONG, f"{LGET}; {LIT}"]),
        (LLAMA3, {"must_call": True}, [LGET, f"{LGET}; {LIT}"], [*LWRONG, "", "hi"]),
    ],
)  # fmt: skip
def test_exactly_the_right_calls_are_possible(
    form: ToolFormat, options: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    matcher = matcher_of(form, **options)

    assert [text for text in good if not accepts(matcher, TOKENIZER, EOS, text)] == []
    assert [text for text in bad if accepts(matcher, TOKENIZER, EOS, text)] == []


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([HERMES, LLAMA3]), st.booleans(), st.integers(0, 2**32))
def test_whatever_is_sampled_is_read_as_calls_that_keep_to_their_schemas(
    form: ToolFormat, is_parallel: bool, seed: int
) -> None:
    matcher = matcher_of(form, must_call=True, is_parallel=is_parallel).copy()

    text = random_text(matcher, TOKENIZER, EOS, seed)

    if text is None:
        return
    parser = ReplyParser(Thinking.OFF, form, [tool.name for tool in TOOLS])
    pieces = parser.feed(text) + parser.flush()
    assert {piece.kind for piece in pieces} == {"call", "arguments"}
    names = [piece.text for piece in pieces if piece.kind == "call"]
    arguments = [
        "".join(p.text for p in pieces if p.kind == "arguments" and p.call == i) for i in range(len(names))
    ]
    for name, each in zip(names, arguments, strict=True):
        jsonschema.validate(json.loads(each), CITY if name == "get" else ANY)
    assert len(names) == 1 or is_parallel


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
        ({"type": "object", "x-guidance": {}}, "x-guidance"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"type": "object", "description": "x" * 130_000}, "too many"),
    ],
)
def test_a_schema_that_could_not_be_kept_to_is_refused_by_its_own_field(
    parameters: dict[str, Any], reason: str
) -> None:
    tools = [TOOLS[0], ToolSpec("bad", parameters, "tools[1].function.parameters"), TOOLS[1]]

    with pytest.raises(RequestError, match=reason) as refused:
        GRAMMARS._compile(
            tools_grammar(tools, HERMES, must_call=True, is_parallel=True, field="tool_choice")
        )

    assert refused.value.field == "tools[1].function.parameters"


def test_too_many_large_schemas_are_refused() -> None:
    tools = [
        ToolSpec(f"f{i}", {"type": "object", "description": "x" * 100_000}, f"tools[{i}]") for i in range(3)
    ]

    with pytest.raises(RequestError, match="too many") as refused:
        GRAMMARS._compile(tools_grammar(tools, HERMES, must_call=True, is_parallel=True, field="tools"))

    assert refused.value.field == "tools"


def test_an_answer_that_could_not_be_kept_to_is_refused_by_its_own_field() -> None:
    answer = GrammarSpec(kind="json", text='{"type": "foo"}', field="response_format.schema")

    with pytest.raises(RequestError) as refused:
        matcher_of(HERMES, answer=answer)

    assert refused.value.field == "response_format.schema"
