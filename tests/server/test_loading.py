"""What clients and probes are told before the model is there."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from service import app
from service.errors import ModelError
from service.progress import Progress
from service.settings import Settings


class SlowLoad:
    """Stands for `load`: reports a phase and then waits until it is told how to end."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, settings: Settings, api: Any, progress: Progress) -> Any:
        progress.phase("loading weights")
        progress.update(3, 12, "layers")
        self.reached.set()
        self.go_on.wait()
        raise ModelError("model.safetensors is truncated")


@asynccontextmanager
async def starting(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[SlowLoad, httpx.AsyncClient, "asyncio.Task[int]"]]:
    load = SlowLoad()
    monkeypatch.setattr(app, "load", load)
    listener = app.bind("127.0.0.1", 0)
    with listener:
        server = app.Server(Settings(), listener)
        running = asyncio.create_task(server.run())
        await asyncio.to_thread(load.reached.wait)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base) as client:
            yield load, client, running
        load.go_on.set()
        await running


async def test_probes_tell_loading_from_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async with starting(monkeypatch) as (_, client, _):
        live = await client.get("/livez")
        others = [await client.get(path) for path in ("/health", "/readyz", "/startupz")]

    assert live.status_code == 200
    assert [answer.status_code for answer in others] == [503, 503, 503]
    assert others[0].json()["phases"] == [
        {"name": "loading weights", "done": 3, "total": 12, "unit": "layers"}
    ]


async def test_a_request_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with starting(monkeypatch) as (_, client, _):
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        answer = await client.post("/v1/chat/completions", json=chat)

    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert "loading weights, 25%" in answer.json()["error"]["message"]


async def test_a_model_that_can_not_be_loaded_ends_the_process_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with starting(monkeypatch) as (load, _, running):
        load.go_on.set()
        code = await running

    assert code == 1
    assert "photoninfer: model.safetensors is truncated" in capsys.readouterr().err
