"""Decides, once a step, which tokens of which requests the model computes.

Two phases: requests that run go on; what budget is left admits those that wait. The scheme, a token
budget over requests that differ only in how many tokens they lack, is that of vLLM V1; the idea of
joining and leaving at every step is Orca's (Yu et al., OSDI 2022).
"""

from bisect import insort
from dataclasses import dataclass, field

import msgspec

from service.engine.block_pool import BlockPool
from service.engine.prefix_cache import PrefixCache
from service.engine.request import Request, State


class Work(msgspec.Struct, frozen=True):
    """What a step does for one request: compute ids from position `start` on, and maybe sample."""

    request: Request
    start: int
    num_tokens: int
    samples: bool  # these are the last ids that exist, so the next one is sampled
    scores_from: int = 0  # rows from this position ...
    scores_to: int = 0  # ... up to this one tell how likely the prompt's id behind them was


@dataclass(slots=True)
class Step:
    """One step's work, and who lost their blocks for it."""

    budget: int  # tokens left to give
    work: list[Work] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class Scheduler:
    """First come, first served within a priority. Holds no text, no tensors and no clock.

    Invariants: a RUNNING request has a lane of its own, any other has neither lane nor blocks. Requests
    that run are served before any that wait. The running request that is first in order is never
    preempted, so something always gets done.

    Blocks are given back at once, even if a launched step still writes to them: the device runs steps in
    the order of launch, so whoever gets them next writes later.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_step_tokens: int,
        max_running: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._pool = pool
        self._max_step_tokens = max_step_tokens
        self._max_running = max_running
        self._prefix_cache = prefix_cache
        self._free_lanes = list(range(max_running - 1, -1, -1))
        self.running: list[Request] = []  # sorted by Request.order
        self.waiting: list[Request] = []  # sorted by Request.order

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        insort(self.waiting, request, key=lambda r: r.order)

    def schedule(self) -> Step:
        """Plan one step. On return its tokens count as computed and have their blocks."""
        step = Step(self._max_step_tokens)
        self._continue_running(step)
        self._admit_waiting(step)
        return step

    def step_done(self, step: Step) -> None:
        """The device has finished with a step, and its sampled ids are known."""
        for work in step.work:
            work.request.num_in_flight -= 1
            work.request.num_pending_ids -= work.samples

    def finish(self, request: Request) -> None:
        """End a request, whatever its state; nothing happens if it has ended."""
        if request.state is State.RUNNING:
            self._stop_running(request)
        elif request.state is not State.FINISHED:
            self.waiting.remove(request)
        request.state = State.FINISHED

    def _continue_running(self, step: Step) -> None:
        size = self._pool.block_size
        for request in list(self.running):
            num_known = len(request.token_ids) + request.num_pending_ids
            if request.state is not State.RUNNING or num_known >= request.last_num_tokens:
                continue  # preempted for an earlier request in this very step, or waiting for its last id
            if request.num_pending_ids and request.needs_known_ids:
                continue
            num_tokens = min(num_known - request.num_computed_tokens, step.budget)
            num_after = request.num_computed_tokens + num_tokens
            if num_tokens and (
                num_after <= len(request.block_table) * size or self._make_room(request, num_after, step)
            ):
                self._plan(request, num_tokens, step)

    def _make_room(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Get blocks for so many tokens, preempting the last in order; False: `request` itself went."""
        while not self._pool.extend(request.block_table, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the queue, to be recomputed. Ids in flight still count when they arrive."""
        self._stop_running(request)
        request.state = State.PREEMPTED
        self.add(request)

    def _admit_waiting(self, step: Step) -> None:
        while self.waiting and step.budget and len(self.running) < self._max_running:
            request = self.waiting[0]
            if request.num_in_flight or not self._has_room_for(request):
                return  # the head waits, for its last id or for room: skipping it would starve long prompts
            self.waiting.pop(0)
            self._start_running(request)
            step.admitted.append(request)
            num_tokens = min(request.num_uncomputed_tokens, step.budget)
            has_blocks = self._pool.extend(request.block_table, request.num_computed_tokens + num_tokens)
            assert has_blocks, "_has_room_for counted the whole prompt"
            self._plan(request, num_tokens, step)

    def _has_room_for(self, request: Request) -> bool:
        """Whether all its ids fit beside what the running ones lack, with a block to grow for each.

        Taking it in on less would soon preempt it again.
        """
        if not self.running:
            return True  # the engine accepts nothing that does not fit alone
        blocks_for = self._pool.blocks_for
        claimed = sum(blocks_for(r.num_tokens) - len(r.block_table) + 1 for r in self.running)
        missing = blocks_for(request.num_tokens) + claimed - self._pool.num_available
        if missing > 0 and self._prefix_cache is not None and not request.lacks_scores:
            blocks, _ = self._prefix_cache.match(request)
            missing -= sum(map(self._pool.is_used, blocks))  # shared with a running request
        return missing <= 0

    def _start_running(self, request: Request) -> None:
        request.lane = self._free_lanes.pop()
        request.state = State.RUNNING
        insort(self.running, request, key=lambda r: r.order)
        if self._prefix_cache is not None and not request.lacks_scores:  # cached rows give no scores
            blocks, request.chain = self._prefix_cache.match(request)
            for block in blocks:
                self._pool.share(block)
            request.block_table.extend(blocks)
            request.num_registered_blocks = len(blocks)
            request.num_computed_tokens = len(blocks) * self._pool.block_size
        else:
            request.chain, request.num_registered_blocks = request.salt, 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens

    def _plan(self, request: Request, num_tokens: int, step: Step) -> None:
        start = request.num_computed_tokens
        samples = start + num_tokens == len(request.token_ids) + request.num_pending_ids
        scores_from, scores_to = request.plan_scores(start, start + num_tokens)
        step.work.append(Work(request, start, num_tokens, samples, scores_from, scores_to))
        step.budget -= num_tokens
        request.num_computed_tokens = start + num_tokens
        request.num_in_flight += 1
        request.num_pending_ids += samples
        # ids of a block may become known after it was computed, so registered ones are what to compare with
        size = self._pool.block_size
        if (
            self._prefix_cache is not None
            and start + num_tokens >= (request.num_registered_blocks + 1) * size
        ):
            self._prefix_cache.register(request)

    def _stop_running(self, request: Request) -> None:
        self.running.remove(request)
        self._free_lanes.append(request.lane)
        request.lane = -1
        self._pool.release(request.block_table)
        request.num_computed_tokens = 0
