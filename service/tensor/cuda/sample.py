"""Launches kernels/sample.cu. Contract: Backend.sample in service/tensor/backend.py."""

from typing import Any

from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape

_PARTS = 32  # of the vocabulary, in the search for the largest logit


def sample(
    device: CudaDevice,
    logits: Any,
    sampling: SamplingArrays,
    batch: StepArrays,
    last_ids: Any,
    out: SampleArrays,
) -> None:
    samples, vocab = logits.shape
    require_shape("temperature", sampling.temperature, (samples,))
    require_shape("sample_lanes", batch.sample_lanes, (samples,))
    if samples == 0:
        return
    defines = {"VOCAB": vocab, "PARTS": _PARTS, "MAX_TOP": out.top_ids.shape[1]}
    parameters = _parameters(device, sampling)
    partial = device.scratch("sample_partial", (samples, _PARTS), 8)
    first = device.kernel("sample", defines, "p19pp", entry="sample_partial", block=256)
    first(device.stream, (_PARTS, samples, 1), address(logits), *parameters, partial)
    second = device.kernel("sample", defines, "p19ppippp4p", block=1024)
    second(
        device.stream,
        (samples, 1, 1),
        address(logits),
        *parameters,
        partial,
        sampling.max_top_logprobs,
        *map(address, (batch.sample_lanes, last_ids, out.ids)),
        *map(address, (out.logprobs, out.ranks, out.top_ids, out.top_logprobs)),
    )


def _parameters(device: CudaDevice, sampling: SamplingArrays) -> tuple[int, ...]:
    """`struct Sampling` of kernels/sample.cu."""
    arrays = (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        sampling.choices,
        sampling.positions,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seen_starts,
        sampling.seen_ids,
        sampling.seen_counts,
        sampling.bias_starts,
        sampling.bias_ids,
        sampling.bias_values,
        sampling.bitmask,
    )
    saved_seen = device.scratch("saved_seen", (len(sampling.seen_ids),), 4)
    saved_bias = device.scratch("saved_bias", (len(sampling.bias_ids),), 4)
    return (*map(address, arrays), saved_seen, saved_bias)
