"""Steps on a GPU: decode from captured graphs, anything else launched stage by stage.

The host never waits inside `launch`: it fills a page-locked buffer, queues one copy, the step and the copy
of the sampled ids back, and returns. Ids stay on the device too (`last_ids`), where the next step finds
them, so a second step can be queued while the first one runs. A thread of its own waits for events.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.runner import MAX_TOP_LOGPROBS, StepResult
from service.errors import EngineDeadError
from service.model.decoder import Decoder
from service.tensor.backend import Backend, SampleArrays, SamplingArrays, StepArrays

Array = Any
HostArray = NDArray[Any]

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NARROWEST_TABLE = 16  # blocks; wider block tables come in steps of four times
_FIRST_SPARSE = 1 << 16  # ids of penalties, and of bias, that a step has room for at first
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
        self._vocab_size = vocab_size
        self._max_blocks = -(-max_model_len // block_size)
        self._null_block = num_blocks
        self._block_size = block_size
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._cache = decoder.new_cache(num_blocks + 1, block_size)
        self._activations = decoder.new_activations(max(max_step_tokens, max_running))
        self._last_ids = backend.zeros((max_running + 1,), np.int32)
        self._logits = backend.empty((max_running, vocab_size), np.float32)
        self._device = _DeviceArrays(max(max_step_tokens, max_running), max_running, self._max_blocks)
        self._samples = SampleArrays(
            ids=backend.zeros((max_running,), np.int32),
            logprobs=backend.zeros((max_running,), np.float32),
            ranks=backend.zeros((max_running,), np.int32),
            top_ids=backend.zeros((max_running, MAX_TOP_LOGPROBS), np.int32),
            top_logprobs=backend.zeros((max_running, MAX_TOP_LOGPROBS), np.float32),
        )
        self._stages = [_HostStage(self._device, max_running) for _ in range(_NUM_STAGES)]
        self._num_launched = 0
        self._graphs: dict[tuple[int, int, int], Any] = {}
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="gpu")
        cupy.cuda.Device().synchronize()  # buffers were zeroed on another stream

    def launch(self, batch: Batch) -> Future[StepResult]:
        stage = self._stages[self._num_launched % _NUM_STAGES]
        self._num_launched += 1
        self._make_room(max(len(batch.sampling.seen_ids), len(batch.sampling.bias_ids)))
        with self._stream:
            is_decode = batch.arrays.num_decode == len(batch.arrays.lanes)
            padded = self._padded(batch) if is_decode else batch
            arrays, sampling = stage.upload(padded, self._stream)
            if is_decode and sampling.bitmask is None:
                self._replay(arrays, sampling)
            else:
                self._run(arrays, sampling)
            stage.download(self._samples, len(batch.sampled), sampling.max_top_logprobs >= 0, self._stream)
        return self._waiter.submit(stage.wait)

    def close(self) -> None:
        self._waiter.shutdown()

    def capture(self) -> Iterator[tuple[int, int]]:
        """Capture decode graphs of short contexts for every bucket; yields (done, total).

        Before them one prefill, so that the first request does not wait for libraries to load.
        """
        self.launch(_prefill_batch(self._block_size, self._null_block, self._max_running)).result()
        buckets = [bucket for bucket in BUCKETS if bucket < self._max_running] + [self._max_running]
        for done, bucket in enumerate(reversed(buckets), 1):
            empty = _padding_batch(bucket, self._null_block, self._block_size, self._max_running)
            with self._stream:
                arrays, sampling = self._stages[0].upload(self._padded(empty), self._stream)
                self._replay(arrays, sampling)
                self._stream.synchronize()
            yield done, len(buckets)

    def _run(self, arrays: StepArrays, sampling: SamplingArrays) -> None:
        logits = self._logits[: len(arrays.sample_rows)]
        self.decoder.forward(arrays, self._cache, self._activations, self._last_ids, logits)
        if len(logits):
            self._backend.sample(logits, sampling, arrays, self._last_ids, self._samples)

    def _replay(self, arrays: StepArrays, sampling: SamplingArrays) -> None:
        key = (len(arrays.lanes), arrays.block_tables.shape[1], sampling.max_top_logprobs)
        graph = self._graphs.get(key)
        if graph is None:
            self._run(arrays, sampling)  # compiles kernels and makes workspaces, which a capture must not
            self._stream.synchronize()
            self._stream.begin_capture()
            self._run(arrays, sampling)
            graph = self._graphs[key] = self._stream.end_capture()
            return  # this step has been run above
        graph.launch(self._stream)

    def _make_room(self, num_sparse: int) -> None:
        """For more penalties than ever before; graphs hold the old addresses, so they go."""
        if num_sparse > self._device.max_sparse:
            self._stream.synchronize()
            self._graphs.clear()
            self._device.make_sparse(1 << (num_sparse - 1).bit_length())

    def _bucket(self, num_requests: int) -> int:
        return next((b for b in BUCKETS if b >= num_requests and b <= self._max_running), self._max_running)

    def _padded(self, batch: Batch) -> Batch:
        """The batch with rows up to the next bucket, and a block table as wide as one of a few widths."""
        count = len(batch.arrays.lanes)
        padding = _padding_batch(
            self._bucket(count) - count, self._null_block, self._block_size, self._max_running
        )
        width = NARROWEST_TABLE
        while width < batch.arrays.block_tables.shape[1]:
            width *= 4
        return _joined(batch, padding, min(width, self._max_blocks))


class _DeviceArrays:
    """Arrays of fixed address that steps read: one int32 block that a single copy fills, and the tables."""

    def __init__(self, max_rows: int, max_requests: int, max_blocks: int) -> None:
        self.max_rows, self.max_requests, self.max_blocks = max_rows, max_requests, max_blocks
        self.lengths = {
            "token_ids": max_rows,
            "positions": max_rows,
            "slot_mapping": max_rows,
            "row_starts": max_requests + 1,
            "context_lens": max_requests,
            "lanes": max_requests,
            "sample_rows": max_requests,
            "sample_lanes": max_requests,
            "temperature": max_requests,
            "top_k": max_requests,
            "top_p": max_requests,
            "min_p": max_requests,
            "seeds": 2 * max_requests,
            "choices": max_requests,
            "sampling_positions": max_requests,
            "repetition_penalty": max_requests,
            "presence_penalty": max_requests,
            "frequency_penalty": max_requests,
            "seen_starts": max_requests + 1,
            "bias_starts": max_requests + 1,
        }
        self.starts: dict[str, int] = {}
        total = 0
        for name, length in self.lengths.items():
            self.starts[name] = total
            total += -(-length // 4) * 4  # 16-byte pieces
        self.total = total
        self.packed = cupy.zeros(total, np.int32)
        self.tables = cupy.zeros((max_requests, max_blocks), np.int32)
        self.make_sparse(_FIRST_SPARSE)

    def make_sparse(self, length: int) -> None:
        """Room for `length` ids of penalties and as many of bias in one step."""
        self.max_sparse = length
        self.seen_ids, self.seen_counts, self.bias_ids = (cupy.zeros(length, np.int32) for _ in range(3))
        self.bias_values = cupy.zeros(length, np.float32)

    def view(self, name: str, length: int, dtype: Any = np.int32) -> Array:
        start = self.starts[name]
        size = length * np.dtype(dtype).itemsize // 4
        return self.packed[start : start + size].view(dtype)


class _HostStage:
    """Page-locked memory of one step on its way to the device, and of its result on the way back."""

    def __init__(self, device: _DeviceArrays, max_requests: int) -> None:
        self._device = device
        self._packed = _pinned((device.total,), np.int32)
        self._tables = _pinned(device.tables.shape, np.int32)
        self._sparse = _pinned((4, device.max_sparse), np.int32)
        self._ids = _pinned((2, max_requests), np.int32)
        self._logprobs = _pinned((max_requests,), np.float32)
        self._top_ids = _pinned((max_requests, MAX_TOP_LOGPROBS), np.int32)
        self._top_logprobs = _pinned((max_requests, MAX_TOP_LOGPROBS), np.float32)
        self._done = cupy.cuda.Event(block=False, disable_timing=True)
        self._count = 0

    def upload(self, batch: Batch, stream: Any) -> tuple[StepArrays, SamplingArrays]:
        """Queue the copies; return the same batch in arrays on the device."""
        arrays, sampling, device = batch.arrays, batch.sampling, self._device
        views: dict[str, Array] = {}
        for source, prefix in ((arrays, ""), (sampling, "sampling_")):
            for field in fields(source):
                name = (
                    field.name
                    if field.name in device.lengths and field.name != "positions"
                    else prefix + field.name
                )
                if name not in device.lengths:
                    continue
                host = getattr(source, field.name)
                start = device.starts[name]
                flat = host.view(np.int32)
                self._packed[start : start + len(flat)] = flat
                views[name] = device.view(name, len(host), host.dtype)
        device.packed.set(self._packed, stream=stream)
        self._upload_tables(arrays.block_tables, stream)
        self._upload_sparse(sampling, stream)
        count, width = arrays.block_tables.shape
        step: dict[str, Any] = {field.name: views.get(field.name) for field in fields(StepArrays)}
        step |= {"block_tables": device.tables[:count, :width], "num_decode": arrays.num_decode}
        how: dict[str, Any] = {field.name: views.get(field.name) for field in fields(SamplingArrays)}
        how |= {
            "positions": views["sampling_positions"],
            "seen_ids": device.seen_ids,
            "seen_counts": device.seen_counts,
            "bias_ids": device.bias_ids,
            "bias_values": device.bias_values,
            "bitmask": None if sampling.bitmask is None else cupy.asarray(sampling.bitmask),
            "max_top_logprobs": MAX_TOP_LOGPROBS if sampling.max_top_logprobs >= 0 else -1,
        }
        return StepArrays(**step), SamplingArrays(**how)

    def download(self, samples: SampleArrays, count: int, has_logprobs: bool, stream: Any) -> None:
        """Queue the copies back and mark their end."""
        self._count, self._has_logprobs = count, has_logprobs
        if count:
            samples.ids[:count].get(stream=stream, out=self._ids[0, :count], blocking=False)
        if count and has_logprobs:
            samples.ranks[:count].get(stream=stream, out=self._ids[1, :count], blocking=False)
            samples.logprobs[:count].get(stream=stream, out=self._logprobs[:count], blocking=False)
            samples.top_ids[:count].get(stream=stream, out=self._top_ids[:count], blocking=False)
            samples.top_logprobs[:count].get(stream=stream, out=self._top_logprobs[:count], blocking=False)
        self._done.record(stream)

    def wait(self) -> StepResult:
        """Runs in the waiting thread. Raises: EngineDeadError, for a CUDA error is for ever."""
        try:
            self._done.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise EngineDeadError(f"the GPU failed: {error}") from error
        count = self._count
        return StepResult(
            ids=self._ids[0, :count].copy(),
            logprobs=self._logprobs[:count].copy(),
            ranks=self._ids[1, :count].copy(),
            top_ids=self._top_ids[:count].copy(),
            top_logprobs=self._top_logprobs[:count].copy(),
        )

    def _upload_tables(self, tables: HostArray, stream: Any) -> None:
        count, width = tables.shape
        self._tables[:count, :width] = tables
        pitch = self._tables.strides[0]
        cupy.cuda.runtime.memcpy2DAsync(
            self._device.tables.data.ptr,
            self._device.tables.strides[0],
            self._tables.ctypes.data,
            pitch,
            4 * width,
            count,
            cupy.cuda.runtime.memcpyHostToDevice,
            stream.ptr,
        )

    def _upload_sparse(self, sampling: SamplingArrays, stream: Any) -> None:
        if self._sparse.shape[1] < self._device.max_sparse:
            self._sparse = _pinned((4, self._device.max_sparse), np.int32)
        parts = (
            (sampling.seen_ids, self._device.seen_ids),
            (sampling.seen_counts, self._device.seen_counts),
            (sampling.bias_ids, self._device.bias_ids),
            (sampling.bias_values, self._device.bias_values),
        )
        for row, (host, target) in enumerate(parts):
            count = len(host)
            if count:
                self._sparse[row, :count] = host.view(np.int32)
                target[:count].set(self._sparse[row, :count].view(target.dtype), stream=stream)


def _pinned(shape: tuple[int, ...], dtype: Any) -> HostArray:
    count = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)


def _padding_batch(count: int, null_block: int, block_size: int, lane: int) -> Batch:
    """Decode rows that touch nothing but the null block and the spare lane."""
    full = partial(np.full, count)
    arrays = StepArrays(
        token_ids=full(0, np.int32),
        positions=full(0, np.int32),
        slot_mapping=full(null_block * block_size, np.int32),
        row_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=full(1, np.int32),
        block_tables=np.full((count, 1), null_block, np.int32),
        lanes=full(lane, np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
        sample_lanes=full(lane, np.int32),
        num_decode=count,
    )
    empty = np.zeros(0, np.int32)
    sampling = SamplingArrays(
        temperature=full(0, np.float32),
        top_k=full(0, np.int32),
        top_p=full(1, np.float32),
        min_p=full(0, np.float32),
        seeds=full(0, np.uint64),
        choices=full(0, np.int32),
        positions=full(0, np.int32),
        repetition_penalty=full(1, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        seen_starts=np.zeros(count + 1, np.int32),
        seen_ids=empty,
        seen_counts=empty,
        bias_starts=np.zeros(count + 1, np.int32),
        bias_ids=empty,
        bias_values=np.zeros(0, np.float32),
        bitmask=None,
        max_top_logprobs=-1,
    )
    return Batch(arrays, sampling, [])


def _prefill_batch(count: int, null_block: int, lane: int) -> Batch:
    """One request of `count` rows, at most a block, that touches nothing but the null block and lane."""
    one = _padding_batch(1, null_block, count, lane)
    positions = np.arange(count, dtype=np.int32)
    arrays = replace(
        one.arrays,
        token_ids=np.zeros(count, np.int32),
        positions=positions,
        slot_mapping=null_block * count + positions,
        row_starts=np.array([0, count], np.int32),
        context_lens=np.array([count], np.int32),
        sample_rows=np.array([count - 1], np.int32),
        num_decode=0,
    )
    return Batch(arrays, one.sampling, [])


def _joined(batch: Batch, padding: Batch, width: int) -> Batch:
    """One batch after the other, decode rows both."""
    first, second = batch.arrays, padding.arrays
    count = len(first.lanes) + len(second.lanes)
    tables = np.zeros((count, width), np.int32)
    tables[: len(first.lanes), : first.block_tables.shape[1]] = first.block_tables
    tables[len(first.lanes) :, :1] = second.block_tables
    starts = np.arange(count + 1, dtype=np.int32)
    special_step: dict[str, Any] = {
        "row_starts": starts,
        "sample_rows": starts[:-1],
        "block_tables": tables,
        "num_decode": count,
    }
    step: dict[str, Any] = {
        field.name: np.concatenate([getattr(first, field.name), getattr(second, field.name)])
        for field in fields(StepArrays)
        if field.name not in special_step
    }
    mine, other = batch.sampling, padding.sampling
    special: dict[str, Any] = {"bitmask": mine.bitmask, "max_top_logprobs": mine.max_top_logprobs}
    for name in ("seen_starts", "bias_starts"):
        starts_of = getattr(mine, name)
        special[name] = np.concatenate([starts_of, np.full(len(second.lanes), starts_of[-1], np.int32)])
    how: dict[str, Any] = {
        field.name: np.concatenate([getattr(mine, field.name), getattr(other, field.name)])
        for field in fields(SamplingArrays)
        if field.name not in special
    }
    return Batch(StepArrays(**step, **special_step), SamplingArrays(**how, **special), batch.sampled)
