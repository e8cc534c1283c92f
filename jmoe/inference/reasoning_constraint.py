"""A constraint that lets a model reason before the answer that another constraint binds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

from jmoe.inference.harmony import set_mask_bits
from jmoe.inference.sampling_params import Constraint


class ReasoningConstraint(Constraint):
    """Leaves reasoning free, which ends with a token of its own, and binds what follows.

    Without an open reasoning, the output may begin one, or begin the answer.
    """

    def __init__(
        self,
        answer: Constraint,
        begin: int,
        end: int,
        *,
        is_open: bool,
        budget: int | None = None,
        forbidden: Iterable[int] = (),
    ) -> None:
        """Begin after the prompt.

        answer: the constraint of what follows the reasoning.
        begin, end: the tokens around the reasoning.
        is_open: the prompt ends inside the reasoning.
        budget: the reasoning ends after so many tokens, not counting `begin` and `end`; None: when
            the model ends it. With a budget the answer never has `begin`: after a newline it would
            begin a reasoning that nothing ends.
        forbidden: tokens that the reasoning may not have, such as the end of the turn.
        """
        self.answer, self._begin, self._end, self._budget = answer, begin, end, budget
        self._state: Literal["start", "reasoning", "answer"] = "reasoning" if is_open else "start"
        self._forbidden = list(forbidden)
        self._num_tokens = 0  # of the reasoning

    def is_ready(self) -> bool:
        return self._state == "reasoning" or self.answer.is_ready()

    def wait(self, limit_s: float) -> None:
        if self._state != "reasoning":
            self.answer.wait(limit_s)

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        if self._state != "reasoning":
            self.answer.fill_next_token_bitmask(words_W)
            if self._state == "start":
                set_mask_bits(words_W, [self._begin], self._budget != 0)
            elif self._budget is not None:
                set_mask_bits(words_W, [self._begin], False)
        elif self._budget is not None and self._num_tokens >= self._budget:
            words_W[:] = 0
            set_mask_bits(words_W, [self._end], True)
        else:
            words_W[:] = -1
            set_mask_bits(words_W, self._forbidden, False)

    def accept(self, token_id: int) -> None:
        if self._state == "reasoning":
            self._num_tokens += 1
            if token_id == self._end:
                self._state = "answer"
        elif self._state == "start" and token_id == self._begin:
            self._state = "reasoning"
        else:
            self._state = "answer"
            self.answer.accept(token_id)
