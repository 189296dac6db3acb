"""The whole HTTP surface."""

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openai_api.api import Api
from openai_api.chat import Chat
from openai_api.completions import Completions
from openai_api.health import Probes
from openai_api.models import Models


def make_routes(api: Api) -> list[Route]:
    models, probes = Models(api), Probes(api.health)

    async def metrics(_http: Request) -> Response:
        return Response(api.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return [
        Route("/v1/chat/completions", Chat(api).create, methods=["POST"]),
        Route("/v1/completions", Completions(api).create, methods=["POST"]),
        Route("/v1/models", models.listing),
        Route("/v1/models/{id:path}", models.one),
        Route("/health", probes.health),
        Route("/livez", probes.livez),
        Route("/readyz", probes.readyz),
        Route("/startupz", probes.startupz),
        Route("/metrics", metrics),
    ]
