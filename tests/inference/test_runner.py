"""Rows of the cache and the choices of routers, over the steps of an engine."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_engines import tiny_engine

from jmoe.inference.layer_programs import context_bucket
from kernels_pallas.implementations import trace_for_device


def test_use_of_experts_is_counted_in_tokens() -> None:
    with tiny_engine("mixtral") as served:
        # 10 tokens run, in 6 steps
        served.generate([[5, 6, 7, 8, 9, 10]], max_new_tokens=5, ignore_eos=True)
        use = served.tokens_per_expert()
        assert use.shape == (2, 4)
        assert use.sum(axis=1).tolist() == [20, 20]


def test_more_requests_than_rows_and_prefix_reuse() -> None:
    """Requests of many lengths through two rows give what each gives alone; a repeated prompt is
    not computed again.
    """
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 60, n).tolist() for n in (1, 5, 17, 9, 30, 2)]
    with tiny_engine("qwen3_moe", policy="resident") as served:
        alone = [
            served.generate([p], max_new_tokens=5, ignore_eos=True)[0].token_ids for p in prompts
        ]
    with tiny_engine("qwen3_moe", policy="resident") as served:
        together = [
            c.token_ids for c in served.generate(prompts, max_new_tokens=5, ignore_eos=True)
        ]
        assert together == alone
        ran = served.stats().tokens
        again = served.generate([prompts[-2]], max_new_tokens=5, ignore_eos=True)[0].token_ids
        assert again == alone[-2]
        assert served.stats().tokens - ran < len(prompts[-2])


@pytest.mark.parametrize(
    ("capability", "expected"), [("9.0", [None, None]), ("7.5", [512, 600]), ("gfx942", [512, 600])]
)
def test_a_kernel_that_reads_blocks_serves_all_lengths(
    capability: str, expected: list[int | None]
) -> None:
    """Else a program reads a bounded number of positions, one of a few."""
    device: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    with trace_for_device(device):
        assert [context_bucket(end, 600) for end in (3, 513)] == expected
