"""One server with the default model for all tests that do not stop theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.server_process import ServerProcess, running_server


@pytest.fixture(scope="session")
def server(default_model: Path) -> Iterator[ServerProcess]:
    with running_server("--offline", "--kv-cache-gib", "0.25", "--max-running", "8") as server:
        yield server
