"""A real browser on the chat page of a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.programs import require
from tests.server.server_process import ServerProcess, running_server

_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[ServerProcess]:
    with running_server("--offline", "--kv-cache-gib", "0.25", "--max-running", "8") as server:
        yield server


@pytest.fixture(
    scope="module"
)  # not longer: Playwright keeps an event loop running, and others need theirs
def browser() -> Iterator[Browser]:
    program = require("chromium", "chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=list(_FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    """The page, ready, in a browser that has never seen it. Whatever it complains about fails the test."""
    context = browser.new_context(base_url=f"http://127.0.0.1:{server.port}", reduced_motion="reduce")
    context.set_default_timeout(30_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console", lambda told: complaints.append(told.text) if "Content Security" in told.text else None
    )
    page.goto("/")
    page.locator("#model", has_text="SmolLM2").wait_for()
    yield page
    context.close()
    assert complaints == []
