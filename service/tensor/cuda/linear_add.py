"""Launches kernels/linear_add.cu. Contract: Backend.linear_add in service/tensor/backend.py."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address, require_shape, rows_from
from service.tensor.cuda.linear import AnyLinear, decode_product, multiply_rows, num_own, plain_rows


def linear_add(device: CudaDevice, x: Any, weight: AnyLinear, residual: Any, num_decode: int) -> None:
    """The first `num_decode` rows take the decode kernels."""
    rows, outputs = x.shape[0], weight.out_features
    num_decode = num_own(weight, num_decode, rows)
    require_shape("x", x, (rows, weight.in_features))
    require_shape("residual", residual, (rows, outputs))
    if num_decode:
        layout, tail = plain_rows(outputs), (address(weight.bias), address(residual))
        defines = {"M": outputs}
        decode_product(
            device, "linear_add", weight, layout, address(x), num_decode, None, defines, "pp", tail
        )
    if rows > num_decode:
        _prefill(device, rows_from(x, num_decode), weight, rows_from(residual, num_decode))


def _prefill(device: CudaDevice, x: Any, weight: AnyLinear, residual: Any) -> None:
    rows, outputs = residual.shape
    multiply_rows(device, address(x), rows, weight, address(residual), adds=True)
    if weight.bias is not None:
        kernel = device.kernel("add_bias", {"M": outputs}, "ppi", block=256)
        grid = (-(-rows * outputs // 256), 1, 1)
        kernel(device.stream, grid, address(residual), address(weight.bias), rows)
