"""How the process starts, refuses to start, and ends."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.server.server_process import READY_SECONDS, ServerProcess, running_server

ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 6000, "ignore_eos": True}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command that ends by itself."""
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=READY_SECONDS, check=False)


def until_unready(server: ServerProcess, word: str = "ok") -> None:
    """Wait until /readyz fails. `word`: what it calls the status."""
    pause = threading.Event()
    for _ in range(600):
        status, body = server.call("GET", "/readyz")
        if status == 503 and body["status"] == word:
            return
        pause.wait(0.05)
    raise AssertionError("/readyz did not fail")


def test_sigterm_lets_a_stream_end_and_refuses_new_requests(default_model: Path) -> None:
    with running_server("--offline", "--kv-cache-gib", "0.25") as server:
        body = {**ENDLESS, "max_tokens": 120, "stream_options": {"include_usage": True}}
        with server.streaming("/v1/completions", body) as stream:
            stream.take(1)
            server.process.send_signal(signal.SIGTERM)
            until_unready(server, "draining")
            status, refusal = server.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1})
            *events, usage, end = list(stream)
        code = server.wait_until_ended()

    assert status == 503
    assert "shutting down" in refusal["error"]["message"]
    assert end == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 120
    assert json.loads(events[-1])["choices"][0]["finish_reason"] == "length"
    assert code == 0


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stream_that_does_not_end_in_time_ends_with_an_error_event(
    default_model: Path, signals: int
) -> None:
    """After drain_seconds; or at the second signal, whatever drain_seconds says."""
    patience = "0.2" if signals == 1 else "600"
    with running_server("--offline", "--kv-cache-gib", "0.25", "--drain-seconds", patience) as server:
        with server.streaming("/v1/completions", ENDLESS) as stream:
            stream.take(1)
            server.process.send_signal(signal.SIGTERM)
            if signals == 2:
                until_unready(server, "draining")
                server.process.send_signal(signal.SIGINT)
            last = list(stream)[-1]
        code = server.wait_until_ended()

    assert json.loads(last)["error"]["type"] == "server_error"
    assert code == 1
    assert "1 requests unfinished" in server.log


def test_a_port_in_use_is_said_at_once(server: ServerProcess) -> None:
    ended = run("serve", "--port", str(server.port), "--offline")

    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines() == [
        f"photoninfer: Can't listen on 127.0.0.1:{server.port}: Address already in use. "
        "Choose others: --host, --port."
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "/no/such/model"], 1, "/no/such/model"),
        (["--model", "/etc/hostname"], 1, "/etc/hostname"),
        (["--port", "70000"], 2, "port"),
        (["--temperature", "1"], 2, "--temperature"),
        (["--config", "/no/such.toml"], 2, "/no/such.toml"),
        (["--max-running", "0"], 2, "--max-running"),
        (["--device", "tpu"], 2, "device"),
    ],
)
def test_what_can_not_be_served_is_refused_in_words(arguments: list[str], code: int, words: str) -> None:
    ended = run("serve", "--offline", "--port", "0", *arguments)

    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


def test_a_directory_serves_under_the_names_it_was_given(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "tiny")
    names = ("--served-model-name", "mine", "--served-model-name", "other")
    with running_server(
        "--model", str(path), "--kv-cache-gib", "0.01", "--max-body-mib", "1", *names
    ) as server:
        listed = [model["id"] for model in server.call("GET", "/v1/models")[1]["data"]]
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        status, reply = server.call("POST", "/v1/chat/completions", {**chat, "model": "other"})
        unknown = server.call("POST", "/v1/chat/completions", {**chat, "model": "tiny"})
        no_route = server.call("GET", "/v1/nothing")
        wrong_method = server.call("GET", "/v1/chat/completions")
        slash = server.call("POST", "/v1/chat/completions/", {**chat, "model": "mine"})
        no_json = raw(server, b"{nonsense")
        too_long = raw(server, b"", announced=(1 << 20) + 1)
        code = server.stop()

    assert listed == ["mine", "other"]
    assert status == 200
    assert reply["usage"]["completion_tokens"] <= 4
    assert slash[0] == 200
    answers = (unknown, no_route, wrong_method, no_json, too_long)
    assert [answer[0] for answer in answers] == [404, 404, 405, 400, 413]
    assert all(answer[1]["error"]["message"] for answer in answers)
    assert unknown[1]["error"]["code"] == "model_not_found"
    assert code == 0


def test_a_full_queue_is_told_to_routers_where_that_is_asked_for(default_model: Path) -> None:
    limits = ("--kv-cache-gib", "0.25", "--max-running", "1", "--max-waiting", "1", "--unready-when-full")
    short = {"prompt": "Hi", "max_tokens": 1}
    with running_server("--offline", *limits) as server, ThreadPoolExecutor(1) as pool:
        with server.streaming("/v1/completions", ENDLESS) as running:
            running.take(1)
            waiting = pool.submit(server.call, "POST", "/v1/completions", short)
            until_unready(server)
            healthy = server.call("GET", "/health")[0]
            refused = server.call("POST", "/v1/completions", short)
        answered = waiting.result()
        free = server.call("GET", "/readyz")[0]

    assert (healthy, free, answered[0]) == (200, 200, 200)
    assert refused[0] == 503
    assert refused[1]["error"]["code"] == "server_is_overloaded"


def raw(server: ServerProcess, body: bytes, announced: int | None = None) -> tuple[int, Any]:
    """`announced`: a Content-Length to send without a body: the answer must not wait for it."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body) if announced is None else announced))
        connection.endheaders(body or None)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()
