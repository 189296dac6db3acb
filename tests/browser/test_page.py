"""The chat page, as a person uses it."""

import json
import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Dialog, Page, Route, expect

from openai_api.page import FOLDER
from tests.server.server_process import ServerProcess

COMPLETIONS = "**/v1/chat/completions"
ATTACKS = [
    "<script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "[click](javascript:window.hacked=1)",
    '<a href="data:text/html,<script>window.hacked=1</script>">x</a>',
    '<svg onload="window.hacked = 1"><style>*{display:none}</style></svg>',
    '<iframe srcdoc="<script>parent.hacked = 1</script>"></iframe>',
    "```html\n<script>window.hacked = 1</script>\n```",
    '$<img src=x onerror="window.hacked = 1">$',
]


def settings(page: Page, **values: str) -> None:
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)
        page.get_by_label(label.replace("_", " "), exact=True).blur()
    page.get_by_role("button", name="Done").click()


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def answers(page: Page) -> Any:
    return page.locator("article.assistant")


def wait_for_answer(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def events(*chunks: dict[str, Any], is_whole: bool = True) -> str:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join(lines) + ("data: [DONE]\n\n" if is_whole else "")


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def answer_with(page: Page, body: str, status: int = 200, **headers: str) -> None:
    """Instead of the server."""

    def fulfil(route: Route) -> None:
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, body=body, headers={"content-type": kind, **headers})

    page.route(COMPLETIONS, fulfil)


def failure(page: Page, status: int, code: str, message: str, **headers: str) -> None:
    body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    answer_with(page, json.dumps(body), status, **headers)


def test_a_question_is_answered_with_its_figures(page: Page) -> None:
    settings(page, Temperature="0", Longest_reply="24")
    send(page, "What is the capital of France?")

    expect(answers(page).locator(".body")).to_contain_text("Paris")
    expect(page.locator("article.user .body")).to_have_text("What is the capital of France?")
    figures = answers(page).locator(".figures")
    expect(figures).to_have_text(
        re.compile(r"first token \d+ ms · [\d.]+ tokens/s · \d+ tokens · prompt \d+")
    )
    expect(page.locator("#conversations .title")).to_have_text("What is the capital of France?")


def test_settings_go_with_the_request(page: Page) -> None:
    settings(page, Temperature="0.5", Top_p="0.9", Top_k="7", Min_p="0.1", Seed="3", Longest_reply="2")
    settings(page, System_prompt="Be brief.", Stop_strings="END\nSTOP")
    with page.expect_request(COMPLETIONS) as sent:
        send(page, "Hello")
    body: dict[str, Any] = sent.value.post_data_json or {}

    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 2}
    assert body | numbers == body
    assert body["stop"] == ["END", "STOP"]
    wait_for_answer(page)
    expect(answers(page).locator(".figures")).to_contain_text("cut off at the longest allowed length")


def test_stop_ends_the_answer_on_the_server_too(page: Page, server: ServerProcess) -> None:
    settings(page, Temperature="1")
    send(page, "Count from one to five thousand, in words.")
    expect(answers(page).locator(".body")).to_contain_text(re.compile(r"\w{3}"))
    page.get_by_role("button", name="Stop").click()

    expect(answers(page).locator(".error")).to_have_text("Stopped.")
    server.wait_until_idle()
    wait_for_answer(page)


def test_regenerate_edit_and_resend(page: Page) -> None:
    settings(page, Temperature="0", Longest_reply="8")
    send(page, "Say hello.")
    wait_for_answer(page)
    first = answers(page).locator(".body").inner_text()
    page.get_by_role("button", name="Regenerate").click()
    wait_for_answer(page)
    expect(answers(page)).to_have_count(1)
    expect(answers(page).locator(".body")).to_have_text(first)

    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("What is two plus two?")
    page.get_by_role("button", name="Save and send").click()
    wait_for_answer(page)
    expect(page.locator("article.user .body")).to_have_text("What is two plus two?")
    expect(answers(page)).to_have_count(1)


def test_conversations_outlive_a_reload_and_can_be_searched_renamed_and_deleted(page: Page) -> None:
    answer_with(page, events(delta(content="An answer about **cats**.")))
    send(page, "First question")
    wait_for_answer(page)
    page.get_by_role("button", name="New chat").click()
    send(page, "Second question")
    wait_for_answer(page)
    page.reload()

    titles = page.locator("#conversations .title")
    expect(titles).to_have_text(["Second question", "First question"])
    titles.last.click()
    expect(answers(page).locator("strong")).to_have_text("cats")
    page.get_by_label("Search conversations").fill("second")
    expect(titles).to_have_text(["Second question"])
    page.get_by_label("Search conversations").fill("")
    page.get_by_role("button", name="Rename: First question").click()
    page.get_by_label("New title").fill("Cats")
    page.keyboard.press("Enter")
    expect(titles.last).to_have_text("Cats")
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete: Cats").click()
    expect(titles).to_have_text(["Second question"])


