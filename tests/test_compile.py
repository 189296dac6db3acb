"""`photoninfer compile`: the kernels that `serve` looks for, where it looks for them."""

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from openai_api.api import Api, Limits
from service import cli
from service.app import load
from service.engine import build
from service.engine import compile as compile_module
from service.engine.compile import choose_archs, compile_kernels
from service.errors import KernelError, SettingsError
from service.model.config import ModelConfig
from service.model.rope import RopeConfig
from service.progress import NoProgress
from service.settings import Settings
from service.tensor.cuda import kernels
from service.tensor.cuda.kernels import KernelId, cubin_path
from tests.checkpoints import make_checkpoint

CONFIG = ModelConfig(
    architecture="llama",
    dim=64,
    ffn=96,
    num_layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=300,
    max_positions=512,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tied_embeddings=True,
)


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed: pip install photoninfer[test]")


@pytest.fixture
def compiled(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[KernelId]:
    """Kernels that were compiled. They are not really: tests/test_kernels_compile.py does that."""
    done = []

    def compile_cubin(kernel: KernelId, arch: str) -> bytes:
        done.append(kernel)
        return b"cubin"

    monkeypatch.setattr(kernels, "compile_cubin", compile_cubin)
    return done


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "gpu_obstacle", lambda: "CUDA finds no GPU")


class LoadingEndsError(Exception):
    """Kernels are prepared: what follows needs a GPU."""


