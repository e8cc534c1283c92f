"""A vision transformer that learns several tasks at once, with a linear head for each task.

Images are cut into patches; the blocks are those of the decoder. Layers are dense, have experts
that patches choose (V-MoE, arXiv:2106.05974), or experts assigned to tasks (UFO).

Legend:
B images
P pixels a side
C channels
S patches of an image
T tokens, B * S
D hidden
Y outputs of all heads, concatenated
A tasks
N layers with experts per token; for paths, layers with experts per task
E experts
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmoe.config import STACKS, LayerKind, Remat, RouterConfig, VisionModelConfig
from jmoe.layers.experts import affine, normal_parameter
from jmoe.layers.moe import ExpertParallel, MoEStats
from jmoe.layers.norm import Norm
from jmoe.models.block import ApplyBlock, Block
from jmoe.models.decoder import StackLayers, init_one_layer, stack_layers
from jmoe.types import PyTree

SHARED_EXPERT = 0  # in layers with learned paths, each task chooses this one or its own expert


class PathNoise(NamedTuple):
    """Random numbers for a training step that samples the tasks' paths.

    Legend:
    A tasks
    N layers with learned paths
    """

    noise_AN: jax.Array  # float32, logistic: the difference of two Gumbel variables
    temperature: jax.Array


def draw_path_noise(key: jax.Array, shape: tuple[int, int], temperature: jax.Array) -> PathNoise:
    """Return a training step's `PathNoise`, with noise [tasks, layers with experts per task].

    A task's noise depends on the key and the task's number alone.
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(shape[0], dtype=jnp.uint32))
    noise = jax.vmap(lambda own: jax.random.logistic(own, (shape[1],), jnp.float32))(keys)
    return PathNoise(noise, temperature)


def likeliest_experts(path: Sequence[int], logits_N: jax.typing.ArrayLike) -> tuple[int, ...]:
    """Return a task's likelier expert in each layer: that of `path` where the logit is positive,
    else the shared one.
    """
    own = np.asarray(logits_N) > 0
    return tuple(
        expert if mine else SHARED_EXPERT for expert, mine in zip(path, own.tolist(), strict=True)
    )


