"""The memory ledger: what can't fit is refused with the sum and a remedy that works."""

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.errors import MemoryBudgetError
from service.model import ledger as module
from service.model.ledger import MemoryLedger, available_host_bytes

GIB = 2**30
V2 = ("memory.max", "memory.current", "memory.stat")


def make_ledger(weights: float = 2, kv_cache: float = 1, workspace: float = 0.5) -> MemoryLedger:
    """Units: GiB."""
    parts = [int(part * GIB) for part in (weights, kv_cache, workspace)]
    return MemoryLedger(weights_bytes=parts[0], kv_cache_bytes=parts[1], workspace_bytes=parts[2])


def test_what_fits_is_let_through() -> None:
    make_ledger().check(int(3.5 * GIB))
    make_ledger().check(None)  # nobody knows how much there is


def test_what_does_not_fit_is_refused_with_the_sum_and_the_remedy() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        make_ledger().check(3 * GIB)

    assert str(caught.value) == (
        "The model does not fit: weights 2.00 GiB + KV cache 1.00 GiB + workspace 0.50 GiB = 3.50 GiB, but "
        "3.00 GiB are available. To start, set kv_cache_gib to 0.50 or less."
    )


def test_where_a_smaller_cache_does_not_help_something_else_is_advised() -> None:
    with pytest.raises(MemoryBudgetError, match="choose a smaller model, dtype bfloat16, or a machine"):
        make_ledger().check(2 * GIB)


byte_counts = st.integers(0, 64 * GIB)


@given(weights=byte_counts, kv_cache=byte_counts, workspace=byte_counts, available=byte_counts)
@example(weights=GIB, kv_cache=3 * GIB, workspace=0, available=GIB + 2139095040)  # 1.992 GiB fit
@example(weights=GIB, kv_cache=3 * GIB, workspace=0, available=GIB + 1000)  # less than 0.01 GiB fits
def test_the_size_that_is_advised_fits(weights: int, kv_cache: int, workspace: int, available: int) -> None:
    ledger = MemoryLedger(weights_bytes=weights, kv_cache_bytes=kv_cache, workspace_bytes=workspace)
    if weights + kv_cache + workspace <= available:
        ledger.check(available)
        return

    with pytest.raises(MemoryBudgetError) as caught:
        ledger.check(available)

    advised = re.search(r"kv_cache_gib to (\S+) or less", str(caught.value))
    if advised is None:
        assert weights + workspace + GIB // 100 >= available
    else:
        smaller = int(float(advised[1]) * GIB)
        assert smaller > 0
        assert weights + smaller + workspace <= available


def test_the_table_names_every_part_and_the_sum() -> None:
    assert make_ledger(0.25, 1, 0.125).lines() == [
        "weights      0.25 GiB",
        "KV cache     1.00 GiB",
        "workspace    0.12 GiB",
        "together     1.38 GiB",
    ]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files say what memory there is."""
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_CGROUPS", (tuple(tmp_path / name for name in V2),))
    return tmp_path


def control_group(system: Path, limit: str, used: int = GIB, statistics: str = "anon 5\n") -> None:
    for name, content in zip(V2, (limit, str(used), statistics), strict=True):
        (system / name).write_text(f"{content}\n")


def test_the_machine_says_how_much_is_available(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal: 9999999 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n")
    assert available_host_bytes() == 8 * GIB

    control_group(system, "max")
    assert available_host_bytes() == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "statistics", "available"),
    [
        (4 * GIB, GIB, "anon 5", 3 * GIB),
        (4 * GIB, GIB, f"active_file 7\ninactive_file {GIB // 2}", 3 * GIB + GIB // 2),
        (4 * GIB, GIB, f"inactive_file 1\ntotal_inactive_file {GIB // 2}", 3 * GIB + GIB // 2),
        (4 * GIB, 5 * GIB, "anon 5", 0),
        (2**63 - 4096, GIB, "anon 5", 8 * GIB),  # no limit, as version 1 writes it
    ],
)
def test_a_control_group_may_leave_less(
    system: Path, limit: int, used: int, statistics: str, available: int
) -> None:
    (system / "meminfo").write_text("MemAvailable: 8388608 kB\n")
    control_group(system, str(limit), used, statistics)

    assert available_host_bytes() == available


def test_a_system_that_does_not_say_is_not_guessed_at(system: Path) -> None:
    assert available_host_bytes() is None
