"""A model's CUDA kernels, compiled before the first start, on a machine that needs no GPU."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from service.engine.build import (
    CUDA_MAX_RUNNING,
    CUPY_MISSING,
    cubin_folders,
    gpu_obstacle,
    quantization_of,
    require_cuda_shapes,
    shapes_of,
)
from service.environment import nearest_hint, usable_cores
from service.errors import SettingsError
from service.model.config import ModelConfig
from service.progress import Progress
from service.settings import Settings
from service.tensor.cuda.kernels import (
    KernelId,
    cubin_path,
    device_arch,
    device_multiprocessors,
    known_archs,
    store_cubin,
)


@dataclass(slots=True, frozen=True)
class CompiledKernels:
    """Kernels of one architecture that lie in `folder` now; `num_new` of them did not before."""

    arch: str
    num_kernels: int
    num_new: int
    folder: Path


def choose_archs(named: Sequence[str]) -> tuple[str, ...]:
    """The architectures to compile for: those named, or the present GPU's.

    Raises: SettingsError: an unknown name, no GPU to take the default from, no compiler.
    """
    try:
        known = known_archs()
    except ImportError:
        raise SettingsError(f"arch: kernels can't be compiled: {CUPY_MISSING}.") from None
    except RuntimeError as error:  # CuPy is there, NVRTC is not
        raise SettingsError(f"arch: NVRTC can't be used: {str(error).splitlines()[0]}.") from None
    for arch in named:
        if arch not in known:
            hint = nearest_hint(arch, known)
            raise SettingsError(f"--arch is {arch!r}; it takes one of {', '.join(known)}.{hint}")
    if named:
        return tuple(dict.fromkeys(named))
    if (obstacle := gpu_obstacle()) is not None:
        raise SettingsError(
            f"arch: there is no GPU to compile for ({obstacle}); name one, such as --arch sm_90a."
        )
    return (device_arch(),)


def compile_kernels(
    config: ModelConfig,
    settings: Settings,
    archs: Sequence[str],
    *,
    vocab_size: int,
    progress: Progress,
    group_sizes: Mapping[str, int] = MappingProxyType({}),
) -> list[CompiledKernels]:
    """Compile into the folder where `serve` looks, whatever is not there yet.

    `vocab_size`: ids that the tokenizer knows. `group_sizes`: of the checkpoint's INT8 tensors.
    A GPU whose number of multiprocessors is neither present nor the usual one of its architecture may need
    a few kernels more; `serve` compiles those itself.
    Raises: SettingsError (shapes that the kernels are not written for, a folder that can't be written),
    KernelError with the compiler's log.
    """
    *_, folder = cubin_folders(settings)
    wanted = {arch: _kernels(config, settings, arch, vocab_size, group_sizes) for arch in archs}
    missing = [
        (kernel, arch)
        for arch, kernels in wanted.items()
        for kernel in kernels
        if not cubin_path(kernel, arch, folder).is_file()
    ]
    progress.phase(f"compiling kernels for {', '.join(archs)}")
    try:
        _compile(missing, folder, progress)
    except OSError as error:
        raise SettingsError(
            f"cache_dir: kernels can't be written to {folder}: {error.strerror}. Give another folder."
        ) from None
    new = [arch for _, arch in missing]
    return [CompiledKernels(arch, len(wanted[arch]), new.count(arch), folder) for arch in archs]


def _kernels(
    config: ModelConfig, settings: Settings, arch: str, vocab_size: int, group_sizes: Mapping[str, int]
) -> list[KernelId]:
    from service.engine.cuda_kernels import kernels_of  # here: can't be imported without CuPy

    require_cuda_shapes(config, settings)
    is_present = gpu_obstacle() is None and device_arch() == arch
    return kernels_of(
        config,
        vocab_size=min(vocab_size, config.vocab_size),
        block_size=settings.block_size,
        max_running=settings.max_running or CUDA_MAX_RUNNING,
        arch=arch,
        num_multiprocessors=device_multiprocessors() if is_present else None,
        weights=shapes_of(config, settings, group_sizes),
        quantization=quantization_of(settings, group_sizes),
    )


def _compile(jobs: Sequence[tuple[KernelId, str]], folder: Path, progress: Progress) -> None:
    """Side by side: NVRTC runs without Python's lock. After a failure nothing more is begun."""
    with ThreadPoolExecutor(usable_cores(), thread_name_prefix="compile") as pool:
        futures = [pool.submit(store_cubin, kernel, arch, folder) for kernel, arch in jobs]
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress.update(done, len(jobs), "kernels")
        finally:
            pool.shutdown(cancel_futures=True)
