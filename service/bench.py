"""`photoninfer bench`: what this machine does with this model, as JSON.

Offline: the engine in this process, scheduler and sampler included. Over HTTP: a server of its own (or the
one at --url). Decode is counted from the moment when every request has its first id until the last id.
"""

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from openai_api.api import Api
from service import __version__
from service.app import load
from service.engine.engine import Engine
from service.engine.request import SamplingParams
from service.environment import environment_without_keys
from service.errors import PhotonError
from service.load_generator import Target, first_model, run_load
from service.progress import TerminalProgress
from service.settings import Settings

_BATCHES = (1, 8, 16)
_WIDE_BATCH = 64  # where there is a GPU
_PROMPT, _OUTPUT, _LONG_PROMPT = 128, 128, 512
_SETTLE_SECONDS, _IDLE_SECONDS = 2.0, 15.0  # BLAS threads spin for a moment after work
_READY_SECONDS = 600.0


def run_bench(settings: Settings, url: str | None, api_key: str | None) -> int:
    """Run everything, print one JSON object. Raises: PhotonError.

    url: of a running server to measure, instead of this machine. api_key: what that server asks for.
    """
    report: dict[str, Any] = {
        "photoninfer": __version__,
        "machine": describe_machine(),
        "settings": _shown(settings),
    }
    if url is None:
        report["offline"] = asyncio.run(_offline(settings))
        with _server(settings) as (process, target, ready_seconds):
            report["process"] = _measure_process(process, target, ready_seconds)
            report["http"] = _over_http(target, [int(batch) for batch in report["offline"]["decode"]])
    else:
        target = Target(url.rstrip("/").removesuffix("/v1"), api_key)
        report["http"] = _over_http(replace(target, model=first_model(target)), _BATCHES)
    print(json.dumps(report, indent=2))
    return 0


