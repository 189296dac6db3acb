"""Measures the CUDA backend with random weights: `python -m benchmarks.device PART... --out FILE`.

Parts: `tests` runs tests/gpu; `stages` times the stages of a decode step against the time that their bytes
take; `decode` whole decode steps from CUDA graphs, sampling included; `prefill` whole prompts, launched one
by one; `engine` both through scheduler and runner, prompts of 128 and replies of 128 ids. Results go
into the JSON file after every measurement; what it holds is not measured again (`--again` does).
"""

import argparse
import asyncio
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import cupy
import numpy as np
from ml_dtypes import bfloat16

from benchmarks.shapes import MODELS
from service.bench import decode_rate, time_to_first_token
from service.engine.cuda_kernels import kernels_of
from service.engine.cuda_runner import CudaRunner
from service.engine.engine import Engine
from service.model.config import ModelConfig
from service.model.decoder import Activations, Decoder, KVCache
from service.model.quantization import Quantization
from service.model.shapes import ShapeWeights
from service.progress import NoProgress
from service.tensor.backend import SampleArrays, SamplingArrays, StepArrays
from service.tensor.cuda.backend import CudaBackend
from service.tensor.cuda.linear import CudaInt8Linear, CudaLinear, packed_piece_bytes

READ_TERABYTES = 4.34  # a second, read by one kernel from 1.24 GB; measured on the same machine
BLOCK_SIZE = 16
CONTEXT = 192  # half of 128 generated ids behind a prompt of 128
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)


