"""Fine-tuning: a run that starts from a Hugging Face checkpoint instead of random parameters."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jmoe.config import TRAINING_ONLY, TrainConfig
from jmoe.models.huggingface import model_config
from jmoe.models.pretrained import abstract_decoder, read_config
from jmoe.models.weights import flat, load_arrays
from jmoe.training.step import Program, TrainState

TOKENIZER = "tokenizer.json"


def with_pretrained_model(config: TrainConfig) -> TrainConfig:
    """The run with the model of `init_from`, and its tokenizer unless another is given; unchanged if it is empty.

    What concerns training only (`TRAINING_ONLY`) stays as the run has it.
    """
    if not config.init_from:
        return config
    folder = Path(config.init_from).expanduser()
    model, own = model_config(read_config(folder)), config.model
    of_router = {name.removeprefix("router.") for name in TRAINING_ONLY if name.startswith("router.")}
    router = dataclasses.replace(model.router, **{name: getattr(own.router, name) for name in of_router})
    kept = {name: getattr(own, name) for name in TRAINING_ONLY if not name.startswith("router.")}
    model = dataclasses.replace(model, router=router, **kept)
    data = config.data
    if data.tokenizer is None and (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))
    return dataclasses.replace(config, model=model, data=data)


def pretrained_state(program: Program, config: TrainConfig) -> TrainState:
    """Step 0 with the parameters of `init_from` in float32, each read onto the devices that hold it; fresh moments."""
    folder, shape = Path(config.init_from).expanduser(), program.whole_shape
    places = flat(shape.params) | flat(shape.router_bias)
    shapes = abstract_decoder(config.model)[2]
    shapes = jax.tree.unflatten(jax.tree.structure(shapes), [places[path] for path in flat(shapes)])
    arrays = load_arrays(folder, config.model, read_config(folder)["model_type"], shapes, jnp.float32)

    def owned(tree: Any) -> Any:
        """What was read lies in memory of numpy's; a step may only write over JAX's own."""
        return jax.tree.unflatten(jax.tree.structure(tree), [jnp.copy(arrays.pop(path)) for path in flat(tree)])

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), tree)

    params, bias = owned(shape.params), owned(shape.router_bias)
    step = jnp.zeros((), jnp.int32, device=shape.step.sharding)
    return program.from_saved(TrainState(params, zeros(shape.m), zeros(shape.v), bias, step))
