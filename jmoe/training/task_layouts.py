"""Which device runs which tasks of a run on images: by their batches, within the memory of a device."""

from collections import Counter

from jmoe.config import VisionTrainConfig
from jmoe.planning.elastic import DeviceMemory, Layout, TaskLoad, plan

STATE_BYTES, GRADIENT_BYTES = 12, 4  # of a parameter: float32 weight and AdamW's moments; its gradient


def own_experts(config: VisionTrainConfig) -> dict[str, int]:
    """Return how many experts each task has that no other task's path names, in all layers routed by task."""
    named = [Counter(experts) for experts in zip(*(task.path for task in config.tasks.values()), strict=True)]
    return {
        name: sum(count[expert] == 1 for count, expert in zip(named, task.path, strict=True))
        for name, task in config.tasks.items()
    }


def memory_of(config: VisionTrainConfig, num_devices: int) -> tuple[DeviceMemory, dict[str, int]]:
    """Return what a device has, and needs for what tasks share; and bytes of each task's own experts there.

    Counted are parameters with their gradients and optimizer state. A task's head is counted nowhere, since classes are
    not known before images are read, and activations are not.
    """
    model, mesh = config.model, config.mesh
    cast_bytes = 2 if config.compute_dtype == "bfloat16" else 0  # a copy in the dtype of use
    in_use_bytes = GRADIENT_BYTES + cast_bytes
    expert_bytes = model.expert_parameters * (STATE_BYTES + in_use_bytes)
    counts = own_experts(config)
    experts = model.num_experts * (model.num_moe_layers + len(model.task_layers))
    dense = model.num_parameters()[0] - experts * model.expert_parameters
    parts = num_devices if config.comm.shard_dense else 1
    groups = mesh.expert_inter * max(1, mesh.expert_intra)  # devices that divide the experts
    shared = dense * in_use_bytes + -(-dense * STATE_BYTES // parts)
    shared += (experts - sum(counts.values())) * expert_bytes // groups
    own = {name: count * expert_bytes // groups for name, count in counts.items()}
    return DeviceMemory(config.machine.device().device_bytes or None, shared), own


def layout_of(config: VisionTrainConfig, num_devices: int) -> Layout:
    """Return who runs which images, within `machine.device_bytes`.

    Every image costs the same: they have one size, and paths one width.
    """
    memory, own_bytes = memory_of(config, num_devices)
    tasks = [TaskLoad(name, task.batch_size, num_bytes=own_bytes[name]) for name, task in config.tasks.items()]
    layout = plan(tasks, num_devices, mode=config.layout, memory=memory)
    parts, micro = config.gradient_accumulation_steps, layout.micro_batch
    if micro % parts:
        raise ValueError(
            f"gradient_accumulation_steps = {parts}: must divide the {micro} images that a device takes at once"
        )
    return layout


def copies_line(config: VisionTrainConfig, layout: Layout) -> str:
    """Return what a device keeps in fact, where that is more than its own tasks need; "" where it is not."""
    every = layout.shared_bytes + sum(task.num_bytes for task in layout.tasks)
    if every == min(layout.num_bytes):
        return ""
    limit = config.machine.device().device_bytes
    more = f", more than machine.device_bytes = {limit}" if 0 < limit < every else ""
    kept = "every device also keeps copies of the experts of tasks that it does not run"
    return f"{kept}: {every / 1e6:,.2f} MB in all{more}"
