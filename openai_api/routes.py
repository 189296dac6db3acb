"""The whole HTTP surface."""

from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from openai_api.api import Api
from openai_api.chat import Chat
from openai_api.completions import Completions
from openai_api.endpoint import Endpoint, Handler
from openai_api.health import HealthReport, Probes
from openai_api.models import Models
from openai_api.openapi import openapi_document
from openai_api.page import page_routes
from openai_api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from openai_api.replies import (
    ChatChunk,
    ChatCompletion,
    Completion,
    DetokenizeReply,
    Model,
    ModelList,
    RenderReply,
    TokenizeReply,
    VersionReply,
)
from openai_api.responses import Responses
from openai_api.responses_protocol import ResponseEvent, ResponseObject, ResponsesRequest
from openai_api.tokenize import Tokens
from service import __version__

_GENERATES = (404, 503, 504)
_TOKENIZES = (404, 503)


def make_routes(api: Api) -> list[BaseRoute]:
    rows = [*_generation(api), *_stored_responses(api), *_models(api), *_tokens(api), *_operation(api)]
    document = Endpoint(
        methods=("GET",),
        path="/openapi.json",
        handler=_giving(lambda: encoded),
        summary="This document.",
        reply=dict[str, Any],
    )
    rows.append(document)
    encoded = msgspec.json.encode(openapi_document(rows, api.access))
    return [*(row.route for row in rows), *page_routes()]


def _generation(api: Api) -> list[Endpoint]:
    chat = Chat(api)
    return [
        Endpoint(
            methods=("POST",),
            path="/v1/chat/completions",
            handler=chat.create,
            summary="The next message of a chat, plain or as a stream.",
            body=ChatRequest,
            reply=ChatCompletion,
            chunk=ChatChunk,
            errors=_GENERATES,
        ),
        Endpoint(
            methods=("POST",),
            path="/v1/chat/completions/render",
            handler=chat.render,
            summary="The prompt that a chat makes, as text and ids. Nothing is generated.",
            body=ChatRequest,
            reply=RenderReply,
            errors=_TOKENIZES,
        ),
        Endpoint(
            methods=("POST",),
            path="/v1/completions",
            handler=Completions(api).create,
            summary="How prompts go on, plain or as a stream.",
            body=CompletionRequest,
            reply=Completion,
            chunk=Completion,
            errors=_GENERATES,
        ),
        Endpoint(
            methods=("POST",),
            path="/v1/responses",
            handler=Responses(api).create,
            summary="A response, plain or as a stream. Nothing is stored.",
            body=ResponsesRequest,
            reply=ResponseObject,
            chunk=ResponseEvent,
            errors=_GENERATES,
        ),
    ]


def _stored_responses(api: Api) -> list[Endpoint]:
    return [
        Endpoint(
            methods=("GET", "POST", "DELETE"),
            path="/v1/responses/{id:path}",
            handler=Responses(api).stored,
            summary="Always 404, since responses are not stored.",
            errors=(404,),
        )
    ]


def _models(api: Api) -> list[Endpoint]:
    models = Models(api)
    return [
        Endpoint(
            methods=("GET",),
            path="/v1/models",
            handler=models.listing,
            summary="The names that the model is served under.",
            reply=ModelList,
        ),
        Endpoint(
            methods=("GET",),
            path="/v1/models/{id:path}",
            handler=models.one,
            summary="One of these names.",
            reply=Model,
            errors=(404,),
        ),
    ]


def _tokens(api: Api) -> list[Endpoint]:
    tokens = Tokens(api)
    return [
        Endpoint(
            methods=("POST",),
            path="/tokenize",
            handler=tokens.tokenize,
            summary="The ids of a text or of a chat.",
            body=TokenizeRequest,
            reply=TokenizeReply,
            errors=_TOKENIZES,
        ),
        Endpoint(
            methods=("POST",),
            path="/detokenize",
            handler=tokens.detokenize,
            summary="The text of ids.",
            body=DetokenizeRequest,
            reply=DetokenizeReply,
            errors=_TOKENIZES,
        ),
    ]


def _operation(api: Api) -> list[Endpoint]:
    probes = Probes(api.health)
    probed = {
        "/health": (probes.health, "Whether a request would be served now, or how far loading is."),
        "/livez": (probes.livez, "Fails when only a restart helps."),
        "/readyz": (probes.readyz, "Fails while requests should go elsewhere."),
        "/startupz": (probes.startupz, "Fails until the model is loaded."),
    }
    return [
        Endpoint(
            methods=("GET",),
            path="/version",
            handler=_giving(lambda: msgspec.json.encode(VersionReply(__version__))),
            summary="The server's version.",
            reply=VersionReply,
        ),
        *(
            Endpoint(
                methods=("GET",),
                path=path,
                handler=handler,
                summary=text,
                reply=HealthReport,
                failure=HealthReport,
                errors=(503,),
            )
            for path, (handler, text) in probed.items()
        ),
        Endpoint(
            methods=("GET",),
            path="/metrics",
            handler=_giving(api.metrics.exposition, CONTENT_TYPE_LATEST),
            summary="Metrics for Prometheus.",
            media_type="text/plain",
        ),
    ]


def _giving(content: Callable[[], bytes], media_type: str = "application/json") -> Handler:
    async def answer(_http: Request) -> Response:
        return Response(content(), media_type=media_type)

    return answer
