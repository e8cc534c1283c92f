"""Axis names of the device mesh, and the partition specs of parameters and batches.

The mesh is (replica, data, expert_inter, expert_intra). Tokens are sharded over all four axes.
Experts are sharded over the last two: expert_inter spans nodes, expert_intra the devices of a node.
Over the data axis experts are replicated, or each expert's arrays are split. Dense parameters are
sharded over the last three axes (ZeRO-3) or replicated. Over the replica axis (`mesh.replicate`)
all parameters are replicated, except an embedding table that devices split in use.
"""

import hashlib
import socket
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jmoe.config import STACKS
from jmoe.types import PyTree

REPLICA = "replica"
DATA = "data"
EXPERT_INTER = "expert_inter"
EXPERT_INTRA = "expert_intra"
EXPERT = (EXPERT_INTER, EXPERT_INTRA)
SHARDS = (DATA, EXPERT_INTER, EXPERT_INTRA)  # the devices that split the parameters of a replica
ALL = (REPLICA, *SHARDS)
EXPERT_COPIES = (REPLICA, DATA)  # the devices whose experts are the same
PROCESS = "process"  # the axis of `process_mesh`

REPLICATED = PartitionSpec()
BATCH = PartitionSpec(ALL)  # first dimension sharded over all devices
HEADS = PartitionSpec(None, ALL)  # second dimension (heads of a cache) sharded over all devices
BY_PROCESS = PartitionSpec(PROCESS)
ACCUMULATED_BATCH = PartitionSpec(None, ALL)  # [accumulation steps, batch, ...]

EXPERTS_PATH = "experts"  # parameters below a node of this name have one slice per expert


