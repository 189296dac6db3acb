"""Finds, specialises and compiles kernels/*.cu."""

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from service.errors import KernelError

Defines = Mapping[str, int]

_PACKAGE = Path(__file__).resolve().parents[2]
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_LOADING = Lock()


@dataclass(frozen=True, slots=True)
class KernelId:
    """A specialisation: kernels/<name>.cu with these defines."""

    name: str
    defines: tuple[tuple[str, int], ...]


@cache
def kernel_dir() -> Path:
    """The folder of CUDA sources: inside an installed wheel, or beside `service` in a checkout."""
    shipped = _PACKAGE / "kernels"
    return shipped if shipped.is_dir() else _PACKAGE.parent / "kernels"


@cache
def source_text(name: str) -> str:
    """`kernels/<name>` with our own headers pasted in place, line numbers kept by #line.

    Pasted, not found through -I: CuPy's cache key covers source and options but not the headers read
    through them, so an edited header would go unnoticed, and a path would tie the cache to one install.
    """
    text = (kernel_dir() / name).read_text()

    def paste(include: re.Match[str]) -> str:
        next_line = text.count("\n", 0, include.start()) + 2
        return f'{source_text(include[1])}\n#line {next_line} "{name}"'

    return f'#line 1 "{name}"\n{_INCLUDE.sub(paste, text)}'


def compile_options(arch: str, defines: Defines) -> tuple[str, ...]:
    """NVRTC options of one specialisation, the same at run time and in the CI compile check.

    `arch` is an NVRTC target such as "sm_80" or "sm_90a".
    """
    return (f"-arch={arch}", "--std=c++17", *(f"-D{name}={value}" for name, value in defines.items()))


def compile_cubin(kernel: KernelId, arch: str) -> bytes:
    """Compile without a GPU or a driver. Raises: KernelError with the compiler's log."""
    from cupy._core import core  # the options that RawModule adds to its own

    nvrtc = _nvrtc()
    name, defines = kernel.name, dict(kernel.defines)
    options = core.assemble_cupy_compiler_options(()) + compile_options(arch, defines)
    program = nvrtc.createProgram(source_text(f"{name}.cu"), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise KernelError(f"kernels/{name}.cu does not compile with {defines}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return cubin


def cubin_path(kernel: KernelId, arch: str, folder: Path) -> Path:
    """Where the cubin of one specialisation is kept: the name stands for everything that it depends on."""
    options = compile_options(arch, dict(kernel.defines))
    content = repr((source_text(f"{kernel.name}.cu"), options, _nvrtc().getVersion()))
    return folder / f"{kernel.name}-{hashlib.sha256(content.encode()).hexdigest()[:32]}.cubin"


def store_cubin(kernel: KernelId, arch: str, folder: Path) -> Path:
    """Compile into the cache, unless it is there. Raises: KernelError with the compiler's log."""
    path = cubin_path(kernel, arch, folder)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        cubin = compile_cubin(kernel, arch)
        scratch = path.with_suffix(f".{secrets.token_hex(4)}")  # not tempfile: another user may serve
        try:
            scratch.write_bytes(cubin)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    return path


@cache
def load_module(kernel: KernelId, cubin_dirs: tuple[Path, ...]) -> Any:
    """Compiled for the current device: from our cubins, or by CuPy, which keeps a cache of its own.

    Raises: KernelError with the compiler's log.
    """
    import cupy  # here, not above: the CPU backend must work where CuPy is not installed

    name, defines, arch = kernel.name, dict(kernel.defines), device_arch()
    for path in (cubin_path(kernel, arch, folder) for folder in cubin_dirs):
        if path.is_file():
            return cupy.RawModule(path=str(path))
    _nvrtc()
    module = cupy.RawModule(code=source_text(f"{name}.cu"), options=compile_options(arch, defines))
    try:
        module.get_function(name)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernels/{name}.cu does not compile with {defines}:\n{error}") from error
    return module


def device_arch() -> str:
    """NVRTC target of the current device."""
    import cupy

    return _arch_of(str(cupy.cuda.Device().compute_capability))


def device_multiprocessors() -> int:
    """How many multiprocessors the current device has."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return int(properties["multiProcessorCount"])


def known_archs() -> tuple[str, ...]:
    """Targets that the compiler here knows. Raises: ImportError, RuntimeError: there is none."""
    return tuple(_arch_of(str(number)) for number in _nvrtc().getSupportedArchs())


def _arch_of(capability: str) -> str:
    """wgmma and setmaxnreg exist only in the `a` variant of 9.0."""
    return "sm_90a" if capability == "90" else f"sm_{capability}"


def _nvrtc() -> Any:
    """The compiler, with its library loaded.

    CuPy loads it at the first call. Where threads make that call together, most of them fail to open
    libnvrtc-builtins (seen with CuPy 14.2 and NVRTC 13.0 from pip; not with NVRTC 13.5).
    """
    from cupy.cuda import nvrtc

    with _LOADING:
        nvrtc.getVersion()
    return nvrtc
