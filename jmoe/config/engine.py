"""Settings of the inference engine. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from jmoe.config.checks import (
    check,
    check_field,
    check_field_types,
    check_not_negative,
    check_positive,
    check_positive_or_none,
    check_unset,
)
from jmoe.config.tiers import CachePolicy, check_cache_policy
from kernels_pallas.formats import EXPERT_DTYPES, FP8, INT8_TAKING, ExpertDtype

CACHE_BLOCK = 128  # positions of a block of the KV cache
Policy = Literal["auto", "resident", "ring", "experts", "hybrid"]
# Of experts over devices. even: each once, in order; lina: devices in proportion to popularity,
# unpopular ones packed;
# eplb: replicas of the most loaded until all slots are full, then packed into equal numbers.
PlacementPolicy = Literal["even", "lina", "eplb"]
DensePlaces = Literal["replicated", "tensor"]
EngineExchange = Literal["auto", "flat", "dedup"]
Speculation = Literal["off", "lookup", "mtp"]
DRAFT_TOKENS = {"lookup": 5, "mtp": 1}  # default length of a draft, by `speculation`


@dataclass(frozen=True)
class EngineMesh:
    """Devices, in one or several processes, that serve one model; the cache and the experts are
    sharded over them.
    """

    devices: int = 1  # total number; the cache and the experts are divided equally
    # which devices hold which experts. even: one fixed copy of each; lina: chosen for each layer
    # from the experts that the step's tokens choose; eplb: chosen every `rebalance_every` steps
    # from the choices of recent steps
    placement: PlacementPolicy = "even"
    # capacity of a device, in experts per layer; None: just enough for one copy of each expert
    slots_per_device: int | None = None
    rebalance_every: int = 3000  # steps between two placements of `eplb`
    rebalance_window: int = 1000  # number of recent steps whose choices `eplb` uses
    # a JSON file with a fixed placement: `segments` lists the experts by device and by layer with
    # experts; None: even, in order
    segments: str | None = None
    # placement of attention, dense and shared MLPs, embedding and head. replicated: whole on every
    # device, which runs them for its own rows of the cache; tensor: sharded over the devices
    # (attention by heads), with partial results summed
    dense: DensePlaces = "replicated"
    # nodes, each with the same number of neighbouring devices; 0: the hosts of the processes
    nodes: int = 0
    # how tokens are sent to the devices of their experts. flat: each choice directly; dedup: a
    # token once to each node that has one of its experts, and there to its devices; auto: dedup if
    # that saves a tenth of the rows that cross between nodes
    exchange: EngineExchange = "auto"

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "devices", "rebalance_every", "rebalance_window")
        check_positive_or_none(self, "slots_per_device")
        check_not_negative(self, "nodes")
        whole = not self.nodes or self.devices % self.nodes == 0
        check_field(whole, self, "nodes", f"must divide devices = {self.devices}")
        apart = self.exchange != "dedup" or self.nodes != 1
        check_field(apart, self, "exchange", "needs several nodes")
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
            check_unset(
                self,
                "mesh",
                ["placement", "slots_per_device", "nodes", "exchange"],
                "with mesh.devices = 1, which has all experts",
            )
        if self.placement != "eplb":
            check_unset(
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
    # maximum tokens of one sequence, prompt plus output; None: the model's positions, limited so
    # that keys and values do not displace experts from the device; in several processes and in
    # portable programs at most 2048
    max_seq_len: int | None = None
    # tokens that the KV cache holds for all sequences together, in whole blocks of 128 on every
    # device; sequences wait for blocks, or give theirs back and are computed again. None:
    # max_batch * max_seq_len, so that no sequence waits for blocks
    cache_tokens: int | None = None
    # which experts are on the device. resident: all; ring: those of a few layers at a time;
    # experts: the experts that the tokens chose, and the most used ones; hybrid: like experts, but
    # the CPU computes some of the missing ones in host memory; auto: resident if that fits, else
    # the fastest of ring, experts and hybrid, chosen for each step
    policy: Policy = "auto"
    # policy = ring: layers whose experts are on the device at once; None: as many as fit, else half
    # of all layers
    ring_slots: int | None = None
    # device memory for experts; None: with policy = auto the free memory, else half of all experts
    device_bytes: int | None = None
    # tier of the experts that are not on the device
    expert_tier: Literal["auto", "host", "nvme"] = "auto"
    # host memory that caches experts of the tier nvme; None: a quarter of their bytes
    host_cache_bytes: int | None = None
    # which experts stay in that cache. lfu: the most used ones, with counts that notice changes of
    # traffic; moesys: Algorithm 2 of MoESys as printed
    cache_policy: CachePolicy = "lfu"
    # cache_policy = moesys: hits that an expert must have before another may take its place
    cache_threshold: float = 1.0
    # cache_policy = moesys: beta, by which all hits are multiplied every `cache_interval` steps
    cache_beta: float = 0.8
    # cache_policy = moesys: K, the steps between two of these multiplications
    cache_interval: int = 4
    # page-lock the host memory from which experts are copied to the device; auto: for a GPU
    pin_host_memory: Literal["auto", "on", "off"] = "auto"
    cache_dir: str | None = None  # the folder for experts on NVMe; None: beside the model
    # data type of weights, keys and values, and computation; None: as stored
    dtype: Literal["float32", "bfloat16"] | None = None
    # format of the cached keys and values. auto: as `dtype`; fp8: E4M3, half the bytes of
    # bfloat16
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    # format of the experts' matrices on every tier. mxfp4, int4, int8, fp8: blocks of weights with
    # one scale each (4.25, 4.5, 8.5 and 8.25 bits per weight); wide: as `dtype`; None: as the
    # checkpoint stores them if that is one of these formats, else wide
    expert_dtype: ExpertDtype | None = None
    # the inputs of the experts' products. exact: as `dtype`; int8: rounded to 8 bits, in blocks of
    # 32 with one scale each, and multiplied as integers with experts of mxfp4, int4 or int8, on a
    # CPU: faster, and an expert's output changes by about 1.5 % of its norm; fp8: rounded to E4M3,
    # in groups of 128 with one scale each, and multiplied with experts of fp8 by the tensor cores
    # of Ada, Hopper or Blackwell: an expert's output changes by about 4.3 % of its norm
    expert_activations: Literal["exact", "int8", "fp8"] = "exact"
    # how a layer's experts are predicted, so that they are copied early. router: from the next
    # layer's router; counts: the most used ones of recent steps; paths: from the tokens' choices in
    # the layers before (`jmoe.programs.profile`); None: no prediction, and native programs of few
    # tokens copy only missing experts; auto: None where native programs run, else router. On
    # several devices, placement = lina uses the prediction (paths, otherwise counts)
    estimator: Literal["auto", "router", "counts", "paths"] | None = "auto"
    prefill_chunk_tokens: int = 512  # maximum tokens of one prompt in a step
    # maximum tokens of all prompts in a step, with padding; None: 8 whole chunks
    max_prefill_tokens: int | None = None
    # drafts of a sequence's next tokens, which one step verifies together; the tokens are those of
    # steps without drafts. lookup: what followed the last earlier occurrence of the sequence's
    # latest tokens (vLLM's ngram); mtp: what the checkpoint's layer for multi-token prediction
    # predicts (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5); off: no drafts
    speculation: Speculation = "off"
    # maximum tokens of a draft; None: 5 with lookup, 1 with mtp
    num_speculative_tokens: int | None = None
    # latest tokens that are looked up: as many as possible, at most and at least
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    # on a CPU, run steps of few tokens with C++ operations, which are compiled once per machine.
    # auto: on one device, if a compiler is found; on: required; off: use XLA only
    native: Literal["auto", "on", "off"] = "auto"
    # LoRA adapters of the model, each NAME=FOLDER of PEFT's files; a request chooses one by its
    # name. Steps then run without native operations
    lora: tuple[str, ...] = ()
    mesh: EngineMesh = field(default_factory=EngineMesh)

    def __post_init__(self) -> None:
        check_field_types(self)
        check_positive(self, "max_batch", "prefill_chunk_tokens")
        apart = self.pin_host_memory != "on" or self.policy != "hybrid"
        check_field(apart, self, "pin_host_memory", "must be auto or off with policy = 'hybrid'")
        usable = self.native != "off" or self.policy != "hybrid"
        check_field(usable, self, "native", "must be auto or on with policy = 'hybrid'")
        check_positive_or_none(self, "cache_tokens")
        self._check_cache_size()
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
        if self.expert_activations != "exact":
            self._check_rounded_activations()
        self._check_streaming()
        self._check_speculation()
        if self.lora:
            self._check_lora()
        if self.mesh.devices > 1:
            self._check_mesh()

    @property
    def num_cache_pools(self) -> int:
        """Return the number of devices that have blocks of the cache of their own."""
        return 1 if self.mesh.dense == "tensor" else self.mesh.devices

    def num_cache_blocks(self, block_tokens: int = CACHE_BLOCK) -> int:
        """Return the number of blocks of the cache on all devices; `max_seq_len` must be set.

        block_tokens: positions of a block.
        """
        assert self.max_seq_len is not None, "the model's positions say it"
        if self.cache_tokens is None:
            return self.max_batch * -(-self.max_seq_len // block_tokens)
        return self.num_cache_pools * -(-self.cache_tokens // (self.num_cache_pools * block_tokens))

    def _check_cache_size(self) -> None:
        """Raise ValueError for a cache that cannot hold the longest sequence."""
        if self.cache_tokens is None:
            return
        fewest, where = self.num_cache_pools * (self.max_seq_len or 2), ""
        if self.num_cache_pools > 1:
            where = f", on each of {self.num_cache_pools} devices"
        words = f"must be at least {fewest}: a sequence of {self.max_seq_len or 2} tokens"
        check_field(self.cache_tokens >= fewest, self, "cache_tokens", words + where)

    def _check_streaming_mesh(self) -> None:
        """Raise ValueError for placements of experts that do not stay on their devices."""
        mesh, streamed = self.mesh, f"with policy = {self.policy!r}, where experts do not stay"
        evenly = f"must be even {streamed}"
        check(mesh.placement == "even", "mesh.placement", mesh.placement, evenly)
        words = f"must be None {streamed}"
        check(mesh.slots_per_device is None, "mesh.slots_per_device", mesh.slots_per_device, words)
        check(mesh.segments is None, "mesh.segments", mesh.segments, words)
        words = f"must be auto or None with mesh.devices = {mesh.devices}, which follow no guess"
        check_field(self.estimator in ("auto", None), self, "estimator", words)

    @property
    def mesh_allows_streaming(self) -> bool:
        """Whether a mesh of devices may hold only some experts at a time: with policy "ring",
        "experts" or "hybrid", or with "auto" and the even placement that nothing else determines.
        """
        evenly = (
            self.mesh.placement == "even"
            and self.mesh.slots_per_device is None
            and self.mesh.segments is None
        )
        streams = self.policy in ("ring", "experts", "hybrid")
        return streams or (self.policy == "auto" and evenly)

    def _check_rounded_activations(self) -> None:
        """Raise ValueError for options with which operations compute on exact inputs."""
        is_int8 = self.expert_activations == "int8"
        taken = INT8_TAKING if is_int8 else (FP8.name,)
        clashes = {
            f"expert_dtype = {self.expert_dtype!r}": self.expert_dtype not in (None, *taken),
            "policy = 'hybrid'": self.policy == "hybrid",
            f"mesh.devices = {self.mesh.devices}": self.mesh.devices > 1,
            f"native = {self.native!r}": self.native == ("off" if is_int8 else "on"),
        }
        for clash, there in clashes.items():
            check_field(not there, self, "expert_activations", f"must be exact with {clash}")

    def _check_streaming(self) -> None:
        """Raise ValueError for options of expert tiers and guesses that the policy does not use."""
        if self.policy == "resident":
            why = "with policy = 'resident', which keeps every expert on the device"
            check_unset(self, "", ["expert_tier", "host_cache_bytes", "pin_host_memory"], why)
        if self.policy != "experts":  # the other policies do not count steps for the cache
            check_unset(self, "", ["cache_policy"], f"with policy = {self.policy!r}; set experts")
        if self.expert_tier == "host":
            check_unset(self, "", ["cache_policy"], "with expert_tier = 'host', which has no cache")
        check_cache_policy(self, "")
        guesses = self.policy not in ("resident", "ring") or self.mesh.placement == "lina"
        constraint = (
            f"must be auto or None with policy = {self.policy!r}, which fetches no experts by a"
            " guess"
        )
        check_field(guesses or self.estimator in ("auto", None), self, "estimator", constraint)

    @property
    def draft_width(self) -> int:
        """The tokens of a step's chunk of one sequence with a draft; 1 without speculation."""
        if self.speculation == "off":
            return 1
        return 1 + (self.num_speculative_tokens or DRAFT_TOKENS[self.speculation])

    @property
    def adapter_folders(self) -> dict[str, Path]:
        """The folders of the LoRA adapters by name, in the order of `lora`."""
        pairs = (option.partition("=") for option in self.lora)
        return {name: Path(folder).expanduser() for name, _, folder in pairs}

    def _check_speculation(self) -> None:
        """Reject sizes of drafts that nothing would use, or that contradict each other."""
        lookups = ["prompt_lookup_max", "prompt_lookup_min"]
        if self.speculation == "off":
            words = "with speculation = 'off', which drafts no tokens"
            check_unset(self, "", ["num_speculative_tokens", *lookups], words)
        if self.speculation == "mtp":
            check_unset(self, "", lookups, "with speculation = 'mtp', which looks up nothing")
            one = self.mesh.devices == 1
            words = f"must be off or lookup with mesh.devices = {self.mesh.devices}"
            check_field(one, self, "speculation", words)
        check_positive(self, *lookups)
        check_positive_or_none(self, "num_speculative_tokens")
        short = self.draft_width <= CACHE_BLOCK
        words = f"must be below {CACHE_BLOCK}, the positions of a block of the cache"
        check_field(short, self, "num_speculative_tokens", words)
        words = f"must be at most prompt_lookup_max = {self.prompt_lookup_max}"
        ordered = self.prompt_lookup_min <= self.prompt_lookup_max
        check_field(ordered, self, "prompt_lookup_min", words)

    def _check_lora(self) -> None:
        """Reject adapters without a name of their own, and options that adapters do not take."""
        names = [option.partition("=")[0] for option in self.lora]
        for option, name in zip(self.lora, names, strict=True):
            reads = bool(name) and bool(option.partition("=")[2])
            check(reads, "lora", option, "must read NAME=FOLDER")
            check(names.count(name) == 1, "lora", option, f"must be the only adapter {name}")
        devices = self.mesh.devices
        check_field(devices == 1, self, "lora", f"must be empty with mesh.devices = {devices}")
        hybrid = self.policy == "hybrid"
        check_field(not hybrid, self, "lora", "must be empty with policy = 'hybrid'")
        words = "must be auto or off with lora: native operations lack adapters"
        check_field(self.native != "on", self, "native", words)

    def _check_mesh(self) -> None:
        """Raise ValueError for options that are unsupported on a mesh of devices."""
        mesh, devices = self.mesh, self.mesh.devices
        divides = f"must be a multiple of mesh.devices = {devices}"
        check_field(self.max_batch % devices == 0, self, "max_batch", divides)
        check_field(
            self.native != "on",
            self,
            "native",
            f"must be auto or off with mesh.devices = {devices}",
        )
        words = (
            f"must be auto or off with mesh.devices = {devices}, unless policy = 'ring' or"
            " 'experts'"
        )
        pins = self.pin_host_memory != "on" or self.policy in ("ring", "experts")
        check_field(pins, self, "pin_host_memory", words)
        if self.policy in ("ring", "experts", "hybrid"):
            self._check_streaming_mesh()
        if self.mesh_allows_streaming:
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
