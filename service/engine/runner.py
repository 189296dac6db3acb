"""Batches -> model -> sampler -> ids: what the engine asks of a device, and what it gets back."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from service.engine.batch import Batch
from service.model.decoder import Decoder

MAX_TOP_LOGPROBS = 20


@dataclass(slots=True, frozen=True)
class StepResult:
    """What was sampled, on the host. Shapes and meaning: SampleArrays."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    scores: "StepResult | None" = field(
        default=None, kw_only=True
    )  # of prompt ids, in the order of Batch.scoring


class Runner(Protocol):
    """Runs steps in the order of launch. A failed step does not disturb later ones, but for one error:

    EngineDeadError from a step means that no step will ever succeed again.
    """

    decoder: Decoder
    max_in_flight: int  # steps that may be launched before the result of the first is read

    def launch(self, batch: Batch) -> Future[StepResult]:
        """Start a step; returns at once."""

    def close(self) -> None:
        """Wait for launched steps, then release thread and device."""
