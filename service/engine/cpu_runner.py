"""Steps on the NumPy backend, in a thread of its own: the one place that computes without a GPU."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.runner import MAX_TOP_LOGPROBS, StepResult
from service.model.decoder import Decoder
from service.tensor.backend import Backend, SampleArrays


class CpuRunner:
    """Steps on the NumPy backend, one after the other: the next needs this one's ids and all the cores."""

    max_in_flight = 1

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        *,
        num_blocks: int,
        block_size: int,
        max_step_tokens: int,
        max_running: int,
        vocab_size: int,
    ) -> None:
        self.decoder = decoder
        self._backend = backend
        self._vocab_size = vocab_size
        self._cache = decoder.new_cache(num_blocks, block_size)
        self._activations = decoder.new_activations(max_step_tokens)
        self._last_ids = backend.zeros((max_running + 1,), np.int32)  # the last is nobody's
        self._logits = backend.empty((max_running, vocab_size), np.float32)
        self._samples = SampleArrays(
            ids=backend.empty((max_running,), np.int32),
            logprobs=backend.zeros((max_running,), np.float32),
            ranks=backend.zeros((max_running,), np.int32),
            top_ids=backend.zeros((max_running, MAX_TOP_LOGPROBS), np.int32),
            top_logprobs=backend.zeros((max_running, MAX_TOP_LOGPROBS), np.float32),
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")

    def launch(self, batch: Batch) -> Future[StepResult]:
        return self._thread.submit(self._run, batch)

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, batch: Batch) -> StepResult:
        count = len(batch.sampled)
        logits, out = self._logits[:count], self._samples
        self.decoder.forward(batch.arrays, self._cache, self._activations, self._last_ids, logits)
        self._backend.sample(logits, batch.sampling, batch.arrays, self._last_ids, out)
        result = self._result(count)
        return result if batch.scoring is None else replace(result, scores=self._scores(batch))

    def _scores(self, batch: Batch) -> StepResult:
        """Of prompt ids, behind a step whose activations are still there."""
        assert batch.scoring is not None
        found = []
        for piece in batch.scoring.pieces(batch.arrays, len(self._logits), len(self._last_ids) - 1):
            count = len(piece.arrays.sample_rows)
            self.decoder.logits(piece.arrays, self._activations, self._logits[:count])
            self._backend.sample(
                self._logits[:count], piece.sampling, piece.arrays, self._last_ids, self._samples
            )
            found.append(self._result(count))
        parts = zip(*map(_arrays_of, found), strict=True)
        return StepResult(*(np.concatenate(part) for part in parts))

    def _result(self, count: int) -> StepResult:
        return StepResult(*(part[:count].copy() for part in _arrays_of(self._samples)))


def _arrays_of(samples: SampleArrays | StepResult) -> tuple[NDArray[Any], ...]:
    return samples.ids, samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs
