"""Tools and how they may be called -> one grammar of the whole reply, in llguidance's Lark."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from service.text.chat_format import ToolFormat
from service.text.grammar import GrammarSpec, embedded_schema

MAX_CALLS = 32  # in one reply that is bound to a grammar


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that may be called, and what its arguments must be."""

    name: str  # letters, digits and signs that need no escape
    parameters: Mapping[str, Any]  # a schema of an object
    field: str  # where the request has the schema


def tools_grammar(
    tools: Sequence[ToolSpec],
    form: ToolFormat,
    *,
    must_call: bool,
    is_parallel: bool,
    answer: GrammarSpec | None = None,
    field: str,
) -> GrammarSpec:
    """Calls of these tools alone; without `must_call` text, or JSON of `answer`, may stand in their place.

    Text may come before, between and behind calls where they have tags; elsewhere a reply that begins with
    `{` is a call. Raises: RequestError naming the schema's field.
    """
    tag = form.opening.strip()
    call = "tag call" if tag else "call"
    calls = f"{call} (separator {call}){{0,{MAX_CALLS - 1}}}" if is_parallel else call
    schemas = [GrammarSpec(kind="json", text=json.dumps(t.parameters), field=t.field) for t in tools]
    rules = [f"calls: {calls}", *_call_rules(tools, form, schemas), f"separator: {_quoted(form.separator)}"]
    if tag:
        rules.append(f"tag: {_quoted(tag)}")
    if must_call:
        start = "calls"
    elif answer is not None:
        start = "answer | calls"
        rules.append(f"answer: {embedded_schema(answer)}")
        schemas.append(answer)
    elif tag:
        start = f"(before call){{0,{MAX_CALLS}}} text" if is_parallel else "before call | text"
        rules.append(f"before[suffix={_quoted(tag)}]: /(?s:.*)/")
        rules += ["text: TEXT", f"TEXT: /(?s:.*)/ & ~/(?s:.*){tag}(?s:.*)/"]
    else:
        start = "calls | text"
        rules += ["text: TEXT", r"TEXT: /(?s:\s*([^\s{].*)?)/"]
    text = "\n".join([f"start: {start}", *rules])
    return GrammarSpec(kind="tools", text=text, field=field, parts=tuple(schemas))


def _call_rules(tools: Sequence[ToolSpec], form: ToolFormat, schemas: Sequence[GrammarSpec]) -> list[str]:
    before = form.opening.removeprefix(form.opening.strip())
    heads = [_quoted(f'{before}{{"name": "{tool.name}", "{form.arguments_key}": ') for tool in tools]
    ways = " | ".join(f"{head} arguments{i}" for i, head in enumerate(heads))
    arguments = [f"arguments{i}: {embedded_schema(schema)}" for i, schema in enumerate(schemas)]
    return [f"call: ({ways}) {_quoted('}' + form.closing)}", *arguments]


def _quoted(text: str) -> str:
    return json.dumps(text)
