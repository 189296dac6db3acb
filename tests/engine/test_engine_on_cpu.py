"""The engine on the NumPy backend with a tiny real model: a request's ids do not depend on its company.

BLAS sums one row in another order than the same row among many, so ids are compared up to the first
near-tie (a margin below 1e-2 between the two most likely ids), as they would be on any two machines.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.engine.build import build_engine
from service.engine.engine import Engine
from service.engine.observer import EngineObserver, NoObserver
from service.engine.request import FinishReason, SamplingParams
from service.model.checkpoint import Checkpoint, open_checkpoint
from service.progress import NoProgress
from service.settings import Settings
from tests.checkpoints import make_checkpoint

NEAR_TIE = 1e-2
KIB_A_TOKEN = 2 * 2 * 2 * 16 * 4 / 1024  # keys and values, 2 layers, 2 KV heads of 16 floats


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("tiny"), eos_token_id=None))


class Counter(NoObserver):
    num_preempted = 0

    def preempted(self) -> None:
        self.num_preempted += 1


@asynccontextmanager
async def running(
    checkpoint: Checkpoint,
    *,
    kv_tokens: int = 4096,
    vocab: int = 300,
    observer: EngineObserver | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    settings = Settings(kv_cache_gib=kv_tokens * KIB_A_TOKEN / 2**20, block_size=4, device="cpu", **options)
    observer = observer or NoObserver()
    engine = build_engine(checkpoint, settings, vocab_size=vocab, progress=NoProgress(), observer=observer)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def generate(
    engine: Engine, prompt: list[int], **params: Any
) -> tuple[list[int], list[float], FinishReason]:
    """Ids, the margin of each over the runner-up, and how it ended."""
    params = {"max_tokens": 12, "temperature": 0.0, "logprobs": 2} | params
    stream = await engine.submit(prompt, SamplingParams(**params), request_id="r")
    ids: list[int] = []
    margins: list[float] = []
    reason = FinishReason.ERROR
    async for output in stream:
        ids += output.token_ids
        margins += [entry.top_logprobs[0] - entry.top_logprobs[1] for entry in output.logprobs]
        reason = output.finish_reason or reason
    return ids, margins, reason


def assert_same_ids(found: list[int], want: list[int], margins: list[float]) -> None:
    for position, (left, right) in enumerate(zip(found, want, strict=False)):
        if left != right:
            assert margins[position] < NEAR_TIE, (
                f"ids differ at {position}, with margin {margins[position]}"
            )
            return
    assert len(found) == len(want)


async def test_a_request_gets_its_solo_ids_in_any_company(checkpoint: Checkpoint) -> None:
    """Prefix hits, chunks, preemption and cancellations around it change nothing."""
    rng = random.Random(5)
    prefix = [rng.randrange(300) for _ in range(24)]
    prompts = [
        prefix[: rng.randrange(25)] + [rng.randrange(300) for _ in range(rng.randrange(1, 20))]
        for _ in range(60)
    ]
    async with running(checkpoint, prefix_cache=False) as engine:
        solo = [await generate(engine, prompt) for prompt in prompts]

    async with running(checkpoint, kv_tokens=120, max_step_tokens=16, max_running=6) as engine:

        async def quitter(prompt: list[int]) -> None:
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
            stream = await engine.submit(prompt, params, request_id="quits")
            async for _ in stream:
                await stream.close("client_gone")

        crowd = [generate(engine, prompt) for prompt in prompts]
        quitters = [quitter(prompt) for prompt in prompts[:20]]
        shared = (await asyncio.gather(*crowd, *quitters))[: len(prompts)]
        assert engine.pool.num_used == 0

    for found, want in zip(shared, solo, strict=True):
        assert found is not None
        assert_same_ids(found[0], want[0], want[1])
        assert found[2] is FinishReason.LENGTH


async def test_a_seed_repeats_itself_alone_and_in_company_and_choices_differ(
    checkpoint: Checkpoint,
) -> None:
    params: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 20}
    async with running(checkpoint, max_step_tokens=16) as engine:
        solo = [(await generate(engine, [1, 2, 3], choice=choice, **params))[0] for choice in range(4)]
        company = await asyncio.gather(
            *(generate(engine, [1, 2, 3], choice=choice, **params) for choice in range(4)),
            *(generate(engine, [9, i], temperature=1.0) for i in range(8)),
        )

    assert [ids for ids, _, _ in company[:4]] == solo
    assert len({tuple(ids) for ids in solo}) > 1


async def test_without_a_seed_runs_differ(checkpoint: Checkpoint) -> None:
    async with running(checkpoint) as engine:
        runs = [(await generate(engine, [1], temperature=2.0, max_tokens=30))[0] for _ in range(3)]
    assert len({tuple(ids) for ids in runs}) == 3


async def test_ids_above_the_tokenizers_are_never_sampled(checkpoint: Checkpoint) -> None:
    """The embedding has 300 rows, the tokenizer 250 ids."""
    async with running(checkpoint, vocab=250) as engine:
        runs = await asyncio.gather(
            *(generate(engine, [i], temperature=2.0, max_tokens=125, logprobs=None) for i in range(40))
        )
    ids = [token_id for ids, _, _ in runs for token_id in ids]
    assert len(ids) == 5000
    assert 240 < max(ids) < 250


@pytest.mark.parametrize("rule", [{}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.9}], ids=str)
async def test_logprobs_are_those_of_the_whole_distribution_whatever_may_be_sampled(
    checkpoint: Checkpoint, rule: dict[str, float]
) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=5, **rule)  # type: ignore[arg-type]
    async with running(checkpoint) as engine:
        stream = await engine.submit([1, 2, 3], params, request_id="r")
        entries = [entry async for output in stream for entry in output.logprobs]

    assert len(entries) == 30
    for entry in entries:
        assert np.isfinite([entry.logprob, *entry.top_logprobs]).all()
        assert entry.logprob <= 0
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
        assert np.exp(entry.top_logprobs).sum() <= 1 + 1e-4
        if entry.token_id in entry.top_ids:
            assert entry.logprob == entry.top_logprobs[entry.top_ids.index(entry.token_id)]
        else:
            assert entry.logprob <= entry.top_logprobs[-1]


@pytest.mark.parametrize(
    "penalties",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.7},
        {"presence_penalty": -2.0, "frequency_penalty": 0.3, "repetition_penalty": 0.8},
    ],
)
async def test_penalties_follow_the_formula_cold_warm_beside_others_and_after_preemption(
    checkpoint: Checkpoint, penalties: dict[str, float]
) -> None:
    prompt = [5, 5, 7, 9, 5, 11, 5, 7, 9]
    async with running(checkpoint, max_step_tokens=8) as engine:
        cold = (await generate(engine, prompt, **penalties))[0]
        company = await asyncio.gather(
            generate(engine, prompt, **penalties), generate(engine, prompt), generate(engine, [3, 4])
        )
    assert company[0][0] == cold

    observer = Counter()
    async with running(checkpoint, kv_tokens=32, observer=observer) as engine:
        older = generate(engine, [3, 4], max_tokens=20)
        preempted = (await asyncio.gather(older, generate(engine, prompt, **penalties)))[1][0]
    assert observer.num_preempted > 0
    assert preempted == cold

    async with running(checkpoint, vocab=300) as engine:
        known = list(prompt)
        for token_id in cold:
            want, margin = await penalised_choice(engine, known, len(prompt), **penalties)
            assert want == token_id or margin < NEAR_TIE
            known.append(token_id)


async def penalised_choice(
    engine: Engine,
    known: list[int],
    num_prompt: int,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
) -> tuple[int, float]:
    """The id that the formula chooses after `known`, from unpenalised logits, and its margin."""
    logits = engine_logits(engine, known)
    counts = np.bincount(known[num_prompt:], minlength=len(logits))
    seen = np.isin(np.arange(len(logits)), known)
    adjusted = np.where(
        seen, np.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty), logits
    )
    adjusted = adjusted - frequency_penalty * counts - presence_penalty * (counts > 0)
    second, first = np.sort(adjusted)[-2:]
    return int(adjusted.argmax()), float(first - second)


def engine_logits(engine: Engine, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits after `ids`, straight from the decoder with a fresh cache."""
    from service.engine.batch import BatchBuilder
    from service.engine.block_pool import BlockPool
    from service.engine.request import Request
    from service.engine.scheduler import Scheduler

    decoder = engine.runner.decoder
    blocks = -(-len(ids) // 4) + 1
    scheduler = Scheduler(BlockPool(blocks, 4), len(ids), 1)
    scheduler.add(Request(id="r", prompt_ids=ids, params=SamplingParams(max_tokens=1)))
    batch = BatchBuilder(1, blocks, 4, ()).build(scheduler.schedule())
    logits: NDArray[np.float32] = np.empty((1, 300), np.float32)
    decoder.forward(
        batch.arrays,
        decoder.new_cache(blocks, 4),
        decoder.new_activations(len(ids)),
        np.zeros(1, np.int32),
        logits,
    )
    row: NDArray[np.float32] = logits[0]
    return row
