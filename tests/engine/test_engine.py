"""The engine loop over a runner whose ids depend on every block, slot and position of a request's past."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.engine import Engine
from service.engine.interface import EngineClient, OutputStream
from service.engine.observer import EngineGauges, NoObserver, RequestRecord
from service.engine.request import FinishReason, Output, SamplingParams
from service.engine.stream import Stream
from service.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from tests.engine.fake_runner import VOCAB, FakeRunner, expected_ids

BLOCK = 4


class Watcher(NoObserver):
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.gauges: list[EngineGauges] = []
        self.num_preempted = 0
        self.prefill_tokens = 0
        self.refusals: list[str] = []

    def preempted(self) -> None:
        self.num_preempted += 1

    def refused(self, cause: str) -> None:
        self.refusals.append(cause)

    @property
    def reasons(self) -> list[str]:
        return [record.reason for record in self.records]

    def finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    def step_done(self, *, num_prefill_tokens: int, num_decode_tokens: int, gauges: EngineGauges) -> None:
        self.prefill_tokens += num_prefill_tokens
        self.gauges.append(gauges)
        assert 0 <= gauges.num_used_blocks <= gauges.num_blocks
        assert gauges.num_used_blocks + gauges.num_cached_blocks <= gauges.num_blocks


@asynccontextmanager
async def running_engine(
    num_blocks: int = 64, depth: int = 1, eos: int | None = None, **options: Any
) -> AsyncIterator[tuple[Engine, FakeRunner, Watcher]]:
    max_running = options.pop("max_running", 8)
    runner, watcher = FakeRunner(num_blocks, BLOCK, max_running, depth), Watcher()
    engine = Engine(
        runner,
        num_blocks=num_blocks,
        block_size=BLOCK,
        max_model_len=options.pop("max_model_len", 200),
        vocab_size=VOCAB,
        eos_token_ids=() if eos is None else (eos,),
        max_step_tokens=options.pop("max_step_tokens", 16),
        max_running=max_running,
        max_waiting=options.pop("max_waiting", 10_000),
        observer=watcher,
        **options,
    )
    await engine.start()
    try:
        yield engine, runner, watcher
    finally:
        await engine.stop()
    assert runner.is_closed


async def until(condition: Callable[[], object]) -> None:
    """Let the engine's task run until something has happened."""
    while not condition():  # noqa: ASYNC110  # the engine has no event for every step, and needs none
        await asyncio.sleep(0)


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)


async def collect(stream: OutputStream) -> tuple[list[int], Output]:
    outputs = [output async for output in stream]
    assert [output.finish_reason is None for output in outputs[:-1]] == [True] * (len(outputs) - 1)
    return [token_id for output in outputs for token_id in output.token_ids], outputs[-1]


