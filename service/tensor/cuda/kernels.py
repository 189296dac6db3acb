"""Finds, specialises and compiles kernels/*.cu."""

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from service.errors import KernelError

Defines = Mapping[str, int]

_PACKAGE = Path(__file__).resolve().parents[2]
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


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


def compile_cubin(name: str, arch: str, defines: Defines) -> bytes:
    """Compile `kernels/<name>.cu` without a GPU or a driver.

    Raises: KernelError with the compiler's log.
    """
    from cupy._core import core  # the options that RawModule adds to its own
    from cupy.cuda import nvrtc

    options = core.assemble_cupy_compiler_options(()) + compile_options(arch, defines)
    program = nvrtc.createProgram(source_text(f"{name}.cu"), f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise KernelError(f"kernels/{name}.cu does not compile with {dict(defines)}:\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return cubin


def cubin_path(name: str, arch: str, defines: Defines, cache_dir: Path | None = None) -> Path:
    """Where the cubin of one specialisation is kept: the name stands for everything that it depends on."""
    from cupy.cuda import nvrtc

    content = repr((source_text(f"{name}.cu"), compile_options(arch, defines), nvrtc.getVersion()))
    folder = cache_dir or Path(platformdirs.user_cache_dir("photoninfer")) / "cubin"
    return folder / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:32]}.cubin"


def store_cubin(name: str, arch: str, defines: Defines, cache_dir: Path | None = None) -> Path:
    """Compile into the cache, unless it is there."""
    path = cubin_path(name, arch, defines, cache_dir)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(compile_cubin(name, arch, defines))
        os.replace(file.name, path)
    return path


def load_kernel(name: str, defines: Defines, entry: str | None = None) -> Any:
    """The kernel `entry` (else `name`) of `kernels/<name>.cu`, compiled for the current device.

    Raises: KernelError with the compiler's log.
    """
    import cupy  # here, not above: the CPU backend must work where CuPy is not installed

    arch = device_arch()
    path = cubin_path(name, arch, defines)
    if path.is_file():
        return cupy.RawModule(path=str(path)).get_function(entry or name)
    module = cupy.RawModule(code=source_text(f"{name}.cu"), options=compile_options(arch, defines))
    try:
        return module.get_function(entry or name)
    except cupy.cuda.compiler.CompileException as error:
        raise KernelError(f"kernels/{name}.cu does not compile with {dict(defines)}:\n{error}") from error


def device_arch() -> str:
    """NVRTC target of the current device; wgmma and setmaxnreg exist only in the `a` variant."""
    import cupy

    capability = cupy.cuda.Device().compute_capability
    return "sm_90a" if capability == "90" else f"sm_{capability}"
