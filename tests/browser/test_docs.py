"""The API's page, as a person reads it."""

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.server.server_process import ServerProcess


def open_docs(page: Page, server: ServerProcess) -> None:
    page.goto(f"http://127.0.0.1:{server.port}/docs")


def test_operations_lead_to_their_types(page: Page, server: ServerProcess) -> None:
    open_docs(page, server)
    page.get_by_text("POST/v1/chat/completions The next message").click()
    page.get_by_role("link", name="ChatRequest").first.click()

    row = page.locator("#ChatRequest").get_by_role("row").filter(has=page.get_by_text("top_k", exact=True))
    expect(row).to_be_visible()
    expect(row).to_contain_text("integer (minimum -1, maximum 2147483647) | null")
    serious = [
        each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_key_is_asked_for_where_one_is_needed(page: Page, server: ServerProcess) -> None:
    def document(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer sk-good":
            route.continue_(headers={})
        else:
            route.fulfill(status=401, json={"error": {"message": "An API key is needed."}})

    page.route("**/openapi.json", document)
    open_docs(page, server)
    expect(page.get_by_role("alert")).to_have_text("An API key is needed.")
    page.get_by_label("API key").fill("sk-good")
    page.get_by_role("button", name="Show").click()

    expect(page.get_by_text("GET/v1/models The names")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_empty()
    expect(page.get_by_label("API key")).to_be_hidden()
