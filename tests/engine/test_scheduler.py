"""The two phases, preemption, and the invariants of scheduler and pool under random work."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.engine.block_pool import BlockPool
from service.engine.prefix_cache import PrefixCache
from service.engine.request import Request, State
from service.engine.scheduler import Scheduler, Step
from tests.factories import make_request

BLOCK = 4


def make_scheduler(*waiting: Request, blocks: int = 16, budget: int = 8, running: int = 4) -> Scheduler:
    scheduler = Scheduler(BlockPool(blocks, BLOCK), budget, running)
    for request in waiting:
        scheduler.add(request)
    return scheduler


def run_step(scheduler: Scheduler) -> Step:
    """Plan and compute one step: every sample is id 7."""
    step = scheduler.schedule()
    scheduler.step_done(step)
    for work in step.work:
        if work.samples:
            work.request.token_ids.append(7)
            if work.request.is_fully_planned:
                scheduler.finish(work.request)
    return step


def planned(step: Step) -> list[tuple[str, int]]:
    return [(work.request.id, work.num_tokens) for work in step.work]


def test_a_running_request_is_served_before_a_waiting_one() -> None:
    old, new = make_request("old", prompt=3, output=5), make_request("new", prompt=20)
    scheduler = make_scheduler(old)
    run_step(scheduler)
    scheduler.add(new)

    assert planned(scheduler.schedule()) == [("old", 1), ("new", 7)]  # one decode token; the rest of 8


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests() -> None:
    scheduler = make_scheduler(
        make_request("a", prompt=2, output=9), make_request("long", prompt=20, output=1)
    )

    chunks = [dict(planned(run_step(scheduler))).get("long") for _ in range(4)]

    assert chunks == [6, 7, 7, None]


def test_first_come_first_served_within_a_priority() -> None:
    late_but_urgent = make_request("urgent", priority=-1)
    scheduler = make_scheduler(make_request("first"), make_request("second"), budget=4)
    scheduler.add(late_but_urgent)

    assert [planned(run_step(scheduler))[-1][0] for _ in range(1)] == ["urgent"]
    assert [request.id for request in scheduler.waiting] == ["first", "second"]


def test_the_head_of_the_queue_is_not_overtaken_by_a_shorter_request() -> None:
    scheduler = make_scheduler(make_request("a", prompt=8, output=20), blocks=6, budget=64)
    run_step(scheduler)
    scheduler.add(make_request("long", prompt=20, output=1))
    scheduler.add(make_request("short", prompt=1, output=1))

    assert planned(scheduler.schedule()) == [("a", 1)]


def test_the_newest_request_gives_way_and_comes_back_with_its_ids() -> None:
    old, new = make_request("old", prompt=7, output=9), make_request("new", prompt=3, output=9)
    scheduler = make_scheduler(old, new, blocks=4, budget=64)
    seen_states = set()
    while scheduler.has_work:
        run_step(scheduler)
        seen_states.add(new.state)
        if new.state is State.PREEMPTED:
            assert not new.block_table
            assert new.num_computed_tokens == 0
            assert new.lane == -1

    assert State.PREEMPTED in seen_states
    assert old.num_output_tokens == new.num_output_tokens == 9


def test_every_running_request_has_a_lane_of_its_own() -> None:
    scheduler = make_scheduler(*(make_request(prompt=1, output=3) for _ in range(9)), running=3)
    while scheduler.has_work:
        run_step(scheduler)
        lanes = [request.lane for request in scheduler.running]
        assert len(set(lanes)) == len(lanes) <= 3
        assert all(0 <= lane < 3 for lane in lanes)


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(-1, 1)), min_size=1, max_size=12
    ),
    blocks=st.integers(10, 30),  # 10 blocks of 4 tokens hold the largest job: 30 + 10
    budget=st.integers(1, 16),
    running=st.integers(1, 4),
    cached=st.booleans(),
)
@example(jobs=[(30, 10, 0)], blocks=10, budget=16, running=1, cached=True)  # needs the very last block
@example(jobs=[(27, 7, 0)] * 2, blocks=11, budget=5, running=2, cached=True)  # preempted, back at once
@settings(deadline=None)
def test_every_request_finishes_and_every_block_comes_back(
    jobs: list[tuple[int, int, int]], blocks: int, budget: int, running: int, cached: bool
) -> None:
    requests = [make_request(f"r{i}", *job) for i, job in enumerate(jobs)]
    pool = BlockPool(blocks, BLOCK)
    scheduler = Scheduler(pool, budget, running, PrefixCache(pool) if cached else None)
    for request in requests:
        scheduler.add(request)

    while scheduler.has_work:
        step = run_step(scheduler)
        assert 0 < sum(work.num_tokens for work in step.work) <= budget
        assert len(scheduler.running) <= running
        held = {block for request in requests for block in request.block_table}
        assert len(held) == pool.num_used
        if not cached:  # else it may come back at once, sharing blocks that another has filled since
            assert not {r.id for r in step.preempted} & {work.request.id for work in step.work}
            assert len(held) == sum(len(request.block_table) for request in requests)
        for request in [*scheduler.waiting, *scheduler.running]:
            assert request.num_computed_tokens <= len(request.block_table) * BLOCK

    assert all(r.num_output_tokens == r.params.max_tokens for r in requests)
    assert pool.num_available == blocks


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_request_that_needs_the_whole_pool_runs_alone(max_running: int) -> None:
    scheduler = make_scheduler(
        make_request("small", prompt=4, output=2),
        make_request("all", prompt=15, output=1),
        blocks=4,
        running=max_running,
        budget=64,
    )
    for _ in range(8):
        run_step(scheduler)
    assert not scheduler.has_work


def test_a_preempted_request_waits_for_its_id_in_flight() -> None:
    old, new = make_request("old", prompt=3, output=9), make_request("new", prompt=3, output=9)
    scheduler = make_scheduler(old, new, blocks=4, budget=64)
    launched = [scheduler.schedule()]
    while new.state is not State.PREEMPTED:
        launched.append(scheduler.schedule())
    scheduler.finish(old)  # leaves all the room there is

    assert new.num_in_flight > 0
    assert planned(scheduler.schedule()) == []
    for step in launched:
        scheduler.step_done(step)
    assert planned(scheduler.schedule()) == [("new", 3)]
