"""Launches kernels/head_logits.cu. Contract: Backend.head_logits in service/tensor/backend.py."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import AnyLinear, decode_product, plain_rows
from service.tensor.cuda.rms_norm import rms_norm


def head_logits(
    device: CudaDevice, x: Any, norm: Any, eps: float, head: AnyLinear, batch: StepArrays, out: Any
) -> None:
    """The rows are normed first: a head that is the embedding can't have the norm's weight in it."""
    samples, vocab = out.shape
    require_shape("sample_rows", batch.sample_rows, (samples,))
    require_shape("norm", norm, (x.shape[1],))
    if samples == 0:
        return
    normed = rms_norm(device, x, batch.sample_rows, samples, norm, eps)
    layout, defines = plain_rows(vocab), {"M": vocab}
    decode_product(
        device, "head_logits", head, layout, normed, samples, None, defines, "p", (address(out),)
    )
