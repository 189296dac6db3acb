"""As much of CuPy as service/engine/cuda_runner.py uses, over NumPy: what is queued runs late, as on a GPU.

A stream keeps what is queued until somebody waits for it. So whatever is read too early, or overwritten
before it was copied, shows; and a graph replays what was queued while it was captured.
"""

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[], object]


class Stream(AbstractContextManager["Stream"]):
    """Work in order, done when somebody waits."""

    by_ptr: dict[int, "Stream"] = {}  # noqa: RUF012  # of all streams

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = id(self)
        self.by_ptr[self.ptr] = self
        self._queued: deque[Work] = deque()
        self._captured: list[Work] | None = None
        self._running = threading.RLock()

    def __exit__(self, *_exception: object) -> None:
        pass

    def queue(self, work: Work) -> None:
        (self._queued if self._captured is None else self._captured).append(work)

    def begin_capture(self) -> None:
        assert not self._queued
        self._captured = []

    def end_capture(self) -> "Graph":
        captured, self._captured = self._captured, None
        assert captured is not None
        return Graph(captured)

    def synchronize(self) -> None:
        with self._running:
            while self._queued:
                self._queued.popleft()()

    def run_until(self, event: "Event") -> None:
        with self._running:
            while not event.has_passed:
                self._queued.popleft()()


class Graph:
    def __init__(self, work: list[Work]) -> None:
        self._work = work

    def launch(self, stream: Stream) -> None:
        for each in self._work:
            stream.queue(each)


class Event:
    def __init__(self, block: bool = True, disable_timing: bool = False) -> None:
        self.has_passed = True

    def record(self, stream: Stream) -> None:
        self.has_passed = False
        self._stream = stream
        stream.queue(self._pass)

    def _pass(self) -> None:
        self.has_passed = True

    def synchronize(self) -> None:
        self._stream.run_until(self)


class DeviceArray(np.ndarray[Any, Any]):
    """Host code may look at it by `get` alone."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def set(self, host: Any, stream: Stream) -> None:
        stream.queue(lambda: np.copyto(self, host))

    def get(self, stream: Stream, out: Any = None, blocking: bool = True) -> Any:
        if blocking:
            stream.synchronize()
            return np.array(self)
        stream.queue(lambda: np.copyto(out, self))
        return out


def zeros(shape: Any, dtype: Any) -> DeviceArray:
    return np.zeros(shape, dtype).view(DeviceArray)


def asarray(host: Any) -> DeviceArray:
    return np.array(host).view(DeviceArray)


def memcpy_async(target: int, source: int, size: int, _kind: int, stream: int) -> None:
    Stream.by_ptr[stream].queue(lambda: ctypes.memmove(target, source, size))


def memcpy_2d_async(
    target: int, target_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    for row in range(height):
        memcpy_async(target + row * target_pitch, source + row * pitch, width, kind, stream)


def make_cupy() -> ModuleType:
    """The module, to be put in CuPy's place."""
    module = ModuleType("cupy")
    runtime = SimpleNamespace(
        CUDARuntimeError=OSError,
        memcpyHostToDevice=1,
        memcpyAsync=memcpy_async,
        memcpy2DAsync=memcpy_2d_async,
    )
    cuda = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        alloc_pinned_memory=bytearray,
        runtime=runtime,
    )
    vars(module).update(cuda=cuda, zeros=zeros, asarray=asarray)
    return module


class QueuedDecoder:
    """A decoder on the NumPy backend whose work is queued."""

    def __init__(self, decoder: Any, find_stream: Callable[[], Stream]) -> None:
        self._decoder, self._find_stream = decoder, find_stream
        self.new_cache = decoder.new_cache

    def new_activations(self, rows: int) -> Any:
        """Poisoned: what no step has written must reach no answer."""
        activations = self._decoder.new_activations(rows)
        for field in fields(activations):
            getattr(activations, field.name).fill(np.nan)
        return activations

    def forward(self, arrays: Any, *more: Any) -> None:
        def work() -> None:  # with new arrays each time: the NumPy backend keeps what it makes of the last
            with np.errstate(invalid="ignore"):  # rows of padding hold NaN, and are computed with
                self._decoder.forward(replace(arrays), *more)

        self._find_stream().queue(work)

    def logits(self, *arguments: Any) -> None:
        self._find_stream().queue(lambda: self._decoder.logits(*arguments))


class QueuedBackend:
    """The NumPy backend, with arrays of the device."""

    def __init__(self, backend: Any, find_stream: Callable[[], Stream]) -> None:
        self._backend, self._find_stream = backend, find_stream

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return zeros(shape, dtype)

    empty = zeros

    def sample(self, *arguments: Any) -> None:
        self._find_stream().queue(lambda: self._backend.sample(*arguments))
