"""Fixtures of the device tests. Without a GPU they fail and do not skip: `pytest -m gpu` asks for one."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Any:
    """The CUDA backend; with the parameter "portable" it takes the kernels of cards other than sm_90."""
    from service.tensor.cuda.backend import CudaBackend  # here: CuPy may not be installed

    made = CudaBackend()
    if getattr(request, "param", None) == "portable":
        made.device.has_warpgroups = False
    return made


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh inputs every run; pytest shows the seed of a failure."""
    seed = int(np.random.SeedSequence().entropy) % 2**32  # type: ignore[arg-type]
    print(f"seed {seed}")
    return np.random.default_rng(seed)