def describe_machine() -> dict[str, Any]:
    """What the figures depend on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "uvicorn": version("uvicorn"),
        "system": platform.platform(),
    }


async def _offline(settings: Settings) -> dict[str, Any]:
    progress = TerminalProgress()
    started_at = perf_counter()
    _, engine, _ = await asyncio.to_thread(load, settings, Api(model_names=("bench",)), progress)
    progress.close()
    load_seconds = perf_counter() - started_at
    await engine.start()
    try:
        await decode_rate(engine, 1, output=8)  # warm-up
        result: dict[str, Any] = {
            "load_seconds": load_seconds,
            "prefill": await _prefill(engine),
            "decode": {},
        }
        for batch in _batches(engine.numerics):
            measured = await decode_rate(engine, batch, output=_OUTPUT)
            result["decode"][str(batch)] = {"tokens_per_second": measured}
            if engine.numerics.startswith("cpu"):
                ceiling = _gemm_ceiling(engine, batch)
                result["decode"][str(batch)] |= {
                    "gemm_ceiling_tokens_per_second": ceiling,
                    "share_of_ceiling": measured / ceiling,
                }
    finally:
        await engine.stop()
    return result


def _prompt(engine: Engine, length: int, number: int) -> list[int]:
    """Ids that no earlier prompt shares a block with."""
    rng = np.random.default_rng(number)
    ids: list[int] = rng.integers(0, engine.vocab_size, length).tolist()
    return ids


async def _times(engine: Engine, prompt: list[int], output: int) -> AsyncIterator[tuple[float, int]]:
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    stream = await engine.submit(prompt, params, request_id="bench")
    async for part in stream:
        yield perf_counter(), len(part.token_ids)


async def decode_rate(engine: Engine, batch: int, output: int) -> float:
    """Tokens a second of `batch` requests together."""

    async def one(number: int) -> list[tuple[float, int]]:
        prompt = _prompt(engine, _PROMPT, 1000 * batch + number)
        return [item async for item in _times(engine, prompt, output)]

    replies = await asyncio.gather(*(one(number) for number in range(batch)))
    first_all = max(reply[0][0] for reply in replies)
    last = max(reply[-1][0] for reply in replies)
    return sum(count for reply in replies for at, count in reply if at > first_all) / (last - first_all)


async def time_to_first_token(engine: Engine, prompt_tokens: int, number: int) -> float:
    """Seconds from submission to the first id of a prompt that no other shares; `number` chooses it."""
    started_at = perf_counter()
    seconds = [at - started_at async for at, _ in _times(engine, _prompt(engine, prompt_tokens, number), 1)]
    return seconds[0]


async def _prefill(engine: Engine) -> dict[str, float]:
    median = statistics.median([await time_to_first_token(engine, _LONG_PROMPT, i) for i in range(3)])
    return {
        "prompt_tokens": _LONG_PROMPT,
        "ttft_ms": 1000 * median,
        "tokens_per_second": _LONG_PROMPT / median,
    }


def _gemm_ceiling(engine: Engine, rows: int) -> float:
    """Tokens a second if a step were nothing but its matrix products."""
    decoder = engine.runner.decoder
    best = float("inf")
    inputs = {
        width: np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
        for width in {linear.in_features for linear in decoder.linears}
    }
    for _ in range(5):
        started_at = perf_counter()
        for linear in decoder.linears:
            linear.project(inputs[linear.in_features])
        best = min(best, perf_counter() - started_at)
    return rows / best


@contextmanager
def _server(settings: Settings) -> Iterator[tuple[subprocess.Popen[str], Target, float]]:
    """A server in a process of its own, its address, and the seconds from process start to ready."""
    command = [sys.executable, "-m", "service", "serve", "--port", "0", "--no-access-log"]
    for name in (
        "model",
        "tokenizer",
        "device",
        "dtype",
        "cache_dir",
        "threads",
        "quantization",
        "group_size",
    ):
        value = getattr(settings, name)
        if value is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    started_at = perf_counter()
    process = subprocess.Popen(  # noqa: S603  # our own command
        command, stderr=subprocess.PIPE, text=True, env=environment_without_keys()
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("Ready: "):
                target = Target(line.split(" at ")[1].strip().removesuffix("/v1"))
                yield process, target, perf_counter() - started_at
                return
            if perf_counter() - started_at > _READY_SECONDS:
                break
        raise PhotonError("The server that is measured did not start.")
    finally:
        process.terminate()
        process.wait()


def _measure_process(
    process: "subprocess.Popen[str]", target: Target, ready_seconds: float
) -> dict[str, float]:
    first = asyncio.run(run_load(target, [_body(1, 4)]))
    ticks = os.sysconf("SC_CLK_TCK")
    sleep(_SETTLE_SECONDS)
    before = _cpu_ticks(process.pid)
    sleep(_IDLE_SECONDS)
    idle = (_cpu_ticks(process.pid) - before) / ticks / _IDLE_SECONDS
    return {
        "start_to_ready_seconds": ready_seconds,
        "start_to_first_token_seconds": ready_seconds + first["ttft_ms_median"] / 1000,
        "resident_mib": int(_read(f"/proc/{process.pid}/statm").split()[1])
        * os.sysconf("SC_PAGE_SIZE")
        / 2**20,
        "idle_cores": idle,
    }


def _batches(numerics: str) -> tuple[int, ...]:
    return _BATCHES if numerics.startswith("cpu") else (*_BATCHES, _WIDE_BATCH)


def _over_http(target: Target, batches: Iterable[int]) -> dict[str, Any]:
    asyncio.run(run_load(target, [_body(2, 4)]))
    return {
        str(batch): asyncio.run(run_load(target, [_body(100 * batch + i, _OUTPUT) for i in range(batch)]))
        for batch in batches
    }


def _body(number: int, output: int) -> dict[str, Any]:
    ids = np.random.default_rng(number).integers(1000, 10_000, _PROMPT).tolist()
    return {"prompt": ids, "max_tokens": output, "temperature": 0, "ignore_eos": True}


def _cpu_ticks(pid: int) -> int:
    parts = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(parts[11]) + int(parts[12])


def _read(path: str) -> str:
    return Path(path).read_text()


def _shown(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("model", "device", "dtype", "block_size", "threads")}
