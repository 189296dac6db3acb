"""What every route needs to know: the model that is served, its state, and the limits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from openai_api.auth import Access
from openai_api.health import Health
from service.errors import EngineDeadError, ModelNotFoundError, OverloadedError, RequestError
from service.metrics import Metrics
from service.text.generation import TextGenerator


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on what one HTTP request may ask. Those of single fields stand in protocol.py."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_choices: int = 128  # prompts times n
    ping_seconds: float = 15.0  # a waiting stream gets an SSE comment this often; 0: never
    loading_retry_seconds: float = 5.0  # Retry-After while the model loads or the server drains
    timeout_seconds: float = 0.0  # of requests that set none; 0: none


@dataclass(slots=True)
class Api:
    """Shared by all routes; the app fills in `generator` when the model is loaded."""

    model_names: Sequence[str]  # the first is the answer's name when a request names none
    generator: TextGenerator | None = None  # None while loading
    health: Health = field(default_factory=Health)
    metrics: Metrics = field(default_factory=Metrics)
    limits: Limits = field(default_factory=Limits)
    access: Access = field(default_factory=Access)
    system_fingerprint: str | None = None  # stands for weights, numerics and version
    created: int = field(default_factory=lambda: int(time.time()))  # unix seconds, shown by /v1/models
    max_model_len: int | None = None  # tokens of prompt and reply, shown by /v1/models

    def served_name(self, asked: str | None) -> str:
        """The model name to answer with. Raises: ModelNotFoundError for a name that is not served."""
        if asked is None:
            return self.model_names[0]
        if asked not in self.model_names:
            shown = asked if len(asked) <= 100 else f"{asked[:100]}..."
            raise ModelNotFoundError(f"The model `{shown}` does not exist. See GET /v1/models.")
        return asked

    def check_choices(self, generator: TextGenerator, num_choices: int, field: str) -> None:
        """Raises: RequestError for more replies than one request may ask for, or can ever get."""
        most = min(self.limits.max_choices, generator.max_choices)
        if num_choices > most:
            text = f"{num_choices} replies asked for; at most {most} in one request."
            raise RequestError(text, field=field)

    def timeout_of(self, asked: float | None) -> float | None:
        """Seconds that a request may take; None: any."""
        return asked if asked is not None else self.limits.timeout_seconds or None

    def ready_generator(self) -> TextGenerator:
        """Raises: OverloadedError while loading or draining, EngineDeadError after a failure."""
        health = self.health
        if (failure := health.failure) is not None:
            self.metrics.refused("dead")
            raise EngineDeadError(f"The server can't run any request: {failure}")
        if self.generator is None or not health.is_ready:
            self.metrics.refused("loading")
            raise self._later(f"Not ready yet: {health.loading_text()}. GET /health shows how far it is.")
        if health.is_draining:
            self.metrics.refused("draining")
            raise self._later("The server is shutting down and takes no new requests.")
        return self.generator

    def _later(self, message: str) -> OverloadedError:
        return OverloadedError(message, retry_after_seconds=self.limits.loading_retry_seconds)
