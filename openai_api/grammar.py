"""Fields that say what a reply must match -> one grammar."""

from typing import Any, Literal

import msgspec

from openai_api.protocol import GenerationRequest, ResponseFormat
from service.errors import RequestError
from service.text.grammar import GrammarSpec

_ANY_OBJECT = {"type": "object"}
_Kind = Literal["json", "regex", "choice", "grammar"]
_GUIDED: tuple[_Kind, ...] = ("json", "regex", "choice", "grammar")


def grammar_of(body: GenerationRequest) -> GrammarSpec | None:
    """Raises: RequestError: no schema where one is due, two grammars, or a field that none goes with."""
    asked: list[tuple[str, _Kind, Any]] = []
    if body.response_format is not None and body.response_format.type != "text":
        asked.append(_of_response_format(body.response_format))
    elif body.response_format is not None:
        _refuse_schemas(body.response_format, "type json_schema")
    asked += [(f"guided_{kind}", kind, getattr(body, f"guided_{kind}")) for kind in _GUIDED]
    if (outputs := body.structured_outputs) is not None:
        asked += [(f"structured_outputs.{kind}", kind, getattr(outputs, kind)) for kind in _GUIDED]
        if outputs.json_object:
            asked.append(("structured_outputs.json_object", "json", _ANY_OBJECT))
    given = [each for each in asked if each[2] is not None]
    if len(given) > 1:
        first, second = given[0][0], given[1][0]
        raise RequestError(f"{second} and {first} exclude each other; send one of them.", field=second)
    if not given:
        _check_outputs(body)
        return None
    check_ends(body, given[0][0])
    field, kind, value = given[0]
    return GrammarSpec(
        kind=kind, text=value if isinstance(value, str) else _as_json(value, field), field=field
    )


def _of_response_format(asked: ResponseFormat) -> tuple[str, _Kind, Any]:
    if asked.type == "json_object":
        if asked.json_schema is not None:
            raise _misplaced("response_format.json_schema", "type json_schema")
        if asked.schema is not None:
            return "response_format.schema", "json", asked.schema
        return "response_format", "json", _ANY_OBJECT
    field = "response_format.json_schema.schema"
    if asked.schema is not None:
        raise _misplaced("response_format.schema", f"type json_object; send {field}")
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise RequestError(f"{field} is missing.", field=field)
    return field, "json", asked.json_schema.schema


def _refuse_schemas(asked: ResponseFormat, place: str) -> None:
    for name in ("json_schema", "schema"):
        if getattr(asked, name) is not None:
            raise _misplaced(f"response_format.{name}", place)


def _misplaced(field: str, place: str) -> RequestError:
    return RequestError(f"{field} goes with {place}.", field=field)


def _check_outputs(body: GenerationRequest) -> None:
    if body.structured_outputs is not None and body.structured_outputs.json_object is None:
        message = "structured_outputs is empty; send one of json, regex, choice, grammar and json_object."
        raise RequestError(message, field="structured_outputs")


def check_ends(body: GenerationRequest, field: str) -> None:
    """Where a reply ends is up to its grammar. Raises: RequestError."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise RequestError(f"{name} does not go with {field}, which says where to end.", field=name)


def _as_json(value: Any, field: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (RecursionError, ValueError):
        raise RequestError(f"{field} is nested too deeply.", field=field) from None
