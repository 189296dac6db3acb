"""Composition root: the one place that knows both the HTTP side and the engine.

HTTP is up before the model is loaded, so that probes and clients are told what is going on; loading runs in
a thread. SIGTERM or Ctrl-C stops admission, lets accepted requests end, and then ends what is left.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from openai_api.api import Api, Limits
from openai_api.auth import Access
from openai_api.middleware import wrap
from openai_api.routes import make_routes
from openai_api.tracing import Traced
from service import __version__
from service.api_keys import read_api_keys
from service.engine.build import build_engine
from service.engine.engine import Engine
from service.errors import PhotonError, SettingsError
from service.logs import AccessLog
from service.model.checkpoint import Checkpoint
from service.model.locate import find_model
from service.progress import Fanout, Progress, TerminalProgress, say
from service.settings import Settings
from service.text.chat_template import ChatTemplate
from service.text.generation import TextGenerator
from service.text.matcher import Grammars
from service.text.tokenizer import Tokenizer
from service.traces import close_tracer_provider, make_tracer_provider

log = logging.getLogger(__name__)

_BACKLOG = 2048


def serve(settings: Settings) -> int:
    """Serve until a signal. Returns the exit code: 0 after a complete drain, 1 otherwise.

    Raises: SettingsError when the port is taken, or API keys or traces can't be used.
    """
    listener = bind(settings.host, settings.port)
    with listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(settings, listener))


async def _serve(settings: Settings, listener: socket.socket) -> int:
    return await Server(settings, listener).run()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, before minutes of loading. Raises: SettingsError naming host and port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"Can't listen on {host}:{port}: {error.strerror or error}. Choose others: --host, --port."
        ) from None
    return listener


class Server:
    """One process: HTTP, and the engine once it is loaded."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        limits = Limits(
            max_body_bytes=settings.max_body_mib * 2**20,
            ping_seconds=settings.ping_seconds,
            timeout_seconds=settings.request_timeout_seconds,
        )
        access = Access(
            keys=read_api_keys(settings),
            metrics_key=settings.metrics_key,
            max_requests_per_key=settings.max_requests_per_key,
            cors_origins=settings.cors_origins,
        )
        self._api = Api(model_names=_model_names(settings), limits=limits, access=access)
        self._api.health.max_heartbeat_age_seconds = settings.heartbeat_limit_seconds
        self._tracer_provider = make_tracer_provider(settings)
        self._engine: Engine | None = None
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Serve, load, wait for a signal, drain."""
        config = uvicorn.Config(
            self._make_app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
            server_header=False,
        )
        http = _Http(config)
        self._install_signals()
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop_asked.wait())
        await asyncio.wait((serving, loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        code = 0
        if loading.done() and (error := loading.exception()) is not None:
            code = self._report_failure(error)
        else:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            code = await self._drain()
        http.should_exit = True
        await serving
        if self._engine is not None:
            await self._engine.stop()
        if self._tracer_provider is not None:
            await asyncio.to_thread(close_tracer_provider, self._tracer_provider)
        stopping.cancel()
        return code

    def _make_app(self) -> ASGIApp:
        app = wrap(Starlette(routes=make_routes(self._api)), self._api)
        if self._tracer_provider is not None:
            app = Traced(app, self._tracer_provider, self._api.model_names[0])
        return AccessLog(app) if self._settings.access_log else app

    async def _load(self) -> None:
        progress = TerminalProgress()
        try:
            checkpoint, engine, generator = await asyncio.to_thread(
                load, self._settings, self._api, Fanout(progress, self._api.health)
            )
        finally:
            progress.close()
        await engine.start()
        self._engine, health = engine, self._api.health
        self._api.generator = generator
        self._api.max_model_len = generator.max_model_len
        self._api.system_fingerprint = fingerprint(checkpoint, engine)
        health.heartbeat_age = engine.heartbeat_age
        health.engine_failure = lambda: engine.failure
        if self._settings.unready_when_full:
            health.is_full = lambda: engine.is_full
        health.is_ready = True
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        say(f"Ready: {self._api.model_names[0]} at http://{shown}:{port}/v1")

    def _report_failure(self, error: BaseException) -> int:
        if not isinstance(error, PhotonError):
            raise error
        say(f"photoninfer: {error}")
        return 1

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            self._hurry.set()  # asked twice: end at once
        self._stop_asked.set()

    async def _drain(self) -> int:
        """Finish what was accepted, for at most drain_seconds. Returns 0 if all of it was finished."""
        self._api.health.is_draining = True
        if self._engine is None:
            return 0
        self._engine.drain()
        log.info("stopping: %d requests are left to finish", self._engine.num_unfinished)
        finished = asyncio.create_task(self._engine.until_empty())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait(
            (finished, hurry), timeout=self._settings.drain_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        left = self._engine.num_unfinished
        for task in (finished, hurry):
            task.cancel()
        if left:
            log.warning("stopping with %d requests unfinished", left)
            await self._engine.stop()  # their streams end with an error event
        return 1 if left else 0


class _Http(uvicorn.Server):
    """uvicorn without its own signal handlers: Server decides when to stop."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]  # theirs is a generator
        return nullcontext()


def load(settings: Settings, api: Api, progress: Progress) -> tuple[Checkpoint, Engine, TextGenerator]:
    """Find, check and load the model. Runs in a thread. Raises: PhotonError."""
    checkpoint = find_model(settings, progress)
    spec = checkpoint.tokenizer
    tokenizer = Tokenizer(spec)
    template = None if spec.chat_template is None else ChatTemplate(spec.chat_template, tokenizer)
    grammars = Grammars(tokenizer, checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    grammars.warm_up()  # beside the loading, so that it holds up nobody later
    engine = build_engine(
        checkpoint, settings, vocab_size=tokenizer.vocab_size, progress=progress, observer=api.metrics
    )
    api.metrics.describe(model_name=api.model_names[0], block_size=settings.block_size)
    generator = TextGenerator(engine, tokenizer, template, checkpoint.sampling_defaults, grammars)
    return checkpoint, engine, generator


def fingerprint(checkpoint: Checkpoint, engine: Engine) -> str:
    """Same fingerprint, seed and request: same answer, near-ties on the CPU aside."""
    return f"fp_{checkpoint.fingerprint[:12]}_{engine.numerics}_{__version__}"


def _model_names(settings: Settings) -> tuple[str, ...]:
    if settings.served_model_name:
        return settings.served_model_name
    if settings.model is None:
        return ("SmolLM2-135M-Instruct",)
    path = Path(settings.model)
    return (path.stem if path.suffix == ".gguf" else path.name if path.exists() else settings.model,)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return cast("Callable[[], asyncio.AbstractEventLoop]", uvloop.new_event_loop)
