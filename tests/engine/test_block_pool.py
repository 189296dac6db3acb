"""Block pool against a model of it: free, cached and in use add up, whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.engine.block_pool import BlockPool

BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4)
        self.tables: list[list[int]] = []
        self.kept: set[int] = set()
        self.pool.when_evicted(self.kept.remove)

    @rule(num_tokens=st.integers(0, 40))
    def allocate(self, num_tokens: int) -> None:
        table: list[int] = []
        room = self.pool.num_available
        assert self.pool.extend(table, num_tokens) == (-(-num_tokens // 4) <= room)
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from([t for t in self.tables if t]))
        copy = table[: data.draw(st.integers(1, len(table)))]
        for block in copy:
            self.pool.share(block)
        self.tables.append(list(copy))

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for t in self.tables for b in t]))
        self.kept.add(block)
        self.pool.keep(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.kept.remove(block)
        self.pool.forget(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.share(block)
        self.tables.append([block])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        assert table == []

    @invariant()
    def adds_up(self) -> None:
        used = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(used)
        assert self.pool.num_cached == len(self.kept - used)
        assert self.pool.num_used + self.pool.num_available == BLOCKS
        assert all(self.pool.is_used(block) == (block in used) for block in range(BLOCKS))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_least_recently_used_block_is_evicted_first_and_free_ones_before_it() -> None:
    pool = BlockPool(3, 1)
    evicted: list[int] = []
    pool.when_evicted(evicted.append)
    a: list[int] = []
    pool.extend(a, 3)
    old, new, free = a
    pool.keep(old)
    pool.keep(new)
    for block in (old, new, free):
        pool.release([block])

    table: list[int] = []
    for count in (1, 2, 3):
        pool.extend(table, count)

    assert table == [free, old, new]
    assert evicted == [old, new]


def test_releasing_twice_is_caught() -> None:
    pool = BlockPool(2, 4)
    table: list[int] = []
    pool.extend(table, 4)
    pool.release(list(table))
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(list(table))
