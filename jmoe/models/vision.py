"""A vision transformer that learns several tasks at once: patches, the same blocks as a decoder's, a head a task.

Legend: B images, P pixels a side, C channels, S patches of an image, T = B S tokens, D hidden, Y classes of all tasks
side by side, N layers routed per token, E experts.
Layers may be dense, have experts that tokens choose (V-MoE, arXiv:2106.05974), or experts that tasks name (UFO).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np

from jmoe.config import LayerKind, VisionModelConfig
from jmoe.layers.experts import affine, normal
from jmoe.layers.moe import ExpertParallel, MoEStats
from jmoe.layers.norm import Norm
from jmoe.models.block import ApplyBlock, Block
from jmoe.models.decoder import stack_layers

STACK_OF: dict[LayerKind, str] = {"dense": "dense_layers", "moe": "moe_layers", "task": "task_layers"}


def patches(pixels_BPPC: jax.Array, size: int) -> jax.Array:
    """[B, S, size^2 C]: the squares of `size` pixels, row by row."""
    b, p, _, c = pixels_BPPC.shape
    x = pixels_BPPC.reshape(b, p // size, size, p // size, size, c)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(b, -1, size * size * c)


class VisionTransformer(nnx.Module):
    """Images [B, P, P, C] and the task of each -> float32 logits [B, Y]: `logits, stats = model(pixels, task)`.

    num_classes: of each task, in the order of their numbers. paths: [tasks, layers routed by task], the expert that
    each task takes. Patches see all of their image; their mean goes to the heads.
    """

    def __init__(
        self,
        config: VisionModelConfig,
        num_classes: Mapping[str, int],
        paths: Sequence[Sequence[int]],
        parallel: ExpertParallel | None = None,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        self.config, self.tasks, self.num_classes = config, tuple(num_classes), tuple(num_classes.values())
        self.paths = tuple(tuple(path) for path in paths)
        d, side = config.hidden_size, config.image_size // config.patch_size
        inputs, std, kinds = config.patch_size**2 * config.channels, config.initializer_range, config.layer_kinds
        self.patch_embedding = normal(rngs, (inputs, d), inputs**-0.5)
        self.patch_bias = nnx.Param(jnp.zeros(d))
        self.row_positions, self.column_positions = (normal(rngs, (side, d), std) for _ in range(2))

        def stack(kind: LayerKind) -> Any:
            make = lambda rngs: Block(config, kind, parallel, rngs=rngs)  # noqa: E731
            return stack_layers(make, kinds.count(kind), rngs) if kind in kinds else None

        self.dense_layers, self.moe_layers, self.task_layers = stack("dense"), stack("moe"), stack("task")
        self.norm = Norm(d, config.norm, config.norm_eps)
        self.heads = nnx.Dict({name: normal(rngs, (d, count), std) for name, count in num_classes.items()})

    def embed(self, pixels_BPPC: jax.Array, dtype: Any) -> jax.Array:
        """[B, S, D] in `dtype`: the first layer's input."""
        with jax.named_scope("embedding"):
            x_BSI = patches(pixels_BPPC, self.config.patch_size).astype(dtype)
            x_BSD = affine(x_BSI, self.patch_embedding, self.patch_bias)
            rows, columns = self.row_positions[...], self.column_positions[...]
            positions_SD = (rows[:, None] + columns[None, :]).reshape(-1, rows.shape[-1])
            return (x_BSD + positions_SD.astype(jnp.float32)).astype(dtype)

    def __call__(
        self,
        pixels_BPPC: jax.Array,
        task_B: jax.Array,
        *,
        dtype: Any = jnp.float32,
        train: bool = False,
        full_capacity: bool = False,
        remat: bool = False,
    ) -> tuple[jax.Array, MoEStats | None]:
        """Return (logits [B, Y], -inf where a class is another task's; `MoEStats` with a leading [N], or None).

        pixels: in [0, 1]. task: int32. Runs inside `shard_map` or on one device.
        """
        x_BSD = self.embed(pixels_BPPC, dtype)
        graphs, states = {}, {}
        for kind, name in STACK_OF.items():
            if (layers := getattr(self, name)) is not None:
                graphs[kind], states[kind] = nnx.split(layers)
        used, stats = dict.fromkeys(STACK_OF, 0), []
        paths = np.asarray(self.paths, np.int32)
        for kind in self.config.layer_kinds:
            index = used[kind]
            options = {"dtype": dtype, "train": train, "full_capacity": full_capacity}
            if kind == "task":  # how many images go to an expert is no surprise: there is room for all of them
                expert_B = jnp.asarray(paths[:, index])[task_B]
                topk_idx_T1 = jnp.repeat(expert_B, x_BSD.shape[1])[:, None]
                options |= {"topk_idx_TK": topk_idx_T1, "full_capacity": True}
            state = jax.tree.map(lambda w, index=index: w[index], states[kind])
            apply_block = ApplyBlock(graphs, lambda params: params, remat, options)
            x_BSD, layer_stats = apply_block(kind, state, None, None, x_BSD)
            stats += [layer_stats] if kind == "moe" else []
            used[kind] += 1
        stacked_stats = jax.tree.map(lambda *layers: jnp.stack(layers), *stats) if stats else None
        return self.logits(self.norm(x_BSD, dtype), task_B), stacked_stats

    def logits(self, hidden_BSD: jax.Array, task_B: jax.Array) -> jax.Array:
        """Float32 [B, Y] of the mean of an image's patches, -inf where a class is another task's."""
        with jax.named_scope("heads"):
            mean_BD = hidden_BSD.astype(jnp.float32).mean(axis=1)
            heads = [self.heads[task][...].astype(jnp.float32) for task in self.tasks]
            # One product a head: another task changes no bit of a task's logits.
            logits_BY = jnp.concatenate([jnp.dot(mean_BD, head_DY) for head_DY in heads], axis=1)
            owner_Y = np.repeat(np.arange(len(self.num_classes), dtype=np.int32), self.num_classes)
            return jnp.where(task_B[:, None] == owner_Y, logits_BY, -jnp.inf)
