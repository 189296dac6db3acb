"""The runner of the GPU, on a stand-in for CuPy whose streams run late, gives what that of the CPU gives.

Kernels are those of the NumPy backend; tested is all around them: buffers in turn, padding, graphs, copies.
"""

import asyncio
import importlib
import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from service.engine.constraint import Constraint
from service.engine.engine import Engine
from service.engine.request import FinishReason, SamplingParams
from service.model.checkpoint import Checkpoint, open_checkpoint
from tests.checkpoints import make_checkpoint
from tests.engine.fake_cupy import QueuedBackend, QueuedDecoder, make_cupy
from tests.engine.test_engine_on_cpu import running

VOCAB, CONTEXT, BLOCK = 300, 256, 4
SIZES: dict[str, Any] = {"max_step_tokens": 24, "max_running": 6}
MODULES = ("service.engine.cuda_buffers", "service.engine.cuda_runner")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("tiny"), eos_token_id=None))


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CudaRunner, imported with the stand-in in CuPy's place."""
    monkeypatch.setitem(sys.modules, "cupy", make_cupy())
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(MODULES[1]).CudaRunner
    for name in MODULES:
        sys.modules.pop(name, None)


@asynccontextmanager
async def on_device(checkpoint: Checkpoint, runner_class: Any, num_blocks: int) -> AsyncIterator[Engine]:
    async with running(checkpoint, **SIZES) as host:
        cpu: Any = host.runner
        streams: list[Any] = []
        decoder = QueuedDecoder(cpu.decoder, lambda: streams[0])
        backend = QueuedBackend(cpu._backend, lambda: streams[0])
        shared = {"num_blocks": num_blocks, "block_size": BLOCK, "vocab_size": VOCAB, **SIZES}
        runner = runner_class(decoder, backend, **shared, max_model_len=CONTEXT)
        streams.append(runner._stream)
        num_captured = len(list(runner.capture()))
        engine = Engine(runner, **shared, max_model_len=CONTEXT, eos_token_ids=(), max_waiting=1000)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()
        assert num_captured >= 4


Reply = tuple[list[int], list[float], list[tuple[int, float]], FinishReason]


async def generate(engine: Engine, prompt: list[int], params: SamplingParams) -> Reply:
    """Ids, their logprobs, the prompt's logprobs, and how it ended."""
    ids, logprobs, scores, reason = [], [], [], FinishReason.ERROR
    async for output in await engine.submit(prompt, params, request_id="r"):
        assert output.error is None, output.error
        ids += output.token_ids
        logprobs += [entry.logprob for entry in output.logprobs]
        scores += [(entry.token_id, entry.logprob) for entry in output.prompt_logprobs]
        reason = output.finish_reason or reason
    return ids, logprobs, scores, reason


class OnlyEven:
    """A constraint: even ids, and so many of them."""

    def __init__(self, length: int) -> None:
        self.num_left = length
        self.failure: str | None = None
        self.is_over = False

    def advance(self, token_id: int) -> None:
        self.num_left -= 1
        self.is_over = self.num_left == 0

    def fill_mask(self, row: Any) -> None:
        row[:] = 0x55555555


def drawn(rng: random.Random) -> tuple[list[int], dict[str, Any]]:
    """A prompt and what is asked of it: everything that takes another path through the runner."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 20), "temperature": 0.0}
    if rng.random() < 0.3:
        params |= {"temperature": 1.2, "seed": rng.randrange(1000), "top_k": 40, "top_p": 0.9}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    if rng.random() < 0.3:
        params["logit_bias"] = tuple((rng.randrange(VOCAB), 3.0) for _ in range(5))
    if rng.random() < 0.4:
        params["logprobs"] = 3
    if rng.random() < 0.3:
        params["prompt_logprobs"] = 2
    return prompt, params


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [40, 400])  # the first makes it preempt
async def test_it_gives_what_the_runner_of_the_cpu_gives(
    checkpoint: Checkpoint, runner_class: Any, seed: int, num_blocks: int
) -> None:
    rng = random.Random(seed)
    asked = [drawn(rng) for _ in range(14)]

    async def ask(engine: Engine, index: int) -> Reply:
        prompt, params = asked[index]
        constraint = OnlyEven(params["max_tokens"]) if index % 5 == 4 else None
        own: Constraint | None = constraint
        return await generate(engine, prompt, SamplingParams(**params, constraint=own))

    async with running(checkpoint, prefix_cache=False, **SIZES) as engine:
        wanted = [await ask(engine, index) for index in range(len(asked))]
    async with on_device(checkpoint, runner_class, num_blocks) as engine:
        found = await asyncio.gather(*(ask(engine, index) for index in range(len(asked))))
        assert engine.pool.num_used == 0

    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one[0] == other[0], index
        assert one[3] == other[3]
        np.testing.assert_allclose(one[1], other[1], atol=1e-4)
        assert [token_id for token_id, _ in one[2]] == [token_id for token_id, _ in other[2]]
        np.testing.assert_allclose([x for _, x in one[2]], [x for _, x in other[2]], atol=1e-4)
