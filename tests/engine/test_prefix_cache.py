"""Prefix hits are exact, leave the last token to compute, and never give one prompt another's blocks."""

from collections.abc import Hashable, Sequence

import pytest

from service.engine import prefix_cache as module
from service.engine.block_pool import BlockPool
from service.engine.prefix_cache import PrefixCache
from service.engine.request import Request
from tests.factories import make_request

BLOCK = 4


def compute(pool: BlockPool, cache: PrefixCache, request: Request) -> None:
    """Take what is cached, compute the rest of the prompt, register it."""
    blocks, request.chain = cache.match(request)
    for block in blocks:
        pool.share(block)
    request.block_table = list(blocks)
    request.num_registered_blocks = len(blocks)
    assert pool.extend(request.block_table, request.num_tokens)
    request.num_computed_tokens = request.num_tokens
    cache.register(request)


@pytest.mark.parametrize("length", range(1, 3 * BLOCK + 2))
def test_a_second_identical_prompt_recomputes_at_least_its_last_token(length: int) -> None:
    pool = BlockPool(16, BLOCK)
    cache = PrefixCache(pool)
    first = make_request(prompt=length)
    compute(pool, cache, first)
    pool.release(first.block_table)

    blocks, _ = cache.match(make_request(prompt=length))

    assert len(blocks) * BLOCK == (length - 1) // BLOCK * BLOCK


def test_the_same_block_after_another_beginning_is_not_taken() -> None:
    pool = BlockPool(16, BLOCK)
    cache = PrefixCache(pool)
    compute(
        pool, cache, Request(id="a", prompt_ids=[1, 1, 1, 1, 5, 5, 5, 5, 9], params=make_request().params)
    )

    blocks, _ = cache.match(
        Request(id="b", prompt_ids=[2, 2, 2, 2, 5, 5, 5, 5, 9], params=make_request().params)
    )

    assert blocks == []


def test_requests_with_different_salts_share_nothing() -> None:
    pool = BlockPool(16, BLOCK)
    cache = PrefixCache(pool)
    params = make_request().params
    compute(pool, cache, Request(id="a", prompt_ids=[1] * 9, params=params, salt=b"alice"))

    assert cache.match(Request(id="b", prompt_ids=[1] * 9, params=params, salt=b"bob"))[0] == []
    assert len(cache.match(Request(id="c", prompt_ids=[1] * 9, params=params, salt=b"alice"))[0]) == 2


def test_an_evicted_beginning_makes_the_rest_unreachable() -> None:
    pool = BlockPool(4, BLOCK)
    cache = PrefixCache(pool)
    request = make_request(prompt=12)
    compute(pool, cache, request)
    beginning = request.block_table[0]
    pool.release(request.block_table)
    cache.clear()
    again = make_request(prompt=12)
    compute(pool, cache, again)
    pool.release(again.block_table)

    table: list[int] = []
    assert pool.extend(table, 4 * BLOCK)  # takes every block, the cached ones too

    assert beginning in table
    assert cache.match(make_request(prompt=12))[0] == []
    assert len(cache) == 0


class FourBitKey:
    """A key whose hash has 4 bits: equal keys still compare by content."""

    def __init__(self, parent: int | bytes, token_ids: Sequence[int]) -> None:
        self.content = (parent, tuple(token_ids))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FourBitKey) and self.content == other.content

    def __hash__(self) -> int:
        return sum(self.content[1]) % 16


def test_colliding_hashes_cost_a_miss_and_never_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_key", lambda parent, ids: _four_bits(parent, ids))
    pool = BlockPool(2000, 2)
    cache = PrefixCache(pool)
    content: dict[int, tuple[int, ...]] = {}
    for a in range(8):
        for b in range(8):
            for c in range(4):
                ids = [a, b, b, a, c, c, 0]
                request = Request(id="r", prompt_ids=ids, params=make_request().params)
                blocks, _ = cache.match(request)
                for index, block in enumerate(blocks):
                    assert content[block] == tuple(ids[: 2 * index + 2])
                compute(pool, cache, request)
                for index in range(3):
                    content[request.block_table[index]] = tuple(ids[: 2 * index + 2])


def _four_bits(parent: int | bytes, ids: Sequence[int]) -> Hashable:
    return FourBitKey(parent, ids)
