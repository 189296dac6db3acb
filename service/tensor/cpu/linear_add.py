"""Projection into the residual stream. Contract: Backend.linear_add in service/tensor/backend.py."""

from typing import Any

from numpy.typing import NDArray

from service.tensor.cpu.linear import CpuLinear


def linear_add(x: NDArray[Any], weight: CpuLinear, residual: NDArray[Any]) -> None:
    residual += weight.project(x)
