"""kernels/linear_add.cu and the cuBLAS path beside it, against the NumPy twin in float64."""

from typing import Any

import numpy as np
import pytest

from service.tensor.cpu.linear_add import linear_add as reference
from tests.gpu import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("backend", ["sm_90a", "portable"], indirect=True),
]

SHAPES = [(2048, 2048), (2048, 8192), (4096, 12288), (576, 1536), (576, 576), (1000, 24), (9000, 512)]


def run(backend: Any, x: Any, linear: Any, residual: Any, num_decode: int) -> Any:
    from service.tensor.cuda.linear_add import linear_add

    out = residual.copy()
    linear_add(backend.device, x, linear, out, num_decode)
    return out


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 16, 29, 64, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_adds_the_product_to_the_residual(
    backend: Any, rng: np.random.Generator, outputs: int, inputs: int, rows: int, has_bias: bool
) -> None:
    x, residual = cases.normal(rng, (rows, inputs)), cases.normal(rng, (rows, outputs))
    weight = cases.normal(rng, (outputs, inputs), inputs**-0.5)
    bias = cases.vector(rng, outputs) if has_bias else None
    wanted = cases.exact(residual)
    reference(cases.exact(x), cases.reference_linear(weight, bias), wanted)
    linear = backend.linear([weight], None if bias is None else [bias])
    for num_decode in {rows, 0, rows // 2}:
        out = run(backend, cases.device(x), linear, cases.device(residual), num_decode)
        cases.assert_close(out, wanted)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(
    backend: Any, rng: np.random.Generator, outputs: int, inputs: int
) -> None:
    x, residual = cases.normal(rng, (256, inputs)), cases.normal(rng, (256, outputs))
    linear = backend.linear([cases.normal(rng, (outputs, inputs), inputs**-0.5)])
    device_x, device_residual = cases.device(x), cases.device(residual)
    alone = run(backend, device_x[:1], linear, device_residual[:1], 1)
    for rows in (2, 8, 9, 16, 31, 32, 33, 64, 65, 128, 200, 256):
        out = run(backend, device_x[:rows], linear, device_residual[:rows], rows)
        cases.assert_same_bits(out[:1], alone)
