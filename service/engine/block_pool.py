"""Block ids of the KV cache: who holds them, and which one is taken next."""

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush


class BlockPool:
    """Hands out blocks of `block_size` tokens.

    Invariant: every block is free, cached or in use, never two of these. Free: nobody's, content
    worthless. Cached: nobody's, but its content may serve a later prompt; taken, oldest first, when no
    free block is left. In use: referenced by one or more requests.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks))  # a heap: low ids first keeps the touched part small
        heapify(self._free)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._worth_keeping: set[int] = set()  # blocks that a prefix cache knows, in use or cached
        self._on_evict: Callable[[int], None] = lambda block: None

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def is_used(self, block: int) -> bool:
        """Whether a request holds the block."""
        return self._references[block] > 0

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def when_evicted(self, call: Callable[[int], None]) -> None:
        """Register the prefix cache: `call(block)` runs when a kept block is taken for something else."""
        self._on_evict = call

    def extend(self, block_table: list[int], num_tokens: int) -> bool:
        """Append blocks until `block_table` holds `num_tokens`; all or nothing. False: no room."""
        missing = self.blocks_for(num_tokens) - len(block_table)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            block_table.append(self._take())
        return True

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or bring a cached one back into use."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block_table: list[int]) -> None:
        """Give up one reference to each block and empty the table.

        Last blocks first, so that of a prompt the end is evicted before the beginning it depends on.
        """
        while block_table:
            block = block_table.pop()
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} released twice"
            if self._references[block] == 0:
                self._retire(block)

    def keep(self, block: int) -> None:
        """Say that the block's content is worth keeping once nobody holds it."""
        self._worth_keeping.add(block)

    def forget(self, block: int) -> None:
        """Take `keep` back; a cached block becomes free."""
        self._worth_keeping.discard(block)
        if block in self._cached:
            del self._cached[block]
            heappush(self._free, block)

    def _take(self) -> int:
        if self._free:
            block = heappop(self._free)
        else:
            block, _ = self._cached.popitem(last=False)
            self._worth_keeping.discard(block)
            self._on_evict(block)
        self._references[block] = 1
        return block

    def _retire(self, block: int) -> None:
        if block in self._worth_keeping:
            self._cached[block] = None
        else:
            heappush(self._free, block)
