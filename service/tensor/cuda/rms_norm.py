"""Launches kernels/rms_norm.cu, for the products that do not norm by themselves."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address


def rms_norm(
    device: CudaDevice, x: Any, row_ids: Any, rows: int, norm: Any, eps: float, *, is_split: bool
) -> tuple[int, int]:
    """Addresses of normed rows and 0; or, `is_split`, of x times weight and of 1 / rms, for decode.

    Shapes: x [.., dim]; row_ids int32 [rows] or None: the first `rows`; norm [dim].
    """
    dim = x.shape[-1]
    out = device.scratch("normed", (rows, dim), 2)
    scales = device.scratch("scales", (rows,), 4) if is_split else 0
    kernel = device.kernel("rms_norm", {"K": dim, "QUARTERS": 1}, "ppipfpp", block=512)
    grid = (-(-rows // 8), 1, 1)
    kernel(device.stream, grid, address(x), address(row_ids), rows, address(norm), eps, out, scales)
    return out, scales
