"""Choose which device trains on which tasks' images, and when that changes during a run.

`ImageTraining.prepare_on_mesh` plans the first layout; `VisionSession.rebalance` asks
`LayoutController` for later ones. The first plan balances batch sizes within device memory. It
changes when a task ends, when the number of devices changes, or when measured loads are uneven.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import jax

from jmoe.config import VisionTrainConfig, check
from jmoe.models.vision import SHARED_EXPERT
from jmoe.planning.elastic import DeviceMemory, TaskLayout, TaskLoad, plan_layout, size_text
from jmoe.training.tasks.experts import places_experts_by_task, task_slots

LEAST_GAIN = 1.05  # the speedup of a step that justifies compiling again
# bytes per parameter: a float32 weight with AdamW's moments, and its gradient
STATE_BYTES, GRADIENT_BYTES = 12, 4


def count_own_experts_by_task(config: VisionTrainConfig) -> dict[str, int]:
    """Return, for each task, how many experts only its path names, summed over
    task-routed layers.
    """
    named = [
        Counter(experts)
        for experts in zip(*(task.path for task in config.tasks.values()), strict=True)
    ]
    return {
        name: sum(count[expert] == 1 for count, expert in zip(named, task.path, strict=True))
        for name, task in config.tasks.items()
    }


def count_experts_without_task(config: VisionTrainConfig) -> int:
    """Return how many experts no task's path names, summed over task-routed layers."""
    always = {SHARED_EXPERT} if config.model.learn_paths else set()
    named = [
        always.union(experts)
        for experts in zip(*(task.path for task in config.tasks.values()), strict=True)
    ]
    return sum(config.model.num_experts - len(experts) for experts in named)


def device_bytes_per_expert(config: VisionTrainConfig) -> int:
    """Return the device bytes of one expert: weights, moments, gradient, and a copy in the compute
    dtype.
    """
    return config.model.parameters_per_expert * (
        STATE_BYTES + GRADIENT_BYTES + _cast_copy_bytes_per_element(config)
    )


def _cast_copy_bytes_per_element(config: VisionTrainConfig) -> int:
    """Return the bytes of a parameter's copy in the compute dtype; 0 if that is float32."""
    return 0 if config.compute_dtype == "float32" else 2  # a copy in the compute dtype


