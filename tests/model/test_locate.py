"""What a user calls a model is found: paths before names on the hub, and the default without a name."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.errors import DownloadError, ModelError, SettingsError
from service.model.default_model import default_model_path
from service.model.locate import fetch_model, find_model
from service.progress import NoProgress
from service.settings import Settings
from tests.checkpoints import CHATML, make_checkpoint, write_tokenizer
from tests.gguf_files import make_gguf


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the hub is asked for; it answers with a folder."""
    found: dict[str, Any] = {}

    def fetch(name: str, **options: Any) -> Path:
        found.update(options, name=name)
        return tmp_path / "from the hub"

    monkeypatch.setattr("service.model.locate.fetch_from_hub", fetch)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return found


def settings(tmp_path: Path, model: Path | str | None, **options: Any) -> Settings:
    name = None if model is None else str(model)
    return Settings(model=name, cache_dir=str(tmp_path / "cache"), **options)


def test_a_directory_is_opened(directory: Path, tmp_path: Path) -> None:
    checkpoint = find_model(settings(tmp_path, directory), NoProgress())

    assert checkpoint.path == directory
    assert not (tmp_path / "cache").exists()


def test_a_path_may_begin_with_the_home_folder(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert fetch_model(settings(tmp_path, f"~/{directory.name}"), NoProgress()) == directory


@pytest.mark.parametrize("weight_cache", [True, False])
def test_a_gguf_file_goes_through_the_cache_unless_told_otherwise(
    tmp_path: Path, weight_cache: bool
) -> None:
    make_gguf(tmp_path / "model.gguf")

    options = settings(tmp_path, tmp_path / "model.gguf", weight_cache=weight_cache)
    checkpoint = find_model(options, NoProgress())

    assert checkpoint.config.architecture == "llama"
    assert (tmp_path / "cache" / "weights").exists() is weight_cache


def test_without_a_name_it_is_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = settings(tmp_path, None, offline=True)
    with pytest.raises(DownloadError, match="photoninfer pull"):
        find_model(options, NoProgress())

    path = default_model_path(options.cache_path)
    path.parent.mkdir(parents=True)
    make_gguf(path)
    monkeypatch.setattr("service.model.default_model.NUM_BYTES", path.stat().st_size)

    assert find_model(options, NoProgress()).path == path


def test_the_shared_cache_is_looked_into_first_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    path = default_model_path(shared)
    path.parent.mkdir(parents=True)
    make_gguf(path)
    monkeypatch.setattr("service.model.default_model.NUM_BYTES", path.stat().st_size)
    find_model(Settings(cache_dir=str(shared)), NoProgress())  # as an image is built
    before = {each: each.stat().st_mtime_ns for each in shared.rglob("*") if each.is_file()}
    options = settings(tmp_path, None, shared_cache_dir=str(shared))
    (path.parent / "tmp-of-others").mkdir()

    assert find_model(options, NoProgress()).path == path
    assert {each: each.stat().st_mtime_ns for each in shared.rglob("*") if each.is_file()} == before
    assert (path.parent / "tmp-of-others").exists()
    assert not (tmp_path / "cache").exists()


def test_what_the_shared_cache_lacks_is_fetched_into_the_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(name: str, **options: Any) -> Path:
        asked.append((options["cache_dir"], options["offline"]))
        if options["cache_dir"] == tmp_path / "shared":
            raise DownloadError("not there")
        return tmp_path

    monkeypatch.setattr("service.model.locate.fetch_from_hub", fetch)
    options = settings(tmp_path, "org/model", shared_cache_dir=str(tmp_path / "shared"))

    assert fetch_model(options, NoProgress()) == tmp_path
    assert asked == [(tmp_path / "shared", True), (tmp_path / "cache", False)]


def test_a_name_is_asked_of_the_hub_with_all_that_was_set(tmp_path: Path, asked: dict[str, Any]) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    options = settings(
        tmp_path, "org/model", revision="v2", hf_token_file=str(tmp_path / "token"), offline=True
    )

    assert fetch_model(options, NoProgress()) == tmp_path / "from the hub"

    assert {key: asked[key] for key in ("name", "revision", "token", "offline", "cache_dir")} == {
        "name": "org/model",
        "revision": "v2",
        "token": "hf_secret",
        "offline": True,
        "cache_dir": tmp_path / "cache",
    }


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, asked: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="hf_token_file"):
        fetch_model(settings(tmp_path, "org/model", hf_token_file="/nowhere/token"), NoProgress())
    assert asked == {}


def test_a_path_that_exists_goes_before_a_name_on_the_hub(
    tmp_path: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert fetch_model(settings(tmp_path, "org/model"), NoProgress()) == Path("org/model")
    assert asked == {}


@pytest.mark.parametrize("name", ["llama", "./org/model", "/nowhere/model.gguf", "a/b/c"])
def test_what_is_neither_is_refused(tmp_path: Path, asked: dict[str, Any], name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory, and no name on the hub") as caught:
        fetch_model(settings(tmp_path, name), NoProgress())
    assert str(caught.value).startswith(f"{name}: ")
    assert asked == {}


@pytest.mark.parametrize("named", ["", "tokenizer.json"], ids=["folder", "file"])
def test_another_tokenizer_takes_the_place_of_the_models(
    directory: Path, tmp_path: Path, named: str
) -> None:
    write_tokenizer(tmp_path, vocab_size=280)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    options = settings(tmp_path, directory, tokenizer=str(tmp_path / named))

    checkpoint = find_model(options, NoProgress())

    assert checkpoint.tokenizer.chat_template == "other"
    assert checkpoint.tokenizer.tokenizer_json == (tmp_path / "tokenizer.json").read_text()
    assert find_model(settings(tmp_path, directory), NoProgress()).tokenizer.chat_template == CHATML


def test_another_tokenizer_that_is_not_there_is_named(directory: Path, tmp_path: Path) -> None:
    options = settings(tmp_path, directory, tokenizer=str(tmp_path / "none"))
    with pytest.raises(ModelError, match=f"{tmp_path / 'none'} is missing"):
        find_model(options, NoProgress())
