"""Steps begun before the tokens of the one before are read: what comes out is what comes out
without them.
"""

from typing import Any

import numpy as np
import pytest
from tiny_engines import needs_compiler, tiny_engine

from jmoe.inference import engine as engine_module
from jmoe.inference.ahead import StepAhead, StepOutcome
from jmoe.inference.engine import Engine
from jmoe.inference.runner import ModelRunner
from jmoe.inference.sampling_params import Constraint, SamplingParams
from jmoe.inference.scheduler import ChunkGroup
from jmoe.inference.sequence import Output

RANDOM = {"temperature": 1.0, "seed": 3, "presence_penalty": 1.5, "logprobs": 3}


class Multiples(Constraint):
    """Allows the multiples of one more than the number of tokens so far."""

    def __init__(self) -> None:
        self.length = 0

    def fill_next_token_bitmask(self, words_W: np.ndarray) -> None:
        words_W[:] = 0
        for token in range(0, 32 * words_W.size, self.length + 1):
            words_W[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)

    def accept(self, token_id: int) -> None:
        assert token_id % (self.length + 1) == 0
        self.length += 1


def traffic(served: Engine) -> dict[str, Any]:
    """Serve requests of every kind that begin and end at different steps; returns all that can
    be seen of them.
    """
    prompt = [5, 9, 2, 7]

    def add(first: int, **fields: Any) -> Any:
        constraint = Multiples() if fields.pop("constrained", False) else None
        return served.add_request(
            [first, *prompt], SamplingParams(ignore_eos=True, **fields), constraint
        )

    outputs: list[Output] = []
    uses: list[Any] = []

    def run(steps: int) -> None:
        for _ in range(steps):
            outputs.extend(served.step())
            uses.append(
                [
                    c[c[:, 0] < served.config.num_experts].tolist()
                    for c in served.last_expert_choices()
                ]
            )

    requests = [
        add(1, max_new_tokens=24),
        add(2, max_new_tokens=7, **RANDOM),
        add(3, max_new_tokens=30),
    ]
    run(9)
    requests.append(add(4, max_new_tokens=12, constrained=True))  # it comes while the others decode
    run(4)
    served.abort(requests[2])
    stop = requests[0].output_token_ids[3]
    # it ends where only its tokens tell
    requests.append(add(1, max_new_tokens=20, stop_token_ids=(stop,)))
    requests.append(add(6, max_new_tokens=9, **RANDOM))
    while served.has_unfinished:
        run(1)
    requests.append(add(4, max_new_tokens=served.max_seq_len))  # it ends where its row does
    while served.has_unfinished:
        run(1)
    return {
        "tokens": [r.output_token_ids for r in requests],
        "ends": [r.finish_reason for r in requests],
        "logprobs": [output.logprobs for output in outputs],
        "choices": uses,
        "use": served.tokens_per_expert().tolist(),
    }


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_nothing_else_comes_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, log-probabilities and choices of experts, with sequences that end and come while a
    step is under way.
    """
    taken: list[StepOutcome | None] = []
    take = StepAhead.outcome_for

    def note(ahead: StepAhead, group: ChunkGroup) -> StepOutcome | None:
        taken.append(take(ahead, group))
        return taken[-1]

    monkeypatch.setattr(engine_module.StepAhead, "outcome_for", note)
    needs_compiler()
    with tiny_engine(name, policy="resident", max_batch=4) as served:
        found = traffic(served)
        assert served._ahead is None  # nothing is kept for nobody
        num_taken = len(taken) - taken.count(None)
        assert num_taken > 40
        assert [lost for some in taken if some is not None for lost in some.output.choices.lost]
    with (
        monkeypatch.context() as patch,
        tiny_engine(name, policy="resident", max_batch=4) as served,
    ):
        patch.setattr(ModelRunner, "can_run_ahead", lambda *_: False)
        expected = traffic(served)
        assert len(taken) - taken.count(None) == num_taken
    assert found == expected


def test_a_row_is_lost_and_nothing_of_it_reused() -> None:
    """A sequence that ended while the next step ran leaves a cache that a prompt with its tokens
    can go on from.
    """
    with tiny_engine("mixtral", policy="resident", max_batch=2) as served:
        (first,) = served.generate([[1, 5, 9, 2]], max_new_tokens=12, ignore_eos=True)
        stop = first.token_ids[6]
        options: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}
        (ended,) = served.generate([[1, 5, 9, 2]], stop_token_ids=(stop,), **options)
        assert ended.token_ids == first.token_ids[: len(ended.token_ids)]
        for extra in (0, 3):
            prompt = [1, 5, 9, 2, *ended.token_ids, *[7] * extra]
            (again,) = served.generate([prompt], **options)
            with tiny_engine("mixtral", policy="resident", max_batch=2) as other:
                (expected,) = other.generate([prompt], **options)
            assert again.token_ids == expected.token_ids
        assert served.scheduler_stats().reused_tokens > 0


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3_yarn"])
def test_fewer_rows_are_other_programs(name: str) -> None:
    """A sequence ends by its tokens and the other goes on alone: the bits of an engine that
    begins no step early.
    """
    needs_compiler()
    with tiny_engine(name, policy="resident") as served:
        (first,) = served.generate([[1, 5, 9, 2]], max_new_tokens=8, ignore_eos=True)
        stop = SamplingParams(
            max_new_tokens=20, ignore_eos=True, stop_token_ids=(first.token_ids[-1],)
        )

        def both(engine: Engine) -> list[Any]:
            ends = engine.add_request([1, 5, 9, 2], stop)
            stays = engine.add_request(
                [3, 8, 4], SamplingParams(max_new_tokens=16, ignore_eos=True, logprobs=4)
            )
            outputs: list[Output] = []
            while engine.has_unfinished:
                outputs += engine.step()
            return [ends.output_token_ids, [o.logprobs for o in outputs if o.sequence is stays]]

        found = both(served)
    with tiny_engine(name, policy="experts", device_bytes=30_000, prefill_chunk_tokens=16) as other:
        assert both(other) == found


def test_who_leaves_takes_nothing_along() -> None:
    """Aborted or closed while the next step runs: the others go on, and nothing is kept."""
    needs_compiler()
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    with tiny_engine("mixtral", policy="resident") as served:
        alone = served.generate([[3, 8, 4]], **options)[0].token_ids
        gone, stays = (
            served.add_request(p, SamplingParams(**options)) for p in ([1, 5, 9, 2], [3, 8, 4])
        )
        for _ in range(5):
            served.step()
        served.abort(gone)
        assert served._ahead is not None
        while len(stays.output_token_ids) < 10:
            served.step()
        assert stays.output_token_ids == alone[:10]
        served.abort(stays)
        assert served._ahead is None and served.step() == []
        served.add_request([3, 8, 4], SamplingParams(**options))
        served.step(), served.step()
    assert served._ahead is None


def test_without_native_operations_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's choices are read back there: a step begun early would only be waited for
    early.
    """
    monkeypatch.setattr(
        engine_module.StepAhead, "begin", lambda *_: pytest.fail("a step was begun")
    )
    with tiny_engine("mixtral", policy="resident", native="off") as served:
        served.generate([[1, 5, 9, 2]], max_new_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    "policy", [{"policy": "ring", "ring_slots": 1}, {"policy": "experts", "device_bytes": 20_000}]
)
def test_streamed_experts_wait(policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slots change between steps none is begun early."""
    monkeypatch.setattr(
        engine_module.StepAhead, "begin", lambda *_: pytest.fail("a step was begun")
    )
    with tiny_engine("mixtral", **policy) as served:
        served.generate([[1, 5, 9, 2]], max_new_tokens=4, ignore_eos=True)
