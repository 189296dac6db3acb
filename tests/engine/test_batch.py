"""Steps in arrays: order of rows, positions, slots, and what sampling is told."""

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import BatchBuilder
from service.engine.block_pool import BlockPool
from service.engine.request import Request, SamplingParams
from service.engine.scheduler import Scheduler, Step
from tests.factories import make_request

BLOCK = 4


def make(
    *requests: Request, budget: int = 64, stop_ids: tuple[int, ...] = ()
) -> tuple[Scheduler, BatchBuilder]:
    scheduler = Scheduler(BlockPool(32, BLOCK), budget, 8)
    for request in requests:
        scheduler.add(request)
    return scheduler, BatchBuilder(8, 8, BLOCK, stop_ids)


def answer(step: Step, token_id: int) -> None:
    for work in step.work:
        if work.samples:
            work.request.token_ids.append(token_id)


def test_decode_rows_come_first_and_samples_follow_the_rows() -> None:
    long, short = make_request("long", prompt=12), make_request("short", prompt=5, first_id=20)
    scheduler, builder = make(long, short, budget=13)
    step = scheduler.schedule()  # all of long, one token of short
    builder.build(step)
    scheduler.step_done(step)
    answer(step, 9)
    scheduler.running.reverse()  # short, in the middle of its prompt, is planned before long decodes

    batch = builder.build(scheduler.schedule())

    arrays = batch.arrays
    assert arrays.num_decode == 1
    assert arrays.token_ids.tolist() == [9, 21, 22, 23, 24]
    assert arrays.positions.tolist() == [12, 1, 2, 3, 4]
    assert arrays.row_starts.tolist() == [0, 1, 5]
    assert arrays.context_lens.tolist() == [13, 5]
    assert arrays.sample_rows.tolist() == [0, 4]
    assert [request.id for request in batch.sampled] == ["long", "short"]
    where = [(long, 12), *((short, position) for position in range(1, 5))]
    slots = [request.block_table[p // BLOCK] * BLOCK + p % BLOCK for request, p in where]
    assert arrays.slot_mapping.tolist() == slots
    assert batch.sampling.positions.tolist() == [13, 5]


def test_a_chunk_in_the_middle_of_a_prompt_samples_nothing() -> None:
    scheduler, builder = make(make_request(prompt=10), budget=4)
    batches = []
    for _ in range(3):
        step = scheduler.schedule()
        batches.append(builder.build(step))
        scheduler.step_done(step)

    assert [len(batch.sampled) for batch in batches] == [0, 0, 1]
    assert [batch.arrays.num_decode for batch in batches] == [0, 0, 0]
    assert batches[1].arrays.positions.tolist() == [4, 5, 6, 7]


def test_an_id_still_on_the_device_is_taken_from_the_lane() -> None:
    request = make_request(prompt=3)
    scheduler, builder = make(request)
    builder.build(scheduler.schedule())

    arrays = builder.build(scheduler.schedule()).arrays  # the first id is not known yet

    assert arrays.token_ids.tolist() == [-1]
    assert arrays.lanes.tolist() == arrays.sample_lanes.tolist() == [request.lane]


def test_sampling_parameters_follow_their_request_to_its_lane() -> None:
    params = SamplingParams(
        max_tokens=4, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, choice=3, logit_bias=((5, 2.0),)
    )
    plain = make_request("plain", prompt=2)
    special = Request(id="special", prompt_ids=[1, 2], params=params, arrival=10**6, seed=2**63 + 1)
    scheduler, builder = make(plain, special)

    sampling = builder.build(scheduler.schedule()).sampling

    assert sampling.temperature.tolist() == [0.0, 0.5]
    assert (sampling.top_k[1], sampling.choices[1], sampling.seeds[1]) == (7, 3, 2**63 + 1)
    assert np.allclose([sampling.top_p[1], sampling.min_p[1]], [0.9, 0.1])
    assert sampling.bias_starts.tolist() == [0, 0, 1]
    assert (sampling.bias_ids.tolist(), sampling.bias_values.tolist()) == ([5], [2.0])
    assert sampling.max_top_logprobs == -1


def test_ids_that_would_end_a_request_are_forbidden_until_min_tokens() -> None:
    params = SamplingParams(
        max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=(8,), logit_bias=((8, 50.0),)
    )
    request = Request(id="r", prompt_ids=[1], params=params)
    scheduler, builder = make(request, stop_ids=(3,))
    forbidden = []
    for _ in range(3):
        step = scheduler.schedule()
        sampling = builder.build(step).sampling
        forbidden.append(
            {i for i, v in zip(sampling.bias_ids, sampling.bias_values, strict=True) if v == -np.inf}
        )
        scheduler.step_done(step)
        answer(step, 9)

    assert forbidden == [{3, 8}, {3, 8}, set()]


def test_penalties_see_prompt_ids_without_and_generated_ids_with_a_count() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0)
    request = Request(id="r", prompt_ids=[4, 4, 6], params=params)
    scheduler, builder = make(request, make_request("plain", prompt=2))
    for token_id in (6, 6):
        step = scheduler.schedule()
        builder.build(step)
        scheduler.step_done(step)
        answer(step, token_id)

    sampling = builder.build(scheduler.schedule()).sampling

    assert dict(zip(sampling.seen_ids.tolist(), sampling.seen_counts.tolist(), strict=True)) == {4: 0, 6: 2}
    assert sampling.seen_starts.tolist() == [0, 2, 2]


class _Only:
    """A constraint that allows one id."""

    is_over, failure = False, None

    def __init__(self, token_id: int) -> None:
        self._id = token_id

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        row[:] = 0
        row[self._id // 32] = 1 << self._id % 32

    def advance(self, token_id: int) -> None:
        assert token_id == self._id


def test_rows_with_a_constraint_are_masked_and_the_others_are_free() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, constraint=_Only(33))
    scheduler = Scheduler(BlockPool(32, BLOCK), 64, 8)
    for request in (Request(id="r", prompt_ids=[1, 2], params=params), make_request(prompt=2)):
        scheduler.add(request)
    builder = BatchBuilder(8, 8, BLOCK, (), vocab_size=70)

    mask = builder.build(scheduler.schedule()).sampling.bitmask

    assert mask is not None
    assert mask.tolist() == [[0, 2, 0], [0xFFFFFFFF] * 3]


def test_without_a_constraint_there_is_no_mask() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0)
    scheduler, builder = make(Request(id="r", prompt_ids=[1, 2], params=params))

    assert builder.build(scheduler.schedule()).sampling.bitmask is None
