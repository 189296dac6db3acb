"""kernels/gate_up_silu.cu and silu_mul.cu, against the NumPy twin in float64."""

from typing import Any

import numpy as np
import pytest

from service.tensor.cpu.gate_up_silu import gate_up_silu as reference
from tests.gpu import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("backend", ["sm_90a", "portable"], indirect=True),
]

SHAPES = [(8192, 2048), (12288, 4096), (1536, 576), (24, 40)]


def run(backend: Any, x: Any, linear: Any, num_decode: int) -> Any:
    from service.tensor.cuda.gate_up_silu import gate_up_silu

    out = cases.poisoned((len(x), linear.out_features // 2))
    gate_up_silu(backend.device, x, 1e-5, linear, out, num_decode)
    return out


@pytest.mark.parametrize(("ffn", "dim"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64, 131])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gates_the_normed_rows(
    backend: Any, rng: np.random.Generator, ffn: int, dim: int, rows: int, has_bias: bool
) -> None:
    x, norm = cases.normal(rng, (rows, dim), 3.0), cases.vector(rng, dim)
    gate, up = (cases.normal(rng, (ffn, dim), dim**-0.5) for _ in range(2))
    biases = [cases.vector(rng, ffn), cases.vector(rng, ffn)] if has_bias else None
    wanted = np.empty((rows, ffn))
    joined = None if biases is None else np.concatenate(biases)
    linear = cases.reference_linear(np.concatenate([gate, up]), joined, norm)
    reference(cases.exact(x), 1e-5, linear, wanted)
    for num_decode in {rows, 0, rows // 2}:
        out = run(backend, cases.device(x), backend.linear([gate, up], biases, norm), num_decode)
        cases.assert_close(out, wanted, 8e-3)


@pytest.mark.parametrize(("ffn", "dim"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(
    backend: Any, rng: np.random.Generator, ffn: int, dim: int
) -> None:
    x = cases.device(cases.normal(rng, (300, dim)))
    linear = backend.linear([cases.normal(rng, (2 * ffn, dim), dim**-0.5)], None, cases.vector(rng, dim))
    alone = run(backend, x[:1], linear, 1)
    for rows in (2, 8, 9, 16, 31, 32, 33, 64, 65, 128, 200, 256, 300):
        cases.assert_same_bits(run(backend, x[:rows], linear, rows)[:1], alone)
