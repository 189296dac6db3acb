"""The whole HTTP surface."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from openai_api.api import Api
from openai_api.chat import Chat
from openai_api.completions import Completions
from openai_api.health import Probes
from openai_api.models import Models
from openai_api.page import page_routes
from openai_api.responses import Responses
from openai_api.tokenize import Tokens
from service import __version__


def make_routes(api: Api) -> list[BaseRoute]:
    models, probes, tokens, responses = Models(api), Probes(api.health), Tokens(api), Responses(api)

    async def metrics(_http: Request) -> Response:
        return Response(api.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def version(_http: Request) -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    chat = Chat(api)
    return [
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/v1/chat/completions/render", chat.render, methods=["POST"]),
        Route("/v1/completions", Completions(api).create, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        Route("/v1/responses/{id:path}", responses.stored, methods=["GET", "POST", "DELETE"]),
        Route("/v1/models", models.listing),
        Route("/v1/models/{id:path}", models.one),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/version", version),
        Route("/health", probes.health),
        Route("/livez", probes.livez),
        Route("/readyz", probes.readyz),
        Route("/startupz", probes.startupz),
        Route("/metrics", metrics),
        *page_routes(),
    ]
