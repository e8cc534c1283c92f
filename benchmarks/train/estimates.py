"""Estimate training steps on GPUs without one, and compare planned bytes with compiled ones.

    make gpu-estimate    all shapes on an H100, one on the others; an hour or two on two cores
    python benchmarks/train/estimates.py --shapes olmoe mixtral
        some of them; prints and writes nothing
    python benchmarks/train/estimates.py --targets rtx-4090 a100 --shapes olmoe --write
        replaces these rows of benchmarks/results/estimates.json and keeps the others

The published shapes with as many layers as fit, bfloat16 with float32 masters; the smallest preset
of MoESys' Table 2 whole. Needs JAX's CUDA libraries (`make setup EXTRA=cuda13`), no GPU and no
driver. step_ms: estimated, see `jmoe/planning/gpu_estimate.py`. planned, compiled: GB of a device
by `--plan`, and as XLA lays the compiled step out. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import time
from dataclasses import replace
from datetime import date
from typing import Any, get_args, get_type_hints

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

from benchmarks.lib import ahead_of_time, report
from benchmarks.lib.published import published_config
from jmoe.config import CommConfig, MachineConfig, MeshConfig, TrainConfig
from jmoe.config.parallel import ExpertSharding, ScheduleKind
from jmoe.configs import PRESETS
from jmoe.models.huggingface import model_config
from jmoe.planning.gpu_estimate import GpuKernel
from jmoe.planning.gpu_links import GPUS_PER_NODE
from jmoe.run.planner import training_plan
from jmoe.training.fused.step_estimate import StepEstimate, estimate_step

RESULT = RESULTS / "estimates.json"
TARGETS = get_args(get_type_hints(TrainConfig)["estimate"])[1:]


def on_one_gpu(model: str, layers: int, batch: int, seq: int = 2048) -> TrainConfig:
    """Return the run of a published model with this number of layers on one device."""
    return TrainConfig(
        model=model_config(published_config(model, layers)), batch_size=batch, sequence_length=seq
    )


def on_eight_gpus(model: str, layers: int) -> TrainConfig:
    """Return the run of a published model whose experts are sharded over eight devices of a host,
    with four sequences of 4,096 tokens a device.
    """
    run = replace(on_one_gpu(model, layers, 32, 4096), remat="layer")
    return replace(run, mesh=MeshConfig(expert_intra=8))


def on_64_gpus(
    preset: str, sharding: ExpertSharding, schedule: ScheduleKind = "chunks"
) -> TrainConfig:
    """Return a preset's run on eight hosts that each have all experts, with a sequence of 4,096
    tokens a device.
    """
    return replace(
        PRESETS[preset][1],
        mesh=MeshConfig(data=8, expert_intra=8),
        batch_size=64,
        comm=CommConfig(shard_experts=sharding, schedule=schedule),
    )


def in_micro_batches(replicas: int) -> TrainConfig:
    """Return OLMoE's run on eight hosts that each have all experts, with four micro-batches of a
    sequence of 4,096 tokens a device, and this many copies of the state.
    """
    run = replace(on_one_gpu("olmoe", 16, 256, 4096), remat="layer", gradient_accumulation_steps=4)
    return replace(run, mesh=MeshConfig(data=8, expert_intra=8, replicate=replicas))


def with_experts_over_64_gpus(model: str, layers: int) -> TrainConfig:
    """Return the run of a published model whose experts are sharded over eight hosts of eight
    devices, with a sequence of 4,096 tokens a device.
    """
    run = replace(on_one_gpu(model, layers, 64, 4096), remat="layer")
    return replace(run, mesh=MeshConfig(expert_inter=8, expert_intra=8))


SHAPES = {
    "olmoe": on_one_gpu("olmoe", 6, 4),
    "olmoe, 16,384 tokens": on_one_gpu("olmoe", 6, 8),
    "olmoe, 32,768 tokens": on_one_gpu("olmoe", 6, 16),
    "mixtral": on_one_gpu("mixtral", 2, 4),
    "qwen3": on_one_gpu("qwen3", 4, 4),
    "qwen3, 8 layers": on_one_gpu("qwen3", 8, 4),
    "gpt-oss": on_one_gpu("gpt-oss", 6, 4),
    "deepseek-lite": on_one_gpu("deepseek-lite", 4, 4),
    "olmoe, 8,192 positions": on_one_gpu("olmoe", 6, 1, 8192),
    "mixtral, 8,192 positions": on_one_gpu("mixtral", 2, 1, 8192),
    "qwen3, 8,192 positions": on_one_gpu("qwen3", 4, 1, 8192),
    "gpt-oss, 8,192 positions": on_one_gpu("gpt-oss", 6, 1, 8192),
    "deepseek-lite, 8,192 positions": on_one_gpu("deepseek-lite", 4, 1, 8192),
    "gpt-moe-8e, 8 devices": PRESETS["gpt-moe-8e"][1],
    "olmoe, 8 devices": on_eight_gpus("olmoe", 16),
    "mixtral, 8 devices": on_eight_gpus("mixtral", 8),
    "qwen3, 8 devices": on_eight_gpus("qwen3", 12),
    "olmoe, 8 devices, pipelined": replace(
        on_eight_gpus("olmoe", 16), comm=CommConfig(schedule="pipelined")
    ),
    "qwen3, 8 devices, one sequence of 131,072 positions": replace(
        on_one_gpu("qwen3", 4, 1, 131_072),
        remat="layer",
        mesh=MeshConfig(expert_intra=8, context=8),
    ),
    "mixtral-8x7b, 64 devices, weights split": on_64_gpus("mixtral-8x7b", "weights"),
    "mixtral-8x7b, 64 devices, optimizer split": on_64_gpus("mixtral-8x7b", "optimizer"),
    "mixtral-8x7b, 64 devices, weights split, in any order": on_64_gpus(
        "mixtral-8x7b", "weights", "none"
    ),
    "qwen3-30b-a3b, 64 devices, weights split": on_64_gpus("qwen3-30b-a3b", "weights"),
    "olmoe, 64 devices, four micro-batches": in_micro_batches(1),
    "olmoe, 64 devices, four micro-batches, a copy on each host": in_micro_batches(8),
    "deepseek-v3, 64 devices": with_experts_over_64_gpus("deepseek-v3", 16),
    "deepseek-v3, 64 devices, pipelined": replace(
        with_experts_over_64_gpus("deepseek-v3", 16), comm=CommConfig(schedule="pipelined")
    ),
    "gpt-moe-64e, 64 devices": PRESETS["gpt-moe-64e"][1],
    "gpt-175b, 64 devices": replace(
        PRESETS["gpt-175b"][1], mesh=MeshConfig(data=64), batch_size=256
    ),
}

OTHERS_RUN = "olmoe"  # what GPUs other than an H100 are estimated for


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["h100"])
    parser.add_argument(
        "--write", action="store_true", help="into benchmarks/results/estimates.json"
    )
    a = parser.parse_args()
    a.steps = [(target, name) for target in a.targets for name in a.shapes or SHAPES]
    if a.write and not a.shapes:
        a.steps += [(target, OTHERS_RUN) for target in TARGETS if target not in a.targets]
    return a


def estimated_for(run: TrainConfig, target: Any) -> TrainConfig:
    """Return a run to estimate for a GPU on a host whose memory holds everything."""
    machine = MachineConfig(accelerator=target, host_bytes=10**12)
    return replace(run, machine=machine, estimate=target)


def planned_bytes(config: TrainConfig) -> int:
    """Return the planned bytes of a device."""
    return training_plan(replace(config, estimate="", plan=True)).bytes_on_tier("device")


def kernel_text(kernel: GpuKernel) -> str:
    """Return a kernel's milliseconds, launches, name and place in one line."""
    return f"{1e3 * kernel.seconds:.1f} ms in {kernel.launches:,}: {kernel.name} ({kernel.scope})"


