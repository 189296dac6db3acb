"""The OpenAPI document of the HTTP surface, made of the types that requests are checked by."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from openai_api.auth import Access, needs_key
from openai_api.endpoint import Endpoint
from openai_api.errors import ErrorReply
from openai_api.fields import HEADER
from service import __version__

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_KEY = {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."}
_HEADERS = {
    "X-Request-Id": "The request's own, if it sent a sane one; stands in the server's log, too.",
    HEADER: "Fields that were accepted without any effect, or with a changed one.",
}
_ERROR_HEADERS = {
    429: {"Retry-After": "Seconds."},
    503: {"Retry-After": "Seconds."},
}


def openapi_document(endpoints: Sequence[Endpoint], access: Access) -> dict[str, Any]:
    """OpenAPI 3.1. Fields are optional where leaving them out is no mistake by itself."""
    types: list[Any] = [ErrorReply]
    types += [
        each
        for row in endpoints
        for each in (row.body, row.reply, row.chunk, row.failure)
        if each is not None
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = list(zip(types, schemas, strict=True))

    def schema_of(kind: Any) -> dict[str, Any]:
        return next(schema for each, schema in by_type if each is kind)

    paths: dict[str, dict[str, Any]] = {}
    for row in endpoints:
        path = _PARAMETER.sub(r"{\1}", row.path)
        paths[path] = {}
        for method in row.methods:
            operation = paths[path][method.lower()] = _operation(method, row, schema_of)
            is_locked = bool(access.keys) and needs_key(method, row.path, access)
            operation["security"] = [{"key": []}] if is_locked else []
            statuses = (
                (401, 403, 429) if access.max_requests_per_key and row.body is not None else (401, 403)
            )
            for status in statuses if is_locked else ():
                operation["responses"][str(status)] = _failure(status, schema_of(ErrorReply))
    return {
        "openapi": "3.1.0",
        "info": {"title": "PhotonInfer", "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": _KEY}},
    }


def _operation(method: str, row: Endpoint, schema_of: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        row.media_type: {"schema": {} if row.reply is None else schema_of(row.reply)}
    }
    if row.chunk is not None:
        content["text/event-stream"] = {"schema": _event(schema_of(row.chunk))}
    responses = {"200": {"description": "Done.", "headers": _headers(_HEADERS), "content": content}}
    always = (400, 413, 415) if row.body is not None else ()
    for status in (*always, 500):
        responses[str(status)] = _failure(status, schema_of(ErrorReply))
    for status in row.errors:
        responses[str(status)] = _failure(status, schema_of(row.failure))
    name = _PARAMETER.sub(r"\1", row.path.removeprefix("/v1")).replace("/", "_").replace(".", "_")
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{name}",
        "summary": row.summary,
        "responses": responses,
    }
    if row.body is not None:
        body = {"required": True, "content": {"application/json": {"schema": schema_of(row.body)}}}
        operation["requestBody"] = body
    if names := _PARAMETER.findall(row.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """Of a stream of server-sent events, as OpenAPI 3.2 describes them; those of chats end with [DONE]."""
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    return {"type": "object", "properties": {"data": content}, "required": ["data"]}


def _failure(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": HTTPStatus(status).phrase,
        "headers": _headers(_ERROR_HEADERS.get(status, {})),
        "content": {"application/json": {"schema": schema}},
    }


def _headers(texts: dict[str, str]) -> dict[str, Any]:
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()}
