"""Philox4x32-10, a counter-based random number generator: one word a draw, no state.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 4.3.
"""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1: key increments of a round
_WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds over four 32-bit words with a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & _WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int, choice: int) -> float:
    """A number in [0, 1) of 24 bits that depends on these three alone."""
    word = philox((position, choice, 0, 0), (seed & _WORD, seed >> 32))[0]
    return (word >> 8) * 2.0**-24