def row_of(name: str, step: StepEstimate) -> JsonObject:
    """Return a step's estimate, and its bytes beside the planner's."""
    run, gpu = step.config, step.gpu
    planned, collectives = {}, {}
    if run.model.num_moe_layers:  # `--plan` refuses dense models
        num_bytes = planned_bytes(run)
        planned = {
            "planned_gb": round(num_bytes / 1e9, 2),
            "planned_of_compiled": round(num_bytes / step.memory.num_bytes, 3),
        }
    if step.num_devices > GPUS_PER_NODE:
        away_gb = sum(each.away_bytes for each in gpu.communication) / 1e9
        collectives = {
            "between_nodes_gb": round(away_gb, 2),
            "collectives": [str(each) for each in gpu.communication],
        }
    return {
        "shape": name,
        "gpu": run.estimate,
        "layers": run.model.num_hidden_layers,
        "devices": step.num_devices,
        "tokens": run.batch_size * run.sequence_length,
        "step_ms": round(1e3 * gpu.seconds, 1),
        "tokens_per_s": round(step.tokens_per_s),
        "mfu": round(step.mfu, 4),
        "launches": gpu.launches,
        "moved_gb": round(gpu.num_bytes / 1e9, 1),
        "computed_tflop": round(gpu.flops / 1e12, 1),
        "communication_ms": round(1e3 * gpu.exposed_s, 1),
        "compiled_gb": round(step.memory.num_bytes / 1e9, 2),
        **planned,
        **collectives,
        "slowest": [kernel_text(kernel) for kernel in gpu.kernels[:5]],
        "date": f"{date.today()}",
    }


