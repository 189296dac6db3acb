"""How fast requests leave, to tell refused clients when to come back."""

from collections import deque

_REMEMBERED = 64
_LONGEST_SECONDS = 60.0


class DrainRate:
    """Times of the last requests that ended."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, now: float) -> None:
        """A request ended. Units: `now` in seconds of time.monotonic."""
        self._ended_at.append(now)

    def seconds_for(self, num_requests: float, now: float) -> float:
        """Seconds until that many more will have ended, from 1 to 60; 1 while nothing is known."""
        if len(self._ended_at) < 2:
            return 1.0
        seconds_each = (now - self._ended_at[0]) / len(self._ended_at)
        return min(max(num_requests * seconds_each, 1.0), _LONGEST_SECONDS)