def make_mesh(
    shape: tuple[int, int, int],
    devices: Sequence[jax.Device] | None = None,
    *,
    replicas: int = 1,
) -> Mesh:
    """Return a mesh of `shape` = (data, expert_inter, expert_intra); expert_intra varies fastest
    over `devices`. replicas: the size of the replica axis, which is a part of `shape`'s data.

    By default devices are ordered by process. A process then holds contiguous rows of the batch,
    and an expert_intra group stays inside a node if its size divides the node's devices.
    """
    devices = (
        sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        if devices is None
        else list(devices)
    )
    sizes = (replicas, shape[0] // replicas, *shape[1:])
    return Mesh(np.asarray(devices).reshape(sizes), ALL, axis_types=(AxisType.Auto,) * 4)


def mesh_shape(mesh: Mesh) -> tuple[int, int, int]:
    """Return the shape (data, expert_inter, expert_intra) for which `make_mesh` made a mesh."""
    return num_expert_copies(mesh), mesh.shape[EXPERT_INTER], mesh.shape[EXPERT_INTRA]


def num_expert_copies(mesh: Mesh) -> int:
    """Return the number of devices that have the same experts."""
    return mesh.shape[REPLICA] * mesh.shape[DATA]


def num_shards(mesh: Mesh) -> int:
    """Return the number of devices that split the parameters of a replica."""
    return mesh.size // mesh.shape[REPLICA]


def first_devices(num_devices: int) -> list[jax.Device]:
    """Return the first `num_devices` devices, with the same number of each process."""
    each = num_devices // jax.process_count()
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    taken = [
        [d for d in devices if d.process_index == process][:each]
        for process in range(jax.process_count())
    ]
    return [device for own in taken for device in own]


def expert_mesh(num_devices: int, num_nodes: int = 1) -> Mesh:
    """Return a mesh of `num_devices` devices, each with its own experts: shape (1, num_nodes,
    num_devices / num_nodes).

    Raises `ValueError` if there are too few devices, or if several processes would not use all of
    theirs.
    """
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    limit = f"must be at most the {len(devices)} of this process{cpu_devices_hint(num_devices)}"
    if jax.process_count() > 1:
        limit = f"must be all {len(devices)} of the {jax.process_count()} processes"
    fits = num_devices == len(devices) or (jax.process_count() == 1 and num_devices < len(devices))
    if not fits:
        raise ValueError(f"mesh.devices = {num_devices}: {limit}")
    return make_mesh((1, num_nodes, num_devices // num_nodes), devices[:num_devices])


def cpu_devices_hint(num_devices: int) -> str:
    """Return the end of an error message that says how to get `num_devices` CPU devices; "" if the
    default backend is no CPU.
    """
    if jax.default_backend() != "cpu":
        return ""
    return f"; JAX_NUM_CPU_DEVICES={num_devices} makes as many of a CPU"


def process_mesh() -> Mesh:
    """Return a mesh with one device of each process, ordered by process index."""
    first = {d.process_index: d for d in sorted(jax.devices(), key=lambda d: -d.id)}
    return Mesh(
        np.asarray([first[process] for process in sorted(first)]),
        (PROCESS,),
        axis_types=(AxisType.Auto,),
    )


def device_counts_of_hosts() -> list[int]:
    """Return the number of devices on each host, in descending order. Collective: every process
    must call this.
    """
    name = np.frombuffer(hashlib.sha256(socket.gethostname().encode()).digest()[:8], np.uint32)
    told = np.asarray([*name, jax.local_device_count()], np.uint32)
    of_processes = multihost_utils.process_allgather(told).reshape(-1, told.size)
    hosts = np.unique(of_processes[:, :-1], axis=0, return_inverse=True)[1].reshape(-1)
    return sorted(np.bincount(hosts, of_processes[:, -1]).astype(int).tolist(), reverse=True)


def hierarchy(
    mesh: Mesh, hierarchical: bool, *, packed: bool = False
) -> tuple[tuple[str, ...], ...]:
    """Return the axes of each level of a collective over all devices: (across nodes, inside a
    node), or one level with all axes.

    packed: expert packing made replicas of nodes that shared the experts before, so that the data
    axis crosses nodes.
    """
    if hierarchical and (packed or mesh.shape[EXPERT_INTER] > 1) and mesh.shape[EXPERT_INTRA] > 1:
        return (REPLICA, DATA, EXPERT_INTER), (EXPERT_INTRA,)
    return (ALL,)


def inside_replicas(hierarchy: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Return the levels of a `hierarchy` without the replica axis, for collectives of a replica's
    devices.
    """
    return tuple(tuple(axis for axis in axes if axis != REPLICA) for axes in hierarchy)


def path_names(path: KeyPath) -> tuple[str, ...]:
    """Return the key names along a pytree path."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def num_stack_dims(path: KeyPath) -> int:
    """Return how many leading layer dimensions the parameter at `path` has."""
    return sum(name in STACKS.values() for name in path_names(path))


def is_expert(path: KeyPath) -> bool:
    """Return whether the parameter at `path` belongs to a layer's routed experts."""
    return EXPERTS_PATH in path_names(path)


def shard_dim(
    path: KeyPath,
    shape: tuple[int, ...],
    num_devices: int,
    shard_dense: bool,
    fuse_dense: bool = False,
) -> int:
    """Return the dimension in which a dense parameter is sharded over the devices of a replica, or
    -1 if it is not sharded.

    shard_dense: shard dense parameters (ZeRO-3). fuse_dense: also shard norms and biases, which
    share collectives with other parameters.
    """
    if not shard_dense or num_devices == 1 or is_expert(path):
        return -1
    stacked = num_stack_dims(path)
    # norms and biases are not worth a collective each
    if not fuse_dense and len(shape) - stacked < 2:
        return -1
    return next((i for i in range(stacked, len(shape)) if shape[i] % num_devices == 0), -1)


def expert_shard_dim(path: KeyPath, shape: tuple[int, ...], num_replicas: int) -> int:
    """Return the dimension in which an array of experts is split over the replicas of its experts
    (the data axis): the first one, after the experts', that `num_replicas` divides. -1 if there is
    none, or if the parameter is not of experts.
    """
    if num_replicas == 1 or not is_expert(path):
        return -1
    after_experts = range(num_stack_dims(path) + 1, len(shape))
    return next((i for i in after_experts if shape[i] % num_replicas == 0), -1)


def expert_spec(path: KeyPath, shape: tuple[int, ...], num_replicas: int = 1) -> PartitionSpec:
    """Return the partition spec of an array of experts. num_replicas: over how many replicas each
    array is split; 1: every replica has it whole.
    """
    stack, dim = [None] * num_stack_dims(path), expert_shard_dim(path, shape, num_replicas)
    if dim < 0:
        return PartitionSpec(*stack, EXPERT)
    return PartitionSpec(*stack, EXPERT, *[None] * (dim - len(stack) - 1), DATA)


def param_specs(
    params: PyTree,
    mesh: Mesh,
    shard_dense: bool,
    fuse_dense: bool = False,
    *,
    shard_experts: bool = False,
) -> PyTree:
    """Return the partition spec of every leaf of `params` (arrays or shapes), of its gradient and
    of its optimizer state.

    shard_dense, fuse_dense: see `shard_dim`. shard_experts: split each array of experts over the
    data axis too (`expert_shard_dim`).
    """
    replicas = mesh.shape[DATA] if shard_experts else 1

    def spec(path: KeyPath, x: jax.Array) -> PartitionSpec:
        if is_expert(path):
            return expert_spec(path, x.shape, replicas)
        dim = shard_dim(path, x.shape, num_shards(mesh), shard_dense, fuse_dense)
        return REPLICATED if dim < 0 else PartitionSpec(*[None] * dim, SHARDS)

    return jax.tree_util.tree_map_with_path(spec, params)


def shardings(specs: PyTree, mesh: Mesh) -> PyTree:
    """Return a pytree of `NamedSharding`s for a pytree of partition specs."""
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def shapes_with_shardings(shapes: PyTree, placements: PyTree) -> PyTree:
    """Return the `ShapeDtypeStruct`s of arrays with `placements`, a pytree of shardings like
    `shapes`.
    """
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        placements,
    )


def split_over(axes: tuple[str, ...], dim: int = 0) -> PartitionSpec:
    """Return the spec of an array sharded over `axes` in dimension `dim`. `axes` may be of a mesh
    with other axis names.
    """
    return PartitionSpec(*[None] * dim, axes) if axes else REPLICATED


def shard_array(
    value: jax.Array, mesh: Mesh, axes: Sequence[str | tuple[str, ...] | None]
) -> jax.Array:
    """Return an array or tracer with dimension i sharded over `axes[i]` of the mesh; None leaves a
    dimension unsharded.
    """
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    if not isinstance(value, jax.core.Tracer):
        return jax.device_put(value, sharding)
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jax.sharding.reshard(value, sharding)
    # a sharding constraint that also holds under `vmap`
    return jax.jit(lambda x: x, out_shardings=sharding)(value)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """Return the same mesh with all axes of type Auto, so that the compiler chooses shardings and
    array types do not show them.
    """
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def find_explicit_mesh(*trees: PyTree) -> AbstractMesh | None:
    """Return the mesh with Explicit axes of the current context, or of the type of an array in
    `trees`; None if all axes are Auto.
    """
    meshes = (jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(trees))
    context = jax.sharding.get_abstract_mesh()
    return next((mesh for mesh in (context, *meshes) if AxisType.Explicit in mesh.axis_types), None)


def under_auto_axes(
    run: Callable[..., tuple[jax.Array, PyTree]], mesh: AbstractMesh
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Return `run` wrapped for arrays on a mesh with Explicit axes; inside `run` the axes are Auto.

    run(state, x, ...) -> (y of x's shape, rest): y gets the sharding of x, and rest is replicated.
    """

    def call_with_auto_axes(state: PyTree, x: jax.Array, *rest: PyTree) -> tuple[jax.Array, PyTree]:
        out = NamedSharding(mesh, jax.typeof(x).sharding.spec), NamedSharding(mesh, REPLICATED)
        return jax.sharding.auto_axes(run, out_sharding=out)(state, x, *rest)

    return call_with_auto_axes


def put_sharded(values: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return an array sharded by `spec`. Every process passes the whole `values`; no communication
    takes place.
    """
    return jax.make_array_from_callback(
        values.shape, NamedSharding(mesh, spec), lambda index: values[index]
    )
