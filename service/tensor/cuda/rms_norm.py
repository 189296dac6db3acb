"""Launches kernels/rms_norm.cu, for the products that do not norm by themselves."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address


def rms_norm(device: CudaDevice, x: Any, row_ids: Any, rows: int, norm: Any, eps: float) -> int:
    """The address of normed rows, in scratch memory.

    Shapes: x [.., dim]; row_ids int32 [rows] or None: the first `rows`; norm [dim], or None: no weight.
    """
    dim = x.shape[-1]
    out = device.scratch("normed", (rows, dim), 2)
    kernel = device.kernel("rms_norm", {"K": dim, "PARTS": 1}, "ppipfp", block=512)
    grid = (-(-rows // 8), 1, 1)
    kernel(device.stream, grid, address(x), address(row_ids), rows, address(norm), eps, out)
    return out
