"""The engine loop: one asyncio task that owns scheduler, pool and requests.

Everything here runs on the event loop, so nothing needs a lock: a submission or a cancellation happens
between two steps or while a step computes in the runner's thread, never inside `schedule`.
"""

import asyncio
import logging
import random
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from time import monotonic

from service.engine.batch import Batch, BatchBuilder
from service.engine.block_pool import BlockPool
from service.engine.constraint import Constraint
from service.engine.drain_rate import DrainRate
from service.engine.observer import EngineGauges, EngineObserver, NoObserver, RequestRecord
from service.engine.prefix_cache import PrefixCache
from service.engine.request import FinishReason, Request, SamplingParams, State, TokenLogprobs
from service.engine.runner import Runner, StepResult
from service.engine.scheduler import Scheduler, Step
from service.engine.stream import Stream
from service.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError

log = logging.getLogger(__name__)


# Steps whose ids may gather before streams hear of them, while the device is ahead of the host: fewer and
# longer events then keep it busy.
_MAX_HELD = 4


class Engine:
    """Continuous batching over a runner. Implements interface.EngineClient.

    Invariants: every accepted request gets exactly one output with a finish reason, or is closed by its
    owner; whatever happens, blocks of ended requests return to the pool.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_step_tokens: int,
        max_running: int,
        max_waiting: int,
        numerics: str = "",
        prefix_cache: bool = True,
        observer: EngineObserver | None = None,
    ) -> None:
        self.max_model_len = min(max_model_len, num_blocks * block_size)
        self.vocab_size = vocab_size
        self.numerics = numerics  # device and number formats: what decides the last bits of an answer
        self.failure: str | None = None
        self.pool = BlockPool(num_blocks, block_size)
        self._prefix_cache = PrefixCache(self.pool) if prefix_cache else None
        self.scheduler = Scheduler(self.pool, max_step_tokens, max_running, self._prefix_cache)
        max_blocks = self.pool.blocks_for(self.max_model_len)
        self._builder = BatchBuilder(max_running, max_blocks, block_size, eos_token_ids, vocab_size)
        self.runner = runner
        self._observer = observer or NoObserver()
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_waiting = max_waiting
        self._streams: dict[int, Stream] = {}  # by Request.arrival
        self._num_submitted = 0
        self._drain_rate = DrainRate()
        self._is_draining = False
        self._work_arrived = asyncio.Event()
        self._unread: list[Stream] = []  # have ids that they have not heard of
        self._num_held = 0  # steps since streams last heard
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._beat_at: float | None = None  # None: asleep, nothing to do
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the loop."""
        self._task = asyncio.create_task(self._run(), name="engine")

    async def stop(self) -> None:
        """End at once: requests that are left get an error."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail_all("the server stopped")
        await asyncio.to_thread(self.runner.close)

    def drain(self) -> None:
        """Accept nothing more; what was accepted goes on."""
        self._is_draining = True

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    async def until_empty(self) -> None:
        """Wait until no request is left."""
        await self._is_empty.wait()

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no further request."""
        return len(self.scheduler.waiting) >= self.max_waiting

    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round; 0 while it has nothing to do."""
        return 0.0 if self._beat_at is None else monotonic() - self._beat_at

    async def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        salt: bytes = b"",
    ) -> Stream:
        """See interface.EngineClient.submit."""
        self._check_open()
        self._check_request(prompt_ids, params)
        self._num_submitted += 1
        request = Request(
            id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            priority=priority,
            arrival=self._num_submitted,
            submitted_at=monotonic(),
            seed=random.getrandbits(64) if params.seed is None else params.seed % 2**64,
            salt=salt,
            ending_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self._eos_token_ids),
        )
        stream = self._streams[request.arrival] = Stream(request, self.cancel)
        self._is_empty.clear()
        self.scheduler.add(request)
        self._work_arrived.set()
        return stream

    def cancel(self, stream: Stream, cause: str) -> None:
        """End a request from outside; idempotent. Its stream ends with CANCELLED."""
        if stream.request.state is not State.FINISHED:
            self._end(stream.request, FinishReason.CANCELLED, cause)
            self._report(num_prefill_tokens=0, num_decode_tokens=0)

    def _check_open(self) -> None:
        if self.failure is not None:
            self._observer.refused("dead")
            raise EngineDeadError(f"The engine has stopped: {self.failure}")
        if self._is_draining:
            self._observer.refused("draining")
            raise OverloadedError("The server is shutting down.", retry_after_seconds=1.0)
        if self.is_full:
            self._observer.refused("queue_full")
            seconds = self._drain_rate.seconds_for(len(self.scheduler.waiting) / 2, monotonic())
            raise OverloadedError(
                f"The queue is full: {self.max_waiting} requests are waiting.", retry_after_seconds=seconds
            )

    def _check_request(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if not prompt_ids:
            raise RequestError("The prompt is empty: give at least one token.", field="prompt")
        if len(prompt_ids) + params.max_tokens > self.max_model_len:
            self._observer.refused("context_length")
            raise ContextLengthError(
                f"The context holds {self.max_model_len} tokens, but {len(prompt_ids)} in the prompt and "
                f"{params.max_tokens} to generate were asked for.",
                field="prompt",
            )
        for field, ids in (
            ("prompt", prompt_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ):
            if not all(0 <= token_id < self.vocab_size for token_id in ids):
                raise RequestError(f"Token ids go from 0 to {self.vocab_size - 1}.", field=field)

    async def _run(self) -> None:
        launched: deque[_Launched] = deque()
        try:
            while True:
                if not launched and not self.scheduler.has_work:
                    await self._sleep()
                self._beat_at = monotonic()
                has_launched = self._launch(launched)
                if launched and (not has_launched or len(launched) >= self.runner.max_in_flight):
                    await self._collect(launched.popleft())
                    self._wake_streams(launched)
                else:
                    await asyncio.sleep(0)
        except EngineDeadError as error:
            self._die(str(error))
        except Exception as error:  # a fault of ours: nothing can be trusted any more
            log.exception("the engine loop failed")
            self._die(f"internal error: {error}")

    async def _sleep(self) -> None:
        self._beat_at = None
        self._work_arrived.clear()
        await self._work_arrived.wait()

    def _launch(self, launched: "deque[_Launched]") -> bool:
        """Plan a step and start it; False: there is nothing to do until a launched one has ended."""
        step = self.scheduler.schedule()
        self._note_admissions(step)
        if not step.work:
            assert launched or not self.scheduler.has_work, "requests wait, but none can be planned"
            return False
        try:
            batch = self._builder.build(step)
            launched.append(_Launched(step, batch, self.runner.launch(batch)))
        except Exception as error:
            self._fail_step(step, error)
        return True

    def _note_admissions(self, step: Step) -> None:
        for _ in step.preempted:
            self._observer.preempted()
        for request in step.admitted:
            if request.admitted_at is None:
                request.admitted_at = monotonic()
                self._observer.prefix_cache_queried(
                    num_tokens=request.num_prompt_tokens, num_hit_tokens=request.num_cached_tokens or 0
                )

    async def _collect(self, launched: "_Launched") -> None:
        """Wait for a step and hand out its ids."""
        step = launched.step
        try:
            if launched.future.done():
                await asyncio.sleep(0)
            result = await asyncio.wrap_future(launched.future)
        except EngineDeadError:
            raise
        except Exception as error:
            self._fail_step(step, error)
            return
        self.scheduler.step_done(step)
        self._hand_out_scores(launched.batch, result)
        self._hand_out(launched.batch, result)
        arrays = launched.batch.arrays
        num_prefill_tokens = len(arrays.positions) - arrays.num_decode
        self._report(num_prefill_tokens=num_prefill_tokens, num_decode_tokens=arrays.num_decode)

    def _wake_streams(self, launched: "deque[_Launched]") -> None:
        """Let streams read, unless the next step has ended already: then soon, with what it gave."""
        self._num_held += 1
        if self._num_held < _MAX_HELD and launched and launched[0].future.done():
            return
        for stream in self._unread:
            stream.wake()
        self._unread.clear()
        self._num_held = 0

    def _hand_out_scores(self, batch: Batch, result: StepResult) -> None:
        if batch.scoring is None or result.scores is None:
            return
        start = 0
        for request, count in batch.scoring.owners:
            stream = self._streams.get(request.arrival)
            num_top = request.params.prompt_logprobs or 0
            if stream is not None:
                found = [_token_logprobs(num_top, result.scores, start + i) for i in range(count)]
                stream.add_prompt_logprobs(found)
            start += count

    def _hand_out(self, batch: Batch, result: StepResult) -> None:
        now, finished, gaps = monotonic(), State.FINISHED, dict[float, int]()
        for index, (request, token_id) in enumerate(zip(batch.sampled, result.ids.tolist(), strict=True)):
            if request.state is finished:
                continue
            if token_id < 0:
                self._distrust_cache()
                message = "The model's output is not a number (NaN), or every token is forbidden."
                self._end(request, FinishReason.ERROR, "error", error=message)
                continue
            stream = self._streams[request.arrival]
            request.token_ids.append(token_id)
            stream.add(token_id)
            self._unread.append(stream)
            if stream.first_output_after is None:
                stream.first_output_after = now - request.submitted_at
                self._observer.first_token(stream.first_output_after)
            else:
                gaps[stream.last_output_at] = gaps.get(stream.last_output_at, 0) + 1
            stream.last_output_at = now
            if request.params.logprobs is not None:
                stream.add_logprobs(_token_logprobs(request.params.logprobs, result, index))
            if token_id in request.ending_ids:
                self._end(request, FinishReason.STOP, "stop", stop_token_id=token_id)
            elif request.params.constraint is not None:
                self._follow(request, request.params.constraint, token_id)
            elif len(request.token_ids) >= request.last_num_tokens:
                self._end(request, FinishReason.LENGTH, "length")
        for last_output_at, count in gaps.items():
            self._observer.next_tokens(now - last_output_at, count)

    def _follow(self, request: Request, constraint: Constraint, token_id: int) -> None:
        """Go on in the request's grammar, and see whether the id is the last."""
        constraint.advance(token_id)
        if constraint.is_over:
            self._end(request, FinishReason.STOP, "stop")
        elif len(request.token_ids) >= request.last_num_tokens:
            self._end(request, FinishReason.LENGTH, "length")
        elif constraint.failure is not None:
            self._end(request, FinishReason.ERROR, "error", error=constraint.failure)

    def _end(
        self,
        request: Request,
        finish_reason: FinishReason,
        reason: str,
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        """Finish a request and tell its stream and the observer; `reason` as in RequestRecord."""
        stream = self._streams.pop(request.arrival)
        if not self._streams:
            self._is_empty.set()
        self.scheduler.finish(request)
        now = monotonic()
        stream.record = RequestRecord(
            reason=reason,
            submitted_at=request.submitted_at,
            was_planned=request.admitted_at is not None,
            queue_seconds=(request.admitted_at or now) - request.submitted_at,
            first_token_seconds=stream.first_output_after,
            end_to_end_seconds=now - request.submitted_at,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
        )
        stream.end(finish_reason, stop_token_id=stop_token_id, error=error)
        self._drain_rate.note(now)
        self._observer.finished(stream.record)

    def _fail_step(self, step: Step, error: Exception) -> None:
        """End the requests of a step that could not run; the others go on."""
        log.error("a step failed; its %d requests end", len(step.work), exc_info=error)
        self.scheduler.step_done(step)
        self._distrust_cache()
        for work in step.work:
            if work.request.state is not State.FINISHED:
                message = f"The step that computed this request failed: {error}"
                self._end(work.request, FinishReason.ERROR, "error", error=message)

    def _distrust_cache(self) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.clear()

    def _die(self, failure: str) -> None:
        self.failure = failure
        self._fail_all(failure)

    def _fail_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            self._end(stream.request, FinishReason.ERROR, "error", error=message)
        self._report(num_prefill_tokens=0, num_decode_tokens=0)

    def _report(self, *, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self._observer.step_done(
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            gauges=EngineGauges(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                num_blocks=self.pool.num_blocks,
                num_used_blocks=self.pool.num_used,
                num_cached_blocks=self.pool.num_cached,
            ),
        )


@dataclass(slots=True, frozen=True)
class _Launched:
    """A step that the runner has."""

    step: Step
    batch: Batch
    future: Future[StepResult]


def _token_logprobs(num_top: int, result: StepResult, index: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=int(result.ids[index]),
        logprob=float(result.logprobs[index]),
        rank=int(result.ranks[index]),
        top_ids=tuple(result.top_ids[index, :num_top].tolist()),
        top_logprobs=tuple(result.top_logprobs[index, :num_top].tolist()),
    )
