"""Bytes of the state of experts and dense layers, from which a training plan adds up its rows."""

from collections.abc import Iterator

from jmoe.config.tiers import Tier
from jmoe.planning.training_sizes import WEIGHT_BYTES, StatePlacement, TrainingSizes

SAVED_AT_ONCE = 8  # expert records of each kind that are copied to host memory at a time


def nvme_bytes_per_parameter(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes on the tier nvme per expert parameter."""
    kinds = (
        (place.experts, 4),
        (place.optimizer, 8),
        (place.gradients, model.gradient_bytes_per_parameter),
    )
    return sum(size for tier, size in kinds if tier == "nvme") if place.is_streamed else 0


def save_copy_bytes(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes of host memory that a save needs per device: a copy of its arrays, and a few
    expert records at a time if experts are streamed.
    """
    dense_bytes, expert_bytes = saved_bytes_per_parameter(model)
    experts = (
        SAVED_AT_ONCE * model.parameters_per_expert
        if place.is_streamed
        else model.num_device_expert_parameters // model.num_expert_shards
    )
    return int(dense_bytes * model.dense_parameters) // model.num_dense_shards + int(
        expert_bytes * experts
    )


def saved_bytes_per_parameter(model: TrainingSizes) -> tuple[float, float]:
    """Return the bytes in a checkpoint per parameter outside of experts, and of experts: the weight
    and its moments.
    """
    return WEIGHT_BYTES + model.dense_moment_bytes, WEIGHT_BYTES + model.expert_moment_bytes


def summed_gradient_bytes_per_parameter(model: TrainingSizes, place: StatePlacement) -> int:
    """Return the bytes per parameter of the gradients summed over earlier micro-batches; 0 with one
    micro-batch or with streamed experts.
    """
    return WEIGHT_BYTES if model.micro_batches > 1 and not place.is_streamed else 0


def resident_expert_rows(
    model: TrainingSizes, summed_bytes_per_parameter: int, cast_bytes: int
) -> Iterator[tuple[Tier, str, int]]:
    """Yield the rows of experts that are all on the device. cast_bytes: of a layer's weights and
    gradients in the compute dtype, if layers are cast one by one.
    """
    sharded = model.num_device_expert_parameters // model.num_expert_shards
    yield "device", "experts: weights", 4 * sharded
    yield "device", "experts: moments", int(model.expert_moment_bytes * sharded)
    gradient_bytes = summed_bytes_per_parameter + (
        model.compute_dtype_bytes if model.casts_all_experts_at_once else WEIGHT_BYTES
    )
    yield "device", "experts: gradients", gradient_bytes * sharded
    yield "device", "experts: in use", cast_bytes + _unsharded_expert_bytes(model)
    if model.expert_sharding == "optimizer":
        kept = model.compute_dtype_bytes * model.num_device_expert_parameters
        yield "device", "experts: weights gathered for a step", kept
    if model.expert_sharding == "weights" and model.num_expert_shards > 1:
        # `LayerBuffers.flatten_stack` casts the shards of all layers before the first gather
        rows_bytes = model.compute_dtype_bytes * sharded
        yield "device", "experts: shards in the dtype in which they are gathered", rows_bytes
    if model.casts_all_experts_at_once:
        copied = model.num_device_expert_parameters + (
            model.dense_parameters if model.num_all_devices == 1 else 0
        )
        yield "device", "weights in the products' dtype", model.compute_dtype_bytes * copied


def _unsharded_expert_bytes(model: TrainingSizes) -> int:
    """Return the bytes in use if replicas split their experts: float32 gradients of two layers, the
    current one and the one whose gradients are being reduced, and the next layer's weights beside
    the current one's.
    """
    if model.num_expert_shards == 1:
        return 0
    layer = model.num_device_expert_parameters // model.num_layers
    return (2 * WEIGHT_BYTES + 2 * model.compute_dtype_bytes) * layer
