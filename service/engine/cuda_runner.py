"""Steps on a GPU: decode from captured graphs, anything else launched stage by stage.

The host never waits inside `launch`: it fills page-locked memory, queues one copy, the step and the copy
of the sampled ids back, and returns. Ids stay on the device too (`last_ids`), where the next step finds
them, so a second step can be queued while the first one runs. A thread of its own waits for events.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import cupy
import numpy as np

from service.engine.batch import Batch
from service.engine.cuda_buffers import DeviceArrays, HostStage, Kind, Sizes, Spare, arrays_of, new_samples
from service.engine.runner import StepResult
from service.model.decoder import Decoder
from service.tensor.backend import Backend, SampleArrays, SamplingArrays

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NARROWEST_TABLE = 16  # blocks; wider block tables come in steps of four times
PREFILL_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 384, 512)  # longer ones keep the GPU busy as they are
_FIRST_WIDTHS = 2  # of block tables, whose graphs are captured at start
_NUM_STAGES = 3  # host buffers in turn: one more than steps in flight


class CudaRunner:
    """Runs a decoder on one GPU. Padding rows of a bucket write to a block and a lane of their own."""

    max_in_flight = 2

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
        max_model_len: int,
    ) -> None:
        self.decoder = decoder
        self._backend = backend
        self._max_running = max_running
        self._max_blocks = -(-max_model_len // block_size)
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._cache = decoder.new_cache(num_blocks + 1, block_size)
        max_rows = max(max_step_tokens, max_running)
        self._activations = decoder.new_activations(max_rows)
        self._last_ids = backend.zeros((max_running + 1,), np.int32)
        self._logits = backend.empty((max_running, vocab_size), np.float32)
        self._samples = new_samples(backend, max_running)
        spare = Spare(block=num_blocks, lane=max_running, slot=num_blocks * block_size)
        self._device = DeviceArrays(max_rows, max_running, self._max_blocks, vocab_size)
        self._stages = [HostStage(self._device, max_running, spare) for _ in range(_NUM_STAGES)]
        self._num_launched = 0
        self._graphs: dict[tuple[Sizes, Kind], Any] = {}
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="gpu")
        cupy.cuda.Device().synchronize()  # buffers were zeroed on another stream

    def launch(self, batch: Batch) -> Future[StepResult]:
        stage = self._stages[self._num_launched % _NUM_STAGES]
        self._num_launched += 1
        self._make_room(max(len(batch.sampling.seen_ids), len(batch.sampling.bias_ids)))
        with self._stream:
            sizes, kind = Sizes.of(batch), Kind.of(batch)
            bucket = self._bucket(sizes)
            stage.upload(batch, bucket or sizes, self._stream)
            if bucket is None:
                self._run(sizes, kind)
            elif (graph := self._graphs.get((bucket, kind))) is not None:
                graph.launch(self._stream)
            else:
                self._captured(bucket, kind)  # runs the step while it prepares
            scores = None if batch.scoring is None else self._score(batch, sizes)
            stage.download(self._samples, sizes.num_samples, kind.has_logprobs, scores, self._stream)
        return self._waiter.submit(stage.wait)

    def _score(self, batch: Batch, sizes: Sizes) -> SampleArrays:
        """Queue the scoring of prompt ids, behind a step whose activations are still there."""
        assert batch.scoring is not None
        found = new_samples(self._backend, len(batch.scoring.ids))
        arrays = self._device.step(sizes)
        for piece in batch.scoring.pieces(batch.arrays, self._max_running, self._max_running):
            place, count = piece.place, len(piece.arrays.sample_rows)
            own = {
                name: cupy.asarray(getattr(piece.arrays, name)) for name in ("sample_rows", "sample_lanes")
            }
            step = replace(arrays, **own)
            sampling = SamplingArrays(
                **{
                    field.name: cupy.asarray(value) if isinstance(value, np.ndarray) else value
                    for field in fields(SamplingArrays)
                    for value in (getattr(piece.sampling, field.name),)
                }
            )
            logits = self._logits[:count]
            self.decoder.logits(step, self._activations, logits)
            into = SampleArrays(*(array[place] for array in arrays_of(found)))
            self._backend.sample(logits, sampling, step, self._last_ids, into)
        return found

    def close(self) -> None:
        self._waiter.shutdown()

    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture graphs of short contexts for every bucket; yields (done, total)."""
        batches = [bucket for bucket in BUCKETS if bucket < self._max_running] + [self._max_running]
        widths = dict.fromkeys(self._width(NARROWEST_TABLE * 4**i) for i in range(_FIRST_WIDTHS))
        wanted = [_decode_sizes(batch, width) for batch in reversed(batches) for width in widths]
        prompts = [rows for rows in PREFILL_BUCKETS if rows <= self._device.max_rows]
        wanted += [self._prefill_sizes(rows) for rows in prompts]
        with self._stream:
            self._stages[0].fill_spare(self._stream)
            for done, sizes in enumerate(wanted, 1):
                self._captured(sizes, Kind())
                yield done, len(wanted)

    def _captured(self, sizes: Sizes, kind: Kind) -> None:
        """Run a step, then record it: a capture must not compile kernels or make workspaces."""
        self._run(sizes, kind)
        self._stream.synchronize()
        self._stream.begin_capture()
        self._run(sizes, kind)
        self._graphs[sizes, kind] = self._stream.end_capture()

    def _bucket(self, sizes: Sizes) -> Sizes | None:
        """The graph that serves a step, with padding; None: it is launched stage by stage."""
        width, count = self._width(sizes.width), sizes.num_requests
        if sizes.num_decode == count:
            found = next((b for b in BUCKETS if count <= b < self._max_running), self._max_running)
            return _decode_sizes(found, width)
        rows = next((rows for rows in PREFILL_BUCKETS if rows >= sizes.num_rows), self._device.max_rows + 1)
        is_alone = count == 1 and rows <= self._device.max_rows
        return self._prefill_sizes(rows) if is_alone else None

    def _prefill_sizes(self, rows: int) -> "Sizes":
        """One request; its launches do not depend on the width of its block table."""
        return Sizes(rows, 1, 1, self._max_blocks, 0)

    def _run(self, sizes: Sizes, kind: Kind) -> None:
        arrays, sampling = self._device.step(sizes), self._device.sampling(sizes.num_samples, kind)
        logits = self._logits[: sizes.num_samples]
        self.decoder.forward(arrays, self._cache, self._activations, self._last_ids, logits)
        if sizes.num_samples:
            self._backend.sample(logits, sampling, arrays, self._last_ids, self._samples)

    def _make_room(self, num_sparse: int) -> None:
        """For more penalties than ever before; graphs hold the old addresses, so they go."""
        if num_sparse > self._device.max_sparse:
            self._stream.synchronize()
            self._graphs.clear()
            self._device.make_sparse(1 << (num_sparse - 1).bit_length())

    def _width(self, num_blocks: int) -> int:
        width = NARROWEST_TABLE
        while width < num_blocks:
            width *= 4
        return min(width, self._max_blocks)


def _decode_sizes(batch: int, width: int) -> Sizes:
    return Sizes(batch, batch, batch, width, batch)
