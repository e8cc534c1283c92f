"""Estimate the papers' training steps at their sizes on A100, from the compiled programs.

    python benchmarks/paper/gpu_estimates.py            all of them; an hour or two on two cores
    python benchmarks/paper/gpu_estimates.py --steps moesys-gpt-moe-8e --write
        replaces this row of benchmarks/results/paper_estimates.json and keeps the others

MoESys' Table 1 (dense GPT on 8 to 128 GPUs) and Table 2 (GPT-MoE on 8 to 128 GPUs), and Lina's
Table 1 (all-to-alls of 12, 24 and 36 layers of 4 and 16 experts). Needs JAX's CUDA libraries
(`make setup EXTRA=cuda13`), no GPU and no driver. Every figure is estimated, none measured:
`jmoe/planning/gpu_estimate.py` says how. What the papers leave open is chosen here: sequences of
1,024 tokens, 8,192 tokens a device in Lina's steps, bfloat16 with float32 masters, and of the links
NVLink's 300 GB/s and an adapter of 200 Gbit/s for each GPU (MoESys), of 100 Gbit/s for each node
(Lina). Last line: a JSON object.
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
from dataclasses import dataclass, replace
from datetime import date

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

from benchmarks.lib import ahead_of_time, report
from jmoe.config import CommConfig, MachineConfig, MeshConfig, RouterConfig, TrainConfig
from jmoe.config.cluster import NetworkConfig
from jmoe.configs import PRESETS
from jmoe.configs.gpt_moe import gpt_dense
from jmoe.planning.gpu_estimate import GpuEstimate
from jmoe.training.fused.step_estimate import StepEstimate, estimate_step

RESULT = RESULTS / "paper_estimates.json"
GPU = "a100"
NVLINK = 300e9  # bytes/s of an A100 in each direction
MOESYS_LINKS = NetworkConfig(NVLINK, 25e9)
LINA_ADAPTER = 12.5e9  # of a node with up to four GPUs
SEQUENCE = 1024
LINA_TOKENS = 8192  # of a device


@dataclass(frozen=True)
class Step:
    """A training step of a paper. paper: its figures of that step."""

    place: str
    run: TrainConfig
    paper: JsonObject
    links: NetworkConfig = MOESYS_LINKS


def dense(
    hidden: int, layers: int, heads: int, devices: int, sequences: int, paper: JsonObject
) -> Step:
    """Return a step of MoESys' Table 1, its dense parameters split over all devices."""
    model = gpt_dense(hidden, layers, heads)
    run = TrainConfig(
        model=model,
        mesh=MeshConfig(data=devices),
        batch_size=sequences,
        sequence_length=SEQUENCE,
        remat="layer",
    )
    return Step("MoESys, Table 1", run, paper)


def gpt_moe(preset: str, tokens_per_s: int, deepspeed: int, gb: float) -> Step:
    """Return a step of MoESys' Table 2."""
    paper = {"tokens_per_s": tokens_per_s, "deepspeed_tokens_per_s": deepspeed, "gb": gb}
    return Step("MoESys, Table 2", PRESETS[preset][1], paper)


