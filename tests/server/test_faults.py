"""A server that is killed, stopped, left without a disk for its log, or given another clock."""

import ast
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import make_checkpoint
from tests.server.server_process import READY_SECONDS, ServerProcess, Stream, running_server

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
}
YEAR = 365 * 86_400


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def text_of(events: list[str]) -> str:
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def cut_off(stream: Stream) -> list[str]:
    """The events that still came."""
    events = []
    try:
        for event in stream:
            events.append(event)
    except (IncompleteRead, ConnectionError):
        pass
    return events


@pytest.fixture
def big_cache(tmp_path: Path) -> Iterator[Path]:
    """A cache whose half gigabyte does not stay with pytest."""
    yield tmp_path / "cache"
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_a_killed_server_leaves_no_half_files_and_no_port_behind(
    default_model: Path, big_cache: Path
) -> None:
    options = ["--model", str(default_model), "--cache-dir", str(big_cache), "--kv-cache-gib", "0.1"]
    options += ["--port", str(free_port()), "--served-model-name", "m"]
    command = [sys.executable, "-m", "service", "serve", *options]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        while not list(big_cache.glob("weights/tmp-*")):  # it writes prepared weights
            assert first.poll() is None
        first.kill()
    assert list(big_cache.glob("weights/tmp-*")) != []

    with running_server(*options) as second:
        (entry,) = (big_cache / "weights").iterdir()
        assert sorted(path.name for path in entry.iterdir()) == ["checkpoint.json", "weights.safetensors"]
        with second.streaming("/v1/completions", LONG) as stream:
            events = stream.take(2)
            second.process.kill()
            events += cut_off(stream)
    assert "[DONE]" not in events
    assert not any("finish_reason" in event and '"length"' in event for event in events)

    with running_server(*options) as third:
        assert third.call("POST", "/v1/completions", {**LONG, "max_tokens": 3})[0] == 200


def test_a_stopped_server_is_seen_by_probes_and_goes_on_where_it_was(server: ServerProcess) -> None:
    whole = server.call("POST", "/v1/completions", LONG)[1]["choices"][0]["text"]
    process = psutil.Process(server.process.pid)
    with (
        server.streaming("/v1/completions", LONG) as stream,
        closing(HTTPConnection("127.0.0.1", server.port, timeout=1)) as probe,
    ):
        begun = stream.take(2)
        process.send_signal(signal.SIGSTOP)
        try:
            while process.status() != psutil.STATUS_STOPPED:
                pass
            probe.request("GET", "/livez")
            with pytest.raises(TimeoutError):
                probe.getresponse()
        finally:
            process.send_signal(signal.SIGCONT)
        *events, end = [*begun, *stream]
        alive = server.call("GET", "/livez")

    assert end == "[DONE]"
    assert text_of(events) == whole
    assert alive == (200, {"status": "ok"})


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_for_the_log_costs_the_log_and_nothing_else(tmp_path: Path, form: str) -> None:
    model, port = make_checkpoint(tmp_path / "tiny"), free_port()
    options = ["--model", str(model), "--kv-cache-gib", "0.01", "--port", str(port), "--log-format", form]
    command = [sys.executable, "-m", "service", "serve", *options]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stderr=full, text=True) as process:
        server = ServerProcess(process, port=port)
        try:
            until_ready(server)
            statuses = [
                server.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 2})[0]
                for _ in range(100)  # more than a buffer of lines
            ]
            code = server.stop()
        finally:
            process.kill()

    assert statuses == [200] * 100
    assert code == 0


def until_ready(server: ServerProcess) -> None:
    while True:
        try:
            if server.call("GET", "/readyz")[0] == 200:
                return
        except ConnectionRefusedError:
            assert server.process.poll() is None


def test_a_wrong_option_on_a_full_disk_still_ends_with_its_exit_code() -> None:
    command = [sys.executable, "-m", "service", "serve", "--port", "70000"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, timeout=READY_SECONDS, check=False)

    assert done.returncode == 2


CLOCK = """
import time
from pathlib import Path

file, real, real_ns = Path(__file__).with_name("jump"), time.time, time.time_ns
time.time = lambda: real() + float(file.read_text())
time.time_ns = lambda: real_ns() + int(1e9 * float(file.read_text()))
"""


def test_a_clock_that_jumps_ends_nothing_early_and_keeps_nothing_for_ever(
    default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's wall clock is another in this server: it imports `sitecustomize` at its start."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    jump = tmp_path / "jump"
    jump.write_text("0")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with running_server("--offline", "--kv-cache-gib", "0.1", "--heartbeat-limit-seconds", "30") as server:
        with server.streaming("/v1/completions", {**LONG, "timeout": 600}) as stream:
            events = stream.take(2)
            for seconds in (YEAR, -YEAR):
                jump.write_text(str(seconds))
                events += stream.take(5)
                assert server.call("GET", "/livez")[0] == 200
            *more, end = list(stream)
        jump.write_text(str(YEAR))
        created = server.call("POST", "/v1/completions", {**LONG, "max_tokens": 1})[1]["created"]
        jump.write_text(str(-YEAR))
        late = server.call("POST", "/v1/completions", {**LONG, "max_tokens": 6000, "timeout": 0.3})
        metrics = server.metrics()
        code = server.stop()

    assert end == "[DONE]"
    assert len(events + more) >= 60
    assert created > json.loads(events[0])["created"] + YEAR / 2  # the clock did jump
    assert late[0] == 504
    assert 0 < metrics["photoninfer_e2e_request_latency_seconds_sum", ""] < YEAR / 2
    assert 0 <= metrics["photoninfer_queue_time_seconds_sum", ""] < YEAR / 2
    assert code == 0


def test_the_wall_clock_is_read_only_to_be_shown() -> None:
    """Whatever measures or waits uses a clock that does not jump."""
    found = set()
    for path in [*(ROOT / "service").rglob("*.py"), *(ROOT / "openai_api").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"):
                found.add(path.relative_to(ROOT).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "time_ns"}, path

    assert found == {
        "openai_api/answer.py",  # `created`
        "openai_api/api.py",  # `created` of /v1/models
        "openai_api/tracing.py",  # when a span began
        "service/text/chat_template.py",  # the date that a template may ask for
    }
