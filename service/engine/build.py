"""Checkpoint and settings -> a ready engine: chooses the device, sizes the KV cache, loads the weights."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from service.engine.cpu_runner import CpuRunner
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.engine.runner import Runner
from service.errors import SettingsError
from service.model.checkpoint import Checkpoint
from service.model.config import ModelConfig
from service.model.decoder import Decoder
from service.model.ledger import MemoryLedger, available_host_bytes
from service.model.quantization import KEEP, FloatWeights, Quantization
from service.model.shapes import ShapeWeights
from service.model.weights import WeightSource, wanted_shapes
from service.progress import Progress
from service.settings import Settings
from service.tensor.backend import Backend
from service.tensor.cpu.backend import CpuBackend

log = logging.getLogger(__name__)

CUDA_MAX_RUNNING = 256
CUPY_MISSING = "CuPy is not installed (pip install 'photoninfer[cuda13]', or [cuda12] for older drivers)"
_CPU_KV_CACHE_BYTES = 1 << 30


@dataclass(slots=True, frozen=True)
class DeviceLimits:
    """What a device has, and what it does unless the settings say otherwise."""

    max_running: int
    max_step_tokens: int
    weight_bytes: int  # of a parameter
    value_bytes: int  # of an activation, and of a number in the KV cache
    available_bytes: int | None  # that the model may take
    kv_cache_bytes: int | None  # None: all that is left


@dataclass(slots=True, frozen=True)
class Plan:
    """What the engine will hold in memory and how much it does at once."""

    max_model_len: int
    num_blocks: int
    max_running: int
    max_step_tokens: int
    vocab_size: int
    ledger: MemoryLedger


def build_engine(
    checkpoint: Checkpoint,
    settings: Settings,
    *,
    vocab_size: int,
    progress: Progress,
    observer: EngineObserver,
) -> Engine:
    """Load a model and make its engine. `vocab_size`: ids that the tokenizer knows.

    Raises: SettingsError (device or dtype that is not there), MemoryBudgetError, ModelError.
    """
    build = _build_cuda if wants_gpu(settings) else _build_cpu
    runner, plan, numerics = build(checkpoint, settings, vocab_size, progress)
    return Engine(
        runner,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=plan.vocab_size,
        eos_token_ids=checkpoint.config.eos_token_ids,
        max_step_tokens=plan.max_step_tokens,
        max_running=plan.max_running,
        max_waiting=settings.max_waiting,
        numerics=numerics,
        prefix_cache=settings.prefix_cache,
        observer=observer,
    )


def wants_gpu(settings: Settings) -> bool:
    """Whether to compute on a GPU. Raises: SettingsError: one was asked for that can't be used."""
    if settings.device == "cpu":
        return False
    obstacle = gpu_obstacle()
    if obstacle is not None and settings.device == "cuda":
        raise SettingsError(f"device: cuda can't be used: {obstacle}.")
    if obstacle is not None:
        log.info("computing on the CPU: %s", obstacle)
    return obstacle is None


def gpu_obstacle() -> str | None:
    """Why no GPU can be used, for people; None: one can."""
    try:
        import cupy
    except ImportError:
        return CUPY_MISSING
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA finds no GPU ({error})"
    return None if count else "CUDA finds no GPU"


def make_plan(checkpoint: Checkpoint, settings: Settings, vocab_size: int, limits: DeviceLimits) -> Plan:
    """Sizes from settings, limits and the model's shape alone. Raises: SettingsError, MemoryBudgetError."""
    config = checkpoint.config
    vocab_size = min(vocab_size, config.vocab_size)
    max_running = settings.max_running or limits.max_running
    max_step_tokens = settings.max_step_tokens or limits.max_step_tokens
    max_model_len = min(settings.max_model_len or config.max_positions, config.max_positions)
    weights = _weight_bytes(checkpoint, settings, limits.weight_bytes)
    rows = max(max_step_tokens, max_running)
    per_row = config.dim + 2 * config.heads * config.head_dim + 4 * config.ffn
    workspace = (
        rows * per_row * limits.value_bytes
        + max_running * vocab_size * 4  # logits
        + max_model_len * config.head_dim * 4  # rotation
    )
    block_bytes = kv_block_bytes(config, settings.block_size, limits.value_bytes)
    if settings.kv_cache_gib is not None:
        kv_cache = int(settings.kv_cache_gib * 2**30)
    elif limits.kv_cache_bytes is not None:
        kv_cache = limits.kv_cache_bytes
    else:
        kv_cache = max(block_bytes, (limits.available_bytes or 0) - weights - workspace)
    num_blocks = kv_cache // block_bytes
    if num_blocks < 1:
        raise SettingsError(
            f"kv_cache_gib={settings.kv_cache_gib}: not one block fits. A block of {settings.block_size} "
            f"tokens takes {block_bytes / 2**20:.1f} MiB: give at least {block_bytes / 2**30:.3f}."
        )
    ledger = MemoryLedger(
        weights_bytes=weights, kv_cache_bytes=num_blocks * block_bytes, workspace_bytes=workspace
    )
    for line in ledger.lines():
        log.info("%s", line)
    ledger.check(limits.available_bytes)
    if num_blocks * settings.block_size < max_model_len:
        max_model_len = num_blocks * settings.block_size
        log.warning("the KV cache limits the context to %d tokens; kv_cache_gib raises it", max_model_len)
    return Plan(max_model_len, num_blocks, max_running, max_step_tokens, vocab_size, ledger)


