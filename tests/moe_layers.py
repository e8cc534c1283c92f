"""Small layers of every kind, on any mesh with the same parameters, run with their gradients.

Legend: T tokens, D hidden, F expert hidden, E experts, K choices a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jmoe import ExpertParallel, MoEConfig, MoELayer, MoEMetrics, Router, RouterConfig
from jmoe.mesh import DATA, EXPERT, make_mesh

T, D, F, E = 128, 16, 12, 8
# large, to show beside the output
LOSSES: dict[str, Any] = {"aux_loss_coef": 0.5, "z_loss_coef": 0.1}
CASES = {
    "switch": (1, RouterConfig(kind="switch", **LOSSES)),
    "gshard": (2, RouterConfig(kind="gshard", **LOSSES)),
    "softmax": (2, RouterConfig(kind="softmax", **LOSSES)),
    "softmax-raw": (3, RouterConfig(kind="softmax", norm_topk_prob=False, **LOSSES)),
    "sigmoid": (3, RouterConfig(kind="sigmoid", routed_scaling_factor=2.5, **LOSSES)),
    "group_limited": (3, RouterConfig(kind="group_limited", n_group=4, topk_group=2, **LOSSES)),
}

Split = tuple[int, int, int]


def config_of(k: int = 2, router: RouterConfig = RouterConfig(), **options: Any) -> MoEConfig:  # noqa: B008 (frozen)
    sizes = {"hidden_size": D, "num_experts": E, "num_experts_per_tok": k, "intermediate_size": F}
    return MoEConfig(router=router, **(sizes | options))


def over(mesh: Mesh | None, **options: Any) -> ExpertParallel | None:
    """Experts and tokens over all of a mesh's axes, unless others are given."""
    return (
        None
        if mesh is None
        else ExpertParallel(mesh, **({"expert_axes": EXPERT, "data_axes": (DATA,)} | options))
    )


def _assign(variable: nnx.Variable[jax.Array], values: np.ndarray) -> None:
    """Give a parameter other values where it lies: an array on a mesh with Explicit axes takes
    no others.
    """
    variable[...] = jax.device_put(values.astype(np.float32), variable[...].sharding)


def make(name: str, mesh: Mesh | Split | None = None, **options: Any) -> MoELayer:
    """A layer with parameters large enough that every term of a gradient shows, the same on
    every mesh.
    """
    k, router = CASES[name]
    own = {key: options.pop(key) for key in ("router", "experts") if key in options}
    spread = {
        key: options.pop(key)
        for key in ("expert_axes", "data_axes", "exchange", "num_chunks")
        if key in options
    }
    config = config_of(k, router, initializer_range=0.3, **options)
    mesh = make_mesh(mesh) if isinstance(mesh, tuple) else mesh
    layer = MoELayer(config, over(mesh, **spread), rngs=nnx.Rngs(0), **own)
    rng = np.random.default_rng(0)
    for biases in (getattr(layer.experts, "b_up", None), getattr(layer.experts, "b_down", None)):
        if biases is not None:
            _assign(biases, rng.normal(size=biases[...].shape) * 0.3)
    if isinstance(layer.router, Router):
        _assign(layer.router.kernel, rng.normal(size=(D, E)) * 0.4)
        if layer.router.e_score_correction_bias is not None:
            _assign(layer.router.e_score_correction_bias, rng.normal(size=E) * 0.2)
    return layer


def inputs(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    """(x, gradient of y)."""
    rng = np.random.default_rng(1)
    x, g = (jnp.asarray(rng.normal(size=(T, D)), dtype) for _ in range(2))
    return x, g


@dataclass(frozen=True)
class Result:
    y: Any
    metrics: MoEMetrics
    dx: Any
    dparams: dict[str, Any]


def run(
    layer: MoELayer,
    x: jax.Array,
    g: jax.Array,
    key: jax.Array | None = None,
    token_mask: jax.Array | None = None,
) -> Result:
    """The layer under `jit`, with the gradients of sum(y g) + balance loss + z loss. key: as in
    training.
    """
    parts: Any = nnx.split(layer, nnx.Param, ...)
    graph, params, rest = parts

    def loss(params: nnx.State, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, MoEMetrics]]:
        y, metrics = nnx.merge(graph, params, rest)(
            x, key=key, train=key is not None, token_mask=token_mask
        )
        total = (y * g).sum().astype(jnp.float32) + metrics.balance_loss + metrics.z_loss
        return total, (y, metrics)

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, (y, metrics)), (dparams, dx) = jax.block_until_ready(step(params, x))
    return Result(y, metrics, dx, nnx.to_pure_dict(dparams))
