"""A real Prometheus on a real server: every expression of alerts and dashboard means something."""

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs import require
from tests.server.server_process import ServerProcess, running_server

FILES = Path(__file__).parents[2] / "deploy" / "helm" / "photoninfer" / "files"
ALERTS = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((FILES / "dashboard.json").read_text())["panels"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUIET = ("photoninfer_refused_total", "photoninfer_aborts_total")  # no series before the first of its kind
SECONDS = 60


@pytest.fixture(scope="module")
def prometheus(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that has scraped a server which has worked."""
    folder = tmp_path_factory.mktemp("prometheus")
    program = require("prometheus", "prometheus")
    with running_server("--offline", "--kv-cache-gib", "0.1") as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(FILES / "alerts.yaml")],
            "scrape_configs": [
                {"job_name": "p", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        flags = [
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
        ]
        process = subprocess.Popen([program, *flags], cwd=folder, stderr=subprocess.DEVNULL)
        try:
            wait_for_scrapes(f"http://{address}", server)
            yield f"http://{address}"
        finally:
            process.kill()
            process.wait()


def wait_for_scrapes(address: str, server: ServerProcess) -> None:
    """Work for the server, until Prometheus knows of rates."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        server.call("POST", "/v1/completions", {"prompt": "One two three " * 12, "max_tokens": 4})
        try:
            if query(address, "sum(rate(photoninfer_generation_tokens_total[1m])) > 0"):
                return
        except OSError:
            time.sleep(0.2)  # it is still starting
    pytest.fail("Prometheus has scraped nothing.")


def query(address: str, expression: str) -> list[Any]:
    found = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{address}/api/v1/query?{found}", timeout=10) as reply:
        result: list[Any] = json.load(reply)["data"]["result"]
    return result


def test_promtool_finds_nothing() -> None:
    command = [require("promtool", "prometheus"), "check", "rules", str(FILES / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_line_of_the_dashboard_has_data(prometheus: str, expression: str) -> None:
    found = query(prometheus, expression)

    assert found or any(name in expression for name in QUIET)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_can_be_evaluated_and_is_quiet(prometheus: str, alert: dict[str, Any]) -> None:
    assert query(prometheus, alert["expr"]) == []
    left = alert["expr"].rpartition(" > ")[0].split(" > ")[0]
    left = left.replace('{status=~"5.."}', "")  # there were none
    assert query(prometheus, left) != []
    assert set(alert) == {"alert", "expr", "for", "labels", "annotations"}


def test_the_scrape_holds_the_names_that_gateways_read(prometheus: str) -> None:
    for name in (
        "num_requests_waiting",
        "num_requests_running",
        "kv_cache_usage_perc",
        "cache_config_info",
    ):
        assert query(prometheus, f'{{__name__="vllm:{name}"}}'), name
