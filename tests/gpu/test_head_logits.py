"""kernels/head_logits.cu against the NumPy twin in float64."""

from typing import Any

import numpy as np
import pytest

from service.tensor.cpu.head_logits import head_logits as reference
from tests.gpu import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("backend", ["sm_90a", "portable"], indirect=True),
]


@pytest.mark.parametrize(
    ("vocab", "padded", "dim"), [(1003, 1024, 576), (5000, 5000, 2048), (3001, 3001, 4096)]
)
@pytest.mark.parametrize("samples", [1, 9, 20, 70])
def test_logits_of_chosen_rows(
    backend: Any, rng: np.random.Generator, vocab: int, padded: int, dim: int, samples: int
) -> None:
    batch = cases.make_step(rng, cases.LLAMA, [1], [(200, 200)])
    object.__setattr__(batch, "sample_rows", rng.permutation(201)[:samples].astype(np.int32))
    x, norm = cases.normal(rng, (201, dim)), cases.vector(rng, dim)
    weight = cases.normal(rng, (padded, dim), dim**-0.5)
    wanted = np.empty((samples, vocab))
    reference(cases.exact(x), cases.exact(norm), 1e-6, cases.reference_linear(weight), batch, wanted)
    out = cases.poisoned((samples, vocab), np.float32)
    head = backend.linear([weight])
    backend.head_logits(cases.device(x), cases.device(norm), 1e-6, head, cases.on_device(batch), out)
    cases.assert_close(out, wanted)
    one = cases.on_device(batch)
    object.__setattr__(one, "sample_rows", one.sample_rows[:1])
    alone = cases.poisoned((1, vocab), np.float32)
    backend.head_logits(cases.device(x), cases.device(norm), 1e-6, head, one, alone)
    cases.assert_same_bits(out[:1], alone)
