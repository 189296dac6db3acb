"""Launches kernels/head_logits.cu. Contract: Backend.head_logits in service/tensor/backend.py."""

from typing import Any

from service.tensor.backend import StepArrays
from service.tensor.cuda.device import CudaDevice, address, require_shape
from service.tensor.cuda.linear import CudaLinear, decode_product
from service.tensor.cuda.rms_norm import rms_norm


def head_logits(
    device: CudaDevice, x: Any, norm: Any, eps: float, head: CudaLinear, batch: StepArrays, out: Any
) -> None:
    samples, vocab = out.shape
    require_shape("sample_rows", batch.sample_rows, (samples,))
    require_shape("norm", norm, (x.shape[1],))
    if samples == 0:
        return
    product = decode_product(
        device, "head_logits", head, samples, -(-vocab // 16), True, {"M": vocab}, ("ppippfp", "pippp")
    )
    rows, weight = address(batch.sample_rows), address(head.weight)
    if product.is_skinny:
        arguments: tuple[Any, ...] = (address(x), rows, samples, weight, address(norm), eps, address(out))
    else:
        scaled, scales = rms_norm(device, x, batch.sample_rows, samples, norm, eps, is_split=True)
        arguments = (scaled, samples, weight, scales, address(out))
    product.kernel(device.stream, product.grid, *arguments)
