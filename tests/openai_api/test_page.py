"""The chat page's files, as HTTP serves them."""

import pytest

from openai_api.page import FOLDER
from tests.openai_api.scripted import client_of
from tests.openai_api.test_auth import guarded

FILES = [
    "/",
    "/docs",
    *(f"/static/{path.relative_to(FOLDER)}" for path in sorted(FOLDER.rglob("*")) if path.is_file()),
]


@pytest.mark.parametrize("path", FILES)
async def test_every_file_is_open_and_lets_nothing_foreign_in(path: str) -> None:
    async with client_of(guarded()) as client:
        reply = await client.get(path)
        again = await client.get(path, headers={"if-none-match": reply.headers["etag"]})

    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["cache-control"] == "no-cache"
    assert again.status_code in ((200, 304) if path in ("/", "/docs") else (304,))


@pytest.mark.parametrize(
    "path",
    ["/static/", "/static/none.js", "/static/../page.py", "/static/%2e%2e/page.py", "/static/vendor"],
)
async def test_nothing_else_is_given_out(path: str) -> None:
    async with client_of(guarded()) as client:
        reply = await client.get(path)

    assert reply.status_code in (401, 404)
    assert "error" in reply.json()


@pytest.mark.parametrize("path", FILES)
async def test_scripts_are_modules_of_ours_and_markup_holds_none(path: str) -> None:
    async with client_of(guarded()) as client:
        reply = await client.get(path)

    if path.endswith(".js"):
        assert "javascript" in reply.headers["content-type"]
    if path == "/":
        assert " onclick" not in reply.text
        assert "style=" not in reply.text
        assert 'src="/static/main.js"' in reply.text
