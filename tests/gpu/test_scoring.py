"""Logprobs of prompts on the GPU: those of the NumPy backend, whatever steps a prompt is cut into."""

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from service.engine.engine import Engine
from service.engine.request import SamplingParams, TokenLogprobs
from tests.gpu.test_engine import draw_prompt, running

pytestmark = pytest.mark.gpu


async def scores(engine: Engine, prompt: list[int]) -> list[TokenLogprobs]:
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3)
    found = list[TokenLogprobs]()
    async for output in await engine.submit(prompt, params, request_id="r"):
        assert output.error is None, output.error
        found += output.prompt_logprobs
    return found


@pytest.mark.parametrize("changes", [{}, {"max_step_tokens": 96}, {"max_running": 7}], ids=str)
async def test_scores_are_those_of_the_numpy_backend(backend: Any, changes: dict[str, Any]) -> None:
    rng = random.Random(8)
    prompts = [draw_prompt(rng, 500) for _ in range(6)]
    async with running(None) as engine:
        wanted = [await scores(engine, prompt) for prompt in prompts]
    async with running(backend, **changes) as engine:
        found = await asyncio.gather(*(scores(engine, prompt) for prompt in prompts))
        again = await scores(engine, prompts[0])

    for prompt, theirs, ours in zip(prompts, wanted, found, strict=True):
        assert [one.token_id for one in ours] == prompt[1:]
        difference = np.abs([a.logprob - b.logprob for a, b in zip(ours, theirs, strict=True)])
        assert difference.mean() < 0.02
        assert difference.max() < 0.3
        for one in ours:
            assert list(one.top_logprobs) == sorted(one.top_logprobs, reverse=True)
            assert (one.rank == 1) == (one.token_id == one.top_ids[0])
    assert [one.token_id for one in again] == prompts[0][1:]
