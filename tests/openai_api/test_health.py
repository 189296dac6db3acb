"""Probes, and what a client gets while the server loads, drains or has failed."""

import pytest

from openai_api.health import Health
from tests.openai_api.scripted import ENDPOINTS, ScriptedGenerator, client_of, make_api, post

PROBES = ["/health", "/livez", "/readyz", "/startupz"]


def loading() -> Health:
    health = Health()
    health.phase("checkpoint")
    health.phase("weights")
    health.update(5, 20, "tensors")
    return health


def dead() -> Health:
    return Health(is_ready=True, failed_reason="out of memory")


def engine_dead() -> Health:
    return Health(is_ready=True, engine_failure=lambda: "out of memory")


def stuck() -> Health:
    return Health(is_ready=True, heartbeat_age=lambda: 61.0, max_heartbeat_age_seconds=60.0)


@pytest.mark.parametrize(
    ("health", "statuses", "word"),
    [
        (Health(is_ready=True), [200, 200, 200, 200], "ok"),
        (Health(is_ready=True, heartbeat_age=lambda: 59.0), [200, 200, 200, 200], "ok"),
        (loading(), [503, 200, 503, 503], "loading"),
        (Health(is_ready=True, is_draining=True), [503, 200, 503, 200], "draining"),
        (dead(), [503, 503, 503, 503], "failed"),
        (engine_dead(), [503, 503, 503, 503], "failed"),
        (stuck(), [503, 503, 503, 200], "stuck"),
    ],
    ids=["ok", "old-but-alive", "loading", "draining", "failed", "engine-dead", "stuck"],
)
async def test_what_each_probe_answers(health: Health, statuses: list[int], word: str) -> None:
    async with client_of(make_api(health=health)) as client:
        replies = [await client.get(probe) for probe in PROBES]

    assert [reply.status_code for reply in replies] == statuses
    assert [reply.json()["status"] for reply in replies] == [word] * 4


async def test_a_loading_server_shows_its_phases() -> None:
    async with client_of(make_api(health=loading())) as client:
        body = (await client.get("/startupz")).json()

    assert body["phase"] == "weights"
    assert body["phases"] == [
        {"name": "checkpoint", "done": 0, "total": None, "unit": ""},
        {"name": "weights", "done": 5, "total": 20, "unit": "tensors"},
    ]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_while_loading_completions_say_when_to_come_back_and_the_rest_works(
    path: str, body: dict[str, object]
) -> None:
    api = make_api(health=loading())
    api.generator = None

    reply = await post(api, path, body)
    async with client_of(api) as client:
        models = await client.get("/v1/models")
        metrics = await client.get("/metrics")

    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "5"
    assert reply.json()["error"]["code"] == "server_is_overloaded"
    assert "weights, 25%" in reply.json()["error"]["message"]
    assert models.status_code == metrics.status_code == 200
    assert 'photoninfer_refused_total{cause="loading"} 1.0' in metrics.text


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_draining_server_takes_nothing_new(path: str, body: dict[str, object]) -> None:
    generator = ScriptedGenerator()

    reply = await post(make_api(generator, health=Health(is_ready=True, is_draining=True)), path, body)

    assert reply.status_code == 503
    assert reply.headers["retry-after"]
    assert generator.generations == []


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
async def test_a_failed_server_says_why(path: str, body: dict[str, object]) -> None:
    reply = await post(make_api(health=dead()), path, body)

    assert reply.status_code == 503
    assert reply.json()["error"]["code"] == "engine_dead"
    assert "out of memory" in reply.json()["error"]["message"]


async def test_a_full_server_is_unready_only_where_that_is_asked_for() -> None:
    async with client_of(make_api(health=Health(is_ready=True, is_full=lambda: True))) as client:
        statuses = [(await client.get(probe)).status_code for probe in PROBES]

    assert dict(zip(PROBES, statuses, strict=True)) == {
        "/health": 200,
        "/livez": 200,
        "/readyz": 503,
        "/startupz": 200,
    }
