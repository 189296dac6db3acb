"""Launches kernels/gate_up_silu.cu and silu_mul.cu. Contract: Backend.gate_up_silu."""

from typing import Any

from service.tensor.cuda.device import CudaDevice, address, require_shape, rows_from
from service.tensor.cuda.linear import AnyLinear, RowLayout, decode_product, multiply_rows, num_own
from service.tensor.cuda.rms_norm import rms_norm


def gate_up_silu(
    device: CudaDevice, x: Any, eps: float, gate_up: AnyLinear, out: Any, num_decode: int
) -> None:
    """The first `num_decode` rows take the decode kernels."""
    rows, dim = x.shape
    num_decode = num_own(gate_up, num_decode, rows)
    ffn = gate_up.out_features // 2
    require_shape("gate_up", gate_up, (2 * ffn, dim))
    require_shape("out", out, (rows, ffn))
    if num_decode:
        layout = RowLayout(ffn, 8, ffn // 8, ffn, 1)
        tail, defines = (address(gate_up.bias), address(out)), {"FFN": ffn}
        decode_product(
            device, "gate_up_silu", gate_up, layout, address(x), num_decode, eps, defines, "pp", tail
        )
    if rows > num_decode:
        _prefill(device, rows_from(x, num_decode), eps, gate_up, rows_from(out, num_decode))


def _prefill(device: CudaDevice, x: Any, eps: float, gate_up: AnyLinear, out: Any) -> None:
    rows, ffn = out.shape
    normed = rms_norm(device, x, None, rows, None, eps)
    raw = device.scratch("projected", (rows, 2 * ffn), 2)
    multiply_rows(device, normed, rows, gate_up, raw, adds=False)
    kernel = device.kernel("silu_mul", {"FFN": ffn}, "pppi", block=256)
    grid = (-(-rows * (ffn // 8) // 256), 1, 1)
    kernel(device.stream, grid, raw, address(gate_up.bias), address(out), rows)
