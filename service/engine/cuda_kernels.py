"""Which kernels a model needs: found by planning its steps without a GPU."""

from dataclasses import fields
from typing import Any

import numpy as np

from service.engine.cuda_runner import BUCKETS, NARROWEST_TABLE
from service.engine.runner import MAX_TOP_LOGPROBS
from service.model.config import ModelConfig
from service.model.decoder import Decoder
from service.model.quantization import KEEP, Quantization
from service.model.shapes import ShapeWeights
from service.progress import NoProgress
from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cuda.kernels import KernelId
from service.tensor.cuda.recording import Phantom, RecordingBackend, RecordingDevice


def kernels_of(
    config: ModelConfig,
    *,
    vocab_size: int,
    block_size: int,
    max_running: int,
    arch: str,
    num_multiprocessors: int | None = None,
    weights: ShapeWeights | None = None,
    quantization: Quantization = KEEP,
) -> list[KernelId]:
    """Kernels of decode steps up to `max_running` requests and of mixed steps, in order of use.

    `weights`: None: in floats, all of them.
    """
    device = RecordingDevice(arch, num_multiprocessors)
    backend = RecordingBackend(device)
    shapes = weights or ShapeWeights(config)
    decoder = Decoder(config, shapes, backend, block_size, NoProgress(), quantization)
    cache = decoder.new_cache(1, block_size)
    last_ids = Phantom((max_running,))
    batches = [bucket for bucket in BUCKETS if bucket < max_running] + [max_running]
    for num_decode, num_rows in [*((batch, batch) for batch in batches), (0, 64), (1, 65), (0, 300)]:
        step = _step(num_decode, num_rows)
        samples = len(step.lanes)
        logits = Phantom((samples, vocab_size), np.dtype(np.float32))
        decoder.forward(step, cache, decoder.new_activations(num_rows), last_ids, logits)
        backend.sample(logits, _sampling(samples), step, last_ids, _samples(samples))
    return list(device.kernels)


def _step(num_decode: int, num_rows: int) -> StepArrays:
    """Decode rows, and one request with the others."""
    count = num_decode + (num_rows > num_decode)
    of_rows, of_requests = Phantom((num_rows,)), Phantom((count,))
    return StepArrays(
        token_ids=of_rows,
        positions=of_rows,
        slot_mapping=of_rows,
        row_starts=Phantom((count + 1,)),
        context_lens=of_requests,
        block_tables=Phantom((count, NARROWEST_TABLE)),
        lanes=of_requests,
        sample_rows=of_requests,
        sample_lanes=of_requests,
        num_decode=num_decode,
    )


def _sampling(samples: int) -> SamplingArrays:
    arrays: dict[str, Any] = {field.name: Phantom((samples,)) for field in fields(SamplingArrays)}
    return SamplingArrays(**arrays | {"bitmask": None, "max_top_logprobs": -1})


def _samples(samples: int) -> SampleArrays:
    each, top = Phantom((samples,)), Phantom((samples, MAX_TOP_LOGPROBS))
    return SampleArrays(each, each, each, top, top)
