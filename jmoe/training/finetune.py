"""Fine-tuning: start a run from a Hugging Face checkpoint instead of random parameters
(`init_from`).
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jmoe.cluster.processes import check_same_identity
from jmoe.config import (
    ROUTER_TRAINING_ONLY,
    TRAINING_ONLY,
    ModelConfig,
    TrainConfig,
    VisionTrainConfig,
    YarnConfig,
    check,
)
from jmoe.models.config_fields import ignored_training_fields
from jmoe.models.huggingface import family_of, model_config
from jmoe.models.pretrained import abstract_decoder, read_config
from jmoe.models.safetensors_io import StoredTensor, TensorReader, weights_identity
from jmoe.models.tokenizer_file import TOKENIZER, companion_file_names
from jmoe.models.weight_files import read_weight_headers
from jmoe.models.weights import (
    Names,
    Parameter,
    ParameterLoader,
    check_tensors,
    flatten_by_path,
    list_parameters,
)
from jmoe.offload.expert_state import ExpertArrays
from jmoe.optim.loss_scale import initial_loss_scale
from jmoe.training.state import TrainState, experts_of, without_experts
from jmoe.training.trainer import Trainer
from jmoe.types import PyTree

MERGED = "merged"  # in a run's output folder: its merged steps, each a Hugging Face folder
INITIAL_CONFIG = "initial_config.json"  # in a checkpoint: config.json of the initial model
FLOAT32 = np.dtype(np.float32)


def with_pretrained_model(config: TrainConfig) -> TrainConfig:
    """Return `config` with the architecture and, unless another is set, the tokenizer of
    `init_from`.

    Returns `config` unchanged if `init_from` is empty, or for image tasks. Fields in
    `TRAINING_ONLY` (capacity factor, router noise, z-loss and others) keep the values of `config`,
    and `yarn_factor` stretches the model's positions.
    """
    if not config.init_from or isinstance(config, VisionTrainConfig):
        return config
    folder = pretrained_folder(config.init_from)
    model, own = model_config(read_config(folder)), config.model
    router = dataclasses.replace(
        model.router, **{name: getattr(own.router, name) for name in ROUTER_TRAINING_ONLY}
    )
    names = [name for name in TRAINING_ONLY if not name.startswith("router.")]
    own_values = {name: getattr(own, name) for name in names}
    if config.lora.rank is not None:  # the model is frozen, its routers' biases too
        router = dataclasses.replace(router, bias_update_speed=0.0)
    model = dataclasses.replace(model, router=router, **own_values)
    if config.yarn_factor != 1:
        model = _with_stretched_positions(model, config.yarn_factor)
    data = config.data
    if data.tokenizer is None and (folder / TOKENIZER).is_file():
        data = dataclasses.replace(data, tokenizer=str(folder / TOKENIZER))
    config = dataclasses.replace(config, model=model, data=data).with_preferences()
    config.check_chosen_share()
    return config


def _with_stretched_positions(model: ModelConfig, factor: float) -> ModelConfig:
    """Return `model` with YaRN, for contexts of `factor` times its max_position_embeddings.

    Raises ValueError if the model has no rotary positions, or stretched ones already.
    """
    rotary = model.position == "rope"
    check(rotary, "yarn_factor", factor, "must be 1 for a model without rotary positions")
    plain = "must be 1 for a model whose positions are stretched already"
    kind = "" if model.rope_scaling is None else f" (rope_scaling = {model.rope_scaling})"
    check(not kind, "yarn_factor", factor, plain + kind)
    original = model.max_position_embeddings
    return dataclasses.replace(
        model,
        rope_scaling=YarnConfig(factor=factor, original_max_position_embeddings=original),
        max_position_embeddings=round(factor * original),
    )


def pretrained_folder(init_from: str) -> Path:
    """Return the Hugging Face folder that `init_from` names.

    For the output folder of a run, that is its newest merged step; raises ValueError if no step is
    merged.
    """
    folder = Path(init_from).expanduser()
    if not is_run_folder(folder):
        return folder
    merged = sorted((folder / MERGED).glob("step-*"), key=lambda step: int(step.name.split("-")[1]))
    if not merged:
        raise ValueError(
            f"init_from = {init_from!r}: no step is merged; give what python -m jmoe.deploy.merge"
            " makes"
        )
    return merged[-1]


def is_run_folder(folder: Path) -> bool:
    """Return whether `folder` is the output folder of a run."""
    return (folder / "checkpoints").is_dir()


def companion_files(init_from: str, tokenizer: bytes | None) -> dict[str, bytes]:
    """Return the files of `init_from`, by name, that each checkpoint of the run carries along.

    These are the chat templates, end tokens and sampling defaults, and the model's `config.json` as
    `INITIAL_CONFIG`. tokenizer: the content of the run's tokenizer file, or None. Empty unless that
    equals the model's tokenizer, because the files refer to the model's token ids.
    """
    folder = pretrained_folder(init_from)
    own = folder / TOKENIZER
    if tokenizer is None or not own.is_file() or own.read_bytes() != tokenizer:
        return {}
    files = {name: (folder / name).read_bytes() for name in companion_file_names(folder)}
    return files | {INITIAL_CONFIG: (folder / "config.json").read_bytes()}


def ignored_training_options(init_from: str) -> list[str]:
    """Return one line for each training option in the checkpoint's `config.json` that transformers
    honors and jmoe does not.
    """
    fields = read_config(folder := pretrained_folder(init_from))
    changed = ignored_training_fields(fields, family_of(fields))
    return [
        f"{folder / 'config.json'}: {name} = {value!r}: trains without it"
        for name, value in changed.items()
    ]


def load_pretrained_state(trainer: Trainer, config: TrainConfig) -> TrainState:
    """Return the state of step 0 with the float32 parameters of `init_from`, each read directly
    onto its devices.

    Streamed experts are read onto their tiers one layer at a time and are never all in device
    memory. Every process must call this.
    """
    shape = trainer.full_shape
    abstract_params = flatten_by_path(shape.params) | flatten_by_path(shape.router_bias)
    wanted, stored = _match_parameters(config, abstract_params)
    streamed = [p for p in wanted if p.experts and not experts_of(trainer.saved_shape.params)]
    with TensorReader() as reader:
        loader = ParameterLoader(stored, reader)
        arrays = {
            p.path: loader.load(p, FLOAT32, abstract_params[p.path].sharding)
            for p in wanted
            if p not in streamed
        }

        def read_expert_weights(layer: int, experts: NDArray[np.int64]) -> ExpertArrays:
            return {
                p.path[-1]: np.stack(
                    [_read_expert(loader, p, layer, expert) for expert in experts.tolist()]
                )
                for p in streamed
            }

        state = _state_at_step_0(trainer, arrays, has_experts=not streamed)
        if streamed:
            return trainer.restore_state(state, read_expert_weights, lambda *_: {})
        return trainer.restore_state(state)


def load_pretrained_parameters(
    config: TrainConfig, abstract_params: dict[Names, jax.ShapeDtypeStruct]
) -> dict[Names, jax.Array]:
    """Return the parameters of `init_from` that `abstract_params` names, by path, each with the
    dtype and sharding there.

    Every process must call this.
    """
    wanted, stored = _match_parameters(config, abstract_params)
    with TensorReader() as reader:
        loader = ParameterLoader(stored, reader)
        return {
            p.path: loader.load(p, abstract_params[p.path].dtype, abstract_params[p.path].sharding)
            for p in wanted
            if p.path in abstract_params
        }


def _match_parameters(
    config: TrainConfig, abstract_params: dict[Names, jax.ShapeDtypeStruct]
) -> tuple[list[Parameter], dict[str, StoredTensor]]:
    """Return (the decoder's parameters, all stored tensors of `init_from`), after checking that the
    tensors make up the parameters.

    Every process must call this: it compares the folder's content with that of process 0.
    """
    folder = pretrained_folder(config.init_from)
    shapes = abstract_decoder(config.model)[2]
    shapes = jax.tree.unflatten(
        jax.tree.structure(shapes),
        [abstract_params.get(path, shape) for path, shape in flatten_by_path(shapes).items()],
    )
    stored = read_weight_headers(folder)
    wanted = list_parameters(shapes, config.model, family_of(read_config(folder)), stored)
    check_tensors(wanted, stored, folder, config.model, jnp.float32)
    check_same_identity(f"content of {folder}", lambda: weights_identity(stored))
    return wanted, stored


def base_model_fingerprint(init_from: str) -> str:
    """Return a hash of the weights that a LoRA run's adapters belong to."""
    return weights_identity(read_weight_headers(pretrained_folder(init_from)))


def _state_at_step_0(
    trainer: Trainer, arrays: dict[tuple[str, ...], jax.Array], *, has_experts: bool
) -> TrainState:
    """Return the state of step 0 with the parameters `arrays`, which are removed one by one, and
    zero moments. has_experts: whether the state contains the experts.
    """

    def take_copies(tree: PyTree) -> PyTree:
        """Return a copy in JAX's own memory: a training step donates its state, and the loaded
        arrays alias NumPy memory.
        """
        return jax.tree.unflatten(
            jax.tree.structure(tree), [jnp.copy(arrays.pop(path)) for path in flatten_by_path(tree)]
        )

    def make_zeros(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), tree)

    shape = trainer.full_shape
    params, m, v = (
        tree if has_experts else without_experts(tree) for tree in (shape.params, shape.m, shape.v)
    )
    step = jnp.zeros((), jnp.int32, device=shape.step.sharding)
    scaling = jax.tree.map(
        lambda x, s: jax.device_put(x, s.sharding),
        initial_loss_scale(trainer.config),
        shape.loss_scale,
    )
    return TrainState(
        take_copies(params),
        make_zeros(m),
        make_zeros(v),
        take_copies(shape.router_bias),
        step,
        scaling,
        scales=make_zeros(shape.scales),
    )


def _read_expert(
    loader: ParameterLoader, parameter: Parameter, layer: int, expert: int
) -> NDArray[np.float32]:
    """Return one expert of a stored parameter, with the shape of one expert."""
    everything = (slice(None),) * len(parameter.matrix_shape)
    matrix: NDArray[np.float32] = loader.read_slice(
        parameter, FLOAT32, (slice(layer, layer + 1), slice(expert, expert + 1), *everything)
    )
    return matrix[0, 0]
