"""Inputs of the device tests: bfloat16 on the device, float64 on the host, and how results compare."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cpu.linear import CpuLinear

HostArray = NDArray[Any]
TOLERANCE = 6e-3  # norm of the error over norm of the result: operands and results are rounded to bfloat16


def normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 1.0) -> HostArray:
    """Random bfloat16 values."""
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(bfloat16)


def vector(rng: np.random.Generator, length: int) -> HostArray:
    """A norm weight: float32, far from 1."""
    return (0.5 + rng.random(length)).astype(np.float32)


def exact(array: HostArray) -> HostArray:
    return array.astype(np.float64)


def reference_linear(
    weight: HostArray, bias: HostArray | None = None, norm: HostArray | None = None
) -> CpuLinear:
    """The weight of the NumPy twin, in float64."""
    rest = [None if array is None else exact(array) for array in (bias, norm)]
    return CpuLinear(exact(weight), rest[0], np.float64, rest[1])


def device(array: HostArray | None) -> Any:
    import cupy

    return None if array is None else cupy.asarray(array)


def poisoned(shape: tuple[int, ...], dtype: Any = bfloat16) -> Any:
    """An output array whose every element must be written: NaN, or minus 7 where there is none."""
    import cupy

    kind = np.dtype(dtype)
    value = np.nan if kind == bfloat16 or kind.kind == "f" else -7
    return cupy.asarray(np.full(shape, value, np.float32).astype(kind))


def assert_close(result: Any, wanted: HostArray, tolerance: float = TOLERANCE) -> None:
    found = exact(result.get())
    assert np.isfinite(found).all(), f"{np.count_nonzero(~np.isfinite(found))} elements were not written"
    error = float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-30)
    assert error < tolerance, f"relative error {error:.2e}"


def assert_same_bits(left: Any, right: Any) -> None:
    a, b = left.get(), right.get()
    kind = f"u{a.dtype.itemsize}"
    different = np.count_nonzero(a.view(kind) != b.view(kind))
    assert different == 0, f"{different} of {a.size} elements differ"


@dataclass(frozen=True)
class Shape:
    """A decoder's attention."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    block_size: int = 16


LLAMA = Shape()
QWEN = Shape(head_dim=128)
SMOL = Shape(heads=9, kv_heads=3)
SHAPES = [LLAMA, QWEN, SMOL, Shape(8, 8, 80), Shape(12, 2, 96, 32), Shape(32, 2, 64)]


def make_step(
    rng: np.random.Generator,
    shape: Shape,
    decode_contexts: list[int],
    prefills: list[tuple[int, int]] = [],  # noqa: B006  # rows, context
    *,
    num_blocks: int = 4096,
    first_block: int = 0,
    vocab: int = 1000,
) -> StepArrays:
    """A step on the host: decode requests, then prefills, over blocks drawn without repetition."""
    counts = np.array([1] * len(decode_contexts) + [rows for rows, _ in prefills], np.int32)
    contexts = np.array(decode_contexts + [context for _, context in prefills], np.int32)
    num_requests, size = len(counts), shape.block_size
    widths = -(-contexts // size)
    ids = first_block + rng.permutation(num_blocks - first_block)[: int(widths.sum())].astype(np.int32)
    tables = np.full((num_requests, int(widths.max(initial=1))), -(10**6), np.int32)
    for i, (start, width) in enumerate(zip(np.cumsum(widths) - widths, widths, strict=True)):
        tables[i, :width] = ids[start : start + width]
    starts = np.zeros(num_requests + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    positions = np.concatenate(
        [np.arange(c - n, c, dtype=np.int32) for n, c in zip(counts, contexts, strict=True)] or [counts]
    )
    owner = np.repeat(np.arange(num_requests), counts)
    slots = tables[owner, positions // size].astype(np.int32) * size + positions % size
    samples = starts[1:] - 1
    lanes = rng.permutation(num_requests).astype(np.int32)
    return StepArrays(
        token_ids=rng.integers(0, vocab, int(starts[-1])).astype(np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        row_starts=starts,
        context_lens=contexts,
        block_tables=tables,
        lanes=lanes,
        sample_rows=samples.astype(np.int32),
        sample_lanes=lanes,
        num_decode=len(decode_contexts),
    )


def on_device(struct: Any) -> Any:
    """StepArrays, SamplingArrays or SampleArrays with their arrays on the device."""
    arrays = {f.name: getattr(struct, f.name) for f in fields(struct)}
    moved = {name: device(value) for name, value in arrays.items() if isinstance(value, np.ndarray)}
    return replace(struct, **moved)


def strided_tables(batch: StepArrays) -> StepArrays:
    """The same step with its block tables as columns of a wider array. `batch` is on the device."""
    import cupy

    rows, columns = batch.block_tables.shape
    wide = cupy.full((rows, columns + 5), -(10**6), np.int32)
    wide[:, :columns] = batch.block_tables
    return replace(batch, block_tables=wide[:, :columns])


def make_sampling(samples: int, **changes: Any) -> SamplingArrays:
    """Greedy, without penalties, but for `changes`."""
    none, starts = np.zeros(0, np.int32), np.zeros(samples + 1, np.int32)
    zeros, ones = np.zeros(samples, np.float32), np.ones(samples, np.float32)
    plain = SamplingArrays(
        temperature=zeros,
        top_k=np.zeros(samples, np.int32),
        top_p=ones,
        min_p=zeros,
        seeds=np.arange(samples, dtype=np.uint64),
        choices=np.zeros(samples, np.int32),
        positions=np.arange(samples, dtype=np.int32),
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seen_starts=starts,
        seen_ids=none,
        seen_counts=none,
        bias_starts=starts,
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        bitmask=None,
        max_top_logprobs=-1,
    )
    return replace(plain, **changes)


def make_samples(samples: int, max_top: int = 20) -> SampleArrays:
    return SampleArrays(
        ids=np.full(samples, -7, np.int32),
        logprobs=np.full(samples, np.nan, np.float32),
        ranks=np.full(samples, -7, np.int32),
        top_ids=np.full((samples, max_top), -7, np.int32),
        top_logprobs=np.full((samples, max_top), np.nan, np.float32),
    )
