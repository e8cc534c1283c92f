"""The training step of image tasks with everything on the devices: one `shard_map` over the mesh,
from images to the updated state.

The layout says which images of which tasks each device has. Parameters are gathered once per step.
Each device sums the gradients of its own micro-batches, whose number depends on the layout, and the
sums are reduced once. Contrastive embeddings are computed in a forward pass of their own first
(`TaskLosses.contrastive_terms`). The streamed image trainer shares `ShardedVision` and the
functions at the head of this file.

Legend:
M micro-batches
B images of a micro-batch
Y outputs of all heads
C features of all embeddings
K classes of all tasks
A tasks
N layers of a kind
E experts
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath
from numpy.typing import NDArray

from jmoe.config import STACKS, VisionTrainConfig
from jmoe.data.image_batches import ImageBatch
from jmoe.layers.moe import ExpertParallel
from jmoe.memory.record_checkpoint import RecordCheckpoints
from jmoe.mesh import (
    ALL,
    BATCH,
    EXPERT,
    REPLICATED,
    is_expert,
    path_names,
    shapes_with_shardings,
    shardings,
    split_over,
)
from jmoe.models.functional import split_parameters
from jmoe.models.vision import PathNoise, VisionTransformer, draw_path_noise, likeliest_experts
from jmoe.offload.expert_state import ReadExperts
from jmoe.planning.elastic import TaskLayout
from jmoe.training.expert_packing import ROUNDS, time_call_s
from jmoe.training.gradient_reduction import reduce_gradients_local, squared_norms_local
from jmoe.training.sharded_model import ShardedModel
from jmoe.training.state import TrainState, read_missing_experts
from jmoe.training.tasks.experts import TaskSlots, task_experts_of, task_slots, with_task_experts
from jmoe.training.tasks.layouts import layout_notes
from jmoe.training.tasks.losses import ContrastiveTerms, Metrics, TaskLosses
from jmoe.training.update import (
    evaluation_program,
    finish_step,
    num_dropped_assignments,
    run_without_drops,
    sum_over_mesh,
)
from jmoe.types import PyTree

OF_TASKS = ("heads", "path_logits")  # subtrees of the parameters with one entry per task


def _params_and_moments(state: TrainState) -> tuple[PyTree, PyTree, PyTree]:
    return state.params, state.m, state.v


def active_tasks(config: VisionTrainConfig, layout: TaskLayout) -> list[str]:
    """Return the names of the tasks that some device runs in this layout, in
    configuration order.
    """
    active = {layout.tasks[share.task].name for shares in layout.shares for share in shares}
    return [name for name in config.tasks if name in active]


def ended_expert_mask(config: VisionTrainConfig, active: Sequence[str]) -> NDArray[np.bool_]:
    """Return bool [N, E] over task-routed layers: whether only ended tasks' paths name
    the expert.
    """
    paths = {name: np.array(task.path, np.int32) for name, task in config.tasks.items()}
    ended_NE = np.zeros((len(config.model.task_layers), config.model.num_experts), bool)
    for some, ended in ((paths.keys() - active, True), (active, False)):
        for name in some:
            ended_NE[np.arange(len(ended_NE)), paths[name]] = ended
    return ended_NE


def restore_ended_tasks(
    config: VisionTrainConfig,
    active: Sequence[str],
    states: tuple[TrainState, TrainState],
    ended: jax.Array,
) -> TrainState:
    """Return the new state, with the heads, paths and experts of ended tasks from the old one.

    active: names of the tasks that have not ended. states: (old, new). ended: bool [N, E] or [N,
    slots], the experts of task-routed layers to restore; empty if experts are not part of the
    state.
    """
    old, new = states
    if len(active) == len(config.tasks):
        return new

    def restored_leaf(path: KeyPath, was: jax.Array, now: jax.Array) -> jax.Array:
        names = path_names(path)
        if names[0] in OF_TASKS:
            return now if names[1] in active else was
        if names[0] == "task_layers" and is_expert(path):
            return jnp.where(ended.reshape(*ended.shape, *[1] * (now.ndim - 2)), was, now)
        return now

    trees = (
        jax.tree_util.tree_map_with_path(restored_leaf, *pair)
        for pair in zip(_params_and_moments(old), _params_and_moments(new), strict=True)
    )
    params, m, v = trees
    return dataclasses.replace(new, params=params, m=m, v=v)


def draw_step_paths(config: VisionTrainConfig, step: jax.Array) -> PathNoise | None:
    """Return the random numbers (`PathNoise`) with which a step samples the tasks' paths; None if
    paths are fixed.

    The draw depends only on the seed, the step and the numbers of tasks and layers, not on the
    layout.
    """
    paths = config.paths
    if not config.model.learn_paths:
        return None
    done = step.astype(jnp.float32) / config.num_steps
    temperature = paths.temperature * (paths.final_temperature / paths.temperature) ** done
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    return draw_path_noise(key, (len(config.tasks), len(config.model.task_layers)), temperature)


def task_paths(
    config: VisionTrainConfig, state: TrainState, mesh: Mesh
) -> dict[str, tuple[int, ...]]:
    """Return {task: its path}: its expert in each task-routed layer, learned or configured."""
    paths = {name: task.path for name, task in config.tasks.items()}
    if not config.model.learn_paths:
        return paths
    everywhere = NamedSharding(mesh, REPLICATED)
    logits = jax.jit(lambda tree: tree, out_shardings=everywhere)(state.params["path_logits"])
    return {
        name: likeliest_experts(path, logits[name].addressable_data(0))
        for name, path in paths.items()
    }


class ShardedVision(ShardedModel):
    """The vision transformer as a pure function of nested dicts of this device's parameter shards.

    slots: the placement of task-routed experts in training; None if each layer's experts are split
    as in a checkpoint.
    """

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        slots: TaskSlots | None = None,
    ) -> None:
        self._config, self.num_classes, self.slots = config, num_classes, slots
        super().__init__(config, mesh, {})
        self._saved_specs = self.specs
        if slots is not None:
            dims = jax.tree.map(self._saved_split_dim, task_experts_of(self.shapes))
            split = jax.tree.map(lambda dim: REPLICATED if dim < 0 else split_over(ALL, dim), dims)
            own = jax.tree.map(lambda _: split_over(ALL, 1), dims)
            self._saved_specs = with_task_experts(self.specs, split)
            self.specs = with_task_experts(self.specs, own)
            self._to_saved = self._conversion_program(slots.to_saved_local, dims, own, split)
            self._from_saved = self._conversion_program(slots.from_saved_local, dims, split, own)

    def _saved_split_dim(self, shape: jax.ShapeDtypeStruct) -> int:
        """Return the dimension of a stack of experts that devices split in a checkpoint; -1 if no
        dimension is divisible.
        """
        return next(
            (dim for dim in range(2, shape.ndim) if shape.shape[dim] % self.mesh.size == 0), -1
        )

    def build_model(self) -> VisionTransformer:
        """Return the model with random parameters; task-routed layers have as many experts as a
        device has slots.
        """
        return self._build_with_task_experts(0 if self.slots is None else self.slots.num_slots)

    def _build_with_task_experts(self, num_task_experts: int) -> VisionTransformer:
        """Return the model with random parameters and this number of experts in
        task-routed layers.
        """
        config = self._config
        parallel = ExpertParallel(self.mesh, EXPERT, exchange=config.comm.exchange)
        paths = [task.path for task in config.tasks.values()]
        sizes = {
            name: config.tasks[name].head_size(count) for name, count in self.num_classes.items()
        }
        rngs = nnx.Rngs(config.seed)
        return VisionTransformer(
            config.model, sizes, paths, parallel, task_experts=num_task_experts, rngs=rngs
        )

    # Conversion of task-routed experts between training's slots and a checkpoint

    def initial_saved_state(self) -> TrainState:
        """Return the state of step 0 in the layout of a checkpoint."""
        _, params, bias = split_parameters(self._build_with_task_experts(0))
        return TrainState.at_step_0(nnx.to_pure_dict(params), nnx.to_pure_dict(bias))

    def initial_state(self) -> TrainState:
        """Return the state of step 0 in the layout used by training."""
        return self.from_saved(self.initial_saved_state())

    @property
    def saved_shape(self) -> TrainState:
        """Shapes, dtypes and shardings of a checkpoint's state; the shapes are the same for every
        mesh and layout.
        """
        specs, specs_now = self._saved_specs, self.state_specs
        saved = TrainState(specs, specs, specs, specs_now.router_bias, specs_now.step)
        shape: TrainState = shapes_with_shardings(
            jax.eval_shape(self.initial_saved_state), shardings(saved, self.mesh)
        )
        return shape

    def to_saved(self, state: TrainState) -> TrainState:
        """Return `state` in the layout of a checkpoint, which is the same for every mesh."""
        return (
            state
            if self.slots is None
            else state.map_params_and_moments(partial(self._convert_task_experts, self._to_saved))
        )

    def from_saved(self, state: TrainState) -> TrainState:
        """Return a checkpoint's state in the layout used by training."""
        return (
            state
            if self.slots is None
            else state.map_params_and_moments(partial(self._convert_task_experts, self._from_saved))
        )

    @staticmethod
    def _convert_task_experts(program: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
        """Return `tree` with `program` applied to the experts of its task-routed layers."""
        return with_task_experts(tree, program(task_experts_of(tree)))

    def _conversion_program(
        self,
        move: Callable[[jax.Array, int], jax.Array],
        dims: PyTree,
        in_specs: PyTree,
        out_specs: PyTree,
    ) -> PyTree:
        """Return the program that applies `move` to each array of task-routed experts. dims: the
        dimension split in a checkpoint, per array.
        """
        body = lambda experts: jax.tree.map(move, experts, dims)  # noqa: E731
        program = jax.shard_map(
            body, mesh=self.mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=False
        )
        return jax.jit(program, out_shardings=shardings(out_specs, self.mesh))

    def gather_all_params(self, params: PyTree) -> PyTree:
        """Return all parameters in their compute dtype: experts as this device holds them, all
        others unsharded.
        """
        with jax.named_scope("gather"):
            outside = self.gather_params(
                {name: tree for name, tree in params.items() if name not in STACKS.values()}
            )
            stacks = {name: tree for name, tree in params.items() if name in STACKS.values()}
            return outside | {
                name: jax.vmap(self.gather_params)(tree) for name, tree in stacks.items()
            }


class VisionTrainer:
    """The `Trainer` of image runs with everything on the devices. `step` is one compiled program
    and donates its state.
    """

    evaluation_batches = 1
    records: RecordCheckpoints | None = None
    progress_counters: Callable[[], object] | None = None

    def __init__(
        self,
        config: VisionTrainConfig,
        num_classes: Mapping[str, int],
        mesh: Mesh,
        layout: TaskLayout,
    ) -> None:
        self.config, self.layout = config, layout
        self.slots = task_slots(config, layout)
        self.model = model = ShardedVision(config, num_classes, mesh, self.slots)
        everywhere = (tuple(range(mesh.size)),) * len(config.tasks)
        # for each task, the devices that can evaluate it
        self.homes = everywhere if self.slots is None else self.slots.homes
        self.saved_shape = self.full_shape = model.saved_shape
        self.state_shape, self.prepare_state_for_save = model.state_shape, model.to_saved
        self.losses = TaskLosses(config, num_classes, mesh.size, active_tasks(config, layout))
        self.is_contrastive = self.losses.is_contrastive
        self.micro_batch = layout.largest_micro_batch // config.gradient_accumulation_steps
        self.init = jax.jit(model.initial_state, out_shardings=shardings(model.state_specs, mesh))
        state = model.state_specs
        sharded = partial(jax.shard_map, mesh=mesh, check_vma=False)

        def step(state_now: TrainState, batch: ImageBatch, full_capacity: bool = False) -> PyTree:
            body = partial(self._step_local, full_capacity=full_capacity)
            return sharded(body, in_specs=(state, BATCH), out_specs=(state, REPLICATED))(
                state_now, batch
            )

        self.step = jax.jit(step, static_argnames="full_capacity", donate_argnums=0)
        self._evaluate = evaluation_program(
            sharded, self._evaluation_sums_local, state, BATCH, REPLICATED
        )
        self._class_sums = evaluation_program(sharded, self._class_sums_local, state, BATCH)

    @property
    def notes(self) -> list[str]:
        """Lines to print: the tasks and memory of each device; empty unless an elastic layout gives
        devices different work.
        """
        return layout_notes(self.config, self.layout)

    def with_layout(self, mesh: Mesh, layout: TaskLayout) -> "VisionTrainer":
        """Return a trainer of the same run with another layout, on `mesh`. The caller moves the
        state.
        """
        return VisionTrainer(self.config, self.model.num_classes, mesh, layout)

    # A step

    def _step_local(
        self, state: TrainState, batch: ImageBatch, *, full_capacity: bool
    ) -> tuple[TrainState, PyTree]:
        """Return (new state, metrics); the state is unchanged if the loss or gradient is not
        finite, or a dropless buffer overflows.
        """
        grads, metrics = self.gradients_local(state, batch, full_capacity=full_capacity)
        num_devices = self.model.mesh.size
        with jax.named_scope("reduce_gradients"):
            grads, squares = self._reduce_with_norms_local(grads)
            metrics = sum_over_mesh(num_devices, metrics)
        squares = sum_over_mesh(num_devices, squares)
        new, metrics = finish_step(self.config, state, grads, squares, metrics)
        return self._restore_ended_tasks(state, new), metrics

    def _reduce_with_norms_local(self, grads: PyTree) -> tuple[PyTree, dict[str, jax.Array]]:
        """Return (gradients summed over the devices that hold each parameter, this device's addends
        to their squared norms).
        """
        if self.slots is None:
            grads = reduce_gradients_local(grads, self.model)
            return grads, squared_norms_local(grads, self.model)
        with jax.named_scope("experts_of_tasks"):
            experts = self.slots.reduce_experts_local(task_experts_of(grads))
        rest = reduce_gradients_local(with_task_experts(grads, {}), self.model)
        squares = squared_norms_local(rest, self.model)
        squares |= {"task_layers": squares["task_layers"] + self.slots.squared_norms_local(experts)}
        return with_task_experts(rest, experts), squares

    def _restore_ended_tasks(self, old: TrainState, new: TrainState) -> TrainState:
        """Return `new`, with the heads and paths of ended tasks, and the experts that only these
        tasks name, from `old`.
        """
        ended_NE = ended_expert_mask(self.config, self.losses.active)
        if self.slots is not None:
            of_slot = np.maximum(self.slots.experts_RNS, 0)
            ended_RNS = ended_NE[np.arange(len(ended_NE))[:, None], of_slot] & (
                self.slots.experts_RNS >= 0
            )
        ended = (
            jnp.asarray(ended_NE) if self.slots is None else self.slots.device_row_local(ended_RNS)
        )
        return restore_ended_tasks(self.config, self.losses.active, (old, new), ended)

    def gradients_local(
        self, state: TrainState, batch: ImageBatch, *, full_capacity: bool
    ) -> tuple[PyTree, Metrics]:
        """Return this device's addends to (gradients, metrics), summed over its own micro-batches.

        The gradients of sharded parameters are reduced onto their shards already.
        """
        gathered, scatter = jax.vjp(self.model.gather_all_params, state.params)
        draw = draw_step_paths(self.config, state.step)
        contrast = self._contrastive_terms(
            gathered, state, batch, draw, full_capacity=full_capacity
        )
        loss_and_gradients = jax.value_and_grad(
            partial(self.loss_local, full_capacity=full_capacity), has_aux=True
        )

        def micro_batch_gradients(index: jax.Array | int) -> tuple[PyTree, Metrics]:
            (_, metrics), grads = loss_and_gradients(
                gathered,
                state.router_bias,
                _take_micro_batch(batch, index),
                draw,
                _contrastive_terms_of_micro_batch(contrast, index),
            )
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), metrics

        counts = [images // self.micro_batch for images in self.layout.images_per_device]
        if max(counts) == 1:
            grads, metrics = micro_batch_gradients(0)
        else:
            zeros = jax.tree.map(
                lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(micro_batch_gradients, 0)
            )
            # Trip counts may differ between devices: the loop's body holds no collective then.
            own = _own_entry_local(counts)
            grads, metrics = lax.fori_loop(
                0, own, lambda i, sums: jax.tree.map(jnp.add, sums, micro_batch_gradients(i)), zeros
            )
        (reduced,) = scatter(jax.tree.map(lambda g, w: g.astype(w.dtype), grads, gathered))
        return reduced, metrics

    def _contrastive_terms(
        self,
        params: PyTree,
        state: TrainState,
        batch: ImageBatch,
        draw: PathNoise | None,
        *,
        full_capacity: bool,
    ) -> ContrastiveTerms | None:
        """Return this device's contrastive-loss terms; None if no active task is contrastive."""
        shares = self.layout.shares
        compares = [any(self.is_contrastive[share.task] for share in own) for own in shares]
        if not any(compares):
            return None
        options = {"train": True, "full_capacity": full_capacity, "draw": draw}
        if self.config.layout == "even":
            # The forward pass may exchange tokens between devices, so all devices take part.
            compares = [True] * len(compares)
        counts = [
            compares[d] * images // self.micro_batch
            for d, images in enumerate(self.layout.images_per_device)
        ]

        def embed_micro_batch(index: jax.Array | int, z_MBC: jax.Array) -> jax.Array:
            logits_BY, _ = self._logits_and_stats_local(
                params, state.router_bias, _take_micro_batch(batch, index), **options
            )
            return z_MBC.at[index].set(self.losses.embeddings(logits_BY))

        with jax.named_scope("contrast"):
            zeros = jnp.zeros(
                (*batch.label[0].shape, self.losses.total_embedding_size), jnp.float32
            )
            z_MBC = lax.fori_loop(0, _own_entry_local(counts), embed_micro_batch, zeros)
            return self.losses.contrastive_terms(z_MBC, jax.tree.map(lambda a: a[0], batch))

    def loss_local(
        self,
        params: PyTree,
        router_bias: PyTree,
        batch: ImageBatch,
        draw: PathNoise | None,
        contrast: ContrastiveTerms | None,
        *,
        full_capacity: bool,
    ) -> tuple[jax.Array, Metrics]:
        """Return (this device's addend to the loss, its terms as metrics) for one micro-batch.
        contrast: see `TaskLosses.loss`.
        """
        config = self.config
        options = {
            "train": True,
            "full_capacity": full_capacity,
            "remat": config.remat,
            "draw": draw,
        }
        logits_BY, stats = self._logits_and_stats_local(params, router_bias, batch, **options)
        loss, metrics = self.losses.loss(logits_BY, batch, contrast)
        if stats is None:
            return loss, metrics
        z = self.losses.weighted_z_loss(stats.z_sum)
        metrics |= {
            "balance_loss": jnp.zeros((), jnp.float32),
            "z_loss": z,
            "counts": stats.counts_E,
            "entropy": stats.entropy_sum / self.losses.patches_per_step,
            "dropped": stats.dropped,
        }
        return loss + z, lax.stop_gradient(metrics)

    def _logits_and_stats_local(
        self, params: PyTree, router_bias: PyTree, batch: ImageBatch, **options: PyTree
    ) -> PyTree:
        """Return (logits [B, Y], statistics of the MoE layers) of this device's images."""
        pixels = batch.pixels.astype(jnp.float32) / 255.0
        options |= {} if self.slots is None else {"slot_NE": self.slots.expert_slots_local()}
        return self.model.model_with_params(params, router_bias)(
            pixels, batch.task, dtype=self.model.dtype, **options
        )

    # Measuring

    def measure_seconds_per_image(
        self, state: TrainState, samples: Sequence[ImageBatch]
    ) -> list[float]:
        """Return the measured seconds per image of each sample on this process's devices.

        Times the forward and backward pass without the step's collectives; the median of several
        rounds. samples: one per task, arrays [devices, 1, images, ...]. Every process must call
        this.
        """
        spec = self.model.state_specs
        sharded = partial(jax.shard_map, mesh=self.model.mesh, check_vma=False)

        def gather_params_local(state: TrainState) -> PyTree:
            return jax.tree.map(lambda a: a[None], self.model.gather_all_params(state.params))

        def gradients_local(params: PyTree, router_bias: PyTree, batch: ImageBatch) -> jax.Array:
            own, part = jax.tree.map(lambda a: a[0], params), jax.tree.map(lambda a: a[0, 0], batch)
            loss = partial(self.loss_local, full_capacity=False)
            draw = draw_step_paths(self.config, jnp.int32(0))
            contrast = (
                self._placeholder_contrast(own, router_bias, part, draw)
                if self.is_contrastive.any()
                else None
            )
            grads, _ = jax.grad(loss, has_aux=True)(own, router_bias, part, draw, contrast)
            return jnp.stack(
                [jnp.square(g.astype(jnp.float32)).sum() for g in jax.tree.leaves(grads)]
            ).sum()[None]

        params = jax.jit(sharded(gather_params_local, in_specs=(spec,), out_specs=BATCH))(state)
        in_specs = (BATCH, spec.router_bias, BATCH)
        program = jax.jit(sharded(gradients_local, in_specs=in_specs, out_specs=BATCH))
        # Samples alternate, so that a passing slowdown of the machine affects all of them.
        rounds = [
            [time_call_s(program, params, state.router_bias, part) for part in samples]
            for _ in range(1 + ROUNDS)
        ]
        sizes = [part.label.shape[2] for part in samples]
        seconds = np.median(rounds[1:], axis=0) / sizes  # the first round compiles
        return [float(value) for value in seconds]

    def _placeholder_contrast(
        self, params: PyTree, router_bias: PyTree, batch: ImageBatch, draw: PathNoise | None
    ) -> ContrastiveTerms:
        """Return placeholder contrastive terms for timing; the embeddings are computed at the same
        cost as in a step.
        """

        def embed_images() -> jax.Array:
            return self.losses.embeddings(
                self._logits_and_stats_local(params, router_bias, batch, train=True, draw=draw)[0]
            )

        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(embed_images))
        z_BC = lax.cond(
            jnp.asarray(self.is_contrastive)[batch.task[0]], embed_images, lambda: nothing
        )
        return ContrastiveTerms(lax.stop_gradient(z_BC), batch.weight, batch.weight)

    # Without gradients

    def _class_sums_local(
        self, state: TrainState, batch: ImageBatch, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return ([K, C] sums of each class's embeddings, dropped assignments), both over all
        devices.
        """
        part = _take_micro_batch(batch, 0)
        params = self.model.gather_all_params(state.params)
        logits_BY, stats = self._logits_and_stats_local(
            params, state.router_bias, part, full_capacity=full_capacity
        )
        return lax.psum(
            self.losses.class_embedding_sums(logits_BY, part), ALL
        ), num_dropped_assignments(stats)

    def class_mean_embeddings(self, state: TrainState, batches: Iterable[PyTree]) -> jax.Array:
        """Return [K, C], for each class of contrastive tasks a vector in the direction of its mean
        embedding.

        batches: training images of these tasks. Pass the result to `evaluate_batches`.
        """
        sums = np.zeros(self.losses.class_means_shape, np.float32)
        for batch in batches:
            sums += np.asarray(run_without_drops(partial(self._class_sums, state, batch)))
        return jnp.asarray(sums)

    def _evaluation_sums_local(
        self, state: TrainState, batch: ImageBatch, means_KC: jax.Array, *, full_capacity: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Return ([3, A] as of `evaluate_batches`, dropped assignments), both over all devices."""
        part = _take_micro_batch(batch, 0)
        params = self.model.gather_all_params(state.params)
        logits_BY, stats = self._logits_and_stats_local(
            params, state.router_bias, part, full_capacity=full_capacity
        )
        return lax.psum(
            self.losses.evaluation_sums(logits_BY, part, means_KC), ALL
        ), num_dropped_assignments(stats)

    def evaluate_batches(
        self, state: TrainState, batches: Sequence[PyTree], class_means: jax.Array | None = None
    ) -> list[jax.Array]:
        """Return float32 [3, A] for each batch: per task, the summed negative log-likelihood in
        nats, correct images, and images.

        class_means: from `class_mean_embeddings`; an image of a contrastive task is classified by
        the most similar mean.
        """
        means = self.class_mean_embeddings(state, []) if class_means is None else class_means
        return [
            run_without_drops(partial(self._evaluate, state, batch, means)) for batch in batches
        ]

    def task_paths(self, state: TrainState) -> dict[str, tuple[int, ...]]:
        """Return {task: its path}: its expert in each task-routed layer, learned or configured."""
        return task_paths(self.config, state, self.model.mesh)

    # Checkpoints

    def restore_state(
        self,
        saved: TrainState,
        weights: ReadExperts | None = None,
        moments: ReadExperts | None = None,
    ) -> TrainState:
        """Return the training state for a checkpoint's state, and free the arrays of `saved` that
        the two do not share.

        weights, moments: functions that read the experts that `saved` lacks; None if it has them.
        """
        layers = self.config.model.expert_layers
        saved = read_missing_experts(saved, self.saved_shape, layers, weights, moments)
        state = self.model.from_saved(saved)
        if self.slots is not None:
            for tree in (saved.params, saved.m, saved.v):
                jax.tree.map(lambda w: w.delete(), task_experts_of(tree))
        return state

    def expert_stats(self) -> None:
        """Return None: no expert moves between tiers."""

    def close(self) -> None:
        """Do nothing: this trainer has no threads."""


def _take_micro_batch(batch: ImageBatch, index: jax.Array | int) -> ImageBatch:
    """Return micro-batch number `index` of this device, without the device dimension."""
    part: ImageBatch = jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(a[0], index, 0, keepdims=False), batch
    )
    return part


def _contrastive_terms_of_micro_batch(
    contrast: ContrastiveTerms | None, index: jax.Array | int
) -> ContrastiveTerms | None:
    """Return the terms of micro-batch number `index`; None for None."""
    part: ContrastiveTerms | None = jax.tree.map(
        lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), contrast
    )
    return part


def _own_entry_local(values: Sequence[int]) -> PyTree:
    """Return this device's entry of `values`: a Python number if all are equal, else a traced
    scalar.
    """
    return (
        values[0] if len(set(values)) == 1 else jnp.asarray(values, jnp.int32)[lax.axis_index(ALL)]
    )
