"""Estimate how much speed a GPU keeps with experts in host memory, on a machine without one.

    python benchmarks/offload/retention_aot.py --tokens 8192

Compiles what `lib/gpu` times as `offload/training retention`. With all experts on the device a step
is one program; with experts in host memory it is a program for each part of a layer, run layer by
layer and micro-batch by micro-batch. Each program's time is estimated as `train.py --estimate`
does. The seconds of link and host memory are the planner's (`train.py --plan`): a pass takes the
longest of the three. Left out: what the host does between programs, and memory kinds (what is in
host memory is no argument). argument_bytes, temporary_bytes: of a program by itself. --plan: the
planner's seconds of computing, too; most_retained: if the host could update during both passes;
published: another program's run on eight GPUs, planned with our products and with its own.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"

import jax
import jax.numpy as jnp

from benchmarks.lib import ahead_of_time, gpu, report
from benchmarks.lib.report import JsonObject
from benchmarks.offload import retention
from benchmarks.offload.machines import COMPUTERS, SHARE_OF_PEAK, models
from benchmarks.offload.session import add_model_options
from jmoe.config import STACKS, MachineConfig, MeshConfig, TiersConfig, TrainConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.mesh import make_mesh
from jmoe.offload.slot_arrays import put_records
from jmoe.offload.weight_staging import MOST_EXPERTS
from jmoe.planning.gpu_estimate import gpu_rates
from jmoe.planning.training import TrainingPlan
from jmoe.run.planner import training_plan
from jmoe.training.fused.step import FusedTrainer
from jmoe.training.state import without_experts
from jmoe.training.streamed.model import (
    BackwardInputs,
    FinishStepInputs,
    GradAccumulator,
    LayerOptions,
    LayerParams,
    NeighborLayerCollectives,
)
from jmoe.training.streamed.programs import make_step_programs
from jmoe.training.streamed.step import make_text_programs
from jmoe.training.streamed.text import StreamedDecoder

# of a host with one H100: its link, and eight channels of DDR5
HOST = MachineConfig(accelerator="h100", link_bytes_per_s=5e10, host_memory_bytes_per_s=2e11)
PLANNED_HOST_MEMORY = (2e11, 4e11)  # of --plan
PLANNED_HOST_MEMORY_OF_EIGHT = (4e11, 8e11)


class PublishedRun(NamedTuple):
    """A run of another program on eight GPUs. step_s: with all state on them."""

    model: str
    tokens_per_device: int
    step_s: float


# https://github.com/PrimeIntellect-ai/prime-rl/pull/3234, on eight H200
PUBLISHED = PublishedRun("Qwen3-30B-A3B", 8192, 1.75)
H100_FLOPS = ACCELERATORS["h100"].flops
FORWARD = ("unstack", "split", "unsharded", "embed", "route", "add_experts")
OF_LAYER = ("route", "add_experts", "moe_gradients")  # run once a layer and micro-batch
OF_MICRO_BATCH = ("split", "embed", "loss_gradients", "embed_gradients")


def parse() -> argparse.Namespace:
    """Return the options; the defaults are what `lib/gpu` gives to `offload/training retention`."""
    parser = report.parser(__doc__)
    add_model_options(parser, layers=6)
    retention.add_options(parser)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--plan", action="store_true", help="the planner's figures alone; nothing is compiled"
    )
    parser.set_defaults(cache=0.25, batch_size=1)
    given = parser.parse_args(gpu.FULL["retention"].split())
    return parser.parse_args(namespace=given)


def on_device(programs: ahead_of_time.Programs, config: TrainConfig, device: jax.Device) -> None:
    """Compile the step that is one program."""
    trainer = FusedTrainer(config, make_mesh((1, 1, 1), [device]))
    parts = config.gradient_accumulation_steps
    shape = (parts, config.batch_size // parts, config.sequence_length + 1)
    tokens = programs.abstract_tree(jax.ShapeDtypeStruct(shape, jnp.int32))
    programs.compile("step", trainer.step, programs.abstract_tree(trainer.state_shape), tokens)


def in_host_memory(
    programs: ahead_of_time.Programs, config: TrainConfig, device: jax.Device
) -> None:
    """Compile the programs of a streamed step of one micro-batch in their order; all layers run the
    same ones.
    """
    model = StreamedDecoder(config, make_mesh((1, 1, 1), [device]))
    parts, text, do = make_step_programs(model), make_text_programs(model), programs.compile
    state = programs.abstract_tree(
        model.sharded.state_shape.map_params_and_moments(without_experts)
    )
    tokens = programs.abstract_array(jnp.int32, 1, config.batch_size, config.sequence_length + 1)
    number = programs.abstract_array(jnp.int32)
    (tokens_BS,) = do("unstack", text.unstack, tokens)
    part = do("split", text.split, tokens_BS)
    outside, _, _, unsharded_RC = do(
        "unsharded", parts.gather_first_params, state.params, first_kind="moe"
    )
    x_BSD, _ = do("embed", parts.embed, outside, part)
    stacks = {STACKS["moe"]: state.params[STACKS["moe"]]}
    params = LayerParams(stacks[STACKS["moe"]], unsharded_RC, state.router_bias)
    layer, nothing = (
        LayerOptions(number, step=number, accumulation=number),
        NeighborLayerCollectives(),
    )
    options = {"kind": "moe", "train": True, "full_capacity": False, "saves_residuals": True}
    routed, of_route, _ = do("route", parts.route, params, layer, x_BSD, nothing, **options)
    experts = {
        name: programs.abstract_array(config.compute_dtype, *w.shape[1:])
        for name, w in model.modules.experts["moe"].params.items()
    }
    _compile_group_copy(programs, experts)
    params = params._replace(experts=experts)
    y_BSD, of_experts, _ = do(
        *("add_experts", parts.apply_experts, params, routed, layer, nothing),
        kind="moe",
        saves_residuals=True,
    )
    stats = [[routed.stats]] * config.model.num_moe_layers
    totals = do("totals", parts.routing_totals, stats)
    grads = do("zeros", parts.zero_gradients, stacks, outside)
    scale = state.loss_scale
    loss, dx_BSD, doutside = do(
        "loss_gradients", parts.loss_gradients, outside, y_BSD, part, grads.outside, scale
    )
    kept, choices = (routed, of_route, of_experts), {"topk_idx_TK": routed.topk_idx_TK}
    backward = BackwardInputs(x_BSD, dx_BSD, choices, kept, scale, totals.loss_tokens)
    sums = GradAccumulator(None, grads.outside_buffer["moe"])
    dx_BSD, sums, _, square, _ = do(
        "moe_gradients",
        *(parts.moe_gradients, params, layer, backward, sums, nothing),
        kind="moe",
        full_capacity=False,
        is_last_micro_batch=True,
    )
    doutside = do("embed_gradients", parts.embed_gradients, outside, part, dx_BSD, doutside, [])
    grads = grads._replace(
        outside=doutside, outside_buffer=grads.outside_buffer | {"moe": sums.outside_buffer}
    )
    squares = {"moe": [square] * config.model.num_moe_layers}
    results = FinishStepInputs(grads, squares, [loss], stats, totals)
    do("finish", parts.finish_step, state, results)


def _compile_group_copy(
    programs: ahead_of_time.Programs, slot: dict[str, jax.ShapeDtypeStruct]
) -> None:
    """Compile the copy of a group of experts, sent from the host, into the slot of a layer."""
    sent = {
        name: programs.abstract_array(w.dtype, MOST_EXPERTS, *w.shape[1:])
        for name, w in slot.items()
    }
    rows = programs.abstract_array(jnp.int32, MOST_EXPERTS)
    programs.compile("experts into a slot", put_records, slot, sent, rows)


def computing_s_by_pass(
    rows: list[JsonObject], config: TrainConfig, groups: int
) -> tuple[float, float]:
    """Return the estimated seconds of a streamed step's programs, (forward, backward).

    rows: of the programs of one micro-batch. groups: copies of experts into slots, in each pass.
    """
    seconds, parts = [0.0, 0.0], config.gradient_accumulation_steps
    for row in rows:
        name, times = row["program"], 1
        if name in OF_LAYER:
            times = parts * config.model.num_moe_layers
        elif name in OF_MICRO_BATCH:
            times = parts
        elif name == "experts into a slot":
            times = groups
        seconds[name not in (*FORWARD, "experts into a slot")] += times * row["estimated_s"]
    return seconds[0], seconds[1]


def retained(device_s: float, computing_s: tuple[float, float], plan: TrainingPlan) -> JsonObject:
    """Return the estimated step with experts in host memory, and the share of speed it keeps."""
    model = plan.model
    updated = model.num_layers * model.active_experts * model.parameters_per_expert
    updated *= model.devices_per_host
    host_s = [n * updated / plan.machine.host_memory_bytes_per_s for n in plan.host_bytes_by_pass]
    active = model.num_layers * model.active_experts
    in_series = plan.link_bytes_in_series_by_pass
    link_s = [n * active / plan.machine.link_bytes_per_s for n in in_series]
    step_s = sum(map(max, computing_s, link_s, host_s))
    figures: JsonObject = {
        "device_step_s": round(device_s, 4),
        "host_step_s": round(step_s, 4),
        "computing_s": [round(s, 4) for s in computing_s],
        "link_s": [round(s, 4) for s in link_s],
        "host_memory_s": [round(s, 4) for s in host_s],
        "retention": round(device_s / step_s, 3),
    }
    return figures


def most_retained(found: JsonObject) -> float:
    """Return the share of speed that would be kept if the host could update during both passes."""
    each = found["computing_s"], found["link_s"], found["host_memory_s"]
    return round(float(found["device_step_s"] / max(map(sum, each))), 3)


def planned_published_rows() -> list[JsonObject]:
    """Return the planner's figures for the run of `PUBLISHED`, with products as fast as ours and
    with slower ones that take its step.
    """
    model, eight = models()[PUBLISHED.model], COMPUTERS[1]
    in_host_memory = TiersConfig(
        *("host", "host"),
        gradient_dtype="bfloat16",
        update="host",
        device_layers=model.num_hidden_layers,
    )
    rows = []
    for bytes_per_s in PLANNED_HOST_MEMORY_OF_EIGHT:
        device, host = (
            training_plan(
                TrainConfig(
                    model=model,
                    machine=replace(eight.machine, host_memory_bytes_per_s=bytes_per_s),
                    tiers=tiers,
                    mesh=MeshConfig(expert_intra=eight.devices),
                    batch_size=eight.devices,
                    sequence_length=PUBLISHED.tokens_per_device,
                    remat="layer",
                )
            )
            for tiers in (TiersConfig(), in_host_memory)
        )
        for device_s in (device.step_s(), PUBLISHED.step_s):
            slower = device_s / device.step_s()
            forward, backward = (slower * s for s in host.compute_s_by_pass)
            found = retained(device_s, (forward, backward), host)
            run = {"model": PUBLISHED.model, "host_memory_gb_per_s": bytes_per_s / 1e9}
            rows.append(run | found)
    return rows


def planned_rows(a: argparse.Namespace) -> list[JsonObject]:
    """Return the planner's figures, by bytes/s of the host's memory and tokens of a step."""
    rows = []
    for bytes_per_s in PLANNED_HOST_MEMORY:
        on = replace(HOST, flops=SHARE_OF_PEAK * H100_FLOPS, host_memory_bytes_per_s=bytes_per_s)
        for tokens in a.tokens:
            device, host = (
                training_plan(
                    replace(retention.config_at(a, Path("records"), place, tokens), machine=on)
                )
                for place in retention.PLACES
            )
            found = retained(device.step_s(), host.compute_s_by_pass, host)
            found["most_retained"] = most_retained(found)
            rows.append({"host_memory_gb_per_s": bytes_per_s / 1e9, "tokens": tokens} | found)
    return rows


def main() -> None:
    a = parse()
    if a.plan:
        report.finish({"rows": planned_rows(a), "published": planned_published_rows()})
        return
    if ahead_of_time.skip_without_cuda_libraries():
        return
    (device,) = ahead_of_time.abstract_gpu_devices(HOST.accelerator)
    rates, folder = gpu_rates(HOST.accelerator), Path("records")
    one = ahead_of_time.Programs(device, rates)
    in_host_memory(one, retention.config_at(a, folder, "host", a.micro_batch_tokens), device)
    rows, estimates = [{"experts": "host"} | row for row in one.rows], []
    for tokens in a.tokens:
        fused = ahead_of_time.Programs(device, rates)
        on_device(fused, retention.config_at(a, folder, "device", tokens), device)
        rows += [{"experts": "device", "tokens": tokens} | row for row in fused.rows]
        config = replace(retention.config_at(a, folder, "host", tokens), machine=HOST)
        groups = config.model.num_moe_layers * math.ceil(a.experts / MOST_EXPERTS)
        computing_s = computing_s_by_pass(one.rows, config, groups)
        found = retained(fused.rows[0]["estimated_s"], computing_s, training_plan(config))
        estimates.append(report.progress({"tokens": tokens} | found))
    result: dict[str, Any] = {
        "benchmark": "speed kept with experts in host memory, estimated for an H100",
        "link_bytes_per_s": HOST.link_bytes_per_s,
        "host_memory_bytes_per_s": HOST.host_memory_bytes_per_s,
        "estimates": estimates,
        "rows": rows,
    }
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
