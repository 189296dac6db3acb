"""What a step on a GPU reads and gives: arrays of fixed address, and page-locked memory that feeds them."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.engine.runner import MAX_TOP_LOGPROBS, StepResult
from service.errors import EngineDeadError
from service.tensor.backend import Backend, SampleArrays, SamplingArrays, StepArrays

Array = Any
HostArray = NDArray[Any]

_FIRST_SPARSE = 1 << 16  # ids of penalties, and of bias, that a step has room for at first

_ROWS = ("token_ids", "positions", "slot_mapping")  # of StepArrays, a value a row
_REQUESTS = ("context_lens", "lanes", "sample_lanes", "sample_rows")  # a value a request
_SAMPLES = {  # of SamplingArrays, a value a sample, with what makes a padding row greedy
    "temperature": (np.float32, 0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1),
    "min_p": (np.float32, 0),
    "seeds": (np.uint64, 0),
    "choices": (np.int32, 0),
    "repetition_penalty": (np.float32, 1),
    "presence_penalty": (np.float32, 0),
    "frequency_penalty": (np.float32, 0),
}
_STARTS = ("seen_starts", "bias_starts")
_SPARSE = {"seen_ids": np.int32, "seen_counts": np.int32, "bias_ids": np.int32, "bias_values": np.float32}


def new_samples(backend: Backend, count: int) -> SampleArrays:
    """Room for what `count` samples give."""
    return SampleArrays(
        ids=backend.zeros((count,), np.int32),
        logprobs=backend.zeros((count,), np.float32),
        ranks=backend.zeros((count,), np.int32),
        top_ids=backend.zeros((count, MAX_TOP_LOGPROBS), np.int32),
        top_logprobs=backend.zeros((count, MAX_TOP_LOGPROBS), np.float32),
    )


def arrays_of(samples: SampleArrays) -> tuple[Array, ...]:
    """In the order of StepResult."""
    return samples.ids, samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a step: what its launches depend on."""

    num_rows: int
    num_requests: int
    num_samples: int
    width: int  # of block tables
    num_decode: int

    @classmethod
    def of(cls, batch: Batch) -> "Sizes":
        arrays = batch.arrays
        num_requests, width = arrays.block_tables.shape
        return cls(len(arrays.token_ids), num_requests, len(arrays.sample_rows), width, arrays.num_decode)


@dataclass(frozen=True, slots=True)
class Kind:
    """What else the launches of a step depend on."""

    has_logprobs: bool = False
    has_bitmask: bool = False

    @classmethod
    def of(cls, batch: Batch) -> "Kind":
        return cls(batch.sampling.max_top_logprobs >= 0, batch.sampling.bitmask is not None)


@dataclass(frozen=True, slots=True)
class Spare:
    """Where padding rows write."""

    block: int
    lane: int
    slot: int


