"""service/logs.py: lines for people and for machines, and the line a request."""

import json
import logging
from collections.abc import Generator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from service.logs import AccessLog, set_up_logs
from service.settings import LogFormat, Settings


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Generator[None, None, None]:
    """set_up_logs replaces the root logger's handlers; pytest's own must come back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


async def answer(http: Request) -> Response:
    await http.body()
    return PlainTextResponse("text of the reply", headers={"X-Request-Id": "req-7"})


async def asked(path: str, body: str = "") -> None:
    app = AccessLog(Starlette(routes=[Route("/{rest:path}", answer, methods=["POST"])]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        await client.post(path, content=body)


def start(form: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(Settings(log_format=form))
    capsys.readouterr()


async def test_a_request_is_one_line_with_its_id_and_without_any_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start("text", capsys)

    await asked("/v1/completions", '{"prompt": "a secret"}')

    (line,) = capsys.readouterr().err.splitlines()
    assert "POST /v1/completions 200 " in line
    assert line.endswith(" req-7")
    assert "secret" not in line
    assert "reply" not in line


async def test_json_lines_have_the_same_in_fields(capsys: pytest.CaptureFixture[str]) -> None:
    start("json", capsys)

    await asked("/v1/completions")

    (entry,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert entry["level"] == "info"
    assert entry["logger"] == "photoninfer.access"
    assert (entry["method"], entry["path"], entry["status"]) == ("POST", "/v1/completions", 200)
    assert entry["request_id"] == "req-7"
    assert entry["milliseconds"] >= 0


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_path_cannot_forge_a_second_line(
    form: LogFormat, capsys: pytest.CaptureFixture[str]
) -> None:
    start(form, capsys)

    await asked("/x%0A00:00:00%20ERROR%20forged%1b[31m")

    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/startupz", "/metrics"])
async def test_probes_and_scrapes_are_not_logged(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    start("text", capsys)

    await asked(path)

    assert capsys.readouterr().err == ""


def test_json_holds_a_traceback_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    start("json", capsys)

    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("service.x").exception("failed: %s", "why")

    (entry,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert entry["message"] == "failed: why"
    assert "ValueError: two\nlines" in entry["error"]


def test_lines_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs(Settings(log_level="warning"))

    logging.getLogger("service.x").info("quiet")
    logging.getLogger("service.x").warning("loud")

    assert capsys.readouterr().err.count("\n") == 1
