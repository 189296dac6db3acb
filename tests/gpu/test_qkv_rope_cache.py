"""kernels/qkv_rope_cache.cu and rope_cache.cu, against the NumPy twin in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from service.tensor.cpu.qkv_rope_cache import qkv_rope_cache as reference
from tests.gpu import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("backend", ["sm_90a", "portable"], indirect=True),
]


def angles(positions: int, head_dim: int) -> Any:
    turns = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.concatenate([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@pytest.mark.parametrize("num_decode", [0, 1, 13, 30, 70])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_q_and_the_written_slots(
    backend: Any,
    rng: np.random.Generator,
    shape: cases.Shape,
    num_decode: int,
    has_norms: bool,
    has_bias: bool,
) -> None:
    dim, num_blocks = 576, 600
    prefills = [(40, 50), (1, 3), (17, 17)] if num_decode < 30 else []
    contexts = rng.integers(1, 60, num_decode).tolist()
    batch = cases.make_step(rng, shape, contexts, prefills, num_blocks=num_blocks)
    rows, outputs = len(batch.token_ids), (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, norm = cases.normal(rng, (rows, dim)), cases.vector(rng, dim)
    weight, bias = cases.normal(rng, (outputs, dim), dim**-0.5), cases.vector(rng, outputs)
    q_norm, k_norm = (cases.vector(rng, shape.head_dim) if has_norms else None for _ in range(2))
    rope = angles(60, shape.head_dim)
    cache = cases.normal(rng, (2, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim))
    wanted, kept = np.empty((rows, shape.heads, shape.head_dim)), cases.exact(cache)
    reference(
        cases.exact(x),
        1e-5,
        cases.reference_linear(weight, bias if has_bias else None, norm),
        None if q_norm is None else cases.exact(q_norm),
        None if k_norm is None else cases.exact(k_norm),
        cases.exact(rope),
        batch,
        kept[0],
        kept[1],
        wanted,
    )
    q, written = cases.poisoned(wanted.shape), cases.device(cache)
    linear = backend.linear([weight], [bias] if has_bias else None, norm)
    norms = [cases.device(array) for array in (q_norm, k_norm)]
    arguments = (cases.device(x), 1e-5, linear, *norms, cases.device(rope))
    backend.qkv_rope_cache(*arguments, cases.on_device(batch), written[0], written[1], q)
    cases.assert_close(q, wanted)
    changed = kept != cases.exact(cache)
    found = cases.exact(written.get())
    error = np.linalg.norm((found - kept)[changed]) / np.linalg.norm(kept[changed])
    assert error < cases.TOLERANCE
    untouched = np.ones((num_blocks * shape.block_size,), bool)
    untouched[batch.slot_mapping] = False
    as_slots = written.get().swapaxes(2, 3).reshape(2, -1, shape.kv_heads, shape.head_dim)
    before = cache.swapaxes(2, 3).reshape(as_slots.shape)
    assert (as_slots[:, untouched].view("u2") == before[:, untouched].view("u2")).all()


@pytest.mark.parametrize("has_norms", [False, True])
def test_a_row_has_the_same_bits_in_every_batch(
    backend: Any, rng: np.random.Generator, has_norms: bool
) -> None:
    shape, dim = cases.LLAMA, 2048
    batch = cases.make_step(rng, shape, [33] * 256, num_blocks=1000)
    weight = cases.normal(rng, (3072, dim), dim**-0.5)
    x = cases.device(cases.normal(rng, (256, dim)))
    rope, linear = cases.device(angles(60, 64)), backend.linear([weight], None, cases.vector(rng, dim))
    norms = [cases.device(cases.vector(rng, 64)) if has_norms else None for _ in range(2)]
    results = []
    for rows in (1, 2, 8, 9, 16, 31, 32, 33, 64, 65, 128, 200, 256):
        part = cases.on_device(
            replace(
                batch,
                token_ids=batch.token_ids[:rows],
                positions=batch.positions[:rows],
                slot_mapping=batch.slot_mapping[:rows],
                num_decode=rows,
            )
        )
        cache = cases.poisoned((2, 1000, 8, 16, 64))
        q = cases.poisoned((rows, 32, 64))
        backend.qkv_rope_cache(x[:rows], 1e-5, linear, *norms, rope, part, cache[0], cache[1], q)
        block, offset = divmod(int(batch.slot_mapping[0]), 16)
        results.append((q[:1].copy(), cache[:, block, :, offset].copy()))
    for q, written in results[1:]:
        cases.assert_same_bits(q, results[0][0])
        cases.assert_same_bits(written, results[0][1])
