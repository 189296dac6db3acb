"""Logprobs of prompts: every id but the first once, whatever steps, caches and preemptions lie between."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.interface import OutputStream
from service.engine.request import TokenLogprobs
from service.model.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import make_checkpoint
from tests.engine.fake_runner import score_of
from tests.engine.test_engine import greedy, running_engine
from tests.engine.test_engine_on_cpu import engine_logits, running


async def scores(stream: OutputStream) -> list[TokenLogprobs]:
    found = list[TokenLogprobs]()
    has_ids = False
    async for output in stream:
        assert not (has_ids and output.prompt_logprobs), (
            "scores come before the reply, or with its first id"
        )
        has_ids = has_ids or bool(output.token_ids)
        found += output.prompt_logprobs
    return found


def wanted(prompt: list[int]) -> list[tuple[int, float]]:
    return [(prompt[i], score_of(prompt[:i], prompt[i])) for i in range(1, len(prompt))]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    num_blocks=st.integers(14, 30),
    depth=st.integers(1, 2),
    budget=st.integers(1, 24),
)
async def test_every_id_is_scored_once(
    lengths: list[int], num_blocks: int, depth: int, budget: int
) -> None:
    options = {"max_model_len": 56, "max_step_tokens": budget, "max_running": 5}
    async with running_engine(num_blocks, depth, **options) as (engine, _, _):
        prompts = [[(7 * i + j) % 50 for j in range(length)] for i, length in enumerate(lengths)]
        streams = [
            await engine.submit(prompt, greedy(12, prompt_logprobs=0), request_id=str(i))
            for i, prompt in enumerate(prompts)
        ]
        found = await asyncio.gather(*map(scores, streams))
        assert engine.pool.num_used == 0

    for prompt, each in zip(prompts, found, strict=True):
        assert [(one.token_id, one.logprob) for one in each] == wanted(prompt)


async def test_a_cached_prompt_is_scored_too() -> None:
    prompt = list(range(30))
    async with running_engine() as (engine, _, _):
        for _ in range(2):
            stream = await engine.submit(prompt, greedy(2, prompt_logprobs=0), request_id="r")
            assert len(await scores(stream)) == 29


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("tiny"), eos_token_id=None))


@pytest.mark.parametrize("max_running", [3, 64])  # the sampler's buffers: in pieces, and at once
async def test_scores_are_those_of_the_model(checkpoint: Checkpoint, max_running: int) -> None:
    prompt = [3, 9, 250, 4, 17, 3, 88, 120, 41]
    async with running(checkpoint, max_running=max_running, max_step_tokens=64) as engine:
        stream = await engine.submit(prompt, greedy(1, prompt_logprobs=2), request_id="r")
        found = await scores(stream)
        exact = np.array([engine_logits(engine, prompt[:length]) for length in range(1, len(prompt))])

    logprobs = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert [one.logprob for one in found] == pytest.approx(
        [float(row[token_id]) for row, token_id in zip(logprobs, prompt[1:], strict=True)], abs=1e-4
    )
    for one, row in zip(found, logprobs, strict=True):
        assert list(one.top_ids) == np.argsort(-row, kind="stable")[:2].tolist()
        assert one.rank == 1 + int((row > row[one.token_id]).sum())