class RandomBackend(CudaBackend):
    """Draws weights on the device instead of loading them. `quantized`: group size of INT8, or None."""

    quantized: int | None = None

    def linear(
        self,
        parts: Any,
        biases: Any = None,
        norm: Any = None,
        *,
        pairs: int = 8,
        group_size: int | None = None,
    ) -> Any:
        outputs, inputs = sum(len(part) for part in parts), parts[0].shape[1]
        if self.quantized is not None:
            return self._int8(outputs, inputs, norm, pairs)
        weight = self.zeros((-(-outputs // 16) * 16, inputs), bfloat16)[:outputs]
        for start in range(0, outputs, 8192):
            rows = min(8192, outputs - start)
            weight[start : start + rows] = (
                cupy.random.standard_normal((rows, inputs), np.float32) * inputs**-0.5
            ).astype(bfloat16)
        return CudaLinear(weight, None)

    def _int8(self, outputs: int, inputs: int, norm: Any, pairs: int) -> CudaInt8Linear:
        """Any bytes are values; scales are ones that keep activations in range."""
        assert self.quantized is not None
        pieces, size = -(-inputs // 128), packed_piece_bytes(self.quantized)
        tiles = -(-outputs // 128) * 2 * pieces
        packed = cupy.random.randint(0, 256, (tiles, size), np.uint8)
        packed[:, 8192:].view(np.float16)[...] = np.float16(inputs**-0.5 / 74)
        factors = None if norm is None else cupy.ones(pieces * 128, np.float32).astype(bfloat16)
        return CudaInt8Linear(packed.ravel(), factors, None, (outputs, inputs), self.quantized, pairs)


@dataclass
class Bench:
    """A model on the device, and arrays for steps of up to `max_rows` rows."""

    config: ModelConfig
    backend: RandomBackend
    decoder: Decoder
    cache: KVCache
    buffers: Activations
    stream: Any

    @classmethod
    def make(cls, config: ModelConfig, max_rows: int, num_blocks: int, group_size: int | None) -> "Bench":
        backend = RandomBackend()
        backend.quantized = group_size
        decoder = Decoder(config, ShapeWeights(config), backend, 8192, NoProgress())
        cache, buffers = decoder.new_cache(num_blocks, BLOCK_SIZE), decoder.new_activations(max_rows)
        return cls(config, backend, decoder, cache, buffers, cupy.cuda.Stream(non_blocking=True))

    def decode_step(self, batch: int, context: int) -> Callable[[], None]:
        """A function that queues one decode step with greedy sampling."""
        arrays = step_arrays(batch, 1, context)
        vocab = self.config.vocab_size
        logits, last_ids = cupy.empty((batch, vocab), np.float32), cupy.zeros(batch, np.int32)
        sampling, samples = greedy(batch), sample_arrays(batch)

        def step() -> None:
            self.decoder.forward(arrays, self.cache, self.buffers, last_ids, logits)
            self.backend.sample(logits, sampling, arrays, last_ids, samples)

        return step

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The same as a CUDA graph."""
        with self.stream:
            step()
            self.stream.synchronize()
            self.stream.begin_capture()
            step()
            graph = self.stream.end_capture()
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def microseconds(self, launch: Callable[[], None], repeats: int = 20, inner: int = 3) -> float:
        """Median time of one launch, in a row of `inner`."""
        times = []
        with self.stream:
            for _ in range(repeats + 3):
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                start.record(self.stream)
                for _ in range(inner):
                    launch()
                end.record(self.stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3 / inner)
        return float(median(times[3:]))


def step_arrays(requests: int, rows: int, context: int) -> StepArrays:
    """`requests` requests of `rows` rows each that end at `context`; one row each is a decode step."""
    width = -(-context // BLOCK_SIZE)
    width = -(-width // 16) * 16  # as the engine's buckets: whole splits of 256 tokens
    tables = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    positions = np.tile(np.arange(context - rows, context, dtype=np.int32), requests)
    owner = np.repeat(np.arange(requests), rows)
    slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(requests + 1, dtype=np.int32) * rows
    host = {
        "token_ids": np.arange(requests * rows, dtype=np.int32),
        "positions": positions,
        "slot_mapping": slots.astype(np.int32),
        "row_starts": starts,
        "context_lens": np.full(requests, context, np.int32),
        "block_tables": tables,
        "lanes": np.arange(requests, dtype=np.int32),
        "sample_rows": starts[1:] - 1,
        "sample_lanes": np.arange(requests, dtype=np.int32),
    }
    arrays = {name: cupy.asarray(array) for name, array in host.items()}
    return StepArrays(**arrays, num_decode=requests if rows == 1 else 0)


def greedy(samples: int) -> SamplingArrays:
    zeros, ones = cupy.zeros(samples, np.float32), cupy.ones(samples, np.float32)
    integers, starts = cupy.zeros(samples, np.int32), cupy.zeros(samples + 1, np.int32)
    none, values = cupy.zeros(1, np.int32), cupy.zeros(1, np.float32)
    seeds = cupy.zeros(samples, np.uint64)
    head = (zeros, integers, ones, zeros, seeds, integers, integers, ones, zeros, zeros)
    return SamplingArrays(*head, starts, none, none, starts, none, values, None, -1)


def sample_arrays(samples: int) -> SampleArrays:
    floats, integers = cupy.zeros((samples, 20), np.float32), cupy.zeros((samples, 20), np.int32)
    return SampleArrays(
        cupy.zeros(samples, np.int32),
        cupy.zeros(samples, np.float32),
        cupy.zeros(samples, np.int32),
        integers,
        floats,
    )


def stage_steps(  # noqa: C901  seven small functions
    bench: Bench, batch: int
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Every stage by itself, over all layers: name, bytes that it must read, function that queues it."""
    decoder, backend, config = bench.decoder, bench.backend, bench.config
    arrays, eps = step_arrays(batch, 1, CONTEXT), config.rms_norm_eps
    buffers = bench.buffers
    x, q, mixed, hidden = (b[:batch] for b in (buffers.x, buffers.q, buffers.mixed, buffers.hidden))
    backend.embed(arrays, decoder._embedding, cupy.zeros(batch, np.int32), x)
    caches = list(zip(bench.cache.keys, bench.cache.values, strict=True))
    layers = decoder._layers

    def qkv() -> None:
        for layer, (keys, values) in zip(layers, caches, strict=True):
            norms = (layer.q_norm, layer.k_norm, decoder._rope)
            backend.qkv_rope_cache(x, eps, layer.qkv, *norms, arrays, keys, values, q)

    def attention() -> None:
        for keys, values in caches:
            backend.paged_attention(q, keys, values, arrays, config.head_dim**-0.5, mixed)

    def output() -> None:
        for layer in layers:
            backend.linear_add(mixed.reshape(batch, -1), layer.o, x)

    def gate_up() -> None:
        for layer in layers:
            backend.gate_up_silu(x, eps, layer.gate_up, hidden)

    def down() -> None:
        for layer in layers:
            backend.linear_add(hidden, layer.down, x)

    logits = cupy.empty((batch, config.vocab_size), np.float32)
    sampling, samples, last_ids = greedy(batch), sample_arrays(batch), cupy.zeros(batch, np.int32)

    def head() -> None:
        backend.head_logits(x, decoder._final_norm, eps, decoder._head, arrays, logits)

    def sample() -> None:
        backend.sample(logits, sampling, arrays, last_ids, samples)

    first = layers[0]
    context_bytes = batch * CONTEXT * config.kv_heads * config.head_dim * 4
    num_layers = config.num_layers
    yield "qkv_rope_cache", num_layers * first.qkv.num_bytes, qkv
    yield "paged_attention", num_layers * context_bytes, attention
    yield "linear_add (o)", num_layers * first.o.num_bytes, output
    yield "gate_up_silu", num_layers * first.gate_up.num_bytes, gate_up
    yield "linear_add (down)", num_layers * first.down.num_bytes, down
    yield "head_logits", decoder._head.num_bytes, head
    yield "sample (greedy)", logits.nbytes, sample


class Report:
    """Results by key, in a JSON file that is written after each."""

    def __init__(self, path: Path, again: bool, commit: str) -> None:
        self._path = path
        self._results: dict[str, Any] = {} if again or not path.is_file() else json.loads(path.read_text())
        runtime = cupy.cuda.runtime
        self._results["machine"] = {
            "device": runtime.getDeviceProperties(0)["name"].decode(),
            "driver": runtime.driverGetVersion(),
            "cuda": runtime.runtimeGetVersion(),
            "python": platform.python_version(),
            "commit": commit,
            **{name: version(name) for name in ("cupy-cuda13x", "numpy")},
        }

    def lacks(self, key: str) -> bool:
        return key not in self._results

    def add(self, key: str, value: Any) -> None:
        self._results[key] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._results, indent=1) + "\n")
        print(f"{key}: {value}", flush=True)


def run_stages(bench: Bench, name: str, report: Report) -> None:
    for batch in (1, 16, 64, 256):
        for stage, num_bytes, queue in stage_steps(bench, batch):
            key = f"{name} stage {stage} batch {batch}"
            if report.lacks(key):
                found = bench.microseconds(bench.captured(queue), 10)
                floor = num_bytes / READ_TERABYTES / 1e6
                report.add(key, {"us": round(found, 1), "floor_us": round(floor, 1)})


def run_decode(bench: Bench, name: str, report: Report) -> None:
    for batch in BATCHES:
        key = f"{name} decode batch {batch}"
        if report.lacks(key):
            found = bench.microseconds(bench.captured(bench.decode_step(batch, CONTEXT)))
            report.add(key, {"us": round(found, 1), "tokens_per_second": round(batch / found * 1e6)})


def run_prefill(bench: Bench, name: str, report: Report) -> None:
    for rows in (100, 512, 2048):
        key = f"{name} prefill {rows}"
        if not report.lacks(key):
            continue
        arrays, last_ids = step_arrays(1, rows, rows), cupy.zeros(1, np.int32)
        logits = cupy.empty((1, bench.config.vocab_size), np.float32)

        def queue(arrays: Any = arrays, last_ids: Any = last_ids, logits: Any = logits) -> None:
            bench.decoder.forward(arrays, bench.cache, bench.buffers, last_ids, logits)

        report.add(key, {"us": round(bench.microseconds(queue, 10, 1), 1)})


async def _run_engine(bench: Bench, name: str, report: Report) -> None:
    """Through the real engine: submission to the first id on the host, then first to last id."""
    max_running, max_step_tokens, num_blocks = 256, 2048, 256 * 16 + 256
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "vocab_size": bench.config.vocab_size}
    sizes |= {"max_step_tokens": max_step_tokens, "max_running": max_running, "max_model_len": 4096}
    kernels = kernels_of(
        bench.config,
        vocab_size=bench.config.vocab_size,
        block_size=BLOCK_SIZE,
        max_running=max_running,
        arch=bench.backend.device.arch,
        quantization=Quantization(group_size=bench.backend.quantized),
    )
    started_at = perf_counter()
    bench.backend.device.prepare(kernels, lambda done, total: None)
    prepared_at = perf_counter()
    runner = CudaRunner(bench.decoder, bench.backend, **sizes)
    for _ in runner.capture():
        pass
    if report.lacks(f"{name} engine start"):
        seconds = {
            "kernels": len(kernels),
            "compile_seconds": round(prepared_at - started_at, 2),
            "capture_seconds": round(perf_counter() - prepared_at, 2),
        }
        report.add(f"{name} engine start", seconds)
    engine = Engine(runner, **sizes, eos_token_ids=(), max_waiting=1024, prefix_cache=False)
    await engine.start()
    for prompt in (100, 2048):
        key = f"{name} engine ttft {prompt}"
        if report.lacks(key):
            times = [await time_to_first_token(engine, prompt, number) for number in range(12)]
            report.add(key, {"ms": round(1000 * median(times[2:]), 3)})
    for batch in (1, 4, 8, 16, 64, 256):
        key = f"{name} engine decode {batch}"
        if report.lacks(key):
            await decode_rate(engine, batch, output=8)
            rate = await decode_rate(engine, batch, output=128)
            floor = sum(linear.num_bytes for linear in bench.decoder.linears) / READ_TERABYTES / 1e6
            report.add(
                key, {"tokens_per_second": round(rate), "read_share": round(floor * rate / batch / 1e6, 3)}
            )
    await engine.stop()


def run_tests(report: Report) -> None:
    """Kernels against the NumPy reference, the engine, whole models against transformers."""
    started_at = perf_counter()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-q",
        "-rP",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "filterwarnings=default", "--tb=short"]
    if find_spec("xdist"):
        command += ["-n", "12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    lines = done.stdout.splitlines()
    told = [line for line in lines if "mean " in line or "transformers in" in line]
    seconds = round(perf_counter() - started_at, 1)
    report.add("tests", {"result": lines[-1], "code": done.returncode, "told": told, "seconds": seconds})
    if done.returncode:
        print(done.stdout[-6000:], flush=True)


def run_engine(bench: Bench, name: str, report: Report) -> None:
    asyncio.run(_run_engine(bench, name, report))


_PARTS = {"stages": run_stages, "decode": run_decode, "prefill": run_prefill, "engine": run_engine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["tests", *_PARTS])
    parser.add_argument("--commit", default="unknown", help="what is measured")
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/h200.json"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--portable", action="store_true", help="the kernels of cards other than sm_90")
    parser.add_argument("--int8", type=int, metavar="GROUP_SIZE", help="weights in INT8 with such groups")
    options = parser.parse_args()
    report = Report(options.out, options.again, options.commit)
    if "tests" in options.parts:
        run_tests(report)
    parts = [part for part in options.parts if part in _PARTS]
    if not parts:
        return
    for name in options.model or MODELS:
        bench = Bench.make(MODELS[name], 2048, 256 * 16 + 1, options.int8)
        if options.int8:
            name += f" int8-{options.int8}"
        if options.portable:
            bench.backend.device.has_warpgroups = False
            name += " portable"
        for part in parts:
            _PARTS[part](bench, name, report)
        del bench
        cupy.get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    main()
