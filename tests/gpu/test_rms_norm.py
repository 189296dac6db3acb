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
    import cupy

    from service.tensor.cuda.rms_norm import rms_norm

    x, norm = cases.normal(rng, (rows + 3, dim), 2.0), cases.vector(rng, dim)
    ids = rng.integers(0, rows + 3, rows).astype(np.int32)
    wanted = reference(cases.exact(x)[ids], cases.exact(norm), 1e-5)
    device_x, device_norm, device_ids = cases.device(x), cases.device(norm), cases.device(ids)
    for is_split in (False, True):
        out, scales = rms_norm(
            backend.device, device_x, device_ids, rows, device_norm, 1e-5, is_split=is_split
        )
        memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(out, rows * dim * 2, backend), 0)
        found = cases.exact(cupy.ndarray((rows, dim), bfloat16, memory).get())
        if is_split:
            memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(scales, rows * 4, backend), 0)
            found *= cupy.ndarray((rows,), np.float32, memory).get()[:, None]
        assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < cases.TOLERANCE
