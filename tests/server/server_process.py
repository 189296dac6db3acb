"""`photoninfer serve` in a process of its own, and raw HTTP to it."""

import json
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

READY_SECONDS = 120  # much more than it takes: the machine that tests may be busy
EVENT_SECONDS = 60


@dataclass(slots=True)
class ServerProcess:
    """A running server. Its standard error is read all the time, so that it never blocks."""

    process: "subprocess.Popen[str]"
    lines: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_until_ended(self) -> int:
        """Its exit code."""
        return self.process.wait(READY_SECONDS)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait_until_ended()

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status, and the parsed JSON body."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=EVENT_SECONDS)) as connection:
            answer = _ask(connection, method, path, body)
            return answer.status, json.loads(answer.read())

    def metrics(self) -> dict[tuple[str, str], float]:
        """Our samples by name and the value of their first label ("" without labels)."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=EVENT_SECONDS)) as connection:
            text = _ask(connection, "GET", "/metrics", None).read().decode()
        return {
            (sample.name, next(iter(sample.labels.values()), "")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("photoninfer_")
        }

    def wait_until_idle(self) -> dict[tuple[str, str], float]:
        """The metrics once nothing runs, waits or holds a block any more."""
        pause = threading.Event()
        for _ in range(20 * EVENT_SECONDS):
            metrics = self.metrics()
            held = metrics["photoninfer_kv_blocks", "used"]
            if not (
                metrics["photoninfer_requests_running", ""]
                or metrics["photoninfer_requests_waiting", ""]
                or held
            ):
                return metrics
            pause.wait(0.05)
        raise AssertionError("requests are still running, or blocks are lost")

    @contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> "Iterator[Stream]":
        """A streamed request, as raw events; leaving closes the socket at once."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=EVENT_SECONDS)
        try:
            answer = _ask(connection, "POST", path, {**body, "stream": True})
            assert answer.status == 200, answer.read()
            yield Stream(answer)
        finally:
            if connection.sock is not None:
                connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


@dataclass(slots=True)
class Stream:
    """Events of an answer as they arrive."""

    answer: HTTPResponse

    def __iter__(self) -> Iterator[str]:
        """What stands after `data: `; comments are left out."""
        while line := self.answer.readline().decode().rstrip("\n"):
            blank = self.answer.readline()
            assert blank in (b"\n", b""), blank
            if line.startswith("data: "):
                yield line.removeprefix("data: ")

    def take(self, count: int) -> list[str]:
        """The next events."""
        events = iter(self)
        return [next(events) for _ in range(count)]


def _ask(connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None) -> HTTPResponse:
    payload = None if body is None else json.dumps(body)
    connection.request(method, path, payload, {"Content-Type": "application/json"} if body else {})
    return connection.getresponse()


@contextmanager
def running_server(*arguments: str) -> Iterator[ServerProcess]:
    """Start `photoninfer serve --port 0` with more arguments, wait until it is ready, end it at the end."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, bufsize=1)
    server = ServerProcess(process)
    ready: queue.Queue[str | None] = queue.Queue()
    reader = threading.Thread(target=_read_log, args=(server, ready), daemon=True)
    reader.start()
    try:
        line = ready.get(timeout=READY_SECONDS)
        assert line is not None, f"the server ended before it was ready:\n{server.log}"
        server.port = int(line.removesuffix("/v1").rpartition(":")[2])
        yield server
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()


def _read_log(server: ServerProcess, ready: "queue.Queue[str | None]") -> None:
    assert server.process.stderr is not None
    for line in server.process.stderr:
        server.lines.append(line.rstrip("\n"))
        if line.startswith("Ready: "):
            ready.put(line.strip())
    ready.put(None)