async def generate(engine: EngineClient, prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    stream = await engine.submit(prompt, greedy(max_tokens, **params), request_id="r")
    return (await collect(stream))[0]


@pytest.mark.parametrize("depth", [1, 2])
async def test_ids_are_those_of_a_run_without_cache(depth: int) -> None:
    async with running_engine(depth=depth) as (engine, _, _):
        prompts = [
            [i % VOCAB for i in range(start, start + length)] for start, length in ((0, 1), (7, 40), (3, 9))
        ]
        replies = await asyncio.gather(*(generate(engine, prompt, 12) for prompt in prompts))

    assert replies == [expected_ids(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("depth", [1, 2])
async def test_the_last_output_tells_how_it_ended(depth: int) -> None:
    prompt = [1, 2, 3]
    ids = expected_ids(prompt, 9)
    async with running_engine(depth=depth, eos=ids[4]) as (engine, _, watcher):
        reply, last = await collect(await engine.submit(prompt, greedy(9), request_id="eos"))
        assert reply == ids[: ids.index(ids[4]) + 1]
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, ids[4])

        reply, last = await collect(
            await engine.submit(prompt, greedy(9, ignore_eos=True), request_id="on")
        )
        assert reply == ids
        assert (last.finish_reason, last.stop_token_id) == (FinishReason.LENGTH, None)

        params = greedy(9, ignore_eos=True, stop_token_ids=(ids[2],))
        reply, last = await collect(await engine.submit(prompt, params, request_id="stop"))
        assert reply == ids[: ids.index(ids[2]) + 1]
        assert last.stop_token_id == ids[2]
    assert watcher.reasons == ["stop", "length", "stop"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", range(1, 3 * BLOCK + 2))
async def test_a_repeated_prompt_gives_the_same_ids_from_the_cache(length: int, depth: int) -> None:
    prompt = list(range(length))
    async with running_engine(depth=depth) as (engine, _, _):
        for run in range(3):
            stream = await engine.submit(prompt, greedy(6), request_id=str(run))
            reply, last = await collect(stream)
            assert reply == expected_ids(prompt, 6)
            assert last.num_cached_tokens == (0 if run == 0 else (length - 1) // BLOCK * BLOCK)


async def test_choices_submitted_together_compute_their_prompt_once() -> None:
    prompt = list(range(40))
    async with running_engine(max_step_tokens=64) as (engine, _, watcher):
        streams = [await engine.submit(prompt, greedy(3), request_id=str(i)) for i in range(4)]
        replies = [(await collect(stream))[0] for stream in streams]

    assert replies == [expected_ids(prompt, 3)] * 4
    assert watcher.prefill_tokens + 0 <= 40 + 3 * BLOCK


async def test_without_the_prefix_cache_nothing_is_reused() -> None:
    async with running_engine(prefix_cache=False) as (engine, _, watcher):
        for _ in range(2):
            assert await generate(engine, list(range(12)), 2) == expected_ids(list(range(12)), 2)
    assert [record.num_cached_tokens for record in watcher.records] == [0, 0]


def chaos(engine: Engine, rng: random.Random, live: list[Stream]) -> Callable[[Batch], None]:
    """While a step is on the device: cancel some requests, now and then twice."""

    def interfere(batch: Batch) -> None:
        for stream in rng.sample(live, min(len(live), rng.randrange(3))):
            engine.cancel(stream, "client_gone")
            if rng.random() < 0.3:
                engine.cancel(stream, "client_gone")

    return interfere


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("depth", [1, 2])
async def test_survivors_of_any_mix_get_their_solo_ids_and_no_block_is_lost(seed: int, depth: int) -> None:
    """2,000 requests of random length and priority over a tiny pool, with cancels at every phase."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(20))] for _ in range(4)]
    async with running_engine(rng.choice([12, 20]), depth, eos=7, max_running=rng.choice([3, 8])) as (
        engine,
        runner,
        watcher,
    ):
        live: list[Stream] = []
        runner.before_step = chaos(engine, rng, live)

        async def client(number: int) -> bool:
            prompt = rng.choice(prefixes) + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
            max_tokens = rng.randrange(1, 48 - len(prompt))
            params = greedy(max_tokens, min_tokens=0)
            stream = await engine.submit(
                prompt, params, request_id=str(number), priority=rng.randrange(-1, 2)
            )
            if rng.random() < 0.3:
                live.append(stream)
            reply, last = await collect(stream)
            if stream in live:
                live.remove(stream)
            want = expected_ids(prompt, max_tokens, eos=7)
            if last.finish_reason is FinishReason.CANCELLED:
                assert reply == want[: len(reply)]
                return False
            assert reply == want
            return True

        survived = await asyncio.gather(*(client(i) for i in range(2000)))

        assert 800 < sum(survived) < 2000
        assert watcher.num_preempted > 0
        assert engine.num_unfinished == 0
        assert engine.pool.num_used == 0
        assert engine.pool.num_available == engine.pool.num_blocks
        assert watcher.reasons.count("client_gone") == 2000 - sum(survived)
        assert engine.failure is None


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_failed_step_ends_its_requests_alone(depth: int) -> None:
    async with running_engine(depth=depth) as (engine, runner, _):
        fuse = iter([False, False, True])

        def blow(batch: Batch) -> None:
            if next(fuse, False):
                raise RuntimeError("boom")

        runner.before_step = blow
        reply, last = await collect(await engine.submit([1, 2, 3], greedy(50), request_id="a"))
        assert last.finish_reason is FinishReason.ERROR
        assert "boom" in (last.error or "")
        assert len(reply) == 2

        assert await generate(engine, [1, 2, 3], 20) == expected_ids([1, 2, 3], 20)
        assert engine.pool.num_used == 0


async def test_what_a_failed_step_wrote_is_never_reused() -> None:
    async with running_engine(max_step_tokens=64) as (engine, runner, _):
        prompt = list(range(20))

        def fail(batch: Batch) -> None:
            raise RuntimeError("boom")

        runner.before_step = fail
        await collect(await engine.submit(prompt, greedy(5), request_id="a"))
        runner.before_step = lambda batch: None

        assert await generate(engine, prompt, 5) == expected_ids(prompt, 5)


async def test_not_a_number_ends_that_request_alone() -> None:
    async with running_engine() as (engine, runner, _):
        run = runner._run

        def poisoned(batch: Batch) -> Any:
            result = run(batch)
            for index, request in enumerate(batch.sampled):
                if request.id == "nan" and request.num_output_tokens > 2:
                    result.ids[index] = -1
            return result

        runner._run = poisoned  # type: ignore[method-assign]
        streams = [
            await engine.submit([5, i], greedy(8), request_id=name) for i, name in enumerate(["ok", "nan"])
        ]
        (good, fine), (bad, last) = [await collect(stream) for stream in streams]

    assert (good, fine.finish_reason) == (expected_ids([5, 0], 8), FinishReason.LENGTH)
    assert last.finish_reason is FinishReason.ERROR
    assert bad == expected_ids([5, 1], 2)


async def test_a_dead_device_ends_the_engine_and_says_so() -> None:
    async with running_engine() as (engine, runner, watcher):

        def die(batch: Batch) -> None:
            raise EngineDeadError("the device was lost")

        runner.before_step = die
        _, last = await collect(await engine.submit([1], greedy(5), request_id="a"))
        assert last.error == "the device was lost"
        assert engine.failure == "the device was lost"
        with pytest.raises(EngineDeadError, match="the device was lost"):
            await engine.submit([1], greedy(5), request_id="b")
        assert watcher.refusals == ["dead"]


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    async with running_engine(max_running=1, max_waiting=2) as (engine, runner, watcher):
        runner.auto = False
        first = await engine.submit([1], greedy(1), request_id="runs")
        await until(lambda: runner.launched)
        waiting = [await engine.submit([1], greedy(1), request_id=str(i)) for i in range(2)]
        with pytest.raises(OverloadedError) as refused:
            await engine.submit([1], greedy(1), request_id="too many")
        assert 1.0 <= refused.value.retry_after_seconds <= 60.0

        await waiting[0].close("client_gone")  # who gives up makes room at once
        waiting.append(await engine.submit([1], greedy(1), request_id="room"))
        runner.auto = True
        runner.settle()
        for stream in (first, *waiting[1:]):
            assert (await collect(stream))[0] == expected_ids([1], 1)
    assert watcher.refusals == ["queue_full"]


async def test_draining_accepts_nothing_and_finishes_what_it_has() -> None:
    async with running_engine() as (engine, _, _):
        stream = await engine.submit([1, 2], greedy(9), request_id="a")
        engine.drain()
        with pytest.raises(OverloadedError):
            await engine.submit([1], greedy(1), request_id="b")
        assert (await collect(stream))[0] == expected_ids([1, 2], 9)


async def test_what_can_never_fit_is_refused_and_the_next_request_is_served() -> None:
    async with running_engine(num_blocks=8, max_model_len=512) as (engine, _, watcher):
        assert engine.max_model_len == 8 * BLOCK  # the pool limits the context
        with pytest.raises(ContextLengthError, match="32 tokens"):
            await engine.submit([1] * 30, greedy(3), request_id="big")
        assert await generate(engine, [1] * 29, 3) == expected_ids([1] * 29, 3)
        assert watcher.refusals == ["context_length"]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"stop_token_ids": (10**9,)}, "stop_token_ids"),
        ([1], {"logit_bias": ((VOCAB, 1.0),)}, "logit_bias"),
    ],
)
async def test_ids_outside_the_vocabulary_are_refused(
    prompt: list[int], params: dict[str, Any], field: str
) -> None:
    async with running_engine() as (engine, _, _):
        with pytest.raises(RequestError) as refused:
            await engine.submit(prompt, greedy(2, **params), request_id="bad")
        assert refused.value.field == field
        assert engine.num_unfinished == 0


async def test_stopping_ends_every_request_with_an_error() -> None:
    async with running_engine() as (engine, runner, _):
        runner.auto = False
        streams = [await engine.submit([i], greedy(5), request_id=str(i)) for i in range(3)]
        await until(lambda: runner.launched)
        await engine.stop()
        for stream in streams:
            assert (await collect(stream))[1].error == "the server stopped"


async def test_the_heart_stands_still_only_while_there_is_nothing_to_do() -> None:
    async with running_engine() as (engine, runner, _):
        await generate(engine, [1], 3)
        await asyncio.sleep(0)
        assert engine.heartbeat_age() == 0.0
        runner.auto = False
        stream = await engine.submit([1], greedy(1), request_id="a")
        await until(lambda: runner.launched)
        assert engine.heartbeat_age() > 0.0
        runner.settle()
        await collect(stream)


async def test_ids_that_are_ready_together_come_together() -> None:
    async with running_engine() as (engine, _, watcher):
        stream = await engine.submit([1, 2], greedy(9), request_id="slow reader")
        await until(lambda: watcher.reasons)
        outputs = [output async for output in stream]

    assert [len(output.token_ids) for output in outputs] == [9]


class _Counting:
    """A constraint that allows one id after the other: `first`, first + 1, ..."""

    def __init__(self, first: int, num_ids: int, fails_after: int | None = None) -> None:
        self.next_id = first
        self._last = first + num_ids
        self._fails_at = None if fails_after is None else first + fails_after
        self.is_over = False
        self.failure: str | None = None

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        row[:] = 0
        row[self.next_id // 32] = 1 << self.next_id % 32

    def advance(self, token_id: int) -> None:
        assert token_id == self.next_id
        self.next_id += 1
        self.is_over = self.next_id == self._last
        if self.next_id == self._fails_at:
            self.failure = "There is no way on."


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_constraint_decides_the_ids_of_its_own_request_alone(depth: int) -> None:
    async with running_engine(depth=depth) as (engine, _, _):
        params = greedy(20, constraint=_Counting(10, 5))
        stream = await engine.submit([1, 2, 3], params, request_id="bound")
        others = await asyncio.gather(*(generate(engine, [4, 5, i], 12) for i in range(3)))
        ids, last = await collect(stream)

    assert ids == [10, 11, 12, 13, 14]
    assert last.finish_reason is FinishReason.STOP
    assert last.stop_token_id is None
    assert others == [expected_ids([4, 5, i], 12) for i in range(3)]


async def test_a_constraint_is_cut_off_at_max_tokens() -> None:
    async with running_engine() as (engine, _, _):
        stream = await engine.submit([1], greedy(3, constraint=_Counting(10, 5)), request_id="r")
        ids, last = await collect(stream)

    assert ids == [10, 11, 12]
    assert last.finish_reason is FinishReason.LENGTH


async def test_a_constraint_that_fails_ends_its_request_with_the_reason() -> None:
    async with running_engine() as (engine, _, _):
        constraint = _Counting(10, 9, fails_after=2)
        stream = await engine.submit([1], greedy(20, constraint=constraint), request_id="r")
        other = generate(engine, [4, 5], 12)
        (ids, last), ids_of_other = await asyncio.gather(collect(stream), other)

    assert ids == [10, 11]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "There is no way on."
    assert ids_of_other == expected_ids([4, 5], 12)
