"""A runner whose next id is a hash of everything the cache says about the request's past.

It keeps a cache of blocks as a device would, reads the past only through block tables, and runs steps in
order, one or two behind. So a lost, shared or stale block, a wrong position or a wrong slot changes ids.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.runner import StepResult

VOCAB = 50


def next_id(past: list[int], vocab: int = VOCAB) -> int:
    """The id that follows `past`: what the fake model does, with no cache at all."""
    digest = hashlib.blake2b(np.array(past, np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % vocab


def score_of(past: list[int], token_id: int) -> float:
    """The logprob of an id behind `past`."""
    return -float(next_id([*past, token_id], 1000))


def expected_ids(prompt: list[int], max_tokens: int, eos: int | None = None) -> list[int]:
    """Ids of a solo run."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_id(ids))
        if ids[-1] == eos:
            break
    return ids[len(prompt) :]


class FakeRunner:
    """`settle` runs the oldest launched step and resolves its future; `auto` does so at launch."""

    def __init__(self, num_blocks: int, block_size: int, max_running: int, max_in_flight: int = 1) -> None:
        self.decoder: Any = None
        self.max_in_flight = max_in_flight
        self.block_size = block_size
        self.slots = np.full(num_blocks * block_size, -1, np.int64)
        self.last_ids = np.full(max_running + 1, -1, np.int64)
        self.auto = True
        self.launched: list[tuple[Batch, Future[StepResult]]] = []
        self.before_step: Callable[[Batch], None] = lambda batch: None  # may raise: the step fails
        self.is_closed = False

    def launch(self, batch: Batch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        self.launched.append((batch, future))
        if self.auto:
            self.settle()
        return future

    def settle(self) -> None:
        batch, future = self.launched.pop(0)
        try:
            self.before_step(batch)
            result = self._run(batch)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        self.is_closed = True

    def _run(self, batch: Batch) -> StepResult:
        arrays = batch.arrays
        owner = np.repeat(np.arange(len(arrays.lanes)), np.diff(arrays.row_starts))
        ids = np.where(arrays.token_ids < 0, self.last_ids[arrays.lanes[owner]], arrays.token_ids)
        assert (ids >= 0).all(), "an id was asked for that nobody sampled"
        assert len(set(arrays.slot_mapping.tolist())) == len(arrays.slot_mapping)
        self.slots[arrays.slot_mapping] = ids
        row_of = {int(row): index for index, row in enumerate(arrays.sample_rows)}
        sampled = np.zeros(len(row_of), np.int32)
        for request in range(len(arrays.lanes)):
            row = int(arrays.row_starts[request + 1]) - 1
            if row not in row_of:
                continue
            where = np.arange(arrays.context_lens[request])
            assert arrays.positions[row] == where[-1]
            blocks = arrays.block_tables[request, where // self.block_size]
            past = self.slots[blocks * self.block_size + where % self.block_size]
            sampled[row_of[row]] = self._allowed(batch, row_of[row], next_id(past.tolist()))
        scores = None if batch.scoring is None else self._scores(batch, owner)
        self.last_ids[arrays.sample_lanes] = sampled
        count = len(sampled)
        return StepResult(
            ids=sampled,
            logprobs=np.zeros(count, np.float32),
            ranks=np.ones(count, np.int32),
            top_ids=np.zeros((count, 20), np.int32),
            top_logprobs=np.zeros((count, 20), np.float32),
            scores=scores,
        )

    def _scores(self, batch: Batch, owner: NDArray[np.int64]) -> StepResult:
        assert batch.scoring is not None
        arrays, logprobs = batch.arrays, []
        for row, token_id in zip(batch.scoring.rows, batch.scoring.ids, strict=True):
            where = np.arange(arrays.positions[row] + 1)
            blocks = arrays.block_tables[owner[row], where // self.block_size]
            past = self.slots[blocks * self.block_size + where % self.block_size]
            logprobs.append(score_of(past.tolist(), int(token_id)))
        count = len(logprobs)
        return StepResult(
            ids=batch.scoring.ids,
            logprobs=np.array(logprobs, np.float32),
            ranks=np.ones(count, np.int32),
            top_ids=np.zeros((count, 20), np.int32),
            top_logprobs=np.zeros((count, 20), np.float32),
        )

    def _allowed(self, batch: Batch, sample: int, token_id: int) -> int:
        """The id, or where a mask forbids it the next one that is allowed, round the vocabulary."""
        if batch.sampling.bitmask is None:
            return token_id
        bits = np.unpackbits(batch.sampling.bitmask[sample].view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:VOCAB])
        return int(allowed[np.searchsorted(allowed, token_id) % len(allowed)]) if len(allowed) else -1
