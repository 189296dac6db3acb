"""docs/conformance.md is the run that it claims to be."""

import importlib
import subprocess
from pathlib import Path
from typing import Any

from tests.conformance import DOCUMENT, ROOT, Row, row_of, rows_of


def marks_in(path: Path) -> list[Any]:
    """Every `conformance` mark of a module: on tests, on their parameters, or on the whole."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = importlib.import_module(name)
    marks: list[Any] = []
    for attribute, value in vars(module).items():
        if attribute == "pytestmark" or attribute.startswith("test_"):
            own = value if isinstance(value, list) else getattr(value, "pytestmark", [])
            marks += own
            for mark in own:
                if mark.name == "parametrize":
                    marks += [each for case in mark.args[1] for each in getattr(case, "marks", ())]
    return [mark for mark in marks if mark.name == "conformance"]


def test_every_marked_test_has_its_row_and_worked() -> None:
    found = subprocess.run(
        ["grep", "-rlE", "mark.conformance", str(ROOT / "tests")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    modules = [Path(each) for each in found if Path(each).name.startswith("test_")]
    marked = {row_of(mark) for path in modules for mark in marks_in(path)}
    written = rows_of(DOCUMENT.read_text())

    assert [row for row, _ in written] == sorted(marked), "remake it: python -m tests.conformance"
    assert {result for _, result in written} == {"works"}
    assert Row("openai for Node", "chat, text, tools, parsing, responses, models, errors") in marked
