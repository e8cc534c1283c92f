"""Constraints that begin after the reasoning."""

import numpy as np
import pytest

from jmoe.inference.reasoning_constraint import ReasoningConstraint
from jmoe.inference.sampling_params import Constraint, Unconstrained

BEGIN, END, FORBIDDEN, ANSWER = 40, 41, 7, 5
SIZE = 64


class Recorded(Constraint):
    """Allows `ANSWER` alone, and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.ready = False

    def is_ready(self) -> bool:
        return self.ready

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0
        words_W[0] = 1 << ANSWER

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)


def allowed(constraint: Constraint) -> set[int]:
    words = np.zeros(SIZE // 32, np.int32)
    constraint.fill_next_token_bitmask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


FREE = {*range(SIZE)} - {FORBIDDEN}


@pytest.mark.parametrize("is_open", [True, False])
def test_the_answer_is_bound_after_the_reasoning(is_open: bool) -> None:
    answer = Recorded()
    constraint = ReasoningConstraint(answer, BEGIN, END, is_open=is_open, forbidden=[FORBIDDEN])
    if not is_open:
        assert not constraint.is_ready(), "the answer may begin"
        assert allowed(constraint) == {ANSWER, BEGIN}
        constraint.accept(BEGIN)
    for token in (1, 2, BEGIN, END):
        assert constraint.is_ready() and allowed(constraint) == FREE
        constraint.accept(token)
    assert allowed(constraint) == {ANSWER} and answer.told == []
    assert not constraint.is_ready()
    answer.ready = True
    assert constraint.is_ready()
    for token in (ANSWER, BEGIN):
        constraint.accept(token)
    assert answer.told == [ANSWER, BEGIN]


def test_an_answer_without_reasoning() -> None:
    answer = Recorded()
    constraint = ReasoningConstraint(answer, BEGIN, END, is_open=False)
    constraint.accept(ANSWER)
    assert answer.told == [ANSWER] and allowed(constraint) == {ANSWER}


def test_a_budget_ends_the_reasoning() -> None:
    constraint = ReasoningConstraint(Unconstrained(), BEGIN, END, is_open=True, budget=2)
    for token in (1, 2):
        assert allowed(constraint) == {*range(SIZE)}
        constraint.accept(token)
    assert allowed(constraint) == {END}
    constraint.accept(END)
    assert allowed(constraint) == {*range(SIZE)} - {BEGIN}


@pytest.mark.parametrize("budget", [0, 2])
def test_a_budget_holds_after_a_newline(budget: int) -> None:
    """A reasoning that the output begins later would have no budget."""
    constraint = ReasoningConstraint(Unconstrained(), BEGIN, END, is_open=False, budget=budget)
    assert allowed(constraint) == {*range(SIZE)} - ({BEGIN} if budget == 0 else set())
    constraint.accept(1)
    assert allowed(constraint) == {*range(SIZE)} - {BEGIN}