def quantization_of(settings: Settings, group_sizes: Mapping[str, int]) -> Quantization:
    """What is made INT8 at load: nothing where the checkpoint has such weights (`group_sizes`) already."""
    if settings.quantization != "int8" or group_sizes:
        return KEEP
    return Quantization(
        group_size=settings.group_size,
        embedding=settings.quantize_embedding,
        head=settings.quantize_head,
    )


def shapes_of(config: ModelConfig, settings: Settings, group_sizes: Mapping[str, int]) -> ShapeWeights:
    """The weights that will be loaded, by shape alone."""
    return ShapeWeights(config, {} if settings.quantization == "none" else group_sizes)


def weights_of(checkpoint: Checkpoint, settings: Settings) -> WeightSource:
    """The checkpoint's, as floats if the settings say so."""
    wants_floats = settings.quantization == "none" and checkpoint.group_sizes
    return FloatWeights(checkpoint.weights) if wants_floats else checkpoint.weights


def numerics_of(checkpoint: Checkpoint, settings: Settings, device: str, dtype: str) -> str:
    """What answers depend on besides the weights, such as cuda-bfloat16 or cpu-float32-int8-128."""
    sizes = {quantization_of(settings, checkpoint.group_sizes).group_size}
    if settings.quantization != "none":
        sizes |= set(checkpoint.group_sizes.values())
    return f"{device}-{dtype}" + "".join(f"-int8-{size}" for size in sorted(filter(None, sizes)))


