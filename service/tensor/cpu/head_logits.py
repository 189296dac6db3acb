"""Final norm and LM head. Contract: Backend.head_logits in service/tensor/backend.py."""

from typing import Any

from numpy.typing import NDArray

from service.tensor.backend import StepArrays
from service.tensor.cpu.linear import CpuLinear
from service.tensor.cpu.primitives import rms_norm

Array = NDArray[Any]


def head_logits(x: Array, norm: Array, eps: float, head: CpuLinear, batch: StepArrays, out: Array) -> None:
    rows = rms_norm(x[batch.sample_rows], norm, eps)
    out[...] = head.project_transposed(rows, num_outputs=out.shape[1]).T
