"""What a model will take in memory, added up before any of it is taken."""

from pathlib import Path

import msgspec

from service.errors import MemoryBudgetError

_MEMINFO = Path("/proc/meminfo")
# limit, usage and statistics of this process's control group, version 2 and version 1
_CGROUPS = (
    (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
        Path("/sys/fs/cgroup/memory.stat"),
    ),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.stat"),
    ),
)


class MemoryLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The three parts. Units: bytes."""

    weights_bytes: int
    kv_cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.workspace_bytes

    def lines(self) -> list[str]:
        """A table for people."""
        parts = (
            ("weights", self.weights_bytes),
            ("KV cache", self.kv_cache_bytes),
            ("workspace", self.workspace_bytes),
            ("together", self.total_bytes),
        )
        return [f"{name:<10} {_gib(count):>10}" for name, count in parts]

    def check(self, available_bytes: int | None) -> None:
        """Raises: MemoryBudgetError with the sum and the remedy, if it does not fit."""
        if available_bytes is None or self.total_bytes <= available_bytes:
            return
        missing = self.total_bytes - available_bytes
        fits = (self.kv_cache_bytes - missing) * 100 // 2**30 / 100  # rounded down
        remedy = (
            f"set kv_cache_gib to {fits:.2f} or less"
            if fits > 0
            else "choose a smaller model, dtype bfloat16, or a machine with more memory"
        )
        raise MemoryBudgetError(
            f"The model does not fit: weights {_gib(self.weights_bytes)} + KV cache "
            f"{_gib(self.kv_cache_bytes)} + workspace {_gib(self.workspace_bytes)} = "
            f"{_gib(self.total_bytes)}, but {_gib(available_bytes)} are available. To start, {remedy}."
        )


def available_host_bytes() -> int | None:
    """Memory that this process can still take: the machine's, or its control group's where that is less.

    None where the system does not say (other than Linux).
    """
    limits = []
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    for limit_file, usage_file, statistics_file in _CGROUPS:
        if limit_file.exists() and usage_file.exists():
            limit = limit_file.read_text().strip()
            if limit != "max":
                used = int(usage_file.read_text()) - _idle_file_bytes(statistics_file)
                limits.append(max(0, int(limit) - used))
    return min(limits, default=None)


def _idle_file_bytes(statistics_file: Path) -> int:
    """File pages counted as used that the kernel gives up first, such as those of a fresh download."""
    lines = statistics_file.read_text().splitlines() if statistics_file.exists() else []
    statistics = dict(line.rsplit(" ", 1) for line in lines)
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
