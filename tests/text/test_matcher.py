"""Grammars over a real vocabulary: what may come next, where a reply ends, what is too costly."""

import asyncio
import json
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import OverloadedError, RequestError
from service.text.grammar import GrammarSpec
from service.text.matcher import Grammars
from tests.text.grammars import accepts, allowed_ids, compiled, random_text, spec
from tests.text.samples import make_tokenizer

TOKENIZER = make_tokenizer("chatml")
(EOS,) = TOKENIZER.encode("<|im_end|>")
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.vocab_size, [EOS])
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (
            "json",
            PERSON,
            [
                '{"name":"Ada","age":3}',
                '{ "name": "\u00e9", "age": 0 }',
                '{\n    "name": "a\\n",\n    "age": 12\n}',
            ],
            [
                '{"name":"Ada"}',
                '{"name":"Ada","age":-1}',
                '{"age":3,"name":"Ada"}',
                '{"n\\u0061me":"Ada","age":3}',
                ' {"name":"Ada","age":3}',
                '{"name":"Ada","age":3} ',
                '{"name":"Ada","age":3',
                '{"name":"Ada",' + " " * 41 + '"age":3}',
                '{"name":"Ada",\n\n"age":3}',
            ],
        ),
        ("json", {}, ["1", '"a"', "null", '[{"a": [true]}]'], ["", "a", "[1,]"]),
        ("choice", ["yes", "no.", "a|b"], ["yes", "no.", "a|b"], ["", "ye", "noo", "a", "yes "]),
        ("regex", r"[a-c]{2}-\d+", ["ab-1", "cc-1234"], ["ab-", "ad-1", "ab-1x"]),
        ("grammar", 'start: "a" item* \nitem: "b" | "(" start ")"', ["a", "abb", "a(ab)b"], ["b", "a("]),
        ("grammar", 'root ::= ("x" | "y")+ "."', ["x.", "xyx."], [".", "x"]),
        ("grammar", 'start: "<|im_end|>"', ["<|im_end|>"], [""]),  # the text, not the token
    ],
)
def test_exactly_the_texts_of_a_grammar_are_possible(
    kind: str, value: Any, good: list[str], bad: list[str]
) -> None:
    matcher = compiled(GRAMMARS, kind, value)

    assert [text for text in good if not accepts(matcher, TOKENIZER, EOS, text)] == []
    assert [text for text in bad if accepts(matcher, TOKENIZER, EOS, text)] == []


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), schema=st.sampled_from([
    PERSON,
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"const": {"a": None}}]},
    {"$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"},
     {"type": "null"}]}}, "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,3}$"},
    {"type": "integer", "minimum": 5, "maximum": 20_000_000_000},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^a+$": {"type": "integer"}}, "additionalProperties": False,
     "maxProperties": 2},
    {"enum": [f"word number {i}" for i in range(5000)]},
]))  # fmt: skip
def test_whatever_is_sampled_is_json_of_the_schema(seed: int, schema: dict[str, Any]) -> None:
    text = random_text(compiled(GRAMMARS, "json", schema).copy(), TOKENIZER, EOS, seed)

    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "("},
        {"type": "foo"},
        {"properties": {"a": "bar"}},
        {"not": {"type": "string"}},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"contains": {"type": "integer"}},
        {"dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"maxLength": 3}},
        {"unevaluatedProperties": False},
        {"allOf": [{"type": "object"}, {"type": "string"}]},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"multipleOf": 0},
        {"enum": []},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
        {"$ref": "https://example.com/schema.json"},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {"enum": [f"word number {i}" for i in range(10_000)]},
        json.loads('{"items":' * 200 + "{}" + "}" * 200),
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)
def test_a_schema_that_could_not_be_kept_to_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^field: .") as refused:
        compiled(GRAMMARS, "json", schema)

    assert refused.value.field == "field"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "("),
        ("regex", "(?=a)b"),
        ("regex", "$^"),
        ("regex", "(?:)"),  # nothing but the empty text
        ("grammar", "start: nowhere"),
        ("grammar", "no grammar at all"),
    ],
)
def test_what_is_no_regex_or_grammar_is_refused(kind: str, value: str) -> None:
    with pytest.raises(RequestError, match=r"^field: ."):
        compiled(GRAMMARS, kind, value)


