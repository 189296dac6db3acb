"""Checkpoint and settings -> a ready engine: chooses the device, sizes the KV cache, loads the weights."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from service.engine.cpu_runner import CpuRunner
from service.engine.engine import Engine
from service.engine.observer import EngineObserver
from service.errors import SettingsError
from service.model.checkpoint import Checkpoint
from service.model.config import ModelConfig
from service.model.decoder import Decoder
from service.model.ledger import MemoryLedger, available_host_bytes
from service.progress import Progress
from service.settings import Settings
from service.tensor.cpu.backend import CpuBackend

log = logging.getLogger(__name__)

_CPU_KV_CACHE_BYTES = 1 << 30
_CPU_MAX_RUNNING = 64
_CPU_STEP_TOKENS = 256


@dataclass(slots=True, frozen=True)
class Plan:
    """What the engine will hold in memory and how much it does at once."""

    max_model_len: int
    num_blocks: int
    max_running: int
    max_step_tokens: int
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
    if settings.device == "cuda":
        raise SettingsError("device: this version computes on the CPU only; use cpu or auto.")
    dtype = _cpu_dtype(settings)
    config = checkpoint.config
    vocab_size = min(vocab_size, config.vocab_size)
    plan = plan_cpu(checkpoint, settings, vocab_size, dtype)
    for line in plan.ledger.lines():
        log.info("%s", line)
    plan.ledger.check(available_host_bytes())

    progress.phase("loading weights")
    backend = CpuBackend(dtype)
    decoder = Decoder(config, checkpoint.weights, backend, plan.max_model_len, progress)
    progress.phase("starting the engine")
    runner = CpuRunner(
        decoder,
        backend,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_step_tokens=plan.max_step_tokens,
        max_running=plan.max_running,
        vocab_size=vocab_size,
    )
    return Engine(
        runner,
        num_blocks=plan.num_blocks,
        block_size=settings.block_size,
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_step_tokens=plan.max_step_tokens,
        max_running=plan.max_running,
        max_waiting=settings.max_waiting,
        numerics=f"cpu-{np.dtype(dtype).name}",
        prefix_cache=settings.prefix_cache,
        observer=observer,
    )


def plan_cpu(checkpoint: Checkpoint, settings: Settings, vocab_size: int, dtype: Any) -> Plan:
    """Sizes for the NumPy backend, from settings and the model's shape alone."""
    config = checkpoint.config
    block_bytes = kv_block_bytes(config, settings.block_size, itemsize=4)
    wanted = _CPU_KV_CACHE_BYTES if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30)
    num_blocks = wanted // block_bytes
    if num_blocks < 1:
        raise SettingsError(
            f"kv_cache_gib={settings.kv_cache_gib}: not one block fits. A block of {settings.block_size} "
            f"tokens takes {block_bytes / 2**20:.1f} MiB: give at least {block_bytes / 2**30:.3f}."
        )
    max_model_len = min(settings.max_model_len or config.max_positions, config.max_positions)
    if num_blocks * settings.block_size < max_model_len:
        max_model_len = num_blocks * settings.block_size
        log.warning("the KV cache limits the context to %d tokens; kv_cache_gib raises it", max_model_len)
    max_running = settings.max_running or _CPU_MAX_RUNNING
    max_step_tokens = settings.max_step_tokens or _CPU_STEP_TOKENS
    rows_bytes = max_step_tokens * (config.dim + 2 * config.heads * config.head_dim + 4 * config.ffn) * 4
    ledger = MemoryLedger(
        weights_bytes=checkpoint.num_parameters * np.dtype(dtype).itemsize,
        kv_cache_bytes=num_blocks * block_bytes,
        workspace_bytes=rows_bytes + max_running * vocab_size * 4 + max_model_len * config.head_dim * 4,
    )
    return Plan(max_model_len, num_blocks, max_running, max_step_tokens, ledger)


def kv_block_bytes(config: ModelConfig, block_size: int, itemsize: int) -> int:
    """Bytes of keys and values of one block over all layers."""
    return 2 * config.num_layers * config.kv_heads * config.head_dim * block_size * itemsize


def _cpu_dtype(settings: Settings) -> Any:
    return {"auto": np.float32, "float32": np.float32, "bfloat16": bfloat16}[settings.dtype]
