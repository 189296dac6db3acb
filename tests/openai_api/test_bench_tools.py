"""Requests as tools for load and evaluation send them, with all their extra fields."""

from typing import Any

import pytest

from tests.openai_api.scripted import ENDPOINTS, MODEL, events_of, post
from tests.openai_api.whole_server import whole_server

CHAT_URL, COMPLETIONS_URL = (url for url, _ in ENDPOINTS)
USAGE = {"include_usage": True}
TEXT = "a b c."
PART = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    # vllm/benchmarks/lib/endpoint_request_func.py
    "vllm bench serve, completions": (
        COMPLETIONS_URL,
        {
            "prompt": TEXT, "temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 8,
            "logprobs": None, "stream": True, "stream_options": USAGE, "ignore_eos": True,
        },
    ),
    "vllm bench serve, chat": (
        CHAT_URL,
        {
            "messages": PART, "temperature": 0.0, "max_completion_tokens": 8, "stream": True,
            "stream_options": USAGE, "ignore_eos": True,
        },
    ),
    # sglang/bench_serving.py
    "sglang.bench_serving": (
        COMPLETIONS_URL,
        {
            "prompt": TEXT, "temperature": 0.0, "best_of": 1, "max_tokens": 8, "stream": True,
            "ignore_eos": True, "stream_options": USAGE,
        },
    ),
    # guidellm/backends/openai
    "guidellm": (
        CHAT_URL,
        {
            "messages": PART, "stream": True, "max_tokens": 8, "max_completion_tokens": 8,
            "stream_options": USAGE | {"continuous_usage_stats": True}, "stop": None, "ignore_eos": True,
        },
    ),
    "llama-benchy": (
        CHAT_URL,
        {
            "messages": [{"role": "user", "content": TEXT}], "max_tokens": 8, "stream": True,
            "stream_options": USAGE, "return_token_ids": True, "ignore_eos": True,
        },
    ),
    "genai-perf": (
        CHAT_URL,
        {
            "messages": [{"role": "user", "name": None, "content": TEXT}], "stream": True,
            "max_completion_tokens": 8, "min_tokens": 8, "stream_options": USAGE,
        },
    ),
    # lm_eval/models/openai_completions.py: local-completions, a loglikelihood
    "lm-eval": (
        COMPLETIONS_URL,
        {
            "prompt": [[5, 6, 7, 8]], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True,
        },
    ),
}  # fmt: skip


def named(tool: str) -> Any:
    """A parameter of the test below, marked as what this tool does."""
    name, _, kind = tool.partition(", ")
    does = f"{kind or 'its'} requests, with all their fields"
    return pytest.param(*REQUESTS[tool], id=tool, marks=pytest.mark.conformance(name, does))


@pytest.mark.parametrize(("url", "body"), [named(tool) for tool in REQUESTS])
async def test_nothing_of_it_is_refused_or_ignored(url: str, body: dict[str, Any]) -> None:
    async with whole_server() as server:
        reply = await post(server.api, url, {"model": MODEL, **body})

    assert reply.status_code == 200, reply.text
    assert "x-ignored-params" not in reply.headers
    last = events_of(reply)[-2] if body.get("stream") else reply.json()
    assert last["usage"]["completion_tokens"] == (8 if body.get("stream") else 1)
