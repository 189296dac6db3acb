"""Traces of a real process: switched on, switched off, and with nobody to take them."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from service.environment import load_settings
from service.errors import SettingsError
from service.settings import Settings
from service.traces import make_tracer_provider
from tests.checkpoints import make_checkpoint
from tests.server.server_process import running_server

TINY = ("--kv-cache-gib", "0.01", "--served-model-name", "tiny", "--log-format", "json")
COMPLETION = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}


@dataclass(slots=True)
class Collector:
    """What a collector on the loopback interface was sent."""

    port: int = 0
    status: int = 200
    paths: list[str] = field(default_factory=list)
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    asked: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)  # until then it answers nobody


@contextmanager
def collecting(status: int = 200, *, is_stuck: bool = False) -> Iterator[Collector]:
    collector = Collector(status=status)
    if not is_stuck:
        collector.go_on.set()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            collector.requests.append(ExportTraceServiceRequest.FromString(body))
            collector.asked.set()
            collector.go_on.wait()
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield collector
    finally:
        collector.go_on.set()
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def test_a_collector_gets_the_spans_at_the_latest_when_the_server_ends(model: str) -> None:
    with collecting() as collector:
        endpoint = f"http://127.0.0.1:{collector.port}"
        with running_server("--model", model, *TINY, "--trace-endpoint", endpoint) as server:
            status, _ = server.call("POST", "/v1/completions", COMPLETION)
            code = server.stop()

    assert (status, code) == (200, 0)
    assert set(collector.paths) == {"/v1/traces"}
    (resource,) = (each for request in collector.requests for each in request.resource_spans)
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    (span,) = resource.scope_spans[0].spans
    assert about["service.name"] == "photoninfer"
    assert about["service.version"]
    assert span.name == "POST /v1/completions"
    assert [event.name for event in span.events] == ["queue", "prefill", "decode"]


@pytest.mark.parametrize("fault", ["absent", "refusing", "stuck"])
def test_a_collector_s_faults_hurt_no_request(
    model: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")  # milliseconds
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    with collecting(500, is_stuck=fault == "stuck") as collector:
        port = 9 if fault == "absent" else collector.port
        endpoint = ("--trace-endpoint", f"http://127.0.0.1:{port}")
        with running_server("--model", model, *TINY, *endpoint) as server:
            first = server.call("POST", "/v1/completions", COMPLETION)
            if fault != "absent":
                assert collector.asked.wait(60)
            statuses = [server.call("POST", "/v1/completions", COMPLETION)[0] for _ in range(12)]
            alive = server.call("GET", "/livez")[0]
            code = server.stop()

    assert [first[0], *statuses, alive] == [200] * 14
    assert code == 0
    assert "Traceback" not in server.log


def test_nothing_of_opentelemetry_is_imported_unless_it_is_wanted() -> None:
    program = (
        "import sys; from service.app import Server; from service.settings import Settings; "
        "import socket, asyncio; s = Server(Settings(), socket.socket()); s._make_app(); "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_without_the_packages_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(SettingsError, match=r"trace_endpoint is 'http://c:4318', .*photoninfer\[otel\]"):
        make_tracer_provider(Settings(trace_endpoint="http://c:4318"))


@pytest.mark.parametrize("text", ["collector:4318", "grpc://c:4317", "http://", "http://a b"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"PHOTON_TRACE_ENDPOINT is .*an address such as http"):
        load_settings({}, {"PHOTON_TRACE_ENDPOINT": text})


@pytest.mark.parametrize("text", ["-0.1", "1.1", "often"])
def test_a_ratio_is_from_0_to_1(text: str) -> None:
    with pytest.raises(SettingsError, match="a number from 0 to 1"):
        load_settings({}, {"PHOTON_TRACE_SAMPLE_RATIO": text})