class DeviceArrays:
    """Arrays of fixed address that steps read: one block of memory that a single copy fills, and tables."""

    def __init__(self, max_rows: int, max_requests: int, max_blocks: int, vocab_size: int) -> None:
        self.max_rows = max_rows
        lengths: dict[str, tuple[int, Any]] = dict.fromkeys(_ROWS, (max_rows, np.int32))
        lengths |= dict.fromkeys((*_REQUESTS, "sampling_positions"), (max_requests, np.int32))
        lengths |= {name: (max_requests, dtype) for name, (dtype, _) in _SAMPLES.items()}
        lengths |= dict.fromkeys(("row_starts", *_STARTS), (max_requests + 1, np.int32))
        self._places: dict[str, tuple[int, int, Any]] = {}
        total = 0
        for name, (length, dtype) in lengths.items():
            size = length * np.dtype(dtype).itemsize
            self._places[name] = (total, size, dtype)
            total += -(-size // 16) * 16
        self.num_bytes = total
        self.packed = cupy.zeros(total, np.uint8)
        self._fields = self.views_of(self.packed)
        self.tables = cupy.zeros((max_requests, max_blocks), np.int32)
        self.bitmask = cupy.zeros((max_requests, -(-vocab_size // 32)), np.uint32)
        self.make_sparse(_FIRST_SPARSE)

    def views_of(self, packed: Array) -> dict[str, Array]:
        """The fields of a block of memory that is laid out like this one."""
        return {
            name: packed[start : start + size].view(dtype)
            for name, (start, size, dtype) in self._places.items()
        }

    def make_sparse(self, length: int) -> None:
        """Room for `length` ids of penalties and as many of bias in one step."""
        self.max_sparse = length
        self.sparse = {name: cupy.zeros(length, dtype) for name, dtype in _SPARSE.items()}

    def step(self, sizes: Sizes) -> StepArrays:
        fields = self._fields
        count = {
            **dict.fromkeys(_ROWS, sizes.num_rows),
            **dict.fromkeys(("context_lens", "lanes"), sizes.num_requests),
            **dict.fromkeys(("sample_rows", "sample_lanes"), sizes.num_samples),
            "row_starts": sizes.num_requests + 1,
        }
        return StepArrays(
            **{name: fields[name][:length] for name, length in count.items()},
            block_tables=self.tables[: sizes.num_requests, : sizes.width],
            num_decode=sizes.num_decode,
        )

    def sampling(self, num_samples: int, kind: Kind) -> SamplingArrays:
        fields = self._fields
        return SamplingArrays(
            **{name: fields[name][:num_samples] for name in _SAMPLES},
            **{name: fields[name][: num_samples + 1] for name in _STARTS},
            **self.sparse,
            positions=fields["sampling_positions"][:num_samples],
            bitmask=self.bitmask[:num_samples] if kind.has_bitmask else None,
            max_top_logprobs=MAX_TOP_LOGPROBS if kind.has_logprobs else -1,
        )


class HostStage:
    """Page-locked memory of one step on its way to the device, and of its result on the way back."""

    def __init__(self, device: DeviceArrays, max_requests: int, spare: Spare) -> None:
        self._device = device
        self._spare = spare
        self._packed = _pinned((device.num_bytes,), np.uint8)
        self._fields: dict[str, HostArray] = device.views_of(self._packed)
        self._tables = _pinned(device.tables.shape, np.int32)
        self._bitmask = _pinned(device.bitmask.shape, np.uint32)
        self._sparse = {name: _pinned((device.max_sparse,), dtype) for name, dtype in _SPARSE.items()}
        self._ids = _pinned((2, max_requests), np.int32)
        self._logprobs = _pinned((max_requests,), np.float32)
        self._top_ids = _pinned((max_requests, MAX_TOP_LOGPROBS), np.int32)
        self._top_logprobs = _pinned((max_requests, MAX_TOP_LOGPROBS), np.float32)
        self._done = cupy.cuda.Event(block=False, disable_timing=True)
        self._count = 0
        self._scores: SampleArrays | None = None

    def upload(self, batch: Batch, sizes: Sizes, stream: Any) -> None:
        """Queue the copies. Up to `sizes`, rows are filled in that touch only the spare."""
        arrays, sampling, fields = batch.arrays, batch.sampling, self._fields
        for name in (*_ROWS, *_REQUESTS, "row_starts"):
            host = getattr(arrays, name)
            fields[name][: len(host)] = host
        num_rows, num_samples = len(arrays.token_ids), len(arrays.sample_rows)
        for name in _SAMPLES:
            fields[name][:num_samples] = getattr(sampling, name)
        fields["sampling_positions"][:num_samples] = sampling.positions
        for name in _STARTS:
            fields[name][: num_samples + 1] = getattr(sampling, name)
        count, width = arrays.block_tables.shape
        self._tables[:count, :width] = arrays.block_tables
        self._pad_rows(num_rows, sizes.num_rows)
        self._pad_requests(count, sizes.num_requests)
        self._pad_samples(num_samples, sizes.num_samples)
        self._upload_sparse(sampling, stream)
        if sampling.bitmask is not None:
            self._bitmask[:num_samples] = sampling.bitmask
            self._device.bitmask[:num_samples].set(self._bitmask[:num_samples], stream=stream)
        self._send(sizes.num_requests, width, stream)

    def fill_spare(self, stream: Any) -> None:
        """Queue arrays of nothing but padding."""
        num_requests, width = self._tables.shape
        for name in ("row_starts", *_STARTS):
            self._fields[name][0] = 0
        self._pad_rows(0, self._device.max_rows)
        self._pad_requests(0, num_requests)
        self._pad_samples(0, num_requests)
        self._send(num_requests, width, stream)

    def download(
        self,
        samples: SampleArrays,
        count: int,
        has_logprobs: bool,
        scores: SampleArrays | None,
        stream: Any,
    ) -> None:
        """Queue the copies back and mark their end. `scores` are this step's own, and copied by `wait`."""
        self._count, self._scores = count, scores
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
        count, scores, self._scores = self._count, self._scores, None
        return StepResult(
            ids=self._ids[0, :count].copy(),
            logprobs=self._logprobs[:count].copy(),
            ranks=self._ids[1, :count].copy(),
            top_ids=self._top_ids[:count].copy(),
            top_logprobs=self._top_logprobs[:count].copy(),
            scores=None if scores is None else StepResult(*map(_fetched, arrays_of(scores))),
        )

    def _pad_rows(self, count: int, bucket: int) -> None:
        fields, rows = self._fields, slice(count, bucket)
        fields["token_ids"][rows] = fields["positions"][rows] = 0
        fields["slot_mapping"][rows] = self._spare.slot

    def _pad_requests(self, count: int, bucket: int) -> None:
        """Requests of one row each, a context of one token."""
        fields, rows = self._fields, slice(count, bucket)
        fields["context_lens"][rows] = 1
        fields["lanes"][rows] = self._spare.lane
        first = int(fields["row_starts"][count])
        fields["row_starts"][count + 1 : bucket + 1] = np.arange(first + 1, first + 1 + bucket - count)
        self._tables[rows, 0] = self._spare.block

    def _pad_samples(self, count: int, bucket: int) -> None:
        fields, rows = self._fields, slice(count, bucket)
        fields["sample_lanes"][rows] = self._spare.lane
        fields["sample_rows"][rows] = np.arange(count, bucket)
        fields["sampling_positions"][rows] = 0
        for name, (_, value) in _SAMPLES.items():
            fields[name][rows] = value
        for name in _STARTS:
            fields[name][count + 1 : bucket + 1] = fields[name][count]

    def _send(self, num_tables: int, width: int, stream: Any) -> None:
        runtime = cupy.cuda.runtime
        kind, packed, tables = runtime.memcpyHostToDevice, self._device.packed, self._device.tables
        runtime.memcpyAsync(packed.data.ptr, self._packed.ctypes.data, len(self._packed), kind, stream.ptr)
        target, pitch = tables.data.ptr, tables.strides[0]
        source, row_bytes = self._tables.ctypes.data, 4 * width
        runtime.memcpy2DAsync(target, pitch, source, pitch, row_bytes, num_tables, kind, stream.ptr)

    def _upload_sparse(self, sampling: SamplingArrays, stream: Any) -> None:
        if not len(sampling.seen_ids) and not len(sampling.bias_ids):
            return
        if len(self._sparse["seen_ids"]) < self._device.max_sparse:
            self._sparse = {
                name: _pinned((self._device.max_sparse,), dtype) for name, dtype in _SPARSE.items()
            }
        for name, target in self._device.sparse.items():
            host = getattr(sampling, name)
            count = len(host)
            if count:
                self._sparse[name][:count] = host
                target[:count].set(self._sparse[name][:count], stream=stream)


def _fetched(array: Array) -> HostArray:
    """On a stream of its own: the runner's has the next step queued."""
    host: HostArray = array.get(stream=_fetching_stream())
    return host


@cache
def _fetching_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def _pinned(shape: tuple[int, ...], dtype: Any) -> HostArray:
    count = int(np.prod(shape))
    memory = cupy.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
    return np.frombuffer(memory, dtype, count).reshape(shape)
