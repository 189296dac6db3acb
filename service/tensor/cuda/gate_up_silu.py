"""Launches kernels/gate_up_silu.cu. Contract: Backend.gate_up_silu in service/tensor/backend.py."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import CudaLinear, decode_product, multiply_rows
from service.tensor.cuda.rms_norm import rms_norm


def gate_up_silu(
    device: CudaDevice, x: Any, norm: Any, eps: float, gate_up: CudaLinear, out: Any, num_decode: int
) -> None:
    """The first `num_decode` rows take the decode kernels."""
    rows, dim = x.shape
    require_shape("norm", norm, (dim,))
    require_shape("gate_up", gate_up.weight, (gate_up.out_features, dim))
    require_shape("out", out, (rows, gate_up.out_features // 2))
    if num_decode:
        _decode(device, x, num_decode, norm, eps, gate_up, out)
    if rows > num_decode:
        _prefill(device, x[num_decode:], norm, eps, gate_up, out[num_decode:])


def _decode(
    device: CudaDevice, x: Any, rows: int, norm: Any, eps: float, gate_up: CudaLinear, out: Any
) -> None:
    ffn = gate_up.out_features // 2
    product = decode_product(
        device, "gate_up_silu", gate_up, rows, ffn // 8, True, {"FFN": ffn}, ("pippfpp", "pipppp")
    )
    weight, tail = address(gate_up.weight), (address(gate_up.bias), address(out))
    if product.is_skinny:
        arguments: tuple[Any, ...] = (address(x), rows, weight, address(norm), eps, *tail)
    else:
        scaled, scales = rms_norm(device, x, None, rows, norm, eps, is_split=True)
        arguments = (scaled, rows, weight, scales, *tail)
    product.kernel(device.stream, product.grid, *arguments)


def _prefill(device: CudaDevice, x: Any, norm: Any, eps: float, gate_up: CudaLinear, out: Any) -> None:
    rows, ffn = out.shape
    normed, _ = rms_norm(device, x, None, rows, norm, eps, is_split=False)
    raw = device.scratch("projected", (rows, 2 * ffn), 2)
    multiply_rows(device, normed, rows, gate_up, raw, adds=False)
    kernel = device.kernel("silu_mul", {"FFN": ffn}, "pppi", block=256)
    grid = (-(-rows * (ffn // 8) // 256), 1, 1)
    kernel(device.stream, grid, raw, address(gate_up.bias), address(out), rows)
