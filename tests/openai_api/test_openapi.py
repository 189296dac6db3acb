"""/openapi.json says what the server does: checked by thousands of requests that are made from it."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import httpx
import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from tests.openai_api.scripted import client_of, make_api, make_app, served
from tests.openai_api.test_auth import guarded
from tests.openai_api.whole_server import THINKING_TOOLS_TEMPLATE, Whole, chat, whole_server

KEY = {"authorization": "Bearer first"}
CHECKS = [
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]
BODIES = {
    "/v1/chat/completions": chat("a b"),
    "/v1/chat/completions/render": chat("a b"),
    "/v1/completions": {"prompt": "a b", "max_tokens": 20},
    "/v1/responses": {"input": "a b", "max_output_tokens": 20},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [4, 5]},
}
HONEST = (503, 504)
SECONDS = 60  # none takes as long: the engine computes next to nothing
OPERATIONS = schemathesis.openapi.from_dict(TestClient(make_app(make_api())).get("/openapi.json").json())
OPERATIONS.config.generation.update(modes=list(GenerationMode))


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Whole, str]]:
    async with whole_server(template=THINKING_TOOLS_TEMPLATE) as whole, served(whole.api) as port:
        yield whole, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Whole, str]]:
    """In a thread of its own."""
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(listening()) as running:
        yield running


@OPERATIONS.parametrize()
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_asked_is_answered_as_documented(case: Any, server: tuple[Whole, str]) -> None:
    response = case.call(base_url=server[1], timeout=SECONDS)

    is_judged = response.status_code != 413  # which the check does not know as a refusal
    check(case, response, [negative_data_rejection] if is_judged else [])


@pytest.mark.parametrize(("path", "body"), sorted(BODIES.items()))
def test_a_good_request_with_a_few_fields_of_any_value(
    path: str, body: dict[str, Any], server: tuple[Whole, str]
) -> None:
    """Most of these get past the checks, unlike wholly random ones."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=OPERATIONS[path]["POST"].as_strategy(), draw=st.randoms(use_true_random=False))
    def ask(case: Any, draw: Random) -> None:
        given = case.body if isinstance(case.body, dict) else {}
        names = draw.sample(sorted(given), min(len(given), draw.randint(0, 3)))
        case.body = {name: given[name] for name in names} | body
        response = case.call(base_url=server[1], timeout=SECONDS)
        statuses[response.status_code] += 1
        check(case, response)

    ask()

    assert statuses[200] > statuses.total() // 4


def check(case: Any, response: Any, more: Sequence[Any] = ()) -> None:
    assert response.status_code < 500 or response.status_code in HONEST, response.text
    case.validate_response(response, checks=[*CHECKS, *more])


def test_and_the_engine_lives_on_with_all_its_blocks(server: tuple[Whole, str]) -> None:
    whole, address = server
    reply = httpx.post(f"{address}/v1/chat/completions", json=chat("a b"), timeout=SECONDS)

    assert reply.status_code == 200
    assert whole.engine.failure is None
    assert whole.num_used_blocks == 0


async def test_the_document_is_valid_openapi() -> None:
    async with client_of(make_api()) as client:
        document = (await client.get("/openapi.json")).json()

    validate(document)
    assert document["openapi"] == "3.1.0"


async def test_it_tells_which_routes_need_a_key() -> None:
    async with client_of(guarded()) as client:
        refused = await client.get("/openapi.json")
        reply = await client.get("/openapi.json", headers=KEY)
        open_paths = [
            path
            for path, methods in reply.json()["paths"].items()
            if "get" in methods and (await client.get(path)).status_code != 401
        ]

    assert refused.status_code == 401
    told = {
        path: operation["security"]
        for path, methods in reply.json()["paths"].items()
        for operation in methods.values()
    }
    assert [path for path, security in told.items() if not security] == open_paths
    assert "/health" in open_paths
    assert "/v1/models" not in open_paths
