"""Every CUDA kernel compiles, for every architecture that we name, on a machine without a GPU."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.shapes import LLAMA_1B, QWEN3_8B
from service.environment import usable_cores
from service.errors import KernelError
from service.model.config import ModelConfig
from service.model.rope import RopeConfig
from service.tensor.cuda import kernels
from service.tensor.cuda.kernels import KernelId, compile_cubin, cubin_path, kernel_dir, source_text

FILES = sorted(path.stem for path in kernel_dir().glob("*.cu"))
ARCHS = ["sm_75", "sm_80", "sm_89", "sm_90a"]
# every specialisation of a model for the architecture beside it, one of a file for the others
MODELS = {
    "sm_90a": replace(LLAMA_1B, num_layers=1),
    "sm_80": replace(QWEN3_8B, num_layers=1),
    "sm_89": ModelConfig(  # as SmolLM2 135M, with every bias that a checkpoint may have
        architecture="llama",
        dim=576,
        ffn=1536,
        num_layers=1,
        heads=9,
        kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_positions=2048,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
}

GROUP_SIZES = {"sm_90a": 128, "sm_80": 64, "sm_89": 32}  # of the same models in INT8

Outcome = tuple[KernelId, bytes | KernelError]


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed: pip install photoninfer[nvrtc]")


@pytest.fixture(scope="module", params=ARCHS)
def outcomes(request: pytest.FixtureRequest, cupy: Any) -> list[Outcome]:
    """What became of the kernels compiled for one architecture."""
    arch: str = request.param

    def compile_one(kernel: KernelId) -> Outcome:
        try:
            return kernel, compile_cubin(kernel, arch)
        except KernelError as error:
            return kernel, error

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(compile_one, representatives(arch)))


def representatives(arch: str) -> list[KernelId]:
    of_models = {
        of_arch: [*all_kernels(config, arch), *all_kernels(config, arch, GROUP_SIZES[of_arch])]
        for of_arch, config in MODELS.items()
    }
    if arch == "sm_75":  # compiles twenty times slower than sm_80: one of a file for all models together
        return list({kind(each): each for of_model in of_models.values() for each in of_model}.values())
    found: dict[KernelId, None] = {}
    for of_arch, of_model in of_models.items():
        one_each = {kind(each): each for each in of_model}
        found |= dict.fromkeys(of_model if of_arch == arch else one_each.values())
    return list(found)


def kind(kernel: KernelId) -> tuple[str, bool]:
    """The file, and whether weights are in INT8."""
    return kernel.name, dict(kernel.defines).get("GROUP", 0) > 0


def all_kernels(config: ModelConfig, arch: str, group_size: int | None = None) -> list[KernelId]:
    from service.engine.cuda_kernels import kernels_of  # here: can't be imported without CuPy
    from service.model.quantization import Quantization

    return kernels_of(
        config,
        vocab_size=config.vocab_size,
        block_size=16,
        max_running=256,
        arch=arch,
        quantization=Quantization(group_size=group_size),
    )


@pytest.mark.parametrize("name", FILES)
def test_a_kernel_compiles_for_an_architecture(name: str, outcomes: list[Outcome]) -> None:
    own = [outcome for kernel, outcome in outcomes if kernel.name == name]

    assert own, f"no model here uses kernels/{name}.cu: nothing has compiled it"
    for outcome in own:
        assert isinstance(outcome, bytes), str(outcome)
        assert outcome.startswith(b"\x7fELF")


@pytest.fixture
def folder(cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Kernels of the test instead of ours: broken.cu, which uses the header four.cuh."""
    monkeypatch.setattr(kernels, "kernel_dir", lambda: tmp_path)
    (tmp_path / "four.cuh").write_text("__device__ int four() {\n  return 4;\n}\n")
    (tmp_path / "broken.cu").write_text(
        '// a kernel\n#include "four.cuh"\n'
        'extern "C" __global__ void broken(int* out) {\n  *out = four();\n}\n'
    )
    source_text.cache_clear()
    yield tmp_path
    source_text.cache_clear()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    source_text.cache_clear()  # a process reads its sources once


TOGETHER = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from service.tensor.cuda.kernels import KernelId, compile_cubin

barrier = Barrier(4)

def compile_one(dim):
    barrier.wait()
    return len(compile_cubin(KernelId("embed", (("K", dim), ("VOCAB", 1000), ("GROUP", 0))), "sm_80"))

with ThreadPoolExecutor(4) as pool:
    print(*pool.map(compile_one, (64, 72, 80, 88)))
"""


@pytest.mark.usefixtures("cupy")
def test_threads_may_compile_together_from_the_first_kernel_on() -> None:
    """With NVRTC 13.0 they must not load it together; 13.5 does not mind."""
    command = [sys.executable, "-c", TOGETHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert len(done.stdout.split()) == 4, done.stderr


BROKEN = KernelId("broken", (("SIZE", 8),))


def test_an_error_names_the_kernel_its_constants_and_the_line(folder: Path) -> None:
    compile_cubin(BROKEN, "sm_80")  # not broken yet
    edit(folder / "broken.cu", "four();", "five();")

    with pytest.raises(KernelError) as caught:
        compile_cubin(BROKEN, "sm_80")

    message = str(caught.value)
    assert message.startswith("kernels/broken.cu does not compile with {'SIZE': 8}:\n")
    assert 'broken.cu(4): error: identifier "five" is undefined' in message


def test_an_error_in_a_header_names_the_header_and_its_line(folder: Path) -> None:
    edit(folder / "four.cuh", "return 4;", "return 4")

    with pytest.raises(KernelError, match=r'four\.cuh\(3\): error: expected a ";"'):
        compile_cubin(BROKEN, "sm_80")


def test_a_cached_kernel_is_known_by_all_that_it_is_made_of(folder: Path) -> None:
    key = cubin_path(BROKEN, "sm_80", folder)
    others = [
        cubin_path(KernelId("broken", (("SIZE", 16),)), "sm_80", folder),
        cubin_path(BROKEN, "sm_89", folder),
    ]
    edit(folder / "four.cuh", "return 4;", "return 2 + 2;")
    others.append(cubin_path(BROKEN, "sm_80", folder))
    edit(folder / "broken.cu", "// a kernel", "// the kernel")
    others.append(cubin_path(BROKEN, "sm_80", folder))

    assert len({key, *others}) == 5

    edit(folder / "four.cuh", "return 2 + 2;", "return 4;")
    edit(folder / "broken.cu", "// the kernel", "// a kernel")

    assert cubin_path(BROKEN, "sm_80", folder) == key
