"""Launches kernels/embed.cu. Contract: Backend.embed in service/tensor/backend.py."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import CudaLinear


def embed(device: CudaDevice, batch: StepArrays, table: CudaLinear, last_ids: Any, out: Any) -> None:
    rows, dim = out.shape
    require_shape("token_ids", batch.token_ids, (rows,))
    require_shape("table", table.weight, (table.out_features, dim))
    if rows == 0:
        return
    # first of a step: it starts once everything before has ended
    kernel = device.kernel(
        "embed", {"DIM": dim, "VOCAB": table.out_features}, "ppppp", block=128, is_dependent=False
    )
    arrays = (batch.token_ids, batch.lanes, last_ids, table.weight, out)
    kernel(device.stream, (rows, 1, 1), *map(address, arrays))
