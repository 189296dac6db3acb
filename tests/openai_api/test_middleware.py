"""Request ids, paths, body size, and errors of OpenAI's shape wherever they come from."""

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from openai_api.api import Limits
from openai_api.middleware import wrap
from tests.openai_api.scripted import CHAT, MODEL, ScriptedGenerator, client_of, make_api, post

CHAT_URL = "/v1/chat/completions"


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat///completions//"],
)
async def test_slashes_too_many_change_nothing_and_redirect_nowhere(path: str) -> None:
    async with client_of(ScriptedGenerator()) as client:
        reply = await client.post(f"http://test{path}", json=CHAT)

    assert reply.status_code == 200
    assert reply.history == []


@pytest.mark.parametrize(
    "path",
    ["/chat/completions", "/v1/v1/chat/completions", "/api/v1/chat/completions", "/chat/completions/"],
)
async def test_a_wrong_base_is_told_the_right_one(path: str) -> None:
    reply = await post(ScriptedGenerator(), path, CHAT)

    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "not_found")
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize(
    "path", ["/v2", "/v2/models", "/v1/embeddings", "/v1/chat/completions/x", "/%00", "/v1"]
)
async def test_an_unknown_path_is_a_404_of_openais_shape(path: str) -> None:
    async with client_of(ScriptedGenerator()) as client:
        reply = await client.get(path)

    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "not_found"
    assert reply.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT_URL), ("DELETE", "/v1/models"), ("PUT", "/health")]
)
async def test_a_wrong_method_is_a_405_of_openais_shape(method: str, path: str) -> None:
    async with client_of(ScriptedGenerator()) as client:
        reply = await client.request(method, path)

    assert reply.status_code == 405
    assert reply.headers["allow"]
    assert reply.json()["error"]["code"] == "method_not_allowed"


async def test_a_sane_request_id_comes_back_and_any_other_is_replaced() -> None:
    api = make_api()

    kept = await post(api, CHAT_URL, CHAT, **{"x-request-id": "abc-1.2:3"})
    made = [
        await post(api, CHAT_URL, CHAT, **{"x-request-id": bad})
        for bad in ("", "a b", "x" * 129, 'a"b', "{}")
    ]

    assert kept.headers["x-request-id"] == "abc-1.2:3"
    ids = {reply.headers["x-request-id"] for reply in made}
    assert all(each.startswith("req-") for each in ids)
    assert len(ids) == len(made)


async def test_two_requests_with_one_id_are_two_inside() -> None:
    generator = ScriptedGenerator()

    for _ in range(2):
        await post(generator, CHAT_URL, CHAT, **{"x-request-id": "same"})

    assert len(set(generator.request_ids)) == 2


@pytest.mark.parametrize("path", ["/nowhere", "/health"])
async def test_every_answer_has_a_request_id(path: str) -> None:
    async with client_of(ScriptedGenerator()) as client:
        reply = await client.get(path)

    assert reply.headers["x-request-id"].startswith("req-")


async def in_chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(total // 100):
        yield b" " * 100


async def test_a_body_above_the_limit_is_a_413_whether_its_length_is_announced_or_not() -> None:
    api = make_api(limits=Limits(max_body_bytes=1000))
    headers = {"content-type": "application/json"}

    announced = await post(api, CHAT_URL, b" " * 1001)
    async with client_of(api) as client:
        chunked = await client.post(CHAT_URL, content=in_chunks(1100), headers=headers)
    fitting = await post(api, CHAT_URL, CHAT)

    for reply in (announced, chunked):
        assert reply.status_code == 413
        assert reply.headers["connection"] == "close"
        assert reply.json()["error"]["code"] == "request_too_large"
        assert "1000 bytes" in reply.json()["error"]["message"]
    assert fitting.status_code == 200


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


async def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    headers = {"content-type": "application/json", "content-length": "1001"}
    async with client_of(make_api(limits=Limits(max_body_bytes=1000))) as client:
        reply = await client.post(CHAT_URL, content=unread(), headers=headers)

    assert reply.status_code == 413


async def test_a_mounted_folder_is_not_redirected_to_itself_for_ever() -> None:
    mounted = Mount("/static", routes=[Route("/page", fail)])
    app = wrap(Starlette(routes=[mounted]), make_api())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await client.get("/static")

    assert reply.status_code == 404


async def test_models_are_listed_and_found_with_slashes_in_their_names() -> None:
    async with client_of(ScriptedGenerator()) as client:
        listing = (await client.get("/v1/models/")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
        escaped = (await client.get("/v1/models/org%2Ftiny")).json()
        missing = await client.get("/v1/models/other")

    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == [MODEL, "alias"]
    assert one == escaped == listing["data"][0]
    assert (one["object"], one["created"], one["owned_by"]) == ("model", 1_700_000_000, "photoninfer")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("asked", "answered"),
    [({"model": "alias"}, "alias"), ({"model": MODEL}, MODEL), ({"model": None}, MODEL)],
)
async def test_the_answer_names_the_model_as_it_was_asked_for(
    asked: dict[str, str | None], answered: str
) -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, {**CHAT, **asked})

    assert reply.json()["model"] == answered


@pytest.mark.parametrize("name", ["gpt-4", "", "x" * 5000])
async def test_an_unknown_model_is_a_404_that_lists_nothing(name: str) -> None:
    reply = await post(ScriptedGenerator(), CHAT_URL, {**CHAT, "model": name})

    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL not in error["message"]
    assert len(error["message"]) < 300


async def fail(_http: Request) -> Response:
    raise ZeroDivisionError("secret")


async def test_a_route_that_fails_is_a_500_without_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    app = wrap(Starlette(routes=[Route("/fail", fail)]), make_api())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await client.get("/fail")

    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert caplog.text.count("ZeroDivisionError: secret") == 1
