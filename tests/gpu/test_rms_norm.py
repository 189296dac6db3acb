"""kernels/rms_norm.cu against float64."""

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from service.tensor.cpu.primitives import rms_norm as reference
from tests.gpu import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [8, 576, 2048, 4096])
@pytest.mark.parametrize("rows", [1, 7, 8, 300])
def test_rows_are_normed(backend: Any, rng: np.random.Generator, dim: int, rows: int) -> None:
    from service.tensor.cuda.rms_norm import rms_norm

    x, norm = cases.normal(rng, (rows + 3, dim), 2.0), cases.vector(rng, dim)
    ids = rng.integers(0, rows + 3, rows).astype(np.int32)
    device_x = cases.device(x)
    for weight in (norm, None):
        wanted = reference(cases.exact(x)[ids], None if weight is None else cases.exact(weight), 1e-5)
        out = rms_norm(backend.device, device_x, cases.device(ids), rows, cases.device(weight), 1e-5)
        found = cases.exact(at_address(out, (rows, dim), bfloat16).get())
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < cases.TOLERANCE


def at_address(pointer: int, shape: tuple[int, ...], dtype: Any) -> Any:
    import cupy

    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.UnownedMemory(pointer, size, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))
