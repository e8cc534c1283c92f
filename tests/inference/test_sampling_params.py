"""SamplingParams: defaults, what is accepted, and the message for everything that is not."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from jmoe.inference.sampling_params import MAX_IDS, SamplingParams


def test_defaults_are_plain_greedy() -> None:
    params = SamplingParams()
    assert params.is_greedy
    assert params.is_plain_greedy


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.7},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"logit_bias": {3: 1.0}},
        {"min_new_tokens": 2},
        {"logprobs": 0},
    ],
)
def test_not_plain_greedy(changes: dict[str, Any]) -> None:
    assert not SamplingParams(**changes).is_plain_greedy


def test_filters_do_not_change_greedy() -> None:
    assert SamplingParams(
        top_k=5, top_p=0.5, min_p=0.1, seed=3, prompt_logprobs=2, stop="x"
    ).is_plain_greedy
    assert SamplingParams(temperature=1e-7).is_plain_greedy
    assert not SamplingParams(temperature=1e-4).is_greedy


def test_sequences_are_copied() -> None:
    stop, ids, bias = ["a", "b"], [1, 2], {7: -100}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("c")
    ids.append(3)
    bias[8] = 1
    assert params.stop == ("a", "b")
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {7: -100}
    assert SamplingParams(stop="end").stop == ("end",)
    assert dataclasses.replace(params, top_k=3).stop == ("a", "b")
    assert hash(params) == hash(dataclasses.replace(params))


def test_numpy_numbers_are_numbers() -> None:
    params = SamplingParams(
        top_k=np.int64(3), temperature=np.float32(0.5), stop_token_ids=(np.int32(3),)
    )
    assert params.top_k == 3


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_say_all_tokens(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -2),
        ("top_k", 2.0),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("frequency_penalty", None),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", dict.fromkeys(range(MAX_IDS + 1), 1.0)),
        ("logit_bias[3]", {3: 101.0}),
        ("logit_bias[3]", {3: math.nan}),
        ("seed", 1.0),
        ("seed", 2**63),
        ("stop_token_ids", 3),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(MAX_IDS + 1))),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop", 3),
        ("ignore_eos", 1),
        ("min_new_tokens", -1),
        ("min_new_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
        ("prompt_logprobs", 21),
    ],
)
def test_bad_value(field: str, value: object) -> None:
    name = field.partition("[")[0]
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(f"{field} = ")
    shown = value[3] if field.endswith("]") else value  # type: ignore[index]
    assert message.startswith(f"{field} = {shown!r}: ")


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_vocabulary(field: str) -> None:
    params = SamplingParams(**{field: {100: 1.0} if field == "logit_bias" else (100,)})
    params.check_vocabulary(101)
    with pytest.raises(
        ValueError, match=f"a token of {field} = 100: must be below vocab_size = 100"
    ):
        params.check_vocabulary(100)


def test_min_new_tokens_needs_a_token_that_does_not_end_the_text() -> None:
    """The sampler would have to draw from no token, and drew token 0."""
    params = SamplingParams(min_new_tokens=2, stop_token_ids=tuple(range(9)))
    params.check_vocabulary(10)
    words = "min_new_tokens = 2: must be 0, because every token of the vocabulary ends the text"
    with pytest.raises(ValueError, match=words):
        params.check_vocabulary(10, [9])
    dataclasses.replace(params, min_new_tokens=0).check_vocabulary(10, [9])
