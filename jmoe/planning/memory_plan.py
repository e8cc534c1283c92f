"""Memory plan of serving: which tier (device, host memory, NVMe) holds experts, other weights and
the KV cache. Pure functions.

The engine and `serve.py --dry-run` use it before any weight is loaded.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from jmoe.config.checks import check
from jmoe.config.engine import EngineConfig, EngineMesh, Policy
from jmoe.planning.roofline import ExpertWeightSizes

# Fraction of free memory left for temporaries of programs and for other processes of the
# system.
RESERVE = 0.1
MIN_CACHE_RECORDS = 2
# Fraction of free memory that the KV cache takes by default, if experts or the system can use the
# rest.
CACHE_SHARE = 1 / 8
LENGTH_STEP = 1024  # default sequence lengths are multiples of this many tokens
# and have this many leading binary digits: as free memory varies from start to start, most starts
# get the same length, and so find their programs compiled
LENGTH_DIGITS = 3


@dataclass(frozen=True)
class ModelBytes:
    """Memory needs of a served model.

    record_bytes: one expert as stored in host memory or on NVMe. dense_bytes: a device's weights
    without experts. cache_bytes: a device's KV cache. draft_bytes: logits of a step with drafts.
    state_bytes: the states of gated delta networks, which do not grow with the sequences.
    prediction_bytes: the layer that predicts further tokens, with its experts.
    """

    weights: ExpertWeightSizes
    record_bytes: int
    dense_bytes: int
    cache_bytes: int
    draft_bytes: int = 0
    state_bytes: int = 0
    prediction_bytes: int = 0

    @property
    def bytes_beside_experts(self) -> int:
        """Return the bytes of a device that no slots can have."""
        return sum(
            (
                self.dense_bytes,
                self.cache_bytes,
                self.draft_bytes,
                self.state_bytes,
                self.prediction_bytes,
            )
        )

    @property
    def num_experts(self) -> int:
        """Return the number of experts of all layers together."""
        return self.weights.num_layers * self.weights.num_experts


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of device and host. shared: the device is the CPU, so both are the same memory."""

    device_bytes: int
    host_bytes: int
    shared: bool


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on every tier: of each device, and of a process's host.

    policy: `auto` if experts are streamed and each step's way of fetching them is chosen by
    measured times. expert_tier: tier from which experts are streamed; None if all are on the
    device. expert_slots: slots of one expert each on the device. ring_slots: slots of one layer
    each (policy `ring`). host_bytes: expert records in host memory, all or a cache. nvme_bytes:
    expert records on disk. num_devices: devices that share each layer's experts.
    """

    policy: Policy
    expert_tier: Literal["host", "nvme"] | None
    model: ModelBytes
    expert_slots: int
    ring_slots: int
    host_bytes: int
    nvme_bytes: int
    num_devices: int = 1

    @property
    def device_expert_bytes(self) -> int:
        return self.expert_slots * self.model.weights.expert_bytes

    @property
    def device_bytes(self) -> int:
        """Return the total bytes on the device: experts, other weights, KV cache, and logits of
        drafts.
        """
        return self.device_expert_bytes + self.model.bytes_beside_experts

    def __str__(self) -> str:
        rows = [
            ("device", self.device_bytes),
            ("  experts", self.device_expert_bytes),
            ("  other weights", self.model.dense_bytes),
            ("  keys and values", self.model.cache_bytes),
            *[("  states", self.model.state_bytes)] * (self.model.state_bytes > 0),
            *[("  prediction layer", self.model.prediction_bytes)]
            * (self.model.prediction_bytes > 0),
            *[("  logits of drafts", self.model.draft_bytes)] * (self.model.draft_bytes > 0),
            ("host", self.host_bytes),
            ("nvme", self.nvme_bytes),
        ]
        weights = self.model.weights
        head = (
            f"policy {self.policy}, experts from {self.expert_tier or 'the device'}:"
            f" {self.expert_slots} slots for {weights.num_layers} x {weights.num_experts} experts"
            f" of {weights.expert_bytes} bytes"
        )
        return "\n".join([head, *(f"{name:<18}{size / 1e6:>14.1f} MB" for name, size in rows)])


def plan_memory(model: ModelBytes, free: FreeMemory, options: EngineConfig) -> MemoryPlan:
    """Return the memory plan of one device. Raises `ValueError`, naming the field, if the options
    cannot be met.

    `options.device_bytes` limits the expert slots; None means the free memory for `auto`, all
    experts for `resident`, and half of them for the other policies. `options.host_cache_bytes`
    applies to the tier `nvme`; None means a quarter of the records, or less if that does not fit.
    """
    options = _validate_and_complete_options(model, options)
    policy, ring_slots, device_bytes = options.policy, options.ring_slots, options.device_bytes
    if policy == "resident" or (policy == "auto" and ring_slots is None):
        free_bytes = _free_device_bytes(model, free) if device_bytes is None else device_bytes
        fits = free_bytes >= model.weights.total_bytes or (
            policy == "resident" and device_bytes is None
        )
        needed = (
            f"must hold all {model.num_experts} experts of {model.weights.expert_bytes} bytes for"
            " 'resident'"
        )
        check(fits or policy == "auto", "device_bytes", device_bytes, needed)
        if fits:
            return MemoryPlan("resident", None, model, model.num_experts, 0, 0, 0)
    if device_bytes is None:
        device_bytes = _default_bytes_of_all_slots(model, free, options)
    layers, e = model.weights.num_layers, model.weights.num_experts
    fit = device_bytes // model.weights.expert_bytes
    needed = (
        f"must hold the {e} experts of a layer, of {model.weights.expert_bytes} bytes each; other"
        f" weights take {model.dense_bytes} bytes, keys and values"
        f" {model.cache_bytes}{_drafts_text(model)}, of {free.device_bytes} free"
    )
    check(fit >= e, "device_bytes", device_bytes, needed)
    if policy == "ring" or ring_slots is not None:
        policy, ring_slots = "ring", ring_slots or min(layers, fit // e)
        check(
            ring_slots * e <= fit,
            "ring_slots",
            ring_slots,
            f"{ring_slots * e} experts do not fit device_bytes",
        )
    slots = min(model.num_experts, fit) if ring_slots is None else ring_slots * e
    free_bytes = int(free.host_bytes * (1 - RESERVE))
    if free.shared:
        free_bytes -= slots * model.weights.expert_bytes + model.bytes_beside_experts
    tier, host_bytes = _record_tier_and_host_bytes(
        model.num_experts * model.record_bytes, free_bytes, model, options
    )
    nvme_bytes = model.num_experts * model.record_bytes if tier == "nvme" else 0
    return MemoryPlan(policy, tier, model, slots, ring_slots or 0, host_bytes, nvme_bytes)


def _validate_and_complete_options(model: ModelBytes, options: EngineConfig) -> EngineConfig:
    """Return the options, with `expert_tier` = host for the policy hybrid.

    Raises `ValueError` if an option contradicts the policy or the number of layers.
    """
    policy, ring_slots, layers = options.policy, options.ring_slots, model.weights.num_layers
    check(
        ring_slots is None or 1 <= ring_slots <= layers,
        "ring_slots",
        ring_slots,
        f"must be between 1 and {layers}",
    )
    check(
        ring_slots is None or policy in ("auto", "ring"),
        "ring_slots",
        ring_slots,
        "needs policy = 'ring'",
    )
    options = _with_tier_of_hybrid(options)
    _check_host_cache(options)
    return options


def _with_tier_of_hybrid(options: EngineConfig) -> EngineConfig:
    """Return the options, with `expert_tier` = host for the policy hybrid. Raises `ValueError` for
    its experts on NVMe.
    """
    if options.policy != "hybrid":
        return options
    words = "must be auto or host with policy = 'hybrid'"
    check(options.expert_tier != "nvme", "expert_tier", options.expert_tier, words)
    return replace(options, expert_tier="host")


def default_sequence_length(
    model: ModelBytes,
    shortest: int,
    longest: int,
    free: FreeMemory,
    plan: Callable[[ModelBytes], MemoryPlan],
) -> int:
    """Return the default maximum sequence length in tokens, from `shortest` to `longest`.

    A longer KV cache must not change the policy or tier of the experts. On a device with its own
    memory it takes what resident experts leave; otherwise at most `CACHE_SHARE` of the free memory.
    model: with the KV cache of `shortest` tokens. plan: a function from a model's bytes to the
    memory plan, by `plan_memory` or `plan_mesh_memory`; its `ValueError` for `shortest` propagates.
    """
    first = plan(model)

    def fits(tokens: int) -> bool:
        longer = replace(model, cache_bytes=model.cache_bytes * tokens // shortest)
        try:
            made = plan(longer)
        except ValueError:
            return False
        alone = made.policy == "resident" and not free.shared
        most = (
            int(free.device_bytes * (1 - RESERVE))
            if alone
            else int(free.device_bytes * CACHE_SHARE)
        )
        same = (made.policy, made.expert_tier) == (first.policy, first.expert_tier)
        return same and (made.device_bytes if alone else longer.cache_bytes) <= most

    if fits(longest):
        return longest
    # the first fits, the last does not
    low, high = shortest // LENGTH_STEP, longest // LENGTH_STEP + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * LENGTH_STEP) else (low, middle)
    tokens = low * LENGTH_STEP
    step = 1 << max(0, tokens.bit_length() - LENGTH_DIGITS)
    return max(shortest, tokens // step * step)


def plan_mesh_memory(
    model: ModelBytes,
    free: FreeMemory,
    options: EngineConfig,
    local_devices: int,
    expert_slots: int | None = None,
) -> MemoryPlan:
    """Return the memory plan of each of several devices. Raises `ValueError`, naming the field, if
    the model does not fit.

    A process keeps a copy of all experts in host memory if their placement may change, and only its
    own devices' experts if layers pass through a ring. local_devices: devices of a process.
    expert_slots: slots of each device over all layers; None: as `options.mesh` says.
    `options.device_bytes` limits the expert slots of each device.
    """
    mesh, weights = options.mesh, model.weights
    if expert_slots is None:
        expert_slots = weights.num_layers * slots_per_device(mesh, weights.num_experts)
    moves = mesh.placement != "even"
    host_bytes = model.num_experts * model.record_bytes if moves else 0
    plan = MemoryPlan(
        "resident",
        "host" if moves else None,
        model,
        expert_slots,
        ring_slots=0,
        host_bytes=host_bytes,
        nvme_bytes=0,
        num_devices=mesh.devices,
    )
    free_bytes = int(free.device_bytes * (1 - RESERVE))
    needed_bytes = (
        local_devices * plan.device_bytes + host_bytes if free.shared else plan.device_bytes
    )
    fits = needed_bytes <= free_bytes and plan.device_expert_bytes <= (
        options.device_bytes or needed_bytes
    )
    if options.policy in ("ring", "experts", "hybrid") or (
        options.mesh_allows_streaming and (options.ring_slots is not None or not fits)
    ):
        return _plan_mesh_streaming(model, free, options, local_devices)
    where = (
        f"the {local_devices} devices of a process need" if free.shared else "each of them needs"
    )
    needed = (
        f"{where} {needed_bytes} bytes and {free_bytes} are free; only policy = 'ring' needs less"
    )
    check(needed_bytes <= free_bytes, "mesh.devices", mesh.devices, needed)
    free_bytes = int(free.host_bytes * (1 - RESERVE))
    needed = (
        f"keeps a copy of all experts, {host_bytes} bytes, in host memory, of which {free_bytes}"
        " are free"
    )
    check(host_bytes <= free_bytes, "mesh.placement", mesh.placement, needed)
    return plan


def _plan_mesh_streaming(
    model: ModelBytes, free: FreeMemory, options: EngineConfig, local_devices: int
) -> MemoryPlan:
    """Return the memory plan of each of several devices if experts stream to them: whole layers
    through a ring of slots, or single experts, of which each device owns an even share.
    """
    options = _with_tier_of_hybrid(options)
    _check_host_cache(options)
    mesh, layers, ring_slots = options.mesh, model.weights.num_layers, options.ring_slots
    policy: Policy = "ring" if ring_slots is not None else options.policy
    share = slots_per_device(mesh, model.weights.num_experts)
    words = f"must be between 1 and {layers}"
    check(ring_slots is None or 1 <= ring_slots <= layers, "ring_slots", ring_slots, words)
    words = "needs policy = 'ring'"
    check(ring_slots is None or options.policy in ("auto", "ring"), "ring_slots", ring_slots, words)
    free_bytes = int(free.device_bytes * (1 - RESERVE))
    if free.shared:
        free_bytes //= local_devices
    free_bytes = max(0, free_bytes - model.bytes_beside_experts)
    slots = _expert_slots_per_mesh_device(model, options, share, free_bytes, shared=free.shared)
    slot_bytes = slots * model.weights.expert_bytes
    needed = f"each of them needs {slot_bytes} bytes for experts and {free_bytes} are free"
    check(slot_bytes <= free_bytes, "mesh.devices", mesh.devices, needed)
    own_bytes = layers * min(model.weights.num_experts, local_devices * share) * model.record_bytes
    free_host_bytes = int(free.host_bytes * (1 - RESERVE))
    if free.shared:
        free_host_bytes -= local_devices * (slot_bytes + model.bytes_beside_experts)
    tier, host_bytes = _record_tier_and_host_bytes(own_bytes, free_host_bytes, model, options)
    return MemoryPlan(
        policy,
        tier,
        model,
        slots,
        ring_slots=slots // share if policy == "ring" else 0,
        host_bytes=host_bytes,
        nvme_bytes=model.num_experts * model.record_bytes if tier == "nvme" else 0,
        num_devices=mesh.devices,
    )


def _expert_slots_per_mesh_device(
    model: ModelBytes, options: EngineConfig, share: int, free_bytes: int, *, shared: bool
) -> int:
    """Return the number of expert slots of each device if experts stream to it.

    share: experts of a layer on a device. free_bytes: of a device, beside other weights and the
    cache. shared: whether records in host memory need a part of `free_bytes`. Raises ValueError if
    the experts of one layer do not fit.
    """
    layers, ring_slots = model.weights.num_layers, options.ring_slots
    for_slots = options.device_bytes  # bytes of a device
    layer_bytes = share * model.weights.expert_bytes
    if for_slots is None and options.policy != "auto":
        for_slots = (ring_slots or max(1, layers // 2)) * layer_bytes
    elif for_slots is None:
        for_slots = free_bytes - free_bytes // 4 if shared else free_bytes
    if options.policy == "ring" or ring_slots is not None:  # whole layers
        slots = (ring_slots or min(layers, for_slots // layer_bytes)) * share
    else:
        slots = min(layers * share, for_slots // model.weights.expert_bytes)
    needed = (
        f"must hold {ring_slots or 1} layers' experts, of {layer_bytes} bytes each;"
        f" {free_bytes} are free beside other weights, keys and values"
    )
    enough = share <= slots and slots * model.weights.expert_bytes <= for_slots
    check(enough, "device_bytes", options.device_bytes or for_slots, needed)
    return slots


def slots_per_device(mesh: EngineMesh, num_experts: int) -> int:
    """Return the number of slots that each device has for a layer's experts:
    `mesh.slots_per_device`, or the fewest that hold every expert once.

    Raises `ValueError` if all devices' slots are fewer than the experts, or one device's are more.
    """
    fewest = -(-num_experts // mesh.devices)
    slots = fewest if mesh.slots_per_device is None else mesh.slots_per_device
    enough = f"must be at least {fewest} for {num_experts} experts on {mesh.devices} devices"
    check(slots >= fewest, "mesh.slots_per_device", slots, enough)
    fit = f"must be at most {num_experts}: no device has an expert twice"
    check(slots <= num_experts, "mesh.slots_per_device", slots, fit)
    return slots


def _check_host_cache(options: EngineConfig) -> None:
    """Raise `ValueError` for a size of the cache in host memory with `expert_tier` = host."""
    usable = options.host_cache_bytes is None or options.expert_tier != "host"
    check(usable, "host_cache_bytes", options.host_cache_bytes, "needs expert_tier = 'nvme'")


def _free_device_bytes(model: ModelBytes, free: FreeMemory) -> int:
    """Return the bytes of device memory that are left for experts."""
    return max(0, int(free.device_bytes * (1 - RESERVE)) - model.bytes_beside_experts)


def _drafts_text(model: ModelBytes) -> str:
    """Return the end of an error message with the bytes of the drafts' logits; "" for none."""
    return f", logits of drafts {model.draft_bytes}" if model.draft_bytes else ""


