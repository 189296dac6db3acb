"""Launches kernels/embed.cu. Contract: Backend.embed in service/tensor/backend.py."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import AnyLinear, CudaInt8Linear


def embed(device: CudaDevice, batch: StepArrays, table: AnyLinear, last_ids: Any, out: Any) -> None:
    rows, dim = out.shape
    require_shape("token_ids", batch.token_ids, (rows,))
    require_shape("table", table, (table.out_features, dim))
    if rows == 0:
        return
    # first of a step: it starts once everything before has ended
    defines = {"K": dim, "VOCAB": table.out_features, "GROUP": table.group_size, "NORM": 0}
    kernel = device.kernel("embed", defines, "ppppp", block=128, is_dependent=False)
    weight = table.packed if isinstance(table, CudaInt8Linear) else table.weight
    arrays = (batch.token_ids, batch.lanes, last_ids, weight, out)
    kernel(device.stream, (rows, 1, 1), *map(address, arrays))
