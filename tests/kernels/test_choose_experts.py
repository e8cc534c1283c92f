"""The kernel that chooses experts, in Pallas' interpreter, against every kind of router's plain
form.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.config.router import ROUTERS, RouterConfig, RouterKind
from jmoe.inference.few_tokens import kernel_choice_rules
from jmoe.layers.router import route
from kernels_pallas.choose_experts import MAX_EXPERTS, SCORES, choose_experts
from kernels_pallas.expert_choices import ChoiceRules, RouterLogits
from tests.arrays import assert_close

TOKENS, EXPERTS = 6, 60  # as Qwen1.5-MoE, no power of two


def config_of(kind: RouterKind, **options: float) -> RouterConfig:
    groups = {"n_group": 6, "topk_group": 2} if ROUTERS[kind].limits_groups else {}
    if ROUTERS[kind].normalizes is not None:  # whatever the option says
        options.pop("norm_topk_prob", None)
    return RouterConfig(kind, **groups, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in ROUTERS if ROUTERS[kind].scores in SCORES])
@pytest.mark.parametrize("options", [{}, {"norm_topk_prob": False, "routed_scaling_factor": 2.5}])
def test_every_router(kind: RouterKind, options: dict[str, float]) -> None:
    rng, rules = np.random.default_rng(1), ROUTERS[kind]
    config, k = config_of(kind, **options), rules.num_experts_per_tok or 4
    # coarse, so that scores tie
    logits_TE = jnp.asarray(rng.integers(-4, 4, (TOKENS, EXPERTS)) / 2, jnp.float32)
    bias = jnp.asarray(rng.integers(-2, 3, EXPERTS) / 8, jnp.float32)
    bias_E = bias if rules.has_bias else None
    expected = route(logits_TE, k, config, bias_E)
    logits = RouterLogits(logits_TE, kernel_choice_rules(config, k), bias_E)
    idx_TK, weights_TK = choose_experts(logits, interpret=True)
    assert idx_TK.dtype == jnp.int32 and np.array_equal(idx_TK, expected.topk_idx_TK)
    assert_close(weights_TK, expected.topk_weights_TK, 1e-6)


def test_padding_chooses_no_expert() -> None:
    logits_TE = jnp.asarray(np.random.default_rng(2).normal(size=(3, EXPERTS)), jnp.float32)
    positions_T, rules = jnp.array([5, 256, 255]), ChoiceRules("softmax", 3, True)
    logits = RouterLogits(logits_TE, rules, positions_T=positions_T, end=256)
    idx_TK, _ = choose_experts(logits, interpret=True)
    assert np.array_equal(idx_TK[1], [EXPERTS] * 3)
    for token in (0, 2):
        assert np.array_equal(idx_TK[token], jax.lax.top_k(logits_TE[token], 3)[1])


def test_nan_chooses_experts_that_exist() -> None:
    logits_TE = jnp.full((1, EXPERTS), jnp.nan)
    idx_TK, _ = choose_experts(
        RouterLogits(logits_TE, ChoiceRules("softmax", 4, True)), interpret=True
    )
    assert ((np.asarray(idx_TK) >= 0) & (np.asarray(idx_TK) < EXPERTS)).all()


def test_what_is_left_to_xla() -> None:
    with pytest.raises(NotImplementedError, match="scores tanh: neither softmax nor sigmoid"):
        choose_experts(RouterLogits(jnp.zeros((1, 8)), ChoiceRules("tanh", 2, True)))
    with pytest.raises(NotImplementedError, match=f"{MAX_EXPERTS + 1} experts: more than"):
        choose_experts(
            RouterLogits(jnp.zeros((1, MAX_EXPERTS + 1)), ChoiceRules("softmax", 2, True))
        )
