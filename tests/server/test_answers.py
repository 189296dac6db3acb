"""What clients get from a real process with the real default model."""

import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from service.model.checkpoint import open_checkpoint
from service.text.tokenizer import Tokenizer
from tests.conftest import require_program
from tests.server.server_process import ServerProcess

CASES = json.loads((Path(__file__).parents[1] / "cases" / "smol_ref.json").read_text())["cases"]
NEAR_TIE = 1e-2  # closer than this, BLAS may turn two ids round
MODEL = "SmolLM2-135M-Instruct"
CAPITAL: Any = CASES[0]["messages"]
PARIS = CASES[0]["text_to_eos"]


@pytest.fixture
def client(server: ServerProcess) -> "openai.OpenAI":
    return openai.OpenAI(base_url=server.base, api_key="none", max_retries=0)


def ids_before_a_near_tie(case: dict[str, Any]) -> list[int]:
    certain = next((i for i, margin in enumerate(case["margin"]) if margin < NEAR_TIE), len(case["margin"]))
    return list(case["output_ids"][:certain])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["messages"][-1]["content"][:20])
def test_greedy_ids_are_the_golden_ones(
    case: dict[str, Any], server: ServerProcess, default_model: Path
) -> None:
    wanted = ids_before_a_near_tie(case)
    assert len(wanted) >= 20
    tokenizer = Tokenizer(open_checkpoint(default_model).tokenizer)

    status, reply = server.call(
        "POST",
        "/v1/completions",
        {
            "prompt": case["prompt_ids"],
            "max_tokens": len(wanted),
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "logprobs": 0,
        },
    )

    assert status == 200, reply
    choice = reply["choices"][0]
    assert choice["text"] == tokenizer.decode(wanted, skip_special_tokens=False)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(case["logprob"][: len(wanted)], abs=1e-3)


def test_the_text_of_a_chat_is_the_golden_text(client: openai.OpenAI) -> None:
    for case in CASES:
        if case["text_to_eos"] is None:
            continue
        reply = client.chat.completions.create(
            model=MODEL, messages=case["messages"], temperature=0, max_tokens=64
        )

        assert reply.choices[0].message.content == case["text_to_eos"]


def test_the_sdk_lists_the_model_and_chats_plain_and_streamed_alike(client: openai.OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    plain = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0)
    stream: Any = client.chat.completions.create(
        model=MODEL, messages=CAPITAL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert names == [MODEL]
    assert plain.choices[0].message.content == PARIS
    assert plain.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == PARIS
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert plain.usage.prompt_tokens == len(CASES[0]["prompt_ids"])


def test_the_second_time_the_prompt_comes_from_the_prefix_cache(client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=8)
    again = client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=0, max_tokens=8)

    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 32  # two blocks of 16 of 37 tokens
    assert again.choices[0].message.content == PARIS


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    texts = [
        client.chat.completions.create(
            model=MODEL, messages=CAPITAL, temperature=1.5, seed=seed, max_tokens=24
        )
        .choices[0]
        .message.content
        for seed in (7, 7, 8)
    ]

    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_cut_the_golden_text_plain_and_streamed_under_load(server: ServerProcess) -> None:
    """Wherever they begin and end within its tokens."""
    text, chosen = CASES[1]["text_to_eos"], random.Random(1)
    body = {"messages": CASES[1]["messages"], "temperature": 0, "max_tokens": 64}
    stops = [
        text[start : start + chosen.randrange(2, 13)]
        for start in (chosen.randrange(len(text) - 2) for _ in range(12))
    ]

    def plain(stop: str) -> tuple[str, str]:
        status, reply = server.call("POST", "/v1/chat/completions", {**body, "stop": [stop]})
        assert status == 200, reply
        return reply["choices"][0]["message"]["content"], reply["choices"][0]["finish_reason"]

    def streamed(stop: str) -> tuple[str, str]:
        with server.streaming("/v1/chat/completions", {**body, "stop": [stop]}) as stream:
            *chunks, done = [json.loads(event)["choices"][0] for event in stream if event != "[DONE]"]
        pieces = [chunk["delta"].get("content", "") for chunk in chunks]
        return "".join(pieces), done["finish_reason"]

    with ThreadPoolExecutor(8) as pool:
        found = [(pool.submit(plain, stop), pool.submit(streamed, stop)) for stop in stops]

    for stop, (whole, pieces) in zip(stops, found, strict=True):
        assert whole.result() == pieces.result() == (text[: text.find(stop)], "stop"), stop


