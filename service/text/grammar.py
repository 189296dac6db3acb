"""Schemas, regular expressions, choices and grammars of requests -> the grammar that llguidance reads.

JSON under a schema is that of llguidance with three things made narrower, for replies that end and parse to
what the schema says: white space is bounded; letters have one spelling (with `\\uXXXX` a key could be
spelt so that it passes for another key); special tokens and options of llguidance can't be named.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from service.errors import RequestError

# Characters. Compiling costs more than in proportion: 50,000 of `a?` take 28 s, 4,000 take 0.1 s.
MAX_CHARS = {"json": 128_000, "choice": 128_000, "grammar": 32_000, "regex": 8_000, "tools": 256_000}
WHITE_SPACE = r"\n?[ \t]{0,40}"  # between two tokens of JSON: a line break, and indentation

_JSON_OPTIONS: Any = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITE_SPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": '"\\bfnrt',
    "json_allow_general_unicode_escapes": False,
}
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")  # values are schemas
_NO_SCHEMAS = ("enum", "const", "default", "example", "examples")  # values are any JSON
_QUOTED = re.compile(
    r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*'
)  # strings, regexes, comments of Lark


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a reply must match. `text`: JSON of a schema, or of a list of choices; a regex; a grammar."""

    kind: Literal["json", "regex", "choice", "grammar", "tools"]  # "tools": a grammar of tool_grammar.py
    text: str
    field: str  # the request's field that asks for it
    parts: tuple["GrammarSpec", ...] = ()  # schemas within `text`: one of them may be to blame for all


def llguidance_grammar(spec: GrammarSpec) -> str:
    """The grammar for LLMatcher, which checks the rest.

    Raises: RequestError naming the field: too long, no JSON, or something that is refused by name.
    """
    _check_length(spec)
    try:
        if spec.kind == "json":
            return _of_schema(spec)
        if spec.kind == "choice":
            return str(LLMatcher.grammar_from_regex(choice_regex(json.loads(spec.text))))
        if spec.kind == "tools":
            return str(LLMatcher.grammar_from_lark(spec.text))
        if spec.kind == "regex":
            return str(LLMatcher.grammar_from_regex(spec.text))
        return _of_grammar(spec)
    except RecursionError:
        raise refusal(spec, "nested too deeply.") from None


def refusal(spec: GrammarSpec, reason: str) -> RequestError:
    """A 400 that names the field, with llguidance's reason on one line."""
    if "oneOf" in reason:
        reason = "oneOf is done only where its parts exclude each other visibly; use anyOf."
    reason = " ".join(reason.rpartition("error: ")[2].replace("<non-verbose/>", "").split())
    return RequestError(f"{spec.field}: {reason[:300]}", field=spec.field)


def choice_regex(choices: Sequence[str]) -> str:
    """A regex for exactly these texts."""
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def _literal(letter: str) -> str:
    return letter if letter.isalnum() or not letter.isascii() else f"\\x{{{ord(letter):x}}}"


def _check_length(spec: GrammarSpec) -> None:
    limit = MAX_CHARS[spec.kind]
    if len(spec.text) > limit:
        raise refusal(spec, f"{len(spec.text)} characters are too many; at most {limit}.")


def embedded_schema(spec: GrammarSpec) -> str:
    """A schema as a part of a Lark grammar. Raises: RequestError naming the field."""
    _check_length(spec)
    return f"%json {json.dumps({**_checked_schema(spec), 'x-guidance': _JSON_OPTIONS})}"


def _of_schema(spec: GrammarSpec) -> str:
    schema = _checked_schema(spec)
    try:
        return str(
            LLMatcher.grammar_from_json_schema(spec.text if schema else "{}", overrides=_JSON_OPTIONS)
        )
    except ValueError as error:
        raise refusal(spec, str(error)) from None


def _checked_schema(spec: GrammarSpec) -> dict[str, Any]:
    try:
        schema = json.loads(spec.text)
    except ValueError as error:
        raise refusal(spec, f"no valid JSON: {error}.") from None
    except RecursionError:
        raise refusal(spec, "nested too deeply.") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise refusal(spec, "a JSON schema is an object, such as {...}.")
    for each in _schemas_in(schema):
        _check_schema(spec, each)
    return schema


def _check_schema(spec: GrammarSpec, schema: Mapping[str, Any]) -> None:
    """What llguidance would take and not do."""
    if "x-guidance" in schema:
        raise refusal(spec, "the keyword x-guidance is not supported.")
    least, required = schema.get("minProperties"), schema.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, num_required):
        # of properties without a name in the schema, one could be there twice
        raise refusal(spec, f"minProperties = {least} is not supported; list the properties in required.")
    pattern = schema.get("pattern")
    patterns = [pattern] if isinstance(pattern, str) else []
    if isinstance(named := schema.get("patternProperties"), dict):
        patterns += named
    if any(len(each) > MAX_CHARS["regex"] for each in patterns):
        raise refusal(spec, f"a pattern has more than {MAX_CHARS['regex']} characters.")


def _schemas_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A schema and all within; objects under unknown keywords, too, since a $ref may point there."""
    left: list[Any] = [schema]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            yield each
            for key, value in each.items():
                if key in _NAMED_SCHEMAS and isinstance(value, dict):
                    left += value.values()
                elif key not in _NO_SCHEMAS:
                    left.append(value)


def _of_grammar(spec: GrammarSpec) -> str:
    bare = _QUOTED.sub(" ", spec.text)
    if "::=" not in bare:
        if "<" in bare:
            raise refusal(spec, "special tokens (<...>) can't be used in a grammar.")
        if found := re.search(r"%(?!ignore\b|import\b)\w+|@\w+", bare):
            raise refusal(spec, f"{found[0]} is not supported.")
        return str(LLMatcher.grammar_from_lark(spec.text))
    try:
        lark = any_to_lark(spec.text)
    except RecursionError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise refusal(spec, f"no valid GBNF: {error}") from None
    return str(LLMatcher.grammar_from_lark(lark))
