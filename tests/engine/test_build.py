"""Which device an engine is built for."""

import logging
import sys
from typing import Any

import pytest

from service.engine.build import wants_gpu
from service.errors import SettingsError
from service.settings import Settings


@pytest.fixture
def cuda_runtime() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install photoninfer[test]")
    from cupy.cuda import runtime

    return runtime


@pytest.fixture
def no_driver(cuda_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy as it is on a machine without a GPU."""

    def fail() -> int:
        raise cuda_runtime.CUDARuntimeError(35)  # cudaErrorInsufficientDriver

    monkeypatch.setattr(cuda_runtime, "getDeviceCount", fail)


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def hidden_gpu(cuda_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "getDeviceCount", lambda: 0)


@pytest.fixture
def one_gpu(cuda_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "getDeviceCount", lambda: 1)


obstacles = pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("no_driver", "CUDA finds no GPU (cudaErrorInsufficientDriver"),
        ("hidden_gpu", "CUDA finds no GPU"),
        ("no_cupy", "CuPy is not installed (pip install 'photoninfer[cuda13]'"),
    ],
)


@obstacles
def test_auto_computes_on_the_cpu_and_says_why(
    obstacle: str, reason: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    request.getfixturevalue(obstacle)

    with caplog.at_level(logging.INFO):
        assert not wants_gpu(Settings(device="auto"))

    assert caplog.messages[0].startswith(f"computing on the CPU: {reason}")


@obstacles
def test_a_gpu_that_was_asked_for_and_is_not_there_is_an_error_that_says_why(
    obstacle: str, reason: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(obstacle)

    with pytest.raises(SettingsError) as caught:
        wants_gpu(Settings(device="cuda"))

    assert str(caught.value).startswith(f"device: cuda can't be used: {reason}")


@pytest.mark.usefixtures("one_gpu")
def test_a_gpu_is_used_if_there_is_one_unless_the_cpu_was_asked_for() -> None:
    assert wants_gpu(Settings(device="auto"))
    assert wants_gpu(Settings(device="cuda"))
    assert not wants_gpu(Settings(device="cpu"))
