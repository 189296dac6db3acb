"""API keys and origins, as clients meet them."""

import asyncio
import logging
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_api.api import Api
from openai_api.auth import Access
from service.api_keys import ApiKey, Scope, digest_of
from service.text.generation import TextGenerator
from tests.openai_api.scripted import CHAT, MODEL, PROMPT, ScriptedGenerator, client_of, deltas_of, make_api

CHAT_URL = "/v1/chat/completions"
ORIGIN = "https://app.example.org"
PREFLIGHT = {"origin": ORIGIN, "access-control-request-method": "POST"}


def key(text: str, scope: Scope = "inference") -> ApiKey:
    return ApiKey(digest_of(text.encode()), scope)


def guarded(**access: Any) -> Api:
    keys = (key("first"), key("watch", "metrics"), key("last"))
    return make_api(access=Access(**{"keys": keys, **access}))


async def ask(api: Api, method: str, path: str, authorization: str | None) -> httpx.Response:
    headers = {} if authorization is None else {"authorization": authorization}
    body = CHAT if "chat" in path else PROMPT if method == "POST" else None
    async with client_of(api) as client:
        return await client.request(method, path, json=body, headers=headers)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer firs", "Bearer first1", "Bearer FIRST", "Basic first", "first"],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT_URL),
        ("POST", "//v1/completions/"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/version"),
        ("GET", "/no/such/route"),
        ("GET", "/health/../v1/models"),
        ("GET", "/livez/x"),
        ("DELETE", CHAT_URL),
    ],
)
async def test_without_a_good_key_nothing_is_told(method: str, path: str, given: str | None) -> None:
    reply = await ask(guarded(), method, path, given)

    error = reply.json()["error"]
    assert reply.status_code == 401
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["x-request-id"]


async def test_a_refused_body_is_not_read_and_starts_nothing() -> None:
    generator = ScriptedGenerator()
    api = make_api(generator, access=Access(keys=(key("k"),)))

    await ask(api, "POST", CHAT_URL, "Bearer other")

    assert generator.prompts == []


@pytest.mark.parametrize("given", ["Bearer first", "Bearer last", "bearer last", "Bearer  first "])
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT_URL), ("GET", "/v1/models")])
async def test_each_key_is_good(method: str, path: str, given: str) -> None:
    assert (await ask(guarded(), method, path, given)).status_code == 200


async def test_two_keys_in_one_request_are_none() -> None:
    async with client_of(guarded()) as client:
        headers = [("authorization", "Bearer first"), ("authorization", "Bearer first")]
        reply = await client.get("/v1/models", headers=headers)

    assert reply.status_code == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/health", "/health/"])
async def test_probes_need_no_key(path: str) -> None:
    assert (await ask(guarded(metrics_key=True), "GET", path, None)).status_code == 200


@pytest.mark.parametrize(
    ("metrics_key", "given", "status"),
    [
        (False, None, 200),
        (False, "Bearer wrong", 200),
        (True, None, 401),
        (True, "Bearer wrong", 401),
        (True, "Bearer watch", 200),
        (True, "Bearer first", 200),
    ],
)
async def test_metrics_need_a_key_if_the_setting_says_so(
    metrics_key: bool, given: str | None, status: int
) -> None:
    assert (await ask(guarded(metrics_key=metrics_key), "GET", "/metrics", given)).status_code == status


@pytest.mark.parametrize(("method", "path"), [("POST", CHAT_URL), ("GET", "/v1/models"), ("GET", "/no")])
async def test_a_key_for_metrics_is_for_nothing_else(method: str, path: str) -> None:
    reply = await ask(guarded(), method, path, "Bearer watch")

    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "insufficient_permissions"
    assert "/metrics" in reply.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, PREFLIGHT])
async def test_options_need_no_key(headers: dict[str, str]) -> None:
    async with client_of(guarded()) as client:
        reply = await client.options(CHAT_URL, headers=headers)

    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


async def test_without_keys_any_is_taken() -> None:
    assert (await ask(make_api(), "POST", CHAT_URL, "Bearer none")).status_code == 200


@given(st.binary(max_size=40).filter(lambda raw: raw.strip() not in (b"first", b"last", b"watch")))
async def test_any_other_bytes_are_refused_and_break_nothing(raw: bytes) -> None:
    headers = [(b"authorization", b"Bearer " + raw.replace(b"\r", b"").replace(b"\n", b""))]
    async with client_of(guarded()) as client:
        reply = await client.get("/v1/models", headers=headers)

    assert reply.status_code == 401


