"""What the engine tells about itself as it runs; metrics implement it, tests and benchmarks may."""

from typing import Protocol

import msgspec


class EngineGauges(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state after a step."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_used_blocks: int  # referenced by a request
    num_cached_blocks: int  # free to take, but still holding a prefix


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, when it is over. Units: seconds of time.monotonic; tokens."""

    reason: (
        str  # "stop", "length", "error", "stop_string", or a cause of cancellation such as "client_gone"
    )
    submitted_at: float
    was_planned: bool
    queue_seconds: float  # submission until first planned, or until the end if it never was
    first_token_seconds: float | None  # submission until the first id was handed out
    end_to_end_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int


class EngineObserver(Protocol):
    """Called in the engine's task, between steps: must return at once and never raise."""

    def step_done(self, *, num_prefill_tokens: int, num_decode_tokens: int, gauges: EngineGauges) -> None:
        """After every step, and whenever requests arrive or leave without one."""

    def prefix_cache_queried(self, *, num_tokens: int, num_hit_tokens: int) -> None:
        """At a request's first admission: prompt tokens looked up, and found."""

    def first_token(self, seconds: float) -> None:
        """TTFT of a request."""

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` ids of as many requests, each `seconds` after its request's previous one."""

    def preempted(self) -> None:
        """A request lost its blocks and will be recomputed."""

    def finished(self, record: RequestRecord) -> None:
        """A request is over, one way or another."""

    def refused(self, cause: str) -> None:
        """A submission that was not accepted: "queue_full", "context_length", "dead"."""


class NoObserver:
    """Watches nothing."""

    def step_done(
        self, *, num_prefill_tokens: int, num_decode_tokens: int, gauges: EngineGauges
    ) -> None: ...
    def prefix_cache_queried(self, *, num_tokens: int, num_hit_tokens: int) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_tokens(self, seconds: float, num_tokens: int) -> None: ...
    def preempted(self) -> None: ...
    def finished(self, record: RequestRecord) -> None: ...
    def refused(self, cause: str) -> None: ...