def _weight_bytes(checkpoint: Checkpoint, settings: Settings, float_bytes: int) -> int:
    quantization = quantization_of(settings, checkpoint.group_sizes)
    total = 0
    for name, shape in wanted_shapes(checkpoint.config).items():
        group_size = quantization.of(name, shape)
        if settings.quantization != "none":
            group_size = checkpoint.group_sizes.get(name, group_size)
        scales = 0 if group_size is None else 2 * prod(shape[:-1]) * -(-shape[-1] // group_size)
        total += prod(shape) * (float_bytes if group_size is None else 1) + scales
    return total


def kv_block_bytes(config: ModelConfig, block_size: int, value_bytes: int) -> int:
    """Bytes of keys and values of one block over all layers."""
    return 2 * config.num_layers * config.kv_heads * config.head_dim * block_size * value_bytes


def _build_cpu(
    checkpoint: Checkpoint, settings: Settings, vocab_size: int, progress: Progress
) -> tuple[Runner, Plan, str]:
    dtype = _cpu_dtype(settings)
    limits = DeviceLimits(
        max_running=64,
        max_step_tokens=256,
        weight_bytes=np.dtype(dtype).itemsize,
        value_bytes=4,
        available_bytes=available_host_bytes(),
        kv_cache_bytes=_CPU_KV_CACHE_BYTES,
    )
    plan = make_plan(checkpoint, settings, vocab_size, limits)
    progress.phase("loading weights")
    backend = CpuBackend(dtype)
    decoder = _load(checkpoint, settings, backend, plan.max_model_len, progress)
    progress.phase("starting the engine")
    runner = CpuRunner(
        decoder,
        backend,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=plan.max_step_tokens,
        max_running=plan.max_running,
        vocab_size=plan.vocab_size,
    )
    return runner, plan, numerics_of(checkpoint, settings, "cpu", np.dtype(dtype).name)


def load_decoder(
    checkpoint: Checkpoint, settings: Settings, max_model_len: int, progress: Progress
) -> tuple[Decoder, Backend, str]:
    """A decoder by itself, its backend and the name of its numerics. Raises: SettingsError, ModelError."""
    progress.phase("loading weights")
    if not wants_gpu(settings):
        dtype = _cpu_dtype(settings)
        backend: Backend = CpuBackend(dtype)
        numerics = numerics_of(checkpoint, settings, "cpu", np.dtype(dtype).name)
    else:
        from service.tensor.cuda.backend import CudaBackend
        from service.tensor.cuda.device import CudaDevice

        require_cuda_shapes(checkpoint.config, settings)
        backend = CudaBackend(CudaDevice(cubin_folders(settings)))
        numerics = numerics_of(checkpoint, settings, "cuda", "bfloat16")
    return _load(checkpoint, settings, backend, max_model_len, progress), backend, numerics


def _cpu_dtype(settings: Settings) -> Any:
    return {"auto": np.float32, "float32": np.float32, "bfloat16": bfloat16}[settings.dtype]


def _load(
    checkpoint: Checkpoint, settings: Settings, backend: Backend, max_model_len: int, progress: Progress
) -> Decoder:
    return Decoder(
        checkpoint.config,
        weights_of(checkpoint, settings),
        backend,
        max_model_len,
        progress,
        quantization_of(settings, checkpoint.group_sizes),
    )


def _build_cuda(
    checkpoint: Checkpoint, settings: Settings, vocab_size: int, progress: Progress
) -> tuple[Runner, Plan, str]:
    import cupy  # here: most of these modules can't be imported without CuPy

    from service.engine.cuda_kernels import kernels_of
    from service.engine.cuda_runner import CudaRunner
    from service.tensor.cuda.backend import CudaBackend
    from service.tensor.cuda.device import CudaDevice

    config = checkpoint.config
    require_cuda_shapes(config, settings)
    free_bytes, _ = cupy.cuda.runtime.memGetInfo()
    limits = DeviceLimits(
        max_running=CUDA_MAX_RUNNING,
        max_step_tokens=2048,
        weight_bytes=2,
        value_bytes=2,
        available_bytes=int(free_bytes * settings.gpu_memory_fraction),
        kv_cache_bytes=None,
    )
    plan = make_plan(checkpoint, settings, vocab_size, limits)
    device = CudaDevice(cubin_folders(settings))
    log.info("computing on %s", device.name)
    progress.phase("compiling kernels")
    kernels = kernels_of(
        config,
        weights=shapes_of(config, settings, checkpoint.group_sizes),
        quantization=quantization_of(settings, checkpoint.group_sizes),
        vocab_size=plan.vocab_size,
        block_size=settings.block_size,
        max_running=plan.max_running,
        arch=device.arch,
        num_multiprocessors=device.num_multiprocessors,
    )
    device.prepare(kernels, lambda done, total: progress.update(done, total, "kernels"))
    progress.phase("loading weights")
    backend = CudaBackend(device)
    decoder = _load(checkpoint, settings, backend, plan.max_model_len, progress)
    cupy.get_default_memory_pool().free_all_blocks()  # what weights passed through
    runner = CudaRunner(
        decoder,
        backend,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=plan.max_step_tokens,
        max_running=plan.max_running,
        vocab_size=plan.vocab_size,
        max_model_len=plan.max_model_len,
    )
    progress.phase("capturing graphs")
    for done, total in runner.capture():
        progress.update(done, total, "graphs")
    return runner, plan, numerics_of(checkpoint, settings, "cuda", "bfloat16")


def cubin_folders(settings: Settings) -> tuple[Path, ...]:
    """Where compiled kernels lie; new ones go into the last."""
    shared = settings.shared_cache_path
    own = settings.cache_path / "cubin"
    return (own,) if shared is None else (shared / "cubin", own)


def require_cuda_shapes(config: ModelConfig, settings: Settings) -> None:
    """Raises: SettingsError: shapes that the kernels are not written for."""
    if settings.dtype == "float32":
        raise SettingsError("dtype: float32 is for the CPU; on a GPU use auto or bfloat16.")
    if settings.block_size not in (8, 16, 32, 64, 128, 256):
        raise SettingsError(f"block_size: {settings.block_size} is no power of two from 8 to 256; use 16.")
    if config.head_dim % 16 or config.head_dim > 128:
        raise SettingsError(
            f"device: the GPU kernels need a head_dim that is a multiple of 16 up to 128, and this model "
            f"has {config.head_dim}; use device cpu."
        )
    odd = [size for size in (config.dim, config.ffn) if size % 8]
    if odd:
        raise SettingsError(f"device: the GPU kernels need sizes in eights, not {odd[0]}; use device cpu.")
