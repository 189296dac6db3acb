"""Finds blocks that already hold the beginning of a prompt.

A full block is known by its exact token ids and by the entry of the block before it, so the entries form
a tree whose paths are prompts (the idea is RadixAttention's: Zheng et al. 2023, arXiv:2312.07104, with the
fixed-size nodes of vLLM's block hashing). Keys are compared whole: a collision of hashes costs time, never
a wrong answer. Token ids are hashed as bytes, which Python keys at random per process, so that nobody can
craft prompts that collide.
"""

from array import array
from collections.abc import Hashable, Sequence
from itertools import count

from service.engine.block_pool import BlockPool
from service.engine.request import Request


def _key(parent: int | bytes, token_ids: Sequence[int]) -> Hashable:
    """`parent`: serial of the entry before, or the salt for a prompt's first block."""
    return parent, array("i", token_ids).tobytes()


class PrefixCache:
    """Blocks by content. Knows a block from the step that fills it until the pool takes it back.

    Invariant: an entry's content is its block's content, for as long as the block is in use or cached.
    A request's `chain` is the serial of the entry of its last registered block.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[Hashable, tuple[int, int]] = {}  # key -> (block, serial)
        self._keys: dict[int, Hashable] = {}  # block -> key
        self._serials = count()
        pool.when_evicted(self._drop)

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, request: Request) -> tuple[list[int], int | bytes]:
        """Blocks that hold the beginning of the request's ids, and the chain at their end.

        At least one id is left to compute, for its logits are needed. Takes no references.
        """
        size = self._pool.block_size
        blocks: list[int] = []
        chain: int | bytes = request.salt
        for start in range(0, len(request.token_ids) - size, size):
            found = self._entries.get(_key(chain, request.token_ids[start : start + size]))
            if found is None:
                break
            block, chain = found
            blocks.append(block)
        return blocks, chain

    def register(self, request: Request) -> None:
        """Make known the request's blocks that are full of computed, known ids.

        Called when a step is planned, so requests of one step can share; the step writes K and V of all
        rows before it reads any.
        """
        size = self._pool.block_size
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // size
        for index in range(request.num_registered_blocks, num_full):
            block = request.block_table[index]
            key = _key(request.chain, request.token_ids[index * size : (index + 1) * size])
            found = self._entries.get(key)
            if found is None:  # else the same content is known in another block: this one stays unknown
                found = self._entries[key] = block, next(self._serials)
                self._keys[block] = key
                self._pool.keep(block)
            request.chain = found[1]
        request.num_registered_blocks = max(num_full, request.num_registered_blocks)

    def clear(self) -> None:
        """Unlearn everything, because a step failed and what it wrote can't be trusted."""
        for block in list(self._keys):
            self._drop(block)
            self._pool.forget(block)

    def _drop(self, block: int) -> None:
        del self._entries[self._keys.pop(block)]