def test_choices_of_one_seed_differ_and_come_again_plain_and_streamed(server: ServerProcess) -> None:
    body = {"messages": CAPITAL, "temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 16}
    plain = [server.call("POST", "/v1/chat/completions", body)[1] for _ in range(2)]
    joined = [""] * 3
    with server.streaming("/v1/chat/completions", body) as stream:
        for event in stream:
            for choice in [] if event == "[DONE]" else json.loads(event)["choices"]:
                joined[choice["index"]] += choice["delta"].get("content", "")

    texts = [[choice["message"]["content"] for choice in reply["choices"]] for reply in plain]
    assert texts[0] == texts[1] == joined
    assert len(set(texts[0])) > 1
    assert [choice["index"] for choice in plain[0]["choices"]] == [0, 1, 2]
    assert plain[0]["usage"]["prompt_tokens"] == len(CASES[0]["prompt_ids"])
    server.wait_until_idle()


def test_refusals_come_as_the_sdk_errors_they_mean(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.chat.completions.create(model="gpt-5", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=CAPITAL, temperature=3)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="word " * 9000)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.conformance("curl", "curl -N shows whole events as they come")
def test_curl_gets_whole_events_and_the_end_mark(server: ServerProcess) -> None:
    body = json.dumps({"messages": CAPITAL, "temperature": 0, "stream": True})
    command = [require_program("curl"), "-sSN", "--max-time", "60", f"{server.base}/chat/completions"]
    done = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body],
        capture_output=True,
        text=True,
        check=True,
    )

    *events, last, nothing = done.stdout.split("\n\n")
    assert nothing == ""
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content") or "" for delta in deltas) == PARIS
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == 1


def test_metrics_count_what_was_done(server: ServerProcess) -> None:
    before = server.wait_until_idle()
    server.call("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 5, "ignore_eos": True})
    after = server.wait_until_idle()

    def rise(name: str, label: str = "") -> float:
        return after[name, label] - before[name, label]

    assert rise("photoninfer_requests_total", "length") == 1
    assert rise("photoninfer_generation_tokens_total") == 5
    assert rise("photoninfer_time_to_first_token_seconds_count") == 1
    assert rise("photoninfer_inter_token_latency_seconds_count") == 4
    assert after["photoninfer_build_info", "0.1.0"] == 1


def test_an_idle_server_does_not_compute(server: ServerProcess) -> None:
    server.wait_until_idle()
    process = psutil.Process(server.process.pid)

    before = sum(process.cpu_times()[:2])
    psutil.wait_procs([process], timeout=1)  # it does not end: a second passes
    spent = sum(process.cpu_times()[:2]) - before

    assert spent < 0.3  # a loop that spins would take a second


def test_probes_say_that_all_is_well(server: ServerProcess) -> None:
    for path in ("/health", "/livez", "/readyz", "/startupz"):
        assert server.call("GET", path) == (200, {"status": "ok"})


def test_the_log_has_a_line_a_request_and_never_its_text(server: ServerProcess) -> None:
    server.call("POST", "/v1/completions", {"prompt": "xylophone", "max_tokens": 2, "stop": ["zeppelin"]})
    server.call(
        "POST", "/v1/chat/completions", {"messages": [{"role": "xylophone", "content": "zeppelin"}]}
    )

    assert "POST /v1/completions 200" in server.log
    assert "POST /v1/chat/completions 400" in server.log
    assert "xylophone" not in server.log
    assert "zeppelin" not in server.log
