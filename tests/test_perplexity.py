"""`photoninfer perplexity`, against transformers on a tiny model."""

import json
import subprocess
import sys
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.model.huggingface import read_tokenizer
from service.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint, oracle_logits

TEXT = "hello world, the cat sat on the mat. " * 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("perplexity") / "model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def losses(model: Path, ids: list[int]) -> list[float]:
    """Minus the log-probability of every id behind the first, by transformers."""
    logits = oracle_logits(model, ids).astype(np.float64)
    sums = np.log(np.exp(logits).sum(axis=1))
    return [float(sums[i] - logits[i, ids[i + 1]]) for i in range(len(ids) - 1)]


def run(model: Path, text: Path, *more: str) -> Any:
    """What it prints; where it fails, what it says."""
    command = [sys.executable, "-m", "service", "perplexity", str(model), "--text", str(text)]
    done = subprocess.run([*command, "--device", "cpu", *more], capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@pytest.mark.parametrize(("window", "stride"), [(512, 512), (40, 40), (40, 15), (41, 41)])
def test_every_token_counts_once_behind_its_window(
    model: Path, text: Path, window: int, stride: int
) -> None:
    ids = Tokenizer(read_tokenizer(model)).encode(TEXT)
    wanted: list[float] = []
    for start in range(0, max(1, len(ids) - window + stride), stride):
        part = ids[start : start + window]
        known = 1 if start == 0 else max(1, window - stride)
        wanted += losses(model, part)[known - 1 :]
    found = run(model, text, "--window", str(window), "--stride", str(stride))

    assert found["tokens"] == len(wanted)
    assert found["perplexity"] == pytest.approx(exp(np.mean(wanted)), rel=1e-4)


def test_int8_is_near(model: Path, text: Path) -> None:
    floats = run(model, text)
    int8 = run(model, text, "--quantization", "int8", "--group-size", "32")

    assert int8["numerics"] == "cpu-float32-int8-32"
    assert int8["perplexity"] != floats["perplexity"]
    assert int8["perplexity"] == pytest.approx(floats["perplexity"], rel=0.03)


@pytest.mark.parametrize(
    ("content", "more", "told"),
    [
        (b"", [], "has 0 tokens; at least 2"),
        (b"\xff\xfe\x00", [], "can't be read as text"),
        (
            b"fine text",
            ["--window", "100000"],
            "window=100000: it takes a number from 2 to the model's context, 512",
        ),
        (b"fine text", ["--window", "10", "--stride", "11"], "stride=11: it takes a number from 1 to"),
        (b"fine text", ["--stride", "0"], "stride=0"),
    ],
)
def test_what_can_not_be_measured_is_told(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    content: bytes,
    more: list[str],
    told: str,
) -> None:
    (tmp_path / "text.txt").write_bytes(content)

    assert told in run(model, tmp_path / "text.txt", *more)


def test_a_missing_file_is_named(model: Path) -> None:
    assert "/no/file can't be read as text" in run(model, Path("/no/file"))
