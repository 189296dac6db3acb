"""Embedding lookup. Contract: Backend.embed in service/tensor/backend.py."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.tensor.backend import StepArrays
from service.tensor.cpu.linear import CpuLinear

Array = NDArray[Any]


def embed(batch: StepArrays, table: CpuLinear, last_ids: Array, out: Array) -> None:
    ids = batch.token_ids
    if (ids < 0).any():
        request_of_row = np.repeat(np.arange(len(batch.lanes)), np.diff(batch.row_starts))
        ids = np.where(ids < 0, last_ids[batch.lanes[request_of_row]], ids)
    out[...] = table.rows(ids)