def image_patches(pixels_BPPC: jax.Array, size: int) -> jax.Array:
    """Return the patches of images, [B, S, size^2 C]: squares of `size` pixels, row by row."""
    b, p, _, c = pixels_BPPC.shape
    x = pixels_BPPC.reshape(b, p // size, size, p // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, size * size * c)


def layer_kind_config(
    config: VisionModelConfig, kind: LayerKind, task_experts: int
) -> VisionModelConfig:
    """Return the configuration of layers of one kind.

    task_experts: expert slots on a device of each layer with experts per task.
    """
    if kind != "task":
        return config
    return replace(
        config,
        num_experts=task_experts,
        num_experts_per_tok=1,
        router=RouterConfig(aux_loss_coef=0.0),
    )


class VisionTransformer(nnx.Module):
    """Maps images [B, P, P, C] and their tasks to (float32 logits [B, Y], routing statistics).

    Attention is bidirectional; the mean over an image's patches goes to the heads.

    head_sizes: each task's number of classes, or of embedding features, in task order.
    paths: [tasks, layers with experts per task], the expert assigned to each task. With learned
        paths a task uses it where `path_logits` says so, and the shared expert elsewhere.
    task_experts: expert slots on a device of each layer with experts per task; 0 for all experts.
    stack: a function that makes the stacked layers of a kind, called like `stack_layers`.
    """

    def __init__(
        self,
        config: VisionModelConfig,
        head_sizes: Mapping[str, int],
        paths: Sequence[Sequence[int]],
        parallel: ExpertParallel | None = None,
        *,
        task_experts: int = 0,
        stack: StackLayers = stack_layers,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.tasks, self.head_sizes = (
            config,
            tuple(head_sizes),
            tuple(head_sizes.values()),
        )
        self.paths = tuple(tuple(path) for path in paths)
        d, side = config.hidden_size, config.image_size // config.patch_size
        inputs = config.patch_size**2 * config.channels
        std = config.initializer_range
        self.patch_embedding = normal_parameter(rngs, (inputs, d), inputs**-0.5)
        self.patch_bias = nnx.Param(jnp.zeros(d))
        self.row_positions, self.column_positions = (
            normal_parameter(rngs, (side, d), std) for _ in range(2)
        )

        self.task_experts = task_experts or config.num_experts

        def stack_kind(kind: LayerKind) -> PyTree:
            own = layer_kind_config(config, kind, self.task_experts)
            make = lambda rngs: Block(own, kind, parallel, rngs=rngs)  # noqa: E731
            count = sum(layer.kind == kind for layer in config.layers)
            return stack(make, count, rngs) if count else None

        self.dense_layers, self.moe_layers, self.task_layers = (
            stack_kind("dense"),
            stack_kind("moe"),
            stack_kind("task"),
        )
        self.norm = Norm(d, config.norm, config.norm_eps)
        self.heads = nnx.Dict(
            {name: normal_parameter(rngs, (d, count), std) for name, count in head_sizes.items()}
        )
        undecided = {name: nnx.Param(jnp.zeros(len(config.task_layers))) for name in head_sizes}
        self.path_logits = nnx.Dict(undecided) if config.learn_paths else None

    @staticmethod
    def init_layer_experts(
        config: VisionModelConfig, kind: LayerKind, layer: jax.Array | int, rngs: nnx.Rngs
    ) -> nnx.Module:
        """Return the experts of one layer as `VisionTransformer(config, ...)` initializes them.

        layer: index among the layers of this kind.

        Inside `jit`, XLA drops the initialization of all other parameters. Heads and paths are no
        arguments, as neither affects a layer's initial values.
        """
        drawn = VisionTransformer(config, {}, (), stack=partial(init_one_layer, layer), rngs=rngs)
        experts: nnx.Module = getattr(drawn, STACKS[kind]).moe.experts
        return experts

    def embed(self, pixels_BPPC: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return the first layer's input, [B, S, D] in `dtype`."""
        with jax.named_scope("embedding"):
            x_BSI = image_patches(pixels_BPPC, self.config.patch_size).astype(dtype)
            x_BSD = affine(x_BSI, self.patch_embedding, self.patch_bias)
            rows, columns = self.row_positions[...], self.column_positions[...]
            positions_SD = (rows[:, None] + columns[None, :]).reshape(-1, rows.shape[-1])
            return (x_BSD + positions_SD.astype(jnp.float32)).astype(dtype)

    def __call__(
        self,
        pixels_BPPC: jax.Array,
        task_B: jax.Array,
        *,
        dtype: DTypeLike = jnp.float32,
        train: bool = False,
        full_capacity: bool = False,
        remat: Remat = "none",
        draw: PathNoise | None = None,
        slot_NE: jax.Array | None = None,
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (logits [B, Y], `MoEStats` with a leading [N], or None). Logits of other tasks are
        -inf.

        Runs inside `shard_map` or on one device.
        pixels_BPPC: in [0, 1].
        task_B: int32, the task of each image.
        draw: samples learned paths; None takes each task's likelier expert.
        slot_NE: this device's slot of each expert, for layers with experts per task; None for slot
            e = expert e.
        """
        x_BSD = self.embed(pixels_BPPC, dtype)
        graphs, states = {}, {}
        for kind, name in STACKS.items():
            if (layers := getattr(self, name, None)) is not None:
                graphs[kind], states[kind] = nnx.split(layers)
        stats = []
        for layer in self.config.layers:
            options: dict[str, PyTree] = {
                "dtype": dtype,
                "train": train,
                "full_capacity": full_capacity,
            }
            # the tasks fix how many images go to an expert, so its buffers hold all of them
            if layer.kind == "task":
                options |= self.route_by_task(layer.number, task_B, draw, slot_NE)
                options["full_capacity"] = True
            state = jax.tree.map(lambda w, i=layer.number: w[i], states[layer.kind])
            apply_block = ApplyBlock(graphs, lambda params: params, remat, options)
            x_BSD, layer_stats = apply_block(layer.kind, state, None, None, x_BSD)
            stats += [layer_stats] if layer.kind == "moe" else []
        stacked_stats = jax.tree.map(lambda *layers: jnp.stack(layers), *stats) if stats else None
        return self.logits(self.norm(x_BSD, dtype), task_B), stacked_stats

    def route_by_task(
        self,
        layer: int,
        task_B: jax.Array,
        draw: PathNoise | None = None,
        slot_NE: jax.Array | None = None,
    ) -> dict[str, jax.Array]:
        """Return every patch's experts and weights, as keyword arguments of `Block.route`.

        layer: index among the layers with experts per task.

        In training with learned paths both the shared expert and the task's own run, the sampled
        one with weight 1 and the other with 0; gradients are the softmax's (straight-through
        Gumbel-softmax).
        """
        num_patches, own = self.config.num_patches, np.asarray(self.paths, np.int32)[:, layer]
        slot_E = (
            jnp.arange(self.config.num_experts, dtype=jnp.int32)
            if slot_NE is None
            else slot_NE[layer]
        )
        own_A, shared_A = slot_E[own], slot_E[np.full_like(own, SHARED_EXPERT)]

        def repeat_per_patch(values_AK: jax.Array) -> jax.Array:
            return jnp.repeat(values_AK[task_B], num_patches, axis=0)

        if self.path_logits is None:
            return {"topk_idx_TK": repeat_per_patch(own_A[:, None])}
        logits_A = jnp.stack([self.path_logits[task][...][layer] for task in self.tasks])
        if draw is None:
            none_A, one_A = jnp.full_like(own_A, self.task_experts), jnp.ones_like(logits_A)
            chosen_A2 = jnp.stack([jnp.where(logits_A > 0, own_A, shared_A), none_A], axis=1)
            weights_A2 = jnp.stack([one_A, 0 * one_A], axis=1)
        else:
            chosen_A2 = jnp.stack([shared_A, own_A], axis=1)
            soft_A = jax.nn.sigmoid((logits_A + draw.noise_AN[:, layer]) / draw.temperature)
            hard_A = (soft_A > 0.5).astype(jnp.float32)
            takes_own_A = hard_A + soft_A - jax.lax.stop_gradient(soft_A)
            weights_A2 = jnp.stack([1 - takes_own_A, takes_own_A], axis=1)
        return {
            "topk_idx_TK": repeat_per_patch(chosen_A2),
            "topk_weights_TK": repeat_per_patch(weights_A2),
        }

    def logits(self, hidden_BSD: jax.Array, task_B: jax.Array) -> jax.Array:
        """Return float32 [B, Y] from the mean over each image's patches; logits of other tasks are
        -inf.
        """
        with jax.named_scope("heads"):
            mean_BD = hidden_BSD.astype(jnp.float32).mean(axis=1)
            heads = [self.heads[task][...].astype(jnp.float32) for task in self.tasks]
            # one product per head, so that adding a task does not change another's logits by a bit
            exact = partial(jnp.dot, precision=jax.lax.Precision.HIGHEST)
            logits_BY = jnp.concatenate([exact(mean_BD, head_DY) for head_DY in heads], axis=1)
            owner_Y = np.repeat(np.arange(len(self.head_sizes), dtype=np.int32), self.head_sizes)
            return jnp.where(task_B[:, None] == owner_Y, logits_BY, -jnp.inf)