def lina(layers: int, experts: int, all_to_all_ms: int, share: float) -> Step:
    """Return a step of Lina's Table 1: an expert of every layer on each of `experts` devices of
    four nodes, dense gradients all-reduced in the order in which they are known.

    hidden 512 follows from the paper's numbers of parameters, 117 million to 1.2 billion.
    """
    model = replace(
        gpt_dense(512, layers, 8),
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=2048,
        capacity_factor=1.25,
        router=RouterConfig(kind="gshard", aux_loss_coef=0.01),
    )
    run = TrainConfig(
        model=model,
        mesh=MeshConfig(expert_inter=4, expert_intra=experts // 4),
        comm=CommConfig(
            schedule="ready", shard_dense=False, embedding="replicated", exchange="flat"
        ),
        batch_size=experts * LINA_TOKENS // SEQUENCE,
        sequence_length=SEQUENCE,
    )
    links = NetworkConfig(NVLINK, LINA_ADAPTER / (experts // 4))
    return Step("Lina, Table 1", run, {"all_to_all_ms": all_to_all_ms, "share": share}, links)


STEPS = {
    "moesys-gpt-0.35b": dense(1024, 24, 16, 8, 64, {"tokens_per_s": 291585, "megatron": 255401}),
    "moesys-gpt-1.3b": dense(2048, 24, 16, 8, 64, {"tokens_per_s": 115682, "megatron": 109537}),
    "moesys-gpt-6.7b": dense(4096, 32, 32, 16, 128, {"tokens_per_s": 44605, "megatron": 39936}),
    "moesys-gpt-175b": Step(
        "MoESys, Table 1", PRESETS["gpt-175b"][1], {"tokens_per_s": 14634, "megatron": 14571}
    ),
    "moesys-gpt-moe-8e": gpt_moe("gpt-moe-8e", 31085, 24165, 56.8),
    "moesys-gpt-moe-16e": gpt_moe("gpt-moe-16e", 59136, 43691, 53.9),
    "moesys-gpt-moe-32e": gpt_moe("gpt-moe-32e", 113456, 82957, 54.5),
    "moesys-gpt-moe-64e": gpt_moe("gpt-moe-64e", 209970, 157728, 54.4),
    "moesys-gpt-moe-128e": gpt_moe("gpt-moe-128e", 376968, 283706, 54.3),
    "lina-12-layers-4-experts": lina(12, 4, 259, 0.367),
    "lina-24-layers-4-experts": lina(24, 4, 589, 0.354),
    "lina-36-layers-4-experts": lina(36, 4, 979, 0.382),
    "lina-12-layers-16-experts": lina(12, 16, 333, 0.395),
    "lina-24-layers-16-experts": lina(24, 16, 715, 0.376),
    "lina-36-layers-16-experts": lina(36, 16, 1145, 0.368),
}


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--steps", nargs="+", choices=tuple(STEPS), default=tuple(STEPS))
    parser.add_argument(
        "--write", action="store_true", help=f"into benchmarks/results/{RESULT.name}"
    )
    return parser.parse_args()


def all_to_all_s(gpu: GpuEstimate) -> float:
    """Return the seconds of a step's all-to-alls, hidden or not."""
    return sum(each.seconds for each in gpu.communication if "all-to-all" in each.name)


def row_of(name: str, estimate: StepEstimate) -> JsonObject:
    """Return a step's estimate beside the paper's figures."""
    step, run, gpu = STEPS[name], estimate.config, estimate.gpu
    return {
        "step": name,
        "place": step.place,
        "gpu": GPU,
        "devices": estimate.num_devices,
        "parameters_billions": round(run.model.total_and_active_parameters()[0] / 1e9, 2),
        "tokens": run.batch_size * run.sequence_length,
        "step_ms": round(1e3 * gpu.seconds, 1),
        "tokens_per_s": round(estimate.tokens_per_s),
        "mfu": round(estimate.mfu, 3),
        "device_gb": round(estimate.memory.num_bytes / 1e9, 1),
        "exposed_communication_ms": round(1e3 * gpu.exposed_s, 1),
        "all_to_all_ms": round(1e3 * all_to_all_s(gpu), 1),
        "all_to_all_share": round(all_to_all_s(gpu) / gpu.seconds, 3),
        "paper": step.paper,
        "date": f"{date.today()}",
    }


def with_committed(rows: list[JsonObject]) -> list[JsonObject]:
    """Return the committed rows with these in place of older ones, in the order of `STEPS`."""
    committed = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    newest = {row["step"]: row for row in [*committed, *rows]}
    return [newest[name] for name in STEPS if name in newest]


def result_with(rows: list[JsonObject]) -> JsonObject:
    """Return the whole result with these rows."""
    return {
        "benchmark": "the papers' training steps at their sizes on A100: estimated, none measured",
        "command": "python benchmarks/paper/gpu_estimates.py --write",
        "date": f"{date.today()}",
        "machine": "CPU cores alone: compiled with the CUDA 13 libraries, run nowhere",
        "notes": [
            "paper: the paper's measured figures, of all GPUs together",
            "chosen, since the papers do not say: sequences of 1,024 tokens; bfloat16, float32 "
            "masters; in Lina's steps 8,192 tokens a device, capacity 1.25 and one GPU (4 experts) "
            "or four (16) in each of four nodes",
            "links a GPU and direction: 300 GB/s inside a node; between nodes 200 Gbit/s (MoESys), "
            "100 Gbit/s a node (Lina)",
            "dense GPT: parameters split over all devices, every layer computed again in the "
            "backward pass; the paper has tensor and pipeline parallelism for 175 billion "
            "parameters, which jmoe has not",
            "Lina's steps: its baseline, dense gradients all-reduced as soon as they are known",
        ],
        "rows": rows,
        "versions": report.versions("jax", "jaxlib"),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    rows: list[JsonObject] = []
    for name in a.steps:
        begun = time.perf_counter()
        run = replace(
            STEPS[name].run,
            machine=MachineConfig(accelerator=GPU, host_bytes=10**12),
            estimate=GPU,
        )
        row = row_of(name, estimate_step(run, STEPS[name].links))
        rows.append(report.progress(row | {"compile_s": round(time.perf_counter() - begun)}))
        if a.write:
            report.write(result_with(with_committed(rows)), RESULT)
    report.finish(result_with(rows))


if __name__ == "__main__":
    main()
