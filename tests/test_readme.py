"""What README.md says is what there is."""

import ast
import re
from pathlib import Path

import pytest

from service.options import as_markdown
from service.settings import OPTIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
_COMMAND_FLAGS = {"--api-key", "--config", "--url", "--arch", "--version", "--help"}
_OTHERS = {
    "--no-deps",
    "--port",
    "--text",
    "--tag",
    "--target",
    "--build-arg",
    "--set",
    "--values",
    "--file",
}


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_option_table_is_that_of_the_settings() -> None:
    assert as_markdown() in README, (
        "remake it: python -c 'from service.options import *; print(as_markdown())'"
    )


def test_every_flag_that_is_shown_exists() -> None:
    known = {option.flag for option in OPTIONS} | _COMMAND_FLAGS | _OTHERS
    shown = {
        flag
        for line in README.splitlines()
        if "photoninfer" in line or "make " in line
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)
    }

    assert shown <= known


def test_every_variable_that_is_shown_exists() -> None:
    known = {option.variable for option in OPTIONS} | {
        "PHOTON_CONFIG",
        "PHOTON_HF_TOKEN",
        "PHOTON_API_KEYS",
    }

    assert set(re.findall(r"PHOTON_[A-Z][A-Z_]+", README)) <= known


@pytest.mark.parametrize("code", fenced("python"))
def test_python_examples_can_be_parsed(code: str) -> None:
    ast.parse(code)


def test_links_lead_to_files() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)

    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_nothing_is_left_to_fill_in() -> None:
    assert re.findall(r"^(FIGURES|OPTIONS|TODO)", README, re.MULTILINE) == []
