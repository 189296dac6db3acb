"""Fixtures and rules for all tests."""

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from service.errors import DownloadError
from service.model.default_model import fetch_default_model
from service.progress import NoProgress
from service.settings import Settings

IS_CI = bool(os.environ.get("CI"))  # noqa: TID251  not a setting of the server


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a test that skips itself has failed: what it needs was to be installed."""
    report = yield
    if IS_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure in CI: {report.longrepr}"
    return report


def require_program(name: str) -> str:
    """The path of a program that a test runs; without it the test is skipped, and fails in CI."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"the program {name} is not installed")
    return found


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's file, in the user's cache, where it stays for the next run."""
    try:
        return fetch_default_model(Settings().cache_path, NoProgress(), offline=False)
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see no PHOTON_* variable of the person who runs them."""
    names: list[Any] = [name for name in os.environ if name.startswith("PHOTON_")]  # noqa: TID251
    for name in [*names, "PORT"]:
        monkeypatch.delenv(name, raising=False)
