"""docs/fields.md: every known field of each endpoint, and whether it is done, harmless or refused.

`python -m openai_api.field_table > docs/fields.md` writes it.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

import msgspec
from msgspec import Meta

from openai_api.fields import (
    HARMLESS,
    HEADER,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_RESPONSES,
    Refused,
)
from openai_api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from openai_api.responses_protocol import ResponsesRequest
from openai_api.tokenize import REFUSED_BY_TOKENIZE

_ENDPOINTS: tuple[tuple[str, type[msgspec.Struct], Mapping[str, Refused]], ...] = (
    ("/v1/chat/completions", ChatRequest, REFUSED_BY_CHAT),
    ("/v1/completions", CompletionRequest, REFUSED_BY_COMPLETIONS),
    ("/v1/responses", ResponsesRequest, REFUSED_BY_RESPONSES),
    ("/tokenize", TokenizeRequest, REFUSED_BY_TOKENIZE),
    ("/detokenize", DetokenizeRequest, {}),
)
_HEAD = f"""# Fields of requests

Written from the code by `python -m openai_api.field_table`. A field that is null counts as absent. One that
is in no table is accepted without effect, like those that are harmless, and both are listed in the answer's
header `{HEADER}`. One that is refused gets status 400 and is named in `error.param`.
"""


def field_table() -> str:
    """The whole document."""
    return _HEAD + "".join(_section(*row) for row in _ENDPOINTS)


def _section(path: str, request: type[msgspec.Struct], refused: Mapping[str, Refused]) -> str:
    lines = [f"\n## {path}\n", "| field | takes | |", "| --- | --- | --- |"]
    lines += _done(request)
    done = {field.name for field in msgspec.structs.fields(request)}
    lines += [f"| `{name}` | | harmless: {text} |" for name, text in HARMLESS.items() if name not in done]
    lines += [_refused(name, rule) for name, rule in refused.items()]
    return "\n".join(line.replace(" |  |", " | |") for line in lines) + "\n"


def _done(request: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(request):
        yield f"| `{field.name}` | {_takes(field.type)} | done |"


def _refused(name: str, rule: Refused) -> str:
    told = f"refused. {rule.remedy}" if rule.remedy else "refused"
    return f"| `{name}` | {_allowed(rule)} | {told} |"


def _allowed(rule: Refused) -> str:
    values = [json.dumps(value) for value in rule.allowed]
    return "only " + " or ".join(f"`{value}`" for value in values) if values else ""


def _takes(kind: Any) -> str:
    """A type in words."""
    arguments = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"object `{kind.__name__}`"
    match get_origin(kind):
        case origin if origin is list:
            return f"list of: {_takes(arguments[0])}"
        case origin if origin is dict:
            return "object"
    return _plain(kind, arguments)


def _plain(kind: Any, arguments: tuple[Any, ...]) -> str:
    words = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "anything"}
    if kind in words:
        return words[kind]
    if arguments and all(isinstance(each, str) for each in arguments):  # a Literal
        return " ".join(f"`{each}`" for each in arguments)
    if len(arguments) > 1 and isinstance(arguments[1], Meta):
        return _takes(arguments[0]) + _limits(arguments[1])
    return " or ".join(_takes(each) for each in arguments if each is not type(None))


def _limits(meta: Meta) -> str:
    bounds = [
        (">=", meta.ge), (">", meta.gt), ("<=", meta.le),
        ("at least", meta.min_length), ("at most", meta.max_length),
    ]  # fmt: skip
    given = [(sign, bound) for sign, bound in bounds if bound is not None and abs(bound) < 2**31 - 1]
    limits = ", ".join(f"{sign} {bound:g}" for sign, bound in given)
    return f" ({limits})" if limits else ""


if __name__ == "__main__":
    print(field_table(), end="")
