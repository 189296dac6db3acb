"""Two servers behind a real nginx are restarted in turn under load: nobody notices."""

import json
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path

from tests.programs import require
from tests.server.server_process import ServerProcess, running_server

CLIENTS, TOKENS = 3, 24

CONFIG = """
daemon off;
worker_processes 1;
error_log stderr crit;
pid {folder}/nginx.pid;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream photoninfer {{
    server 127.0.0.1:{ports[0]} max_fails=0;
    server 127.0.0.1:{ports[1]} max_fails=0;
  }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://photoninfer;
      proxy_buffering off;
      proxy_read_timeout 600s;
      proxy_next_upstream error timeout http_503 non_idempotent;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def nginx(folder: Path, ports: tuple[int, int]) -> Iterator[int]:
    port = free_port()
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, ports=ports, port=port))
    process = subprocess.Popen([require("nginx", "nginx-light"), "-c", str(config)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "nginx ended"
        yield port
    finally:
        process.terminate()
        process.wait()


class Client(threading.Thread):
    """Asks for one stream after another until it is told to stop; notes what was not whole."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.port, self.stop = port, stop
        self.num_whole = 0
        self.faults: list[str] = []

    def run(self) -> None:
        while not self.stop.is_set():
            connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                self.one(connection)
            except OSError as error:
                self.faults.append(repr(error))
            finally:
                connection.close()

    def one(self, connection: HTTPConnection) -> None:
        body = {
            "prompt": "Once",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        body["stream_options"] = {"include_usage": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse()
        content = reply.read().decode()
        events = [line.removeprefix("data: ") for line in content.splitlines() if line.startswith("data: ")]
        is_whole = reply.status == 200 and events[-1:] == ["[DONE]"]
        if is_whole and json.loads(events[-2])["usage"]["completion_tokens"] == TOKENS:
            self.num_whole += 1
        else:
            self.faults.append(f"{reply.status} {content[-300:]}")


def start(stack: ExitStack, port: int) -> ServerProcess:
    arguments = ("--offline", "--kv-cache-gib", "0.1", "--max-running", "4", "--port", str(port))
    return stack.enter_context(running_server(*arguments))


def test_a_rolling_restart_loses_no_stream(default_model: Path, tmp_path: Path) -> None:
    ports, stop = (free_port(), free_port()), threading.Event()
    with ExitStack() as stack:
        servers = [start(stack, port) for port in ports]
        clients = [Client(stack.enter_context(nginx(tmp_path, ports)), stop) for _ in range(1)]
        clients += [Client(clients[0].port, stop) for _ in range(CLIENTS - 1)]
        for client in clients:
            client.start()
        for index, port in enumerate(ports):
            before = sum(client.num_whole for client in clients)
            servers[index].process.send_signal(signal.SIGTERM)
            assert servers[index].process.wait(60) == 0
            servers[index] = start(stack, port)
            while sum(client.num_whole for client in clients) < before + CLIENTS and not faults(clients):
                servers[index].call("GET", "/readyz")
        stop.set()
        for client in clients:
            client.join(120)

    assert faults(clients) == []
    assert sum(client.num_whole for client in clients) >= 2 * CLIENTS


def faults(clients: list[Client]) -> list[str]:
    return [fault for client in clients for fault in client.faults]
