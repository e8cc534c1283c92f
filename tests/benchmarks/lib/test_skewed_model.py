"""Models whose routers choose experts as often as a benchmark asks."""

import numpy as np

from benchmarks.lib.skewed_model import _router_bias_for_shares, zipf_shares


def test_a_router_with_this_bias_chooses_experts_in_these_shares() -> None:
    """Zipf's, over logits that say nothing about experts: each within a tenth of the largest."""
    share_E = zipf_shares(1, 8, 1.1, seed=0)[0]
    assert np.isclose(share_E.sum(), 1.0) and share_E.max() / share_E.min() > 8
    logits_TE = np.random.default_rng(0).standard_normal((4096, 8)) / 2
    chosen_TK = np.argsort(-(logits_TE + _router_bias_for_shares(logits_TE, share_E, 2)), axis=1)[
        :, :2
    ]
    found_E = np.bincount(chosen_TK.ravel(), minlength=8) / chosen_TK.size
    np.testing.assert_allclose(found_E, share_E, atol=share_E.max() / 10)
