"""kernels/paged_attention.cu and prefill_attention.cu, against the NumPy twin in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from service.tensor.cpu.paged_attention import paged_attention as reference
from tests.gpu import cases

pytestmark = pytest.mark.gpu


def filled_cache(rng: np.random.Generator, shape: cases.Shape, batch: Any, num_blocks: int) -> Any:
    """Keys and values where the step looks, NaN elsewhere."""
    cache = np.full((2, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim), np.nan, np.float32)
    for table, context in zip(batch.block_tables, batch.context_lens, strict=True):
        for position in range(0, context, shape.block_size):
            count = min(shape.block_size, context - position)
            block = table[position // shape.block_size]
            cache[:, block, :, :count] = rng.standard_normal((2, shape.kv_heads, count, shape.head_dim))
    return cache.astype(bfloat16)


def check(backend: Any, rng: np.random.Generator, shape: cases.Shape, batch: Any, num_blocks: int) -> None:
    cache = filled_cache(rng, shape, batch, num_blocks)
    rows = len(batch.token_ids)
    q, scale = cases.normal(rng, (rows, shape.heads, shape.head_dim), 2.0), shape.head_dim**-0.5
    wanted = np.empty(q.shape)
    reference(cases.exact(q), cases.exact(cache[0]), cases.exact(cache[1]), batch, scale, wanted)
    keys, values = cases.device(cache[0]), cases.device(cache[1])
    on_device = cases.on_device(batch)
    for step in (on_device, cases.strided_tables(on_device)):
        out = cases.poisoned(q.shape)
        backend.paged_attention(cases.device(q), keys, values, step, scale, out)
        cases.assert_close(out, wanted)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("contexts", [[1], [256], [257, 1, 16, 17], [31, 700, 255, 1025, 2, 64]], ids=str)
def test_decode(backend: Any, rng: np.random.Generator, shape: cases.Shape, contexts: list[int]) -> None:
    check(backend, rng, shape, cases.make_step(rng, shape, contexts, num_blocks=300), 300)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize(
    "prefills", [[(1, 1)], [(2, 2), (64, 64)], [(200, 200), (5, 400), (33, 100), (129, 130)]], ids=str
)
def test_prefill(
    backend: Any, rng: np.random.Generator, shape: cases.Shape, prefills: list[tuple[int, int]]
) -> None:
    check(backend, rng, shape, cases.make_step(rng, shape, [], prefills, num_blocks=300), 300)


def test_prefill_and_decode_rows_share_a_step(backend: Any, rng: np.random.Generator) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [300, 5], [(70, 90), (1, 40), (128, 128)], num_blocks=300)
    check(backend, rng, cases.LLAMA, batch, 300)


def test_the_longest_context(backend: Any, rng: np.random.Generator) -> None:
    shape = cases.Shape(heads=4, kv_heads=1)
    batch = cases.make_step(rng, shape, [131072, 7], num_blocks=8300)
    check(backend, rng, shape, batch, 8300)


def test_a_row_has_the_same_bits_alone_and_among_others(backend: Any, rng: np.random.Generator) -> None:
    shape, contexts = cases.LLAMA, [700, 300, 256, 100, 2000, 3]
    batch = cases.make_step(rng, shape, contexts, num_blocks=300)
    cache = filled_cache(rng, shape, batch, 300)
    keys, values = cases.device(cache[0]), cases.device(cache[1])
    q = cases.device(cases.normal(rng, (6, 32, 64)))
    together = cases.poisoned(q.shape)
    backend.paged_attention(q, keys, values, cases.on_device(batch), 0.125, together)
    for row, context in enumerate(contexts):
        one = replace(
            batch,
            token_ids=batch.token_ids[row : row + 1],
            context_lens=batch.context_lens[row : row + 1],
            block_tables=np.ascontiguousarray(batch.block_tables[row : row + 1, : -(-context // 16)]),
            num_decode=1,
        )
        alone = cases.poisoned((1, 32, 64))
        backend.paged_attention(q[row : row + 1], keys, values, cases.on_device(one), 0.125, alone)
        cases.assert_same_bits(alone, together[row : row + 1])


def test_blocks_beyond_two_to_the_31_elements(backend: Any, rng: np.random.Generator) -> None:
    """Offsets of high block ids overflow 32 bits."""
    import cupy

    shape, num_blocks = cases.LLAMA, 2**31 // (8 * 16 * 64) + 500
    batch = cases.make_step(rng, shape, [300, 20], [(90, 100)], num_blocks=500)
    cache = filled_cache(rng, shape, batch, 500)
    high = replace(batch, block_tables=batch.block_tables + np.int32(num_blocks - 500))
    q = cases.device(cases.normal(rng, (92, 32, 64)))
    results = []
    for step, blocks in ((batch, 500), (high, num_blocks)):
        keys, values = (cupy.zeros((blocks, 8, 16, 64), "uint16").view(bfloat16) for _ in range(2))
        keys[-500:], values[-500:] = cases.device(cache[0]), cases.device(cache[1])
        out = cases.poisoned(q.shape)
        backend.paged_attention(q, keys, values, cases.on_device(step), 0.125, out)
        results.append(out)
        del keys, values
    cases.assert_same_bits(*results)
