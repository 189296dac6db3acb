"""Launches kernels/linear_add.cu. Contract: Backend.linear_add in service/tensor/backend.py."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import CudaLinear, decode_product, multiply_rows


def linear_add(device: CudaDevice, x: Any, weight: CudaLinear, residual: Any, num_decode: int) -> None:
    """The first `num_decode` rows take the decode kernels."""
    rows = x.shape[0]
    require_shape("x", x, (rows, weight.in_features))
    require_shape("residual", residual, (rows, weight.out_features))
    if num_decode:
        _decode(device, x, num_decode, weight, residual)
    if rows > num_decode:
        _prefill(device, x[num_decode:], weight, residual[num_decode:])


def _decode(device: CudaDevice, x: Any, rows: int, weight: CudaLinear, residual: Any) -> None:
    outputs = weight.out_features
    product = decode_product(
        device, "linear_add", weight, rows, -(-outputs // 16), False, {"M": outputs}, ("pippp", "pippp")
    )
    arrays = (weight.weight, weight.bias, residual)
    product.kernel(device.stream, product.grid, address(x), rows, *map(address, arrays))


def _prefill(device: CudaDevice, x: Any, weight: CudaLinear, residual: Any) -> None:
    rows, outputs = residual.shape
    multiply_rows(device, address(x), rows, weight, address(residual), adds=True)
    if weight.bias is not None:
        kernel = device.kernel("add_bias", {"M": outputs}, "ppi", block=256)
        grid = (-(-rows * outputs // 256), 1, 1)
        kernel(device.stream, grid, address(residual), address(weight.bias), rows)
