"""GET /v1/models and /v1/models/{id}. They answer while the model loads, too."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from openai_api.api import Api
from openai_api.replies import Model, ModelList


class Models:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def listing(self, _http: Request) -> Response:
        """GET /v1/models."""
        return _json(ModelList([self._model(name) for name in self._api.model_names]))

    async def one(self, http: Request) -> Response:
        """GET /v1/models/{id}; ids may hold slashes. Raises: ModelNotFoundError."""
        return _json(self._model(self._api.served_name(http.path_params["id"])))

    def _model(self, name: str) -> Model:
        return Model(name, self._api.created, self._api.max_model_len)


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
