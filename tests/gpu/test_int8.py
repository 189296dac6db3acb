"""INT8 weights: layout, quantisation and every product, against service/tensor/quantized.py in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from service.errors import ModelError
from service.tensor.cpu.embed import embed as embed_reference
from service.tensor.cpu.gate_up_silu import gate_up_silu as gate_up_reference
from service.tensor.cpu.head_logits import head_logits as head_reference
from service.tensor.cpu.linear_add import linear_add as linear_reference
from service.tensor.cpu.qkv_rope_cache import qkv_rope_cache as qkv_reference
from service.tensor.quantized import GROUP_SIZES, quantize
from tests.gpu import cases
from tests.gpu.test_qkv_rope_cache import angles

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize("backend", ["sm_90a", "portable"], indirect=True)
groups = pytest.mark.parametrize("group_size", GROUP_SIZES)
SHAPES = [(2048, 2048), (2048, 8192), (576, 1536), (1000, 24), (9000, 520)]
ROWS = (2, 8, 9, 16, 31, 32, 33, 64, 65, 128, 200, 256)


def reference(weight: Any, group_size: int, bias: Any = None, norm: Any = None) -> Any:
    """The NumPy twin of the quantised weight."""
    return cases.reference_linear(quantize(weight, group_size).dequantize(np.float64), bias, norm)


@groups
@pytest.mark.parametrize(
    ("outputs", "inputs", "pairs"), [(2048, 2048, 8), (1000, 24, 8), (176, 520, 88), (384, 136, 32)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_layout_and_quantisation_are_those_of_the_formulas(
    backend: Any,
    rng: np.random.Generator,
    outputs: int,
    inputs: int,
    pairs: int,
    group_size: int,
    has_norm: bool,
) -> None:
    """Bit for bit, whether floats are quantised on the device or values are brought to it."""
    from service.tensor.cuda.linear import unpack

    weight = cases.normal(rng, (outputs, inputs), 0.02)
    weight[:, : inputs // 2] *= cases.normal(rng, (outputs, 1), 30.0)  # groups far from each other
    weight[5] = 0
    norm = cases.vector(rng, inputs).astype(bfloat16).astype(np.float32) if has_norm else None
    quantized = quantize(weight, group_size)
    product = quantized.dequantize(np.float32) * (1 if norm is None else norm)
    wanted = cases.device(product.astype(bfloat16))
    half = outputs // 2
    for parts, asked in (
        ([quantized], None),
        ([weight[:half], weight[half:]], group_size),
        ([weight.astype(np.float32)], group_size),
    ):
        linear = backend.linear(parts, None, norm, pairs=pairs, group_size=asked)
        out = cases.poisoned((outputs, inputs))
        unpack(backend.device, linear, out.data.ptr)
        cases.assert_same_bits(out, wanted)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e8])
@pytest.mark.parametrize("dtype", [bfloat16, np.float32])
def test_weights_that_are_not_finite_are_refused(
    backend: Any, rng: np.random.Generator, bad: float, dtype: Any
) -> None:
    weight = cases.normal(rng, (40, 136)).astype(dtype)
    weight[39, 135] = bad
    with pytest.raises(ModelError, match=r"\[40, 136\] holds NaN"):
        backend.linear([weight], group_size=32)


@both
@groups
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 29, 64, 130, 300])
def test_linear_add(
    backend: Any, rng: np.random.Generator, outputs: int, inputs: int, rows: int, group_size: int
) -> None:
    x, residual = cases.normal(rng, (rows, inputs)), cases.normal(rng, (rows, outputs))
    weight, bias = cases.normal(rng, (outputs, inputs), inputs**-0.5), cases.vector(rng, outputs)
    wanted = cases.exact(residual)
    linear_reference(cases.exact(x), reference(weight, group_size, bias), wanted)
    linear = backend.linear([weight], [bias], group_size=group_size)
    for num_decode in {rows, 0, rows // 8}:
        out = _added(backend, cases.device(x), linear, cases.device(residual), num_decode)
        cases.assert_close(out, wanted)


@both
@groups
@pytest.mark.parametrize(("ffn", "dim"), [(8192, 2048), (1536, 576), (24, 40)])
@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64, 131, 280])
def test_gate_up_silu(
    backend: Any, rng: np.random.Generator, ffn: int, dim: int, rows: int, group_size: int
) -> None:
    x, norm = cases.normal(rng, (rows, dim), 3.0), cases.vector(rng, dim)
    gate, up = (cases.normal(rng, (ffn, dim), dim**-0.5) for _ in range(2))
    wanted = np.empty((rows, ffn))
    gate_up_reference(
        cases.exact(x), 1e-5, reference(np.concatenate([gate, up]), group_size, None, norm), wanted
    )
    linear = backend.linear([gate, up], None, norm, pairs=ffn, group_size=group_size)
    for num_decode in {rows, 0}:
        cases.assert_close(_gated(backend, cases.device(x), linear, num_decode), wanted, 8e-3)


@both
@groups
@pytest.mark.parametrize("shape", [cases.LLAMA, cases.QWEN, cases.SMOL, cases.Shape(8, 8, 80)], ids=str)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("num_decode", [0, 13, 70])
def test_qkv_rope_cache(
    backend: Any,
    rng: np.random.Generator,
    shape: cases.Shape,
    has_norms: bool,
    num_decode: int,
    group_size: int,
) -> None:
    dim, num_blocks = 576, 600
    prefills = [(300, 300)] if num_decode < 50 else []
    contexts = rng.integers(1, 60, num_decode).tolist()
    batch = cases.make_step(rng, shape, contexts, prefills, num_blocks=num_blocks)
    rows, outputs = len(batch.token_ids), (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, norm = cases.normal(rng, (rows, dim)), cases.vector(rng, dim)
    weight = cases.normal(rng, (outputs, dim), dim**-0.5)
    q_norm, k_norm = (cases.vector(rng, shape.head_dim) if has_norms else None for _ in range(2))
    rope = angles(300, shape.head_dim)
    cache = cases.normal(rng, (2, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim))
    wanted, kept = np.empty((rows, shape.heads, shape.head_dim)), cases.exact(cache)
    exact_norms: Any = [None if array is None else cases.exact(array) for array in (q_norm, k_norm)]
    exact_rope, given = cases.exact(rope), cases.exact(x)
    linear = reference(weight, group_size, None, norm)
    exact_q, exact_k = exact_norms
    qkv_reference(given, 1e-5, linear, exact_q, exact_k, exact_rope, batch, kept[0], kept[1], wanted)
    q, written = cases.poisoned(wanted.shape), cases.device(cache)
    ours = backend.linear([weight], None, norm, pairs=shape.head_dim // 2, group_size=group_size)
    norms = [cases.device(array) for array in (q_norm, k_norm)]
    arguments = (cases.device(x), 1e-5, ours, *norms, cases.device(rope))
    backend.qkv_rope_cache(*arguments, cases.on_device(batch), written[0], written[1], q)
    cases.assert_close(q, wanted)
    cases.assert_close(written, kept)


@both
@groups
@pytest.mark.parametrize(("vocab", "padded", "dim"), [(1003, 1024, 576), (5000, 5000, 2048)])
@pytest.mark.parametrize("samples", [1, 9, 70])
def test_head_logits(
    backend: Any,
    rng: np.random.Generator,
    vocab: int,
    padded: int,
    dim: int,
    samples: int,
    group_size: int,
) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [1], [(200, 200)])
    batch = replace(batch, sample_rows=rng.permutation(201)[:samples].astype(np.int32))
    x, norm = cases.normal(rng, (201, dim)), cases.vector(rng, dim)
    weight = cases.normal(rng, (padded, dim), dim**-0.5)
    wanted = np.empty((samples, vocab))
    head_reference(cases.exact(x), cases.exact(norm), 1e-6, reference(weight, group_size), batch, wanted)
    out = cases.poisoned((samples, vocab), np.float32)
    head = backend.linear([weight], group_size=group_size)
    backend.head_logits(cases.device(x), cases.device(norm), 1e-6, head, cases.on_device(batch), out)
    cases.assert_close(out, wanted)


@groups
@pytest.mark.parametrize("dim", [8, 576, 2048])
def test_embed(backend: Any, rng: np.random.Generator, dim: int, group_size: int) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [3, 9, 1, 5], [(30, 30)])
    weight, last_ids = cases.normal(rng, (1000, dim)), rng.integers(0, 1000, 8).astype(np.int32)
    batch.token_ids[[0, 2]] = -1
    wanted = np.empty((34, dim), np.float32)
    table = quantize(weight, group_size).dequantize(np.float32)
    embed_reference(batch, cases.reference_linear(table), last_ids, wanted)
    out = cases.poisoned((34, dim))
    linear = backend.linear([weight], group_size=group_size)
    backend.embed(cases.on_device(batch), linear, cases.device(last_ids), out)
    cases.assert_same_bits(out, cases.device(wanted.astype(bfloat16)))


@both
@groups
def test_a_row_has_the_same_bits_in_every_batch(
    backend: Any, rng: np.random.Generator, group_size: int
) -> None:
    for outputs, inputs in SHAPES:
        x, residual = cases.normal(rng, (256, inputs)), cases.normal(rng, (256, outputs))
        weight = cases.normal(rng, (outputs, inputs), inputs**-0.5)
        linear = backend.linear([weight], group_size=group_size)
        device_x, device_residual = cases.device(x), cases.device(residual)
        alone = _added(backend, device_x[:1], linear, device_residual[:1], 1)
        for rows in ROWS:
            out = _added(backend, device_x[:rows], linear, device_residual[:rows], rows)
            cases.assert_same_bits(out[:1], alone)
    x, norm = cases.device(cases.normal(rng, (256, 2048))), cases.vector(rng, 2048)
    weight = cases.normal(rng, (16384, 2048), 2048**-0.5)
    linear = backend.linear([weight], None, norm, pairs=8192, group_size=group_size)
    alone = _gated(backend, x[:1], linear, 1)
    for rows in ROWS:
        cases.assert_same_bits(_gated(backend, x[:rows], linear, rows)[:1], alone)


def _added(backend: Any, x: Any, linear: Any, residual: Any, num_decode: int) -> Any:
    from service.tensor.cuda.linear_add import linear_add

    out = residual.copy()
    linear_add(backend.device, x, linear, out, num_decode)
    return out


def _gated(backend: Any, x: Any, linear: Any, num_decode: int) -> Any:
    from service.tensor.cuda.gate_up_silu import gate_up_silu

    out = cases.poisoned((len(x), linear.out_features // 2))
    gate_up_silu(backend.device, x, 1e-5, linear, out, num_decode)
    return out