@pytest.mark.parametrize(
    "kept",
    [
        "{",
        '"x"',
        "5",
        '{"a": 1}',
        "[1, null]",
        '[{"messages": 5}]',
        '[{"messages": [null, {"role": "user"}]}]',
    ],
)
def test_storage_that_was_spoilt_does_no_harm(page: Page, kept: str) -> None:
    for name in ("conversations", "settings"):
        page.evaluate("([name, kept]) => localStorage.setItem(`photoninfer.${name}`, kept)", [name, kept])
    page.evaluate(
        'localStorage.setItem(\'photoninfer.settings\', \'{"system": null, "temperature": "x"}\')'
    )
    page.reload()
    answer_with(page, events(delta(content="Still here.")))
    send(page, "Hello")

    expect(answers(page).last.locator(".body")).to_have_text("Still here.")


def test_two_tabs_keep_each_other_s_conversations(page: Page) -> None:
    other = page.context.new_page()
    other.goto("/")
    for tab, text in ((page, "In the first tab"), (other, "In the second tab")):
        answer_with(tab, events(delta(content="Yes.")))
        send(tab, text)
        wait_for_answer(tab)
    page.reload()

    titles = page.locator("#conversations .title")
    expect(titles).to_have_text(["In the second tab", "In the first tab"])


def test_an_export_can_be_imported(page: Page) -> None:
    answer_with(page, events(delta(content="Kept.")))
    send(page, "Keep this")
    wait_for_answer(page)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = download.value.path().read_bytes()
    page.once("dialog", lambda dialog: dialog.accept())
    page.set_input_files(
        "#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": exported}
    )
    expect(page.locator("#conversations .title")).to_have_text(["Keep this", "Keep this"])

    told: list[str] = []

    def note(dialog: Dialog) -> None:
        told.append(dialog.message)
        dialog.accept()

    page.once("dialog", note)
    page.set_input_files(
        "#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": b"[1"}
    )
    expect(page.locator("#announcer")).to_have_text("This file is no export of conversations.")
    assert told == ["This file is no export of conversations."]


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_is_written_can_run(page: Page, attack: str) -> None:
    answer_with(page, events(delta(content=attack), delta(reasoning_content=attack)))
    send(page, attack)
    wait_for_answer(page)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": attack,
        "reasoning": attack,
        "error": attack,
        "figures": attack,
    }
    message |= {"calls": [{"id": attack, "name": attack, "arguments": attack}]}
    content = {
        "format": "photoninfer-conversations",
        "conversations": [{"title": attack, "messages": [message]}],
    }
    page.once("dialog", lambda dialog: dialog.accept())
    buffer = json.dumps(content).encode()
    page.set_input_files(
        "#import-file", {"name": "x.json", "mimeType": "application/json", "buffer": buffer}
    )
    page.locator("#conversations .title").first.click()
    for link in page.locator("article a").all():
        assert not (link.get_attribute("href") or "").startswith(("javascript", "data"))

    assert page.evaluate("window.hacked") is None
    assert page.locator("article :is(script, iframe, img, svg, style)").count() == 0


def test_code_tables_formulas_and_links(page: Page) -> None:
    text = (
        "```python\nprint('hi')\n```\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n"
        "$x_1 + x_2 = \\frac{a}{b}$ and [a link](https://example.org)"
    )
    answer_with(page, events(delta(content=text)))
    send(page, "Show")
    wait_for_answer(page)

    expect(page.locator(".code .hljs-string")).to_have_text("'hi'")
    expect(page.locator("td").first).to_have_text("1")
    expect(page.locator(".math")).to_have_text("$x_1 + x_2 = \\frac{a}{b}$")
    expect(page.locator("article a")).to_have_attribute("rel", "noopener noreferrer")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".code .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print('hi')\n"


