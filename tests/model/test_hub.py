"""Fetching from the hub, against a server on this machine that answers as the hub does."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from service.errors import DownloadError
from service.model.hub import fetch_from_hub, is_hub_name
from service.progress import NoProgress

NAME = "someone/model"
SHA, OLD_SHA = "a" * 40, "b" * 40
WANTED = {
    "config.json": b"{}",
    "generation_config.json": b"{ }",
    "model-00001-of-00002.safetensors": b"one" * 1000,
    "model-00002-of-00002.safetensors": b"two" * 1000,
    "model.safetensors.index.json": b"{  }",
    "tokenizer.json": b"{   }",
    "tokenizer_config.json": b"{    }",
    "special_tokens_map.json": b"{     }",
    "chat_template.jinja": b"template",
}
OTHERS = {
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same once more",
    "original/model.safetensors": b"and again",
    "onnx/config.json": b"for something else",
    "model-old/weights.safetensors": b"of another time",
    "figure.png": b"picture",
}


class Hub:
    """What the server has, what it was asked, and what it refuses."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {**WANTED, **OTHERS}
        self.revisions = {"main": SHA, "old": OLD_SHA, SHA: SHA, OLD_SHA: OLD_SHA}
        self.asked: list[tuple[str, str]] = []  # method and path
        self.tokens: set[str | None] = set()
        self.refusal: tuple[int, str, str] | None = None  # status, code, where the path must contain it
        self.hangs_up = False  # instead of an answer
        self.endpoint = ""

    @property
    def downloaded(self) -> set[str]:
        prefix = f"/{NAME}/resolve/"
        return {
            path.removeprefix(prefix).partition("/")[2]
            for method, path in self.asked
            if method == "GET" and path.startswith(prefix)
        }