def rows_in_order(rows: list[JsonObject]) -> list[JsonObject]:
    """Return the committed rows with these in place of older ones: by GPU, then by shape; rows of
    shapes that `SHAPES` no longer has are left out.
    """
    committed = json.loads(RESULT.read_text())["rows"]
    newest = {(row["gpu"], row["shape"]): row for row in [*committed, *rows]}
    steps = [(target, name) for target in ("h100", *TARGETS) for name in SHAPES]
    return [newest[step] for step in dict.fromkeys(steps) if step in newest]


def result_with(rows: list[JsonObject]) -> JsonObject:
    """Return the whole result with these rows, as it is committed and printed."""
    return {
        "benchmark": "training steps on GPUs that are not here: estimated, and planned beside "
        "compiled bytes",
        "command": "make gpu-estimate",
        "date": f"{date.today()}",
        "machine": "CPU cores alone: compiled with the CUDA 13 libraries, run nowhere",
        "notes": [
            "an H100 took 193.9 ms for an earlier step of olmoe (gpu_profile_olmoe); this says "
            "198.7, 2.5 % more, and ranks the same five kernels first",
            "that step, of commit 1615e9e, by an earlier form of this estimate: olmoe 201.5 ms, "
            "with 32,768 tokens 617, mixtral 187, qwen3 1,029",
            "before the router's weights multiplied the experts' activations and the loss had a "
            "kernel, on 2026-11-28: olmoe 94.8 ms and 50.35 GB, with 16,384 tokens 156.8 ms and "
            "54.16 GB, mixtral 117.5 ms, qwen3 100.6 ms",
            "with loops over layers and no kernel for norms and rotation, on 2026-11-29: olmoe "
            "92.4 ms in 970 launches, with 16,384 tokens 152.1 in 984, with 32,768 280.1, mixtral "
            "117.4, qwen3 97.6, gpt-oss 293.7, deepseek-lite 84.3; before the experts' gathered "
            "rows were saved and the router's product was one of bfloat16 parts: olmoe with 16,384 "
            "tokens 136.8",
            "gpt-oss and 8 layers of qwen3 exceed an H100's memory: the times are of its rates",
            "8 devices: the experts over all of them, remat = layer, routing as even as it can be; "
            "with collectives ordered by passes over their operands, on 2026-11-28: olmoe 828.9 ms "
            "in 9,009 launches, mixtral 911.3 in 4,139, qwen3 663.4 in 7,040; in an order that XLA "
            "may change: gpt-moe-8e 82.4, olmoe 707.1, pipelined 645.1, mixtral 872.8, qwen3 529.2",
            "between_nodes_gb: what a GPU sends to other hosts",
            "64 devices: eight hosts of eight. mixtral and qwen3 have a replica of all experts on "
            "each host, deepseek-v3 and gpt-moe-64e have the experts over all hosts. Four "
            "collectives may be in flight, and expert products count where collectives are placed; "
            "before both, on 2026-11-29: mixtral 1,570.8 ms with weights split, 1,408.9 with the "
            "optimizer split, qwen3 1,041.7",
            "collectives: asynchronous ones have a start and an end with other work between, which "
            "hides that many ms; rows without this number were written before it was counted",
            "four micro-batches: before the layers added their gradients to one array of sums, on "
            "2026-11-29, olmoe 27.34 GB and 836.0 ms, with a copy on each host 27.55 and 843.6",
            "gpt-175b: dense, so without planned bytes; 85.1 GB do not fit an H100, and 94 of its "
            "100 reduce-scatters are synchronous",
            "gpt-oss, 6 layers: does not fit an H100, so that XLA computes the logits four times "
            "there",
        ],
        "rows": rows,
        "versions": report.versions("jax", "jaxlib"),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    rows = []
    for target, name in a.steps:
        begun = time.perf_counter()
        row = row_of(name, estimate_step(estimated_for(SHAPES[name], target)))
        rows.append(report.progress(row | {"compile_s": round(time.perf_counter() - begun)}))
    result = result_with(rows_in_order(rows) if a.write else rows)
    if a.write:
        report.write(result, RESULT)
    report.finish(result)


if __name__ == "__main__":
    main()
