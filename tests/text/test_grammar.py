"""What may be asked for: each refusal names the field and says why."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import RequestError
from service.text.grammar import MAX_CHARS, choice_regex, llguidance_grammar
from tests.text.grammars import spec


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json", "{", "no valid JSON"),
        ("json", "[]", "an object"),
        ("json", "false", "an object"),
        ("json", {"x-guidance": {"lenient": True}}, "x-guidance"),
        ("json", {"items": {"x-guidance": {}}}, "x-guidance"),
        ("json", {"type": "object", "minProperties": 2}, "minProperties"),
        ("json", {"type": "string", "pattern": "a" * 8001}, "pattern"),
        ("json", {"patternProperties": {"a" * 8001: {}}}, "pattern"),
        ("json", deep(5000), "nested too deeply"),
        ("json", "x" * (MAX_CHARS["json"] + 1), "at most 128000"),
        ("regex", "a" * (MAX_CHARS["regex"] + 1), "at most 8000"),
        ("grammar", "start: %json {}", "%json"),
        ("grammar", "start: @other", "@other"),
        ("grammar", "start: <|im_end|>", "special tokens"),
        ("grammar", "start: <[7]>", "special tokens"),
        ("grammar", 'root ::= nothing "a"', "GBNF"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_is_not_done_is_refused_by_name(kind: str, value: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as refused:
        llguidance_grammar(spec(kind, value, "guided_it"))

    assert refused.value.field == "guided_it"
    assert str(refused.value).startswith("guided_it: ")
    assert len(str(refused.value)) < 400
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    [
        {"enum": [{"x-guidance": 1}]},  # a value, no keyword
        {"properties": {"x-guidance": {"type": "string"}}},  # a name of a property
        {"type": "object", "minProperties": 2, "required": ["a", "b"]},
        True,
        "{}",
    ],
)
def test_words_that_only_look_refused_are_taken(value: Any) -> None:
    assert llguidance_grammar(spec("json", "true" if value is True else value))


def test_special_signs_within_strings_and_regexes_of_a_grammar_are_taken() -> None:
    assert llguidance_grammar(spec("grammar", 'start: "<a>" /<b%json>/ // <c> @d'))


@given(choices=st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4), other=st.text(max_size=6))
def test_the_regex_of_choices_matches_exactly_them(choices: list[str], other: str) -> None:
    # Python writes \x{..} as \x.. or \U........
    pattern = re.sub(r"\\x\{(\w+)\}", lambda code: f"\\U{int(code[1], 16):08x}", choice_regex(choices))

    assert all(re.fullmatch(pattern, each) for each in choices)
    assert bool(re.fullmatch(pattern, other)) == (other in choices)
