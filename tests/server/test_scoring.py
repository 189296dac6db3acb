"""Loglikelihoods of prompts, asked for as lm-eval's `local-completions` does, against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.model.checkpoint import open_checkpoint
from service.text.tokenizer import Tokenizer
from tests.server.server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"
TEXTS = [
    "The tide comes in twice a day, because the earth turns under two bulges of water, one towards the "
    "moon and one away from it. Sailors knew the hours of the tides long before they knew the reason.",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2\n\nprint(area(2.0))\n",
    "Café prices rose by 12 % in Zürich; 東京 stayed as it was. 🙂",
    "A",
]


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer(open_checkpoint(default_model).tokenizer)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def wanted(default_model: Path, prompts: list[list[int]]) -> list[NDArray[np.float64]]:
    """Logprobs [len(prompt), vocab] of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers reads GGUF files with it")
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(default_model.parent), gguf_file=default_model.name, dtype=torch.float32
    )
    model.eval()
    with torch.no_grad():
        return [
            torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1).numpy() for ids in prompts
        ]


def ask(server: ServerProcess, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    """lm-eval's own request."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    status, reply = server.call("POST", "/v1/completions", {**body, "temperature": 0, **fields})
    assert status == 200, reply
    choices: list[dict[str, Any]] = reply["choices"]
    return choices


def test_loglikelihoods_are_those_of_transformers(
    server: ServerProcess, prompts: list[list[int]], wanted: list[NDArray[np.float64]]
) -> None:
    assert sum(map(len, prompts)) > 100

    for choice, ids, logprobs in zip(ask(server, prompts), prompts, wanted, strict=True):
        found = choice["logprobs"]
        own = [float(row[token_id]) for row, token_id in zip(logprobs, ids[1:], strict=False)]
        assert found["token_logprobs"][0] is None
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-3)
        assert len(found["token_logprobs"]) == len(ids) + 1
        # greedy or not, as lm-eval sees it: no other token is likelier than the prompt's own
        for i in range(1, len(ids)):
            is_greedy = max(found["top_logprobs"][i].values()) == found["token_logprobs"][i]
            second, first = np.sort(logprobs[i - 1])[-2:]
            if first - second > 1e-2:
                assert is_greedy == (int(logprobs[i - 1].argmax()) == ids[i])


def test_asking_again_gives_the_same_though_the_prompt_is_cached(
    server: ServerProcess, prompts: list[list[int]]
) -> None:
    first, again = ask(server, prompts[0]), ask(server, prompts[0])

    found, repeated = (choice[0]["logprobs"]["token_logprobs"] for choice in (first, again))
    assert repeated[1:] == pytest.approx(found[1:], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_stands_before_the_reply(
    server: ServerProcess, tokenizer: Tokenizer, prompts: list[list[int]], stream: bool
) -> None:
    if stream:
        body = {"prompt": TEXTS[2], "max_tokens": 4, "echo": True, "logprobs": 0, "temperature": 0}
        with server.streaming("/v1/completions", {**body, "stream": True}) as events:
            pieces = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
        text = "".join(piece["text"] for piece in pieces)
        offsets = [at for piece in pieces if piece["logprobs"] for at in piece["logprobs"]["text_offset"]]
    else:
        (choice,) = ask(server, TEXTS[2], max_tokens=4, logprobs=0)
        text, offsets = choice["text"], choice["logprobs"]["text_offset"]

    assert text.startswith(TEXTS[2])
    assert len(offsets) == len(prompts[2]) + 4
    assert offsets == sorted(offsets)
    assert text[offsets[len(prompts[2])] :] == text.removeprefix(TEXTS[2])


def test_the_prompt_alone(server: ServerProcess, prompts: list[list[int]]) -> None:
    (choice,) = ask(server, prompts[1], max_tokens=0)

    assert choice["text"] == TEXTS[1]
    assert len(choice["logprobs"]["tokens"]) == len(prompts[1])
    assert choice["finish_reason"] == "length"


def test_prompt_logprobs_of_a_chat(server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 2}
    status, reply = server.call("POST", "/v1/chat/completions", {**body, "return_token_ids": True})

    assert status == 200, reply
    ids, scores = reply["prompt_token_ids"], reply["prompt_logprobs"]
    assert len(ids) == len(scores) == reply["usage"]["prompt_tokens"]
    assert scores[0] is None
    for token_id, entries in zip(ids[1:], scores[1:], strict=True):
        assert 2 <= len(entries) <= 3
        assert entries[str(token_id)]["logprob"] <= 0
        ranked = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in ranked[:2]] == [1, 2]
    assert len(reply["choices"][0]["token_ids"]) == reply["usage"]["completion_tokens"]
