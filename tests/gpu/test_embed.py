"""kernels/embed.cu against the NumPy twin."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.gpu import cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [8, 576, 2048])
def test_rows_are_copied_and_sampled_ids_are_found(
    backend: Any, rng: np.random.Generator, dim: int
) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [3, 9, 1, 5], [(30, 30)])
    batch.token_ids[[0, 2]] = -1
    table, last_ids = cases.normal(rng, (1000, dim)), rng.integers(0, 1000, 8).astype(np.int32)
    ids = batch.token_ids.copy()
    ids[[0, 2]] = last_ids[batch.lanes[[0, 2]]]
    out = cases.poisoned((34, dim))
    backend.embed(cases.on_device(batch), backend.linear([table]), cases.device(last_ids), out)
    cases.assert_same_bits(out, cases.device(table[ids]))


def test_the_id_of_a_failed_request_reads_nothing_outside(backend: Any, rng: np.random.Generator) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [3])
    out = cases.poisoned((1, 64))
    lost = cases.on_device(replace(batch, token_ids=np.array([-1], np.int32)))
    backend.embed(
        lost, backend.linear([cases.normal(rng, (10, 64))]), cases.device(np.array([-1], np.int32)), out
    )
    assert np.isfinite(out.get().astype(np.float32)).all()
