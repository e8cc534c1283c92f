"""What an output must look like, said token by token."""

from typing import Protocol

import numpy as np


class Constraint(Protocol):
    """Of one request. W = ceil(V / 32) words for a vocabulary of V tokens."""

    def fill(self, words_W: np.ndarray) -> None:
        """Set the bits of the tokens that may come next and clear the others. int32, the lowest bit first.

        At least one is set: the end-of-text token where nothing else can follow.
        """

    def accept(self, token_id: int) -> None:
        """This token has come next."""


class Unconstrained:
    """Any token may come next."""

    def fill(self, words_W: np.ndarray) -> None:
        words_W[:] = -1

    def accept(self, token_id: int) -> None:
        pass
