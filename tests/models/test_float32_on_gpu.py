"""Products of float32 are float32 on a GPU too, where XLA's default is TF32: read off programs
lowered for CUDA.
"""

from __future__ import annotations

from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jmoe.config import TrainConfig
from jmoe.mesh import ACCUMULATED_BATCH, shardings
from jmoe.models import pretrained
from jmoe.models.decoder import Decoder
from jmoe.training.fused.step import FusedTrainer
from tests import model_configs
from tests.model_configs import OPTIMIZER, mesh_of


def products(lowered: Any) -> list[tuple[bool, bool]]:
    """(whether an operand is float32, whether the product is exact) of every product of a
    lowered program.
    """
    lines = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert lines
    return [
        ("xf32>" in line.split(" : ")[-1].split("->")[0], "[HIGHEST, HIGHEST]" in line)
        for line in lines
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_a_training_step(dtype: str) -> None:
    """All are exact in float32; in bfloat16 the router's are, forward, recomputed and backward,
    and no others.
    """
    mesh = mesh_of(1, 1, 1)
    sizes = {"batch_size": 2, "sequence_length": 32, "num_steps": 10, "compute_dtype": dtype}
    config = TrainConfig(model=model_configs.MODEL, optimizer=OPTIMIZER, **sizes)
    trainer = FusedTrainer(config, mesh)
    places = shardings(trainer.model.state_specs, mesh)
    of = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)  # noqa: E731
    state = jax.tree.map(of, trainer.state_shape, places)
    tokens = of(jax.ShapeDtypeStruct((1, 2, 33), jnp.int32), NamedSharding(mesh, ACCUMULATED_BATCH))
    found = products(trainer.step.trace(state, tokens).lower(lowering_platforms=("cuda",)))
    assert all(is_exact == is_float32 for is_float32, is_exact in found)
    exact = sum(is_exact for _, is_exact in found)
    assert 3 <= exact <= len(found) // 4 if dtype == "bfloat16" else exact == len(found)


def test_logits_of_a_model_in_float32() -> None:
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(model_configs.MODEL, rngs=nnx.Rngs(0))))
    tokens_BS = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    traced = pretrained._logits_and_stats.trace(graph, "float32", False, state, tokens_BS, None)
    assert set(products(traced.lower(lowering_platforms=("cuda",)))) == {(True, True)}
