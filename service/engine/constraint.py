"""What a grammar is to the engine: which ids may come next, and whether any may."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """Where one reply is in its grammar. The engine calls `advance` with every id of the reply, once.

    EOS ids are allowed exactly where the grammar may end.
    """

    @property
    def is_over(self) -> bool:
        """Nothing but EOS may follow, so the reply is whole."""

    @property
    def failure(self) -> str | None:
        """Why no further id can be chosen, for the user; None: all is well."""

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        """Write which ids may come next. Shapes: row [ceil(vocab / 32)]; bit 1: allowed."""

    def advance(self, token_id: int) -> None:
        """Go on behind an id that `fill_mask` allowed."""
