"""How tokens choose experts: the table of routers, and a router's settings.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
)

RouterKind = Literal[
    "switch",
    "gshard",
    "softmax",
    "softmax_biased",
    "softmax_group_limited",
    "sigmoid",
    "group_limited",
    "sparsemixer",
    "input_weighted",
]


@dataclass(frozen=True)
class RouterRules:
    """The rules of one kind of router; they decide which fields of `RouterConfig` have an effect.

    scores: the experts' scores as a function of the logits, one of `SCORES` in
    `jmoe/layers/router.py`. num_experts_per_tok: the only number of choices; None: any. normalizes:
    whether the weights of a token's experts are divided by their sum; None: as `norm_topk_prob`
    says. has_bias: a bias of each expert is added to its scores for the choice alone, and
    `updated_bias` moves it by `bias_update_speed`. limits_groups: a token chooses only among its
    best `topk_group` of `n_group` groups, which are ranked by the sum of this many of their best
    scores; 0: among all experts. may_drop_second: `second_expert_policy` may be random.
    masks_distant_logits: the weight of a choice is its probability among the experts not yet
    chosen whose logit is near the largest, see `RouterConfig.mask_distance`. weighs_inputs: the
    weight multiplies the input of a token's expert instead of its output.
    """

    scores: str
    num_experts_per_tok: int | None = None
    normalizes: bool | None = None
    has_bias: bool = False
    limits_groups: int = 0
    may_drop_second: bool = False
    masks_distant_logits: bool = False
    weighs_inputs: bool = False


ROUTERS: dict[RouterKind, RouterRules] = {
    "switch": RouterRules("softmax", num_experts_per_tok=1, normalizes=False),
    "gshard": RouterRules("softmax", num_experts_per_tok=2, normalizes=True, may_drop_second=True),
    "softmax": RouterRules("softmax"),
    "softmax_biased": RouterRules("softmax", has_bias=True),
    "softmax_group_limited": RouterRules("softmax", limits_groups=1),
    "sigmoid": RouterRules("sigmoid", has_bias=True),
    "group_limited": RouterRules("sigmoid", has_bias=True, limits_groups=2),
    "sparsemixer": RouterRules(
        "logits", num_experts_per_tok=2, normalizes=False, masks_distant_logits=True
    ),
    "input_weighted": RouterRules(
        "sigmoid", num_experts_per_tok=1, normalizes=False, weighs_inputs=True
    ),
}


@dataclass(frozen=True)
class RouterConfig:
    """How tokens choose experts.

    kind: `switch` top-1 with input jitter (Switch Transformer); `gshard` top-2 (GShard); `softmax`
    top-k of a softmax (Mixtral, OLMoE, Qwen3-MoE); `softmax_biased` the same with a loss-free bias
    (ERNIE 4.5); `softmax_group_limited` top-k of a softmax inside the best `topk_group` of
    `n_group` groups of experts (DeepSeek-V2); `sigmoid` sigmoid scores with loss-free bias
    balancing (DeepSeek-V3); `group_limited` the same inside the best groups; `sparsemixer` top-2 of
    the logits, each weighted by a softmax over the experts near it (Phi-3.5-MoE); `input_weighted`
    top-1 of sigmoid scores, which multiply the expert's input (Llama 4).
    """

    kind: RouterKind = "softmax"
    bias: bool = False  # logits = x @ kernel + bias (gpt-oss)
    norm_topk_prob: bool = True  # divide the chosen weights by their sum
    # switch: inputs are multiplied by uniform(1 - jitter, 1 + jitter) in training
    jitter_noise: float = 0.0
    # gshard, in training: `random` sends a token to its second expert with probability min(1, 2
    # times its weight)
    second_expert_policy: Literal["all", "random"] = "all"
    aux_loss_coef: float = 0.01  # balance loss: E * sum_e f_e P_e
    z_loss_coef: float = 0.0  # mean squared logsumexp of the router's logits
    bias_update_speed: float = 0.001  # step of the loss-free bias, of routers that have one
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    # sparsemixer: experts count whose logit l is near the largest m:
    # m - l <= mask_distance max(m, |l|)
    mask_distance: float = 0.02

    def __post_init__(self) -> None:
        check_field_types(self)
        check_not_negative(self, "aux_loss_coef", "z_loss_coef", "bias_update_speed")
        check_field(0 <= self.jitter_noise < 1, self, "jitter_noise", "must be in [0, 1)")
        check_positive(self, "n_group", "topk_group", "routed_scaling_factor", "mask_distance")
        check_field(
            self.topk_group <= self.n_group,
            self,
            "topk_group",
            f"must not exceed n_group = {self.n_group}",
        )
        default_speed, default_distance = type(self).bias_update_speed, type(self).mask_distance
        fields: list[tuple[str, bool, Callable[[RouterRules], bool]]] = [
            (
                "second_expert_policy",
                self.second_expert_policy == "all",
                lambda rules: rules.may_drop_second,
            ),
            ("n_group", self.n_group == 1, lambda rules: rules.limits_groups > 0),
            (
                "bias_update_speed",
                self.bias_update_speed in (0, default_speed),
                lambda rules: rules.has_bias,
            ),
            (
                "norm_topk_prob",
                self.norm_topk_prob or self.rules.normalizes is False,
                lambda rules: rules.normalizes is None,
            ),
            (
                "mask_distance",
                self.mask_distance == default_distance,
                lambda rules: rules.masks_distant_logits,
            ),
        ]
        for name, changes_nothing, is_used in fields:
            kinds = " or ".join(repr(kind) for kind, rules in ROUTERS.items() if is_used(rules))
            may = changes_nothing or is_used(self.rules)
            check_field(may, self, name, f"needs router.kind = {kinds}")

    @property
    def rules(self) -> RouterRules:
        """The row of `ROUTERS` of this kind."""
        return ROUTERS[self.kind]

    @property
    def draws_random_numbers(self) -> bool:
        """Return whether training draws random numbers to route."""
        return self.jitter_noise > 0 or self.second_expert_policy == "random"

    def normalizes_weights(self, num_experts_per_tok: int) -> bool:
        """Return whether the weights of a token's chosen experts are divided by their sum."""
        own = self.rules.normalizes
        return (self.norm_topk_prob if own is None else own) and num_experts_per_tok > 1


def check_routing(num_experts: int, num_experts_per_tok: int, router: RouterConfig) -> None:
    """Raise `ValueError` if this router cannot choose `num_experts_per_tok` of `num_experts`
    experts.
    """
    k, name, only = num_experts_per_tok, "num_experts_per_tok", router.rules.num_experts_per_tok
    check(1 <= k <= num_experts, name, k, f"must be between 1 and num_experts = {num_experts}")
    check(only in (None, k), name, k, f"must be {only} for router.kind = {router.kind!r}")
    check_field(
        num_experts % router.n_group == 0,
        router,
        "router.n_group",
        f"must divide num_experts = {num_experts}",
    )
    reachable = num_experts // router.n_group * router.topk_group
    groups = f"router.topk_group = {router.topk_group} groups"
    limit = f"must not exceed the {reachable} experts in {groups}"
    check(k <= reachable, name, k, limit)