def _default_bytes_of_all_slots(model: ModelBytes, free: FreeMemory, options: EngineConfig) -> int:
    """Return the default number of bytes for expert slots."""
    if options.ring_slots is not None:
        return options.ring_slots * model.weights.layer_bytes
    if options.policy == "ring":
        return max(1, model.weights.num_layers // 2) * model.weights.layer_bytes
    if options.policy in ("experts", "hybrid"):
        return max(model.weights.num_experts, model.num_experts // 2) * model.weights.expert_bytes
    free_bytes = _free_device_bytes(model, free)
    if free.shared:  # the cache of records needs a part of the same memory
        free_bytes -= (
            free_bytes // 4 if options.host_cache_bytes is None else options.host_cache_bytes
        )
    return max(0, free_bytes)


def _record_tier_and_host_bytes(
    all_bytes: int, free_bytes: int, model: ModelBytes, options: EngineConfig
) -> tuple[Literal["host", "nvme"], int]:
    """Return (tier of a process's expert records, bytes of records in host memory).

    all_bytes: all records of the process. free_bytes: host memory available for records.
    """
    expert_tier, host_cache_bytes = options.expert_tier, options.host_cache_bytes
    if expert_tier == "host" or (
        expert_tier == "auto" and host_cache_bytes is None and all_bytes <= free_bytes
    ):
        needed = f"needs {all_bytes} bytes of host memory, and {max(0, free_bytes)} are free"
        check(all_bytes <= free_bytes, "expert_tier", expert_tier, needed)
        return "host", all_bytes
    if host_cache_bytes is None:
        host_cache_bytes = max(
            min(all_bytes // 4, free_bytes), MIN_CACHE_RECORDS * model.record_bytes
        )
    return "nvme", min(host_cache_bytes, all_bytes)