def kernels_of_serve(
    settings: Settings, arch: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> set[Path]:
    """Files in which `serve` would look on a GPU of this kind."""
    asked: set[Path] = set()

    class Device(Namespace):
        def __init__(self, cubin_dirs: tuple[Path, ...]) -> None:
            super().__init__(name="a GPU", arch=arch, num_multiprocessors=multiprocessors)
            self.folder = cubin_dirs[-1]

        def prepare(self, wanted: Iterable[KernelId], progress: object) -> None:
            asked.update(cubin_path(kernel, arch, self.folder) for kernel in wanted)
            raise LoadingEndsError

    monkeypatch.setattr(build, "wants_gpu", lambda settings: True)
    monkeypatch.setattr("cupy.cuda.runtime.memGetInfo", lambda: (1 << 34, 1 << 34))
    monkeypatch.setattr("service.tensor.cuda.device.CudaDevice", Device)
    api = Api(model_names=("m",), limits=Limits(max_body_bytes=1, ping_seconds=1.0))
    with pytest.raises(LoadingEndsError):
        load(settings, api, NoProgress())
    return asked


@pytest.mark.usefixtures("compiled", "no_gpu")
@pytest.mark.parametrize(
    ("options", "arch", "multiprocessors"),
    [
        ({}, "sm_90a", 132),
        ({"block_size": 32, "max_running": 24}, "sm_75", 40),
    ],
)
def test_serve_finds_every_kernel_that_compile_has_left_and_there_are_no_others(
    options: dict[str, Any],
    arch: str,
    multiprocessors: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = make_checkpoint(tmp_path / "model", vocab_size=512)  # its tokenizer knows fewer ids than that
    settings = Settings(model=str(model), cache_dir=str(tmp_path / "cache"), **options)

    assert cli._compile(settings, {"arch": [arch]}) == 0

    left = set((tmp_path / "cache" / "cubin").iterdir())
    assert len(left) > 10
    assert left == kernels_of_serve(settings, arch, multiprocessors, monkeypatch)
    told = f"{arch}: {len(left)} of {len(left)} kernels compiled into {tmp_path / 'cache' / 'cubin'}\n"
    assert capsys.readouterr().out == told


def test_kernels_of_an_image_are_looked_for_first_and_new_ones_go_elsewhere(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path / "own"), shared_cache_dir=str(tmp_path / "image"))

    assert build.cubin_folders(settings) == (tmp_path / "image" / "cubin", tmp_path / "own" / "cubin")


@pytest.mark.usefixtures("no_gpu")
def test_the_default_model_leaves_what_serve_looks_for(
    compiled: list[KernelId], default_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(model=str(default_model), weight_cache=False, cache_dir=str(tmp_path))

    assert cli._compile(settings, {"arch": ["sm_80"]}) == 0

    assert set((tmp_path / "cubin").iterdir()) == kernels_of_serve(settings, "sm_80", 108, monkeypatch)


@pytest.mark.usefixtures("no_gpu")
def test_what_is_there_is_not_compiled_again(compiled: list[KernelId], tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    archs = ["sm_80", "sm_90a"]
    first = compile_kernels(CONFIG, settings, archs, vocab_size=300, progress=NoProgress())
    assert [(each.arch, each.num_new == each.num_kernels) for each in first] == [
        ("sm_80", True),
        ("sm_90a", True),
    ]
    gone = next((tmp_path / "cubin").glob("sample-*"))
    gone.unlink()
    compiled.clear()

    again = compile_kernels(CONFIG, settings, archs, vocab_size=300, progress=NoProgress())

    assert [kernel.name for kernel in compiled] == ["sample"]
    assert gone.is_file()
    assert [each.num_kernels for each in again] == [each.num_kernels for each in first]
    assert sum(each.num_new for each in again) == 1


class Told(NoProgress):
    def __init__(self) -> None:
        self.updates: list[tuple[int, int | None, str]] = []

    def update(self, done: int, total: int | None, unit: str) -> None:
        self.updates.append((done, total, unit))


@pytest.mark.usefixtures("no_gpu")
def test_progress_counts_kernels_up_to_all(compiled: list[KernelId], tmp_path: Path) -> None:
    told = Told()

    compile_kernels(CONFIG, Settings(cache_dir=str(tmp_path)), ["sm_80"], vocab_size=300, progress=told)

    total = len(compiled)
    assert told.updates == [(done, total, "kernels") for done in range(1, total + 1)]


@pytest.mark.usefixtures("cupy", "no_gpu")
def test_a_kernel_that_does_not_compile_ends_it_and_leaves_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_cubin(kernel: KernelId, arch: str) -> bytes:
        if kernel.name == "sample":
            raise KernelError("kernels/sample.cu does not compile")
        return b"cubin"

    monkeypatch.setattr(kernels, "compile_cubin", compile_cubin)

    with pytest.raises(KernelError, match=r"^kernels/sample\.cu does not compile$"):
        compile_kernels(
            CONFIG, Settings(cache_dir=str(tmp_path)), ["sm_80"], vocab_size=300, progress=NoProgress()
        )

    assert {file.read_bytes() for file in (tmp_path / "cubin").iterdir()} <= {b"cubin"}
    assert {file.suffix for file in (tmp_path / "cubin").iterdir()} <= {".cubin"}


@pytest.mark.usefixtures("compiled", "no_gpu")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cubin").write_text("a file where the folder should be")

    with pytest.raises(SettingsError, match=r"^cache_dir: kernels can't be written to .*cubin: "):
        compile_kernels(
            CONFIG, Settings(cache_dir=str(tmp_path)), ["sm_80"], vocab_size=300, progress=NoProgress()
        )


@pytest.mark.usefixtures("compiled", "no_gpu")
def test_a_model_that_the_kernels_are_not_written_for_is_refused(tmp_path: Path) -> None:
    settings = Settings(cache_dir=str(tmp_path), block_size=12)

    with pytest.raises(SettingsError, match="block_size: 12"):
        compile_kernels(CONFIG, settings, ["sm_80"], vocab_size=300, progress=NoProgress())


def test_architectures_are_taken_once_each_in_the_order_given(cupy: Any) -> None:
    assert choose_archs(["sm_90a", "sm_75", "sm_90a"]) == ("sm_90a", "sm_75")


@pytest.mark.parametrize("name", ["sm_90", "90a", "sm_1", "hopper", ""])
def test_an_unknown_architecture_is_refused_with_those_that_are_known(name: str, cupy: Any) -> None:
    with pytest.raises(SettingsError) as caught:
        choose_archs(["sm_80", name])

    message = str(caught.value)
    assert message.startswith(f"--arch is {name!r}; it takes one of sm_75, sm_80, ")
    assert "sm_90a," in message
    if name == "sm_90":
        assert message.endswith("Did you mean sm_90a?")


@pytest.mark.usefixtures("cupy", "no_gpu")
def test_without_a_gpu_an_architecture_has_to_be_named() -> None:
    with pytest.raises(SettingsError, match=r"no GPU to compile for \(CUDA finds no GPU\).*--arch sm_90a"):
        choose_archs([])


@pytest.mark.usefixtures("cupy")
def test_the_default_is_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "gpu_obstacle", lambda: None)
    monkeypatch.setattr(compile_module, "device_arch", lambda: "sm_89")

    assert choose_archs([]) == ("sm_89",)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(SettingsError, match=r"^arch: .*CuPy is not installed \(pip install 'photoninfer"):
        choose_archs(["sm_80"])


def test_without_nvrtc_the_error_is_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nwith much detail')

    monkeypatch.setattr(compile_module, "known_archs", fail)

    with pytest.raises(
        SettingsError, match=r'^arch: NVRTC can\'t be used: Failure finding "libnvrtc\.so\.13"\.$'
    ):
        choose_archs(["sm_80"])


@pytest.mark.usefixtures("compiled")
def test_a_gpu_that_is_here_counts_with_its_own_multiprocessors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def kernels_of(*arguments: Any, **options: Any) -> list[KernelId]:
        asked.append((options["arch"], options["num_multiprocessors"]))
        return []

    monkeypatch.setattr("service.engine.cuda_kernels.kernels_of", kernels_of)
    monkeypatch.setattr(compile_module, "gpu_obstacle", lambda: None)
    monkeypatch.setattr(compile_module, "device_arch", lambda: "sm_90a")
    monkeypatch.setattr(compile_module, "device_multiprocessors", lambda: 114)
    settings = Settings(cache_dir=str(tmp_path))

    compile_kernels(CONFIG, settings, ["sm_80", "sm_90a"], vocab_size=300, progress=NoProgress())

    assert asked == [("sm_80", None), ("sm_90a", 114)]