async def test_keys_are_never_logged_nor_told(caplog: pytest.LogCaptureFixture) -> None:
    api = guarded()
    with caplog.at_level(logging.DEBUG):
        replies = [
            await ask(api, "GET", "/v1/models", f"Bearer {each}") for each in ("first", "sesame", "watch")
        ]

    shown = caplog.text + repr(api.access) + "".join(reply.text for reply in replies)
    assert [reply.status_code for reply in replies] == [200, 401, 403]
    assert not [each for each in ("first", "sesame", "watch") if each in shown]


async def test_refusals_are_counted() -> None:
    api = guarded()
    await ask(api, "GET", "/v1/models", None)

    assert api.metrics.http == {("other", "GET", "401"): 1}


async def test_by_default_pages_of_other_origins_may_not_ask() -> None:
    async with client_of(make_api()) as client:
        preflight = await client.options(CHAT_URL, headers=PREFLIGHT)
        reply = await client.post(CHAT_URL, json=CHAT, headers={"origin": ORIGIN})

    assert preflight.status_code == 405
    assert not [name for name in [*preflight.headers, *reply.headers] if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [(ORIGIN,), ("https://other.example.org", ORIGIN), ("*",)])
async def test_a_page_of_an_allowed_origin_may_ask_with_a_key(origins: tuple[str, ...]) -> None:
    asked_headers = "authorization,content-type,x-stainless-lang"
    async with client_of(guarded(cors_origins=origins)) as client:
        preflight = await client.options(
            CHAT_URL, headers={**PREFLIGHT, "access-control-request-headers": asked_headers}
        )
        headers = {"origin": ORIGIN, "authorization": "Bearer first"}
        reply = await client.post(CHAT_URL, json={**CHAT, "stream": True}, headers=headers)
        refused = await client.post(CHAT_URL, json=CHAT, headers={"origin": ORIGIN})

    assert preflight.status_code == 200
    allowed = preflight.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert set(asked_headers.split(",")) <= set(allowed)
    assert (reply.status_code, refused.status_code) == (200, 401)
    for each in (preflight, reply, refused):  # the refusal, too: a page can show why
        assert each.headers["access-control-allow-origin"] in (ORIGIN, "*")
        assert "access-control-allow-credentials" not in each.headers
    assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    assert reply.text.endswith("[DONE]\n\n")


async def test_a_page_of_another_origin_may_not() -> None:
    async with client_of(guarded(cors_origins=("https://other.example.org",))) as client:
        preflight = await client.options(CHAT_URL, headers=PREFLIGHT)
        headers = {"origin": ORIGIN, "authorization": "Bearer first"}
        reply = await client.post(CHAT_URL, json=CHAT, headers=headers)

    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
    assert "access-control-allow-origin" not in reply.headers


async def test_a_key_has_so_many_requests_open_and_no_more() -> None:
    gate = asyncio.Event()
    generator = ScriptedGenerator(lambda ids, params: [*deltas_of("a")[:1], gate, *deltas_of("b")])
    api = guarded(max_requests_per_key=2)
    api.generator = cast(TextGenerator, generator)
    first, last = ({"authorization": f"Bearer {name}"} for name in ("first", "last"))
    async with client_of(api) as client:
        asking = [
            asyncio.create_task(client.post(url, json=body, headers=first))
            for url, body in ((CHAT_URL, CHAT), ("/v1/completions", PROMPT))
        ]
        while len(generator.generations) < 2:  # noqa: ASYNC110  # the script has no event for it
            await asyncio.sleep(0)
        refused = await client.post(CHAT_URL, json=CHAT, headers=first)
        listed = await client.get("/v1/models", headers=first)
        gate.set()
        other = await client.post(CHAT_URL, json=CHAT, headers=last)
        answered = await asyncio.gather(*asking)
        again = await client.post(CHAT_URL, json=CHAT, headers=first)

    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "slow_down"
    assert int(refused.headers["retry-after"]) >= 1
    assert "x-should-retry" not in refused.headers
    assert [reply.status_code for reply in (listed, other, *answered, again)] == [200] * 5
    assert api.metrics.refused_by_cause["client_limit"] == 1