def test_thinking_is_folded_and_tool_calls_are_shown(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Paris"}'}}
    thought = delta(reasoning_content="Hm, the city.")
    answer_with(page, events(thought, delta(tool_calls=[call]), delta(tool_calls=[rest])))
    send(page, "Weather?")
    wait_for_answer(page)

    expect(page.locator(".assistant .thinking summary")).to_have_text("Thoughts")
    expect(page.locator(".assistant .thinking .prose")).not_to_be_visible()
    expect(page.locator(".call summary")).to_have_text("Tool call: weather")
    expect(page.locator(".call pre")).to_have_text('{\n  "city": "Paris"\n}')


def test_a_busy_server_says_how_long_to_wait(page: Page) -> None:
    failure(page, 503, "server_is_overloaded", "The queue is full.", **{"retry-after": "1"})
    send(page, "Hello")
    error = answers(page).locator(".error")

    expect(error).to_have_text("The server is busy. Try again in 1 s.")
    expect(error).to_have_text("The server was busy. You can try again now.")
    page.unroute(COMPLETIONS)
    answer_with(page, events(delta(content="Now it works.")))
    page.get_by_role("button", name="Try again").click()
    expect(answers(page).locator(".body")).to_have_text("Now it works.")


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (401, "invalid_api_key", "This server needs an API key. Enter one in the settings. Why."),
        (400, "context_length_exceeded", "The conversation is longer than the model's context."),
        (400, "invalid_value", "Why."),
    ],
)
def test_refusals_are_told_as_what_they_are(page: Page, status: int, code: str, told: str) -> None:
    failure(page, status, code, "Why.")
    send(page, "Hello")

    expect(answers(page).locator(".error")).to_contain_text(told)
    wait_for_answer(page)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (events(delta(content="Half"), is_whole=False), "The connection ended before the reply was whole."),
        (events(delta(content="Half"), {"error": {"message": "The engine died."}}), "The engine died."),
    ],
)
def test_a_stream_that_breaks_keeps_what_came(page: Page, body: str, told: str) -> None:
    answer_with(page, body)
    send(page, "Hello")

    expect(answers(page).locator(".error")).to_have_text(told)
    expect(answers(page).locator(".body")).to_have_text("Half")


def test_a_lost_connection(page: Page) -> None:
    page.route(COMPLETIONS, lambda route: route.abort())
    send(page, "Hello")

    expect(answers(page).locator(".error")).to_have_text("The connection to the server was lost.")


def test_phases_are_shown_while_the_model_loads(page: Page) -> None:
    report: dict[str, Any] = {
        "status": "loading",
        "phases": [{"name": "loading weights", "done": 3, "total": 4}],
    }
    page.route("**/health", lambda route: route.fulfill(status=503, json=report))
    page.reload()

    expect(page.locator("#banner")).to_contain_text("The model is loading: loading weights 75%")
    expect(page.locator("#banner progress")).to_have_attribute("value", "3")
    page.unroute("**/health")
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#model")).to_contain_text("SmolLM2")


def test_the_status_view_reads_the_metrics(page: Page) -> None:
    page.get_by_role("button", name="Status").click()

    expect(page.locator("#status-line")).to_have_text("Ready.")
    labels = ["Running requests", "Waiting requests", "KV cache in use", "Tokens per second"]
    expect(page.locator("#plots figcaption span")).to_have_text(labels)
    expect(page.locator("#plots figcaption b").first).to_have_text(re.compile(r"^\d+$"))


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context(base_url=f"http://127.0.0.1:{server.port}")
    page = context.new_page()

    def models(route: Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.fulfill(json={"data": [{"id": "guarded"}]})
        else:
            route.fulfill(status=401, json={"error": {"message": "No key.", "code": "invalid_api_key"}})

    page.route("**/v1/models", models)
    page.goto("/")
    expect(page.get_by_role("dialog")).to_contain_text("API key")
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.get_by_label("API key").fill("wrong")
    page.get_by_label("API key").blur()
    expect(page.locator("#setting-key-hint")).to_contain_text("No key.")
    page.get_by_label("API key").fill("secret")
    page.get_by_label("API key").blur()
    expect(page.locator("#model")).to_have_text("guarded")
    assert page.evaluate("JSON.stringify(localStorage)").find("secret") == -1
    assert faults == []
    context.close()


def test_the_keyboard_is_enough(page: Page) -> None:
    answer_with(page, events(delta(content="Yes.")))
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("Line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    wait_for_answer(page)

    expect(page.locator("article.user .body")).to_have_text("Line one\nline two", use_inner_text=True)
    expect(page.locator("#announcer")).to_have_text("The answer is complete.")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_has_no_serious_barrier(page: Page, width: int, scheme: Any) -> None:
    page.set_viewport_size({"width": width, "height": 760})
    page.emulate_media(color_scheme=scheme)
    code = (
        "```python\nx = "
        + "1 + " * 60
        + "1  # a comment\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote"
    )
    answer_with(page, events(delta(content=code), delta(reasoning_content="Thought.")))
    send(page, "A very long question " + "w" * 300)
    wait_for_answer(page)
    for opened in (None, "#open-settings", "#open-status"):
        if opened is not None:
            if width < 700:
                page.get_by_role("button", name="Show conversations").click()
            page.locator(opened).click()
        results = Axe().run(page)
        serious = [
            each for each in results.response["violations"] if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], results.generate_report()
        if opened is not None:
            page.keyboard.press("Escape")
            if width < 700:
                page.get_by_role("button", name="Hide conversations").click()

    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_libraries_are_those_that_are_named() -> None:
    named = (FOLDER / "vendor" / "README.md").read_text()
    for file in (FOLDER / "vendor").glob("*.js"):
        assert f"| {file.name} |" in named
        assert (file.parent / f"{file.stem}.LICENSE").is_file()
