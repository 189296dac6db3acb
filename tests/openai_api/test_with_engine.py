"""From HTTP to blocks: the real engine on a fake model, a real tokenizer, and all between."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.batch import Batch
from tests.engine.fake_runner import VOCAB
from tests.openai_api.scripted import events_of, make_app, post, served
from tests.openai_api.whole_server import LETTERS, Whole, chat, whole_server


async def until(condition: Callable[[], bool]) -> None:
    """Let everybody run until something has happened."""
    while not condition():  # noqa: ASYNC110  # what ends a request has no event, and needs none
        await asyncio.sleep(0)


@settings(max_examples=40, deadline=None)
@given(
    text=st.text("abcxyz .\n", min_size=1, max_size=12),
    n=st.integers(1, 3),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=2), max_size=2),
    flags=st.fixed_dictionaries({"skip_special_tokens": st.booleans(), "ignore_eos": st.booleans()}),
)
async def test_a_stream_folds_to_the_plain_reply(
    text: str, n: int, stop: list[str], flags: dict[str, bool]
) -> None:
    asked = chat(text, n=n, stop=stop, logprobs=True, top_logprobs=2, **flags)
    async with whole_server() as server:
        plain = (await post(server.api, "/v1/chat/completions", asked)).json()
        streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last, _ = events_of(await post(server.api, "/v1/chat/completions", streamed))
        num_used = server.num_used_blocks

    assert [choice["index"] for choice in plain["choices"]] == list(range(n))
    for choice in plain["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == ((choice["logprobs"] or {}).get("content") or [])
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
        assert not any(each in choice["message"]["content"] for each in stop)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == plain["usage"][name]
    assert num_used == 0


@pytest.mark.parametrize("begun", ["", "the answer is "])
async def test_a_chat_is_the_completion_of_its_rendered_prompt(begun: str) -> None:
    rendered = f"<|im_start|>user\nhi.<|im_end|>\n<|im_start|>assistant\n{begun}"
    asked = chat("hi.")
    if begun:
        asked["messages"].append({"role": "assistant", "content": begun})
        asked["continue_final_message"] = True
    async with whole_server() as server:
        as_chat = (await post(server.api, "/v1/chat/completions", asked)).json()
        as_text = (await post(server.api, "/v1/completions", {"prompt": rendered, "max_tokens": 20})).json()

    assert as_chat["usage"]["prompt_tokens"] == as_text["usage"]["prompt_tokens"]
    assert as_chat["choices"][0]["message"]["content"] == as_text["choices"][0]["text"]
    assert as_text["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("role", ["developer", "system"])
async def test_a_developer_message_counts_as_a_system_one(role: str) -> None:
    messages = [{"role": role, "content": "a b"}, {"role": "user", "content": "c"}]
    async with whole_server() as server:
        reply = await post(server.api, "/v1/chat/completions", {"messages": messages, "max_tokens": 9})
        system = [{**messages[0], "role": "system"}, messages[1]]
        same = await post(server.api, "/v1/chat/completions", {"messages": system, "max_tokens": 9})

    assert reply.json()["choices"] == same.json()["choices"]
    assert reply.json()["usage"]["prompt_tokens"] == same.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_beyond_the_context_prompts_are_refused_and_limits_are_clamped(
    path: str, is_stream: bool
) -> None:
    def asked(length: int, **fields: Any) -> dict[str, Any]:
        prompt = {"prompt": [5] * length} if path == "/v1/completions" else chat("a?" * (length // 2))
        return {**prompt, "stream": is_stream, **fields}

    async with whole_server(max_model_len=64) as server:
        refused = await post(server.api, path, asked(64))
        seen = server.api.metrics.num_prefill_tokens, server.api.metrics.gauges.num_waiting
        clamped = await post(server.api, path, asked(20, max_tokens=500, ignore_eos=True))

    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "64" in refused.json()["error"]["message"]
    assert seen == (0, 0)
    assert clamped.status_code == 200
    assert clamped.headers["x-ignored-params"].startswith("max_tokens;clamped=")
    last = events_of(clamped)[-2] if is_stream else clamped.json()
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [[1, 2], [3, 10**9]]}, "prompt[1]"),
        ({"prompt": [1], "logit_bias": {"999999": 5}}, "logit_bias"),
        ({"prompt": [1], "stop_token_ids": [10**9]}, "stop_token_ids"),
    ],
)
async def test_ids_outside_the_vocabulary_are_refused(asked: dict[str, Any], param: str) -> None:
    async with whole_server() as server:
        reply = await post(server.api, "/v1/completions", asked)

    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failing_step_is_a_500_for_its_requests_and_the_next_one_is_served(
    n: int, is_stream: bool
) -> None:
    async with whole_server() as server:

        def fail(_batch: Batch) -> None:
            server.runner.before_step = lambda _: None
            raise ArithmeticError("not a number")

        server.runner.before_step = fail
        reply = await post(server.api, "/v1/chat/completions", chat("a", n=n, stream=is_stream))
        after = await post(server.api, "/v1/chat/completions", chat("a"))

    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "generation_failed"
    assert after.status_code == 200
    assert server.num_used_blocks == 0


@pytest.mark.timeout(30)
async def test_clients_that_leave_free_their_blocks_and_are_counted() -> None:
    async with whole_server() as server, served(server.api) as port:
        server.runner.auto = False
        writers = []
        for i in range(16):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps(chat("abc", stream=i % 2 == 0)).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            writers.append(writer)
        await until(lambda: server.engine.num_unfinished == 16)

        for writer in writers:
            writer.close()
        await until(lambda: server.engine.num_unfinished == 0)
        server.runner.auto = True
        while server.runner.launched:
            server.runner.settle()

        after = await post(server.api, "/v1/chat/completions", chat("abc"))

    metrics = server.api.metrics
    assert after.status_code == 200
    assert metrics.aborted_by_cause["client_gone"] == 16
    assert (metrics.gauges.num_running, metrics.gauges.num_waiting, metrics.gauges.num_used_blocks) == (
        0,
        0,
        0,
    )


@pytest.mark.timeout(30)
async def test_beyond_the_queue_clients_are_told_to_come_back_and_the_others_are_served() -> None:
    async with whole_server(max_waiting=4) as server:
        server.runner.auto = False
        transport = httpx.ASGITransport(make_app(server.api))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            sending = [
                asyncio.create_task(
                    client.post("/v1/chat/completions", json=chat("abc", stream=i % 2 == 0))
                )
                for i in range(40)
            ]
            await until(lambda: sum(task.done() for task in sending) >= 40 - 4 - 8)
            refused = [task.result() for task in sending if task.done()]
            probe = await client.get("/health")
            server.runner.auto = True
            while server.runner.launched:
                server.runner.settle()
            replies = await asyncio.gather(*sending)

    assert {reply.status_code for reply in refused} == {503}
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert {reply.json()["error"]["code"] for reply in refused} == {"server_is_overloaded"}
    assert probe.status_code == 200
    assert sum(reply.status_code == 200 for reply in replies) == len(replies) - len(refused)
    assert server.api.metrics.refused_by_cause["queue_full"] == len(refused)
    assert server.num_used_blocks == 0


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", chat("a", n=5), "n"),
        ("/v1/completions", {"prompt": "a", "n": 5}, "n"),
        ("/v1/completions", {"prompt": ["a"] * 5}, "prompt"),
    ],
)
async def test_more_choices_than_the_queue_ever_holds_are_no_overload(
    path: str, asked: dict[str, Any], param: str
) -> None:
    async with whole_server(max_waiting=4) as server:
        refused = await post(server.api, path, asked)
        fits = await post(server.api, path, {**chat("a", n=4), "prompt": "a"})

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert fits.status_code == 200


async def test_each_choice_takes_a_place_in_the_queue_and_refused_ones_give_theirs_back() -> None:
    async with whole_server(max_waiting=4) as server:
        server.runner.auto = False
        running = [
            asyncio.create_task(post(server.api, "/v1/completions", chat("a", prompt="a"))) for _ in "abc"
        ]
        await until(lambda: server.engine.num_unfinished == 3 and not server.engine.scheduler.waiting)
        waiting = [asyncio.create_task(post(server.api, "/v1/completions", {"prompt": "a", "n": 2}))]
        await until(lambda: len(server.engine.scheduler.waiting) == 2)
        refused = await post(server.api, "/v1/completions", {"prompt": "a", "n": 3})
        num_waiting = len(server.engine.scheduler.waiting)
        server.runner.auto = True
        while server.runner.launched:
            server.runner.settle()
        replies = await asyncio.gather(*running, *waiting)

    assert refused.status_code == 503
    assert num_waiting == 2
    assert [reply.status_code for reply in replies] == [200] * 4
    assert server.num_used_blocks == 0


async def test_requests_with_another_salt_share_no_prefix() -> None:
    async def cached_tokens(server: Whole, **fields: Any) -> int:
        reply = await post(server.api, "/v1/chat/completions", chat("a b c d", **fields))
        cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async with whole_server() as server:
        first = await cached_tokens(server, cache_salt="alice")
        other = await cached_tokens(server, cache_salt="bob")
        none = await cached_tokens(server)
        again = await cached_tokens(server, cache_salt="alice")

    assert first == other == none == 0
    assert again > 0