def test_special_tokens_and_ids_of_no_token_are_never_allowed() -> None:
    grammars = Grammars(TOKENIZER, TOKENIZER.vocab_size + 100, [EOS])
    matcher = compiled(grammars, "regex", r"[\s\S]+")

    allowed = allowed_ids(matcher, TOKENIZER.vocab_size + 100)

    assert max(allowed) < TOKENIZER.vocab_size
    assert TOKENIZER.special_ids.isdisjoint(allowed)
    assert len(allowed) > 256


def test_eos_is_allowed_where_the_grammar_may_end_and_nowhere_else() -> None:
    matcher = compiled(GRAMMARS, "regex", "a+b?").copy()
    (a,), (b,) = TOKENIZER.encode("a"), TOKENIZER.encode("b")

    at_start = allowed_ids(matcher, TOKENIZER.vocab_size)
    matcher.advance(a)
    within = allowed_ids(matcher, TOKENIZER.vocab_size)
    is_over_within = matcher.is_over
    matcher.advance(b)

    assert EOS not in at_start
    assert {EOS, a, b} <= set(within)
    assert not is_over_within
    assert matcher.is_over


def test_a_model_without_eos_ends_where_the_grammar_does() -> None:
    matcher = compiled(Grammars(TOKENIZER, TOKENIZER.vocab_size, []), "choice", ["ab"]).copy()

    for token_id in TOKENIZER.encode("ab"):
        assert not matcher.is_over
        matcher.advance(token_id)

    assert matcher.is_over
    assert matcher.failure is None


def test_text_that_no_token_has_is_refused_at_the_start_and_seen_as_soon_as_it_is_due() -> None:
    tokenizer = make_tokenizer("letters")
    grammars = Grammars(tokenizer, tokenizer.vocab_size, [])
    (a,) = tokenizer.encode("a")

    with pytest.raises(RequestError, match="tokens of this model"):
        compiled(grammars, "regex", "[A-Z]")
    matcher = compiled(grammars, "regex", "a[A-Z]").copy()
    before = matcher.failure
    matcher.advance(a)

    assert before is None
    assert matcher.failure is not None
    assert not matcher.is_over


def test_copies_go_their_own_ways() -> None:
    first = compiled(GRAMMARS, "choice", ["ab", "ba"])
    second = first.copy()
    (a,) = TOKENIZER.encode("a")

    second.advance(a)

    assert allowed_ids(first, TOKENIZER.vocab_size) != allowed_ids(second, TOKENIZER.vocab_size)
    assert a in allowed_ids(first, TOKENIZER.vocab_size)


def test_a_row_longer_than_the_vocabulary_is_filled_with_zeros() -> None:
    row = np.full(100, 0xFFFFFFFF, np.uint32)

    compiled(GRAMMARS, "choice", ["a"]).fill_mask(row)

    assert row[-(-TOKENIZER.vocab_size // 32) :].sum() == 0


async def test_a_grammar_is_compiled_once() -> None:
    grammars = Grammars(TOKENIZER, TOKENIZER.vocab_size, [EOS])

    first = await grammars.compile(spec("json", PERSON, "guided_json"))
    second = await grammars.compile(spec("json", PERSON, "response_format"))

    assert first is second


class _Stuck(Grammars):
    """Compiling takes until `go`."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER, TOKENIZER.vocab_size, [EOS], compile_seconds=0.05)
        self.go = threading.Event()

    def _compile(self, spec: GrammarSpec) -> Any:
        self.go.wait(30)
        return super()._compile(spec)


async def test_a_grammar_that_takes_too_long_is_refused_and_the_loop_goes_on() -> None:
    grammars = _Stuck()
    try:
        compiling = asyncio.create_task(grammars.compile(spec("regex", "a+", "guided_regex")))
        await asyncio.sleep(0)  # the loop is free meanwhile, or this would not return
        assert not compiling.done()
        with pytest.raises(RequestError, match="guided_regex: takes more than") as slow:
            await compiling
        # one thread is left: of two more, the one that has to wait is not to blame
        more = [
            asyncio.create_task(grammars.compile(spec("regex", f"b{i}+", "guided_regex"))) for i in range(2)
        ]
        failures = await asyncio.gather(*more, return_exceptions=True)
    finally:
        grammars.go.set()

    assert slow.value.field == "guided_regex"
    assert {type(each) for each in failures} == {RequestError, OverloadedError}