def bytes_per_device_without_task_experts(config: VisionTrainConfig, num_devices: int) -> int:
    """Return the bytes that every device needs for parameters other than task-routed experts, with
    their training state.

    With experts on tiers that are not placed by task, this includes their slots on the device.
    """
    model, mesh = config.model, config.mesh
    in_use_bytes = GRADIENT_BYTES + _cast_copy_bytes_per_element(config)
    routed = model.num_experts * len(model.expert_layers)
    dense = model.total_and_active_parameters()[0] - routed * model.parameters_per_expert
    parts = num_devices if config.comm.shard_dense else 1
    groups = mesh.expert_inter * max(1, mesh.expert_intra)
    experts = model.num_experts * model.num_moe_layers * device_bytes_per_expert(config) // groups
    if not config.tiers.all_on_device:
        whole = not places_experts_by_task(config, num_devices)
        experts = (
            model.num_experts * slot_bytes_per_expert(config, num_devices) // groups if whole else 0
        )
    return dense * in_use_bytes + -(-dense * STATE_BYTES // parts) + experts


def _num_layers_on_device(config: VisionTrainConfig) -> int:
    """Return the number of layers whose experts are on the device at the same time."""
    layers, tiers = len(config.model.expert_layers), config.tiers
    return layers if tiers.experts == "device" else min(tiers.device_layers, layers)


def slot_bytes_per_expert(config: VisionTrainConfig, num_devices: int) -> int:
    """Return the device bytes that one expert of each layer takes if experts are on tiers.

    These are float32 weights in the slots of all resident layers, and for one layer a copy in the
    compute dtype, a gradient, and the previous layer's gradient, which is still being copied out.
    With `tiers.update = "host"` the slots have the compute dtype, without a copy. On a mesh with
    replicas, the gradient exists before and after its sum over devices.
    """
    written = 2 if config.tiers.gradient_dtype == "bfloat16" else 4
    groups = config.mesh.expert_inter * max(1, config.mesh.expert_intra)
    gradients = GRADIENT_BYTES * (2 if num_devices > groups else 1) + written
    cast = _cast_copy_bytes_per_element(config)
    weights = 4 * _num_layers_on_device(config) + cast
    if config.tiers.update == "host":
        weights = (cast or 4) * _num_layers_on_device(config)
    return config.model.parameters_per_expert * (weights + gradients)


def _count_shared_and_own_slots(
    config: VisionTrainConfig, num_devices: int
) -> tuple[int, dict[str, int]]:
    """Return (slots per layer and device for experts that no single task owns, slots per layer for
    each task's own experts).
    """
    shared, own = 0, dict.fromkeys(config.tasks, 0)
    always = {SHARED_EXPERT} if config.model.learn_paths else set()
    for experts in zip(*(task.path for task in config.tasks.values()), strict=True):
        count = Counter(experts)
        several = always | {expert for expert, times in count.items() if times > 1}
        unnamed = config.model.num_experts - len(always | set(experts))
        shared = max(shared, len(several) + -(-unnamed // num_devices))
        for name, expert in zip(config.tasks, experts, strict=True):
            own[name] = max(own[name], int(expert not in several))
    return shared, own


def device_memory_and_bytes_by_task(
    config: VisionTrainConfig, num_devices: int
) -> tuple[DeviceMemory, dict[str, int]]:
    """Return (a device's memory and the bytes that all tasks share there, bytes of each task's own
    experts).

    Counts parameters with their gradients and optimizer state; for experts on tiers, only their
    part on the device. Task heads are left out, because the number of classes is unknown before
    images are read; so are activations. An expert that several tasks name counts on every device.
    """
    model, mesh = config.model, config.mesh
    # the number of devices over which the mesh splits experts, in every layout
    groups = mesh.expert_inter * max(1, mesh.expert_intra)
    device_bytes = config.machine.resolve_device_peaks().device_bytes or None
    if not config.tiers.all_on_device:
        shared, places = (
            bytes_per_device_without_task_experts(config, num_devices),
            dict.fromkeys(config.tasks, 0),
        )
        if places_experts_by_task(config, num_devices):
            shared_places, places = _count_shared_and_own_slots(config, num_devices)
            shared += shared_places * slot_bytes_per_expert(config, num_devices)
        own_bytes = {
            name: count * slot_bytes_per_expert(config, num_devices)
            for name, count in places.items()
        }
        return DeviceMemory(device_bytes, shared), own_bytes
    apart = groups == 1 and config.layout == "elastic"
    own, unnamed = count_own_experts_by_task(config), count_experts_without_task(config)
    everywhere = model.num_experts * len(model.task_layers)
    if apart:
        everywhere += -(-unnamed // num_devices) - unnamed - sum(own.values())
    one = device_bytes_per_expert(config)
    shared = bytes_per_device_without_task_experts(config, num_devices) + everywhere * one // groups
    own_bytes = {name: count * one if apart else 0 for name, count in own.items()}
    return DeviceMemory(device_bytes, shared), own_bytes


def plan_task_layout(
    config: VisionTrainConfig,
    num_devices: int,
    *,
    step: int = 0,
    image_s: Mapping[str, float] | None = None,
) -> TaskLayout:
    """Return the layout of `step` that balances the devices' loads within `machine.device_bytes`.

    image_s: seconds per image of each task; by default all images cost the same, since their sizes
    and the widths of all paths are equal. Raises ValueError if no layout fits, or if
    `gradient_accumulation_steps` does not divide the micro-batch.
    """
    memory, own_bytes = device_memory_and_bytes_by_task(config, num_devices)
    loads = tuple(
        TaskLoad(name, task.batch_size, image_s[name] if image_s else 1.0, own_bytes[name])
        for name, task in config.tasks.items()
    )
    active = [
        number for number, task in enumerate(config.tasks.values()) if task.is_trained_at(step)
    ]
    layout = plan_layout(
        [loads[number] for number in active], num_devices, mode=config.layout, memory=memory
    )
    parts, micro = config.gradient_accumulation_steps, layout.largest_micro_batch
    if micro % parts:
        raise ValueError(
            f"gradient_accumulation_steps = {parts}: must divide the {micro} images that a device"
            " takes at once"
        )
    shares = tuple(
        tuple(replace(share, task=active[share.task]) for share in own) for own in layout.shares
    )
    return replace(layout, tasks=loads, shares=shares)


def check_future_layouts(config: VisionTrainConfig, num_devices: int, step: int = 0) -> None:
    """Raise ValueError if the tasks that remain cannot be laid out at some step from `step` on, as
    other tasks end.
    """
    for start in sorted(
        {step, *(task.num_steps for task in config.tasks.values() if task.num_steps > step)}
    ):
        if start < config.num_steps:
            plan_task_layout(config, num_devices, step=start)


class LayoutController:
    """Decides the layout of each step; every process reaches the same decision."""

    def __init__(self, config: VisionTrainConfig, num_devices: int) -> None:
        check_future_layouts(config, num_devices)
        self._config = config
        self.num_devices = num_devices  # in use
        self._image_s: dict[str, float] | None = None  # measured; None: the batch sizes decide

    def layout_at_step(self, step: int) -> TaskLayout:
        """Return the layout of `step`."""
        return plan_task_layout(self._config, self.num_devices, step=step, image_s=self._image_s)

    def is_replan_due(self, step: int) -> bool:
        """Return whether to measure the seconds per image before this step
        (`elastic.replan_every_steps`).
        """
        every = self._config.elastic.replan_every_steps
        return bool(every) and step > 0 and step % every == 0

    def replan(self, step: int, image_s: Mapping[str, float]) -> str:
        """Choose the layout from `step` on by measured seconds per image of each task; return the
        reason as text.

        The layout changes only if loads are uneven and another layout is faster by `LEAST_GAIN`.
        """
        now = self.layout_at_step(step)
        known = {task.name: image_s.get(task.name, 1.0) for task in now.tasks}
        measured = replace(
            now, tasks=tuple(replace(task, image_s=known[task.name]) for task in now.tasks)
        )
        imbalance, limit = measured.imbalance, self._config.elastic.max_imbalance
        has = f"the busiest device has {imbalance:.2f} x the mean load"
        if imbalance <= limit:
            return f"{has}: the layout stays (elastic.max_imbalance = {limit:g})"
        new = plan_task_layout(self._config, self.num_devices, step=step, image_s=known)
        gain = max(measured.seconds_per_device) / max(new.seconds_per_device)
        if gain < LEAST_GAIN:
            return f"{has}: the layout stays, as no other is better"
        self._image_s = known
        return f"{has}: another layout makes its step {gain:.2f} x as fast"

    def set_num_devices(self, step: int, num_devices: int) -> None:
        """Use `num_devices` devices from `step` on.

        Raises ValueError unless the layout is elastic, experts stay on the devices, and the tasks
        fit on that many devices.
        """
        config, processes, most = self._config, jax.process_count(), jax.device_count()
        check(
            config.layout == "elastic",
            "layout",
            config.layout,
            "must be elastic for another number of devices",
        )
        tiers = config.tiers.experts, config.tiers.optimizer
        constraint = "must be device for another number of devices while the run goes on"
        check(config.tiers.all_on_device, "tiers", tiers, constraint)
        check(0 < num_devices <= most, "devices", num_devices, f"must be between 1 and {most}")
        check(
            num_devices % processes == 0,
            "devices",
            num_devices,
            f"must be a multiple of {processes} processes",
        )
        check_future_layouts(config, num_devices, step)
        self.num_devices = num_devices


def layout_plan_lines(config: VisionTrainConfig) -> list[str]:
    """Return the lines that `--plan` prints: each device's tasks, images and bytes on the devices
    that `mesh` names.

    Images are divided by load (layout = elastic), unless the mesh splits experts.
    """
    mesh = config.mesh
    groups = mesh.expert_inter * max(1, mesh.expert_intra)
    config = replace(config, layout="elastic") if groups == 1 else config
    layout = plan_task_layout(config, max(1, mesh.data) * groups)
    return [
        *layout.describe_lines(),
        *filter(None, [slots_line(config, layout), tiers_line(config)]),
    ]


def layout_notes(config: VisionTrainConfig, layout: TaskLayout) -> list[str]:
    """Return lines to print: the tasks and memory of each device.

    Empty if all devices do the same work, or the layout is not elastic.
    """
    if len(set(layout.shares)) == 1 or config.layout != "elastic":
        return []
    return [*layout.describe_lines(), *filter(None, [slots_line(config, layout)])]


def allocated_bytes_per_device(config: VisionTrainConfig, layout: TaskLayout) -> int:
    """Return the bytes that each device actually allocates: slots are sized by the device with the
    most experts in a layer.
    """
    slots = task_slots(config, layout)
    num_slots = config.model.num_experts if slots is None else slots.num_slots
    experts = num_slots * len(config.model.task_layers) * device_bytes_per_expert(config)
    if not config.tiers.all_on_device:
        experts = (
            0 if slots is None else num_slots * slot_bytes_per_expert(config, len(layout.shares))
        )
    return bytes_per_device_without_task_experts(config, len(layout.shares)) + experts


def tiers_line(config: VisionTrainConfig) -> str:
    """Return one line on which bytes of the experts are on the device and which on lower tiers; ""
    without tiers.
    """
    tiers, layers = config.tiers, len(config.model.expert_layers)
    if tiers.all_on_device:
        return ""
    parameters = config.model.num_experts * layers * config.model.parameters_per_expert
    gradient_bytes = 2 if tiers.gradient_dtype == "bfloat16" else 4
    kinds = {
        "weights": (4, tiers.experts),
        "moments": (8, tiers.optimizer),
        "gradients": (gradient_bytes, tiers.gradients),
    }
    below = ", ".join(
        f"{kind} {size_text(parameters * size)} ({tier})"
        for kind, (size, tier) in kinds.items()
        if tier != "device"
    )
    return (
        f"experts on tiers: a device has its part of {_num_layers_on_device(config)} of {layers}"
        f" layers at one time; for each replica of all experts: {below}"
    )


def slots_line(config: VisionTrainConfig, layout: TaskLayout) -> str:
    """Return one line on each device's slots and their bytes; "" if experts are not
    placed by task.
    """
    slots = task_slots(config, layout)
    if slots is None:
        return ""
    kept, limit = (
        allocated_bytes_per_device(config, layout),
        config.machine.resolve_device_peaks().device_bytes,
    )
    more = f", more than machine.device_bytes = {limit}" if 0 < limit < kept else ""
    layers = (
        len(config.model.task_layers)
        if config.tiers.all_on_device
        else _num_layers_on_device(config)
    )
    of = f"{slots.num_slots} of {slots.num_experts} experts in each of {layers} layers"
    return f"every device has room for {of}: {size_text(kept)} in all{more}"
