"""The state of the process as probes see it, and the routes that show it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response


def never_old() -> float:
    """Heartbeat age before there is an engine: HTTP answers, so the process lives."""
    return 0.0


def never_full() -> bool:
    """Whether the queue is full, where nobody wants /readyz to know."""
    return False


def no_failure() -> str | None:
    """What a dead engine would say, before there is one."""
    return None


@dataclass(slots=True)
class LoadPhase:
    """One phase of start-up. `total` is None while unknown."""

    name: str
    done: int = 0
    total: int | None = None
    unit: str = ""


class HealthReport(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a probe's answer."""

    status: str  # "failed", "loading", "draining", "stuck" or "ok"
    reason: str | UnsetType = UNSET  # of a failure
    phase: str | UnsetType = UNSET  # of loading
    phases: list[LoadPhase] | UnsetType = UNSET
    heartbeat_age_seconds: float | UnsetType | None = UNSET  # of a loop that stands still; null: for ever


@dataclass(slots=True)
class Health:
    """What start-up, engine and shutdown say about themselves. Written by the app, read by the routes.

    `phase` and `update` have the signatures of service.progress.Progress, so that loading can report here.
    """

    phases: list[LoadPhase] = field(default_factory=list)
    is_ready: bool = False  # a request can be served; stays True while draining
    is_draining: bool = False
    failed_reason: str | None = None  # start-up failed: restart the process
    engine_failure: Callable[[], str | None] = no_failure  # why the engine died, if it did
    is_full: Callable[[], bool] = never_full  # no further request would be taken now
    heartbeat_age: Callable[[], float] = never_old  # seconds since the engine loop last showed life
    max_heartbeat_age_seconds: float = 60.0  # above the longest step

    def phase(self, name: str) -> None:
        """Begin a phase of loading."""
        self.phases.append(LoadPhase(name))

    def update(self, done: int, total: int | None = None, unit: str = "") -> None:
        """Say how far the current phase is."""
        if self.phases:
            current = self.phases[-1]
            current.done, current.total, current.unit = done, total, unit

    @property
    def failure(self) -> str | None:
        """Why no request can be served until the process is restarted."""
        return self.failed_reason or self.engine_failure()

    @property
    def is_alive(self) -> bool:
        return self.failure is None and self.heartbeat_age() <= self.max_heartbeat_age_seconds

    @property
    def status(self) -> str:
        """One word: "failed", "loading", "draining", "stuck" or "ok"."""
        if self.failure is not None:
            return "failed"
        if not self.is_ready:
            return "loading"
        if self.is_draining:
            return "draining"
        return "ok" if self.is_alive else "stuck"

    def report(self) -> HealthReport:
        """What a probe is told."""
        report = HealthReport(status=self.status)
        if (failure := self.failure) is not None:
            report.reason = failure
        elif not self.is_ready and self.phases:
            report.phase, report.phases = self.phases[-1].name, self.phases
        elif report.status == "stuck":
            age = self.heartbeat_age()
            report.heartbeat_age_seconds = round(age, 3) if math.isfinite(age) else None
        return report

    def loading_text(self) -> str:
        """What a client is told while the model loads."""
        if not self.phases:
            return "the model is loading"
        current = self.phases[-1]
        share = f", {100 * current.done // current.total}%" if current.total else ""
        return f"the model is loading ({current.name}{share})"


class Probes:
    """Routes for probes and scrapers. They answer at once, whatever the engine does, and need no key."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def health(self, _http: Request) -> Response:
        """GET /health: 200 when a request would be served now; else 503 with status and load phases."""
        return self._answer(self._health.status == "ok")

    async def livez(self, _http: Request) -> Response:
        """GET /livez: 503 when only a restart helps: the engine failed or its loop stands still."""
        return self._answer(self._health.is_alive)

    async def readyz(self, _http: Request) -> Response:
        """GET /readyz: 503 while loading, draining, stuck or failed; where asked for, also while full."""
        return self._answer(self._health.status == "ok" and not self._health.is_full())

    async def startupz(self, _http: Request) -> Response:
        """GET /startupz: 503 with the load phases until the model could serve for the first time."""
        return self._answer(self._health.is_ready and self._health.failure is None)

    def _answer(self, is_good: bool) -> Response:
        body = msgspec.json.encode(self._health.report())
        headers = {"Cache-Control": "no-store"}
        return Response(body, 200 if is_good else 503, headers, "application/json")
