"""Settings of the inference engine. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jmoe.config.checks import check, check_field, check_values, positive, positive_or_none, unset
from kernels_pallas.formats import EXPERT_DTYPES, ExpertDtype

Policy = Literal["auto", "resident", "ring", "experts", "hybrid"]
# Of experts over devices. even: each once, in order; lina: devices in proportion to popularity,
# unpopular ones packed;
# eplb: replicas of the most loaded until all slots are full, then packed into equal numbers.
PlacementPolicy = Literal["even", "lina", "eplb"]
DensePlaces = Literal["replicated", "tensor"]


@dataclass(frozen=True)
class EngineMesh:
    """Devices, in one or several processes, that serve one model; the cache and the experts are
    sharded over them.
    """

    devices: int = 1  # in all; each has an equal part of the cache and of the places for experts
    # where experts are. even: each once, for good; lina: by what the step's tokens choose, a layer
    # at a time;
    # eplb: by what recent steps chose, anew every `rebalance_every` steps
    placement: PlacementPolicy = "even"
    # experts of a layer on a device; None: as few as have room for each once
    slots_per_device: int | None = None
    rebalance_every: int = 3000  # steps between two placements of `eplb`
    rebalance_window: int = 1000  # steps whose choices it goes by
    # a JSON file whose `segments` say where experts are for good: of each device, of each layer
    # with experts, a list of experts; None: evenly, in order
    segments: str | None = None
    # where attention, dense and shared MLPs, embedding and head are. replicated: on every device,
    # which runs them for its rows of the cache; tensor: each device has its heads of all rows, and
    # its part of the rest, summed up
    dense: DensePlaces = "replicated"

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "devices", "rebalance_every", "rebalance_window")
        positive_or_none(self, "slots_per_device")
        check_field(
            self.dense == "replicated" or self.devices > 1,
            self,
            "dense",
            "needs mesh.devices above 1",
        )
        check_field(
            self.segments is None or self.devices > 1,
            self,
            "segments",
            "needs mesh.devices above 1",
        )
        if self.devices == 1:
            unset(
                self,
                "mesh",
                ["placement", "slots_per_device"],
                "with mesh.devices = 1, which has all experts",
            )
        if self.placement != "eplb":
            unset(
                self,
                "mesh",
                ["rebalance_every", "rebalance_window"],
                f"with mesh.placement = {self.placement!r}",
            )
        stays = self.segments is None or self.placement == "even"
        check_field(
            stays,
            self,
            "segments",
            f"must be None with placement = {self.placement!r}, which moves experts",
        )


@dataclass(frozen=True)
class EngineConfig:
    """Capacity of an inference engine, and placement of its model's experts."""

    max_batch: int = 8  # sequences that run at once
    # tokens of one sequence, prompt and output; None: as many as the model has positions for and
    # memory allows, where keys and values of longer ones would move experts; in several processes
    # and in portable programs at most 2048
    max_seq_len: int | None = None
    # resident: every expert on the device; ring: whole layers in turn; experts: those that the
    # tokens chose, beside the most used ones; hybrid: as experts, but the CPU computes a part of
    # those that are not on the device where they lie in host memory; auto: resident if that fits,
    # else ring, experts or hybrid by step, whichever is fastest
    policy: Policy = "auto"
    # layers on the device at once, of policy ring; None: what fits, else half of them
    ring_slots: int | None = None
    # for experts on the device; None: with auto what it has left, else half of them
    device_bytes: int | None = None
    # where experts are that are not on the device
    expert_tier: Literal["auto", "host", "nvme"] = "auto"
    # host memory for experts of the tier nvme; None: a quarter of their bytes
    host_cache_bytes: int | None = None
    # that experts go to the device from; auto: of a GPU
    pin_host_memory: Literal["auto", "on", "off"] = "auto"
    cache_dir: str | None = None  # the folder for experts on NVMe; None: beside the model
    # of weights, keys and values, and computation; None: as stored
    dtype: Literal["float32", "bfloat16"] | None = None
    # of the experts' matrices, on every tier. mxfp4, int4, int8, fp8: blocks of weights under one
    # scale, 4.25, 4.5, 8.5 and 8.25 bits a weight; wide: as `dtype`; None: wide, but on one device
    # what is stored as MXFP4 or FP8 stays that
    expert_dtype: ExpertDtype | None = None
    # how experts are guessed a layer ahead, to be copied early: by the next layer's router, by what
    # recent steps used most, or by the paths of tokens through the layers before
    # (`jmoe.programs.profile`); None: not at all, so that native programs of few tokens run through
    # layers and ask only for what has no slot; auto: None where they can, else router. Over several
    # devices `lina` places experts by such a guess: by paths, or otherwise by recent steps
    estimator: Literal["auto", "router", "counts", "paths"] | None = "auto"
    prefill_chunk_tokens: int = 512  # the most tokens of one prompt in a step
    # the most of all prompts in a step, with padding; None: 8 whole chunks
    max_prefill_tokens: int | None = None
    # on a CPU, steps of few tokens with operations in C++, which are compiled once on each machine.
    # auto: on one device, where there is a compiler; on: an error where they cannot be had; off:
    # XLA's alone
    native: Literal["auto", "on", "off"] = "auto"
    mesh: EngineMesh = field(default_factory=EngineMesh)

    def __post_init__(self) -> None:
        check_values(self)
        positive(self, "max_batch", "prefill_chunk_tokens")
        apart = self.pin_host_memory != "on" or self.policy != "hybrid"
        check_field(apart, self, "pin_host_memory", "must be auto or off with policy = 'hybrid'")
        usable = self.native != "off" or self.policy != "hybrid"
        check_field(usable, self, "native", "must be auto or on with policy = 'hybrid'")
        enough = self.max_seq_len is None or self.max_seq_len >= 2
        check_field(
            enough, self, "max_seq_len", "must be at least 2, a token of prompt and one of output"
        )
        known = self.estimator in ("auto", "router", "counts", "paths", None)
        check_field(known, self, "estimator", "must be auto, router, counts, paths or None")
        known = self.expert_dtype in (None, *EXPERT_DTYPES)
        check_field(known, self, "expert_dtype", f"must be {', '.join(EXPERT_DTYPES)} or None")
        chunk = min(self.prefill_chunk_tokens, self.max_seq_len or self.prefill_chunk_tokens)
        fits = self.max_prefill_tokens is None or self.max_prefill_tokens >= chunk
        check_field(
            fits, self, "max_prefill_tokens", f"must be at least {chunk}, a chunk of one prompt"
        )
        self._check_streaming()
        if self.mesh.devices > 1:
            self._check_mesh()

    @property
    def may_ring(self) -> bool:
        """Whether a mesh of devices may hold only some layers' experts at a time."""
        evenly = (
            self.mesh.placement == "even"
            and self.mesh.slots_per_device is None
            and self.mesh.segments is None
        )
        return self.policy == "ring" or (self.policy == "auto" and evenly)

    def _check_streaming(self) -> None:
        """Reject options of expert tiers and guesses that the policy does not use."""
        if self.policy == "resident":
            why = "with policy = 'resident', which keeps every expert on the device"
            unset(self, "", ["expert_tier", "host_cache_bytes", "pin_host_memory"], why)
        guesses = self.policy not in ("resident", "ring") or self.mesh.placement == "lina"
        constraint = (
            f"must be auto or None with policy = {self.policy!r}, which fetches no experts by a"
            " guess"
        )
        check_field(guesses or self.estimator in ("auto", None), self, "estimator", constraint)

    def _check_mesh(self) -> None:
        """Reject options that are unsupported on a mesh of devices."""
        mesh, devices = self.mesh, self.mesh.devices
        divides = f"must be a multiple of mesh.devices = {devices}"
        check_field(self.max_batch % devices == 0, self, "max_batch", divides)
        wide = self.expert_dtype in (None, "wide")
        check_field(
            wide, self, "expert_dtype", f"must be wide or None with mesh.devices = {devices}"
        )
        check_field(
            self.native != "on",
            self,
            "native",
            f"must be auto or off with mesh.devices = {devices}",
        )
        one = f"must be auto or off with mesh.devices = {devices}"
        check_field(self.pin_host_memory != "on", self, "pin_host_memory", one)
        known = self.policy in ("auto", "resident", "ring")
        check_field(
            known, self, "policy", f"must be auto, resident or ring with mesh.devices = {devices}"
        )
        if self.policy == "ring":
            evenly = "must be even with policy = 'ring', where layers pass through the devices"
            check(mesh.placement == "even", "mesh.placement", mesh.placement, evenly)
            fewest = "must be None with policy = 'ring': as few as hold a layer's experts"
            check(
                mesh.slots_per_device is None,
                "mesh.slots_per_device",
                mesh.slots_per_device,
                fewest,
            )
            evenly = "must be None with policy = 'ring', where layers pass through the devices"
            check(mesh.segments is None, "mesh.segments", mesh.segments, evenly)
        if self.may_ring:
            return
        stays = (
            f"experts stay on their devices with policy = {self.policy!r}, mesh.placement ="
            f" {mesh.placement!r}"
        )
        stays += f", mesh.segments = {mesh.segments!r}" if mesh.segments else ""
        stays += f" and mesh.slots_per_device = {mesh.slots_per_device}: must be "
        check_field(self.expert_tier != "nvme", self, "expert_tier", f"{stays}auto or host")
        for name in ("ring_slots", "device_bytes", "host_cache_bytes"):
            check_field(getattr(self, name) is None, self, name, f"{stays}None")