def object_id(content: bytes) -> str:
    """What stands for a file's content in the cache."""
    return hashlib.sha1(content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    hub: Hub  # given by the subclass that a server is made with

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append((self.command, path))
        self.hub.tokens.add(self.headers.get("Authorization"))
        if self.hub.hangs_up:
            self.close_connection = True
        elif self.hub.refusal is not None and self.hub.refusal[2] in path:
            self.answer(self.hub.refusal[0], b"{}", {"X-Error-Code": self.hub.refusal[1]})
        elif path.startswith(f"/api/models/{NAME}/"):
            self.describe(*path.removeprefix(f"/api/models/{NAME}/").split("/"))
        elif path.startswith(f"/{NAME}/resolve/"):
            self.send(*path.removeprefix(f"/{NAME}/resolve/").split("/", 1))
        elif path == f"/api/models/{NAME}":
            self.describe("revision", "main")
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815  the name that the server calls

    def describe(self, kind: str, revision: str) -> None:
        if revision not in self.hub.revisions:
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": object_id(content)}
                for name, content in self.hub.files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        else:
            names = [{"rfilename": name} for name in self.hub.files]
            about = {"id": NAME, "sha": self.hub.revisions[revision], "siblings": names}
            self.answer(200, json.dumps(about).encode())

    def send(self, revision: str, name: str) -> None:
        if name not in self.hub.files:
            self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = self.hub.files[name]
        headers = {"X-Repo-Commit": self.hub.revisions[revision], "ETag": f'"{object_id(content)}"'}
        self.answer(200, content, headers)

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Silent."""


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As where nobody has set anything for the hub, and no token is stored."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    huggingface_hub.close_session()  # it keeps what it read of the environment
    yield
    huggingface_hub.close_session()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HandlerOfHub", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def fetch(hub: Hub, cache: Path, name: str = NAME, **options: Any) -> Path:
    arguments: dict[str, Any] = {"revision": None, "token": None, "offline": False, **options}
    return fetch_from_hub(name, cache_dir=cache, progress=NoProgress(), endpoint=hub.endpoint, **arguments)


def refusal(hub: Hub, cache: Path, **options: Any) -> str:
    with pytest.raises(DownloadError) as caught:
        fetch(hub, cache, **options)
    return str(caught.value)


def test_only_the_files_that_are_needed_are_fetched(hub: Hub, cache: Path) -> None:
    folder = fetch(hub, cache)

    assert folder.is_relative_to(cache)
    assert hub.downloaded == set(WANTED)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == WANTED


def test_a_second_start_fetches_nothing_again(hub: Hub, cache: Path) -> None:
    first = fetch(hub, cache)
    hub.asked.clear()

    assert fetch(hub, cache) == first
    assert hub.downloaded == set()


def test_the_token_is_sent_with_every_request(hub: Hub, cache: Path) -> None:
    fetch(hub, cache, token="hf_secret")
    assert hub.tokens == {"Bearer hf_secret"}


def test_without_a_token_none_is_sent(hub: Hub, cache: Path) -> None:
    fetch(hub, cache)
    assert hub.tokens == {None}


@pytest.mark.parametrize("revision", ["old", OLD_SHA])
def test_the_revision_that_is_named_is_fetched(hub: Hub, cache: Path, revision: str) -> None:
    assert fetch(hub, cache, revision=revision).name == OLD_SHA
    assert fetch(hub, cache).name == SHA


def test_a_revision_that_is_not_there_is_named(hub: Hub, cache: Path) -> None:
    assert refusal(hub, cache, revision="v9") == "someone/model has no revision v9."


@pytest.mark.parametrize("status", [401, 404])
def test_an_unknown_model_is_named_with_what_may_be_wrong(hub: Hub, cache: Path, status: int) -> None:
    hub.refusal = (status, "RepoNotFound", "/api/models/")

    message = refusal(hub, cache)

    assert message.startswith("someone/model is not on the hub, or is private")
    assert "HF_TOKEN or --hf-token-file" in message
    assert "./models/name" in message


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("where", ["/api/models/", "/resolve/"])
def test_a_gated_model_says_what_to_do(hub: Hub, cache: Path, status: int, where: str) -> None:
    hub.refusal = (status, "GatedRepo", where)

    message = refusal(hub, cache)

    assert message.startswith("someone/model is gated: accept its terms")
    assert "--hf-token-file" in message


@pytest.mark.parametrize("status", [401, 403, 500])
def test_another_refusal_is_told_as_the_hub_gave_it(hub: Hub, cache: Path, status: int) -> None:
    hub.refusal = (status, "", "/api/models/")

    message = refusal(hub, cache, token="hf_secret")

    assert NAME in message
    assert str(status) in message
    assert "hf_secret" not in message


def test_a_model_as_pickles_only_is_refused_without_fetching_them(hub: Hub, cache: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}

    assert "has no model.safetensors; weights as pickles" in refusal(hub, cache)
    assert "pytorch_model.bin" not in hub.downloaded


def test_a_model_as_gguf_only_says_what_to_do(hub: Hub, cache: Path) -> None:
    hub.files = {"model-q4.gguf": b"GGUF", "README.md": b""}
    assert "holds GGUF files only: download one of them and give its path" in refusal(hub, cache)


def test_offline_uses_what_was_fetched_and_asks_nobody(hub: Hub, cache: Path) -> None:
    folder = fetch(hub, cache)
    hub.asked.clear()

    assert fetch(hub, cache, offline=True) == folder
    assert hub.asked == []


def test_offline_without_the_model_says_so(hub: Hub, cache: Path) -> None:
    assert refusal(hub, cache, offline=True) == f"{NAME} is not in {cache / 'hub'}, and offline is set."
    fetch(hub, cache)
    message = refusal(hub, cache, offline=True, revision="old")
    assert message == f"{NAME} at revision old is not in {cache / 'hub'}, and offline is set."


def test_the_variable_of_the_hub_for_offline_counts_too(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(hub, cache) == f"{NAME} is not in {cache / 'hub'}, and HF_HUB_OFFLINE is set."
    assert hub.asked == []


def test_a_hub_that_can_not_be_reached_is_told_and_the_cache_serves(hub: Hub, cache: Path) -> None:
    folder = fetch(hub, cache)
    hub.endpoint = "http://127.0.0.1:9"  # nobody listens at the port of `discard`

    assert fetch(hub, cache) == folder
    assert "the hub can't be reached" in refusal(hub, cache, name="someone/other")


def test_a_hub_that_hangs_up_is_told(hub: Hub, cache: Path) -> None:
    hub.hangs_up = True
    assert f"{NAME} could not be fetched: " in refusal(hub, cache)


def test_a_download_that_broke_off_is_not_taken_for_the_model(hub: Hub, cache: Path) -> None:
    hub.refusal = (403, "GatedRepo", "model-00002")
    refusal(hub, cache)

    assert "offline is set" in refusal(hub, cache, offline=True)

    hub.refusal = None
    assert {path.name for path in fetch(hub, cache).iterdir()} == set(WANTED)


def test_a_cache_that_can_not_be_written_is_told(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "could not be fetched: " in refusal(hub, tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("a/b", True),
        ("meta-llama/Llama-3.2-1B.v_1", True),
        ("model", False),
        ("./models/name", False),
        ("/models/name", False),
        ("a/b/c", False),
        ("../b", False),
        ("a/", False),
        ("a b/c", False),
        ("a/b\n", False),
        ("", False),
    ],
)
def test_names_of_the_hub_are_told_from_paths(name: str, is_one: bool) -> None:
    assert is_hub_name(name) is is_one
