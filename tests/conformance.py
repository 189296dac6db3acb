"""docs/conformance.md: what clients did with a real server, in tests that are marked with `conformance`.

`python -m tests.conformance` runs these tests and writes the file; tests/test_conformance.py checks that no
row is missing or out of date.
"""

import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.npm import OPENAI_VERSION

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "conformance.md"
HEAD = """# Clients

What clients do with PhotonInfer, each unchanged and over a socket, in tests that every change runs. Where
it says "request alone", the tool's request was sent without the tool. `python -m tests.conformance` writes
this file.

| client | version | what it does | result |
| --- | --- | --- | --- |
"""


class Row(msgspec.Struct, frozen=True, order=True):
    """One thing that a client does."""

    client: str
    does: str


def row_of(mark: Any) -> Row:
    client, does = mark.args
    return Row(client, does)


def rows_of(document: str) -> list[tuple[Row, str]]:
    """The rows of the file, with their results."""
    lines = document.removeprefix(HEAD).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(Row(client, does), result) for client, _, does, result in cells]


class _Results:
    """A plugin of pytest that keeps the outcomes of marked tests."""

    def __init__(self) -> None:
        self.outcomes: dict[Row, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if call.when == "call" or report.outcome != "passed":
            for mark in item.iter_markers("conformance"):
                self.outcomes.setdefault(row_of(mark), []).append(report.outcome)
        return report


def _version(client: str) -> str:
    if client == "openai for Node":
        return OPENAI_VERSION
    if client == "curl":
        told = subprocess.run(["curl", "--version"], capture_output=True, text=True, check=True)
        return told.stdout.split()[1]
    try:
        return version(client)
    except ModuleNotFoundError:
        return "request alone"


def _written(outcomes: dict[Row, list[str]]) -> Iterable[str]:
    for row, results in sorted(outcomes.items()):
        result = "works" if set(results) == {"passed"} else ", ".join(sorted(set(results)))
        yield f"| {row.client} | {_version(row.client)} | {row.does} | {result} |\n"


def main() -> int:
    results = _Results()
    code = pytest.main(["-q", "-m", "conformance", str(ROOT / "tests")], plugins=[results])
    DOCUMENT.write_text(HEAD + "".join(_written(results.outcomes)))
    print(f"{DOCUMENT} has {len(results.outcomes)} rows, of Python {platform.python_version()}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
