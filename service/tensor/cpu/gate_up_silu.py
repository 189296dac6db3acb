"""First half of the MLP. Contract: Backend.gate_up_silu in service/tensor/backend.py."""

from typing import Any

from numpy.typing import NDArray

from service.tensor.cpu.linear import CpuLinear
from service.tensor.cpu.primitives import rms_norm, silu

Array = NDArray[Any]


def gate_up_silu(x: Array, eps: float, gate_up: CpuLinear, out: Array) -> None:
    projected = gate_up.project(rms_norm(x, gate_up.norm, eps))
    gate, up = projected[:, : out.shape[1]], projected[:, out.shape[1] :]
    silu(gate)
    gate *= up
    out[...] = gate
