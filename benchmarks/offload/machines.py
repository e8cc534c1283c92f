"""Plan the largest models that three machines fine-tune, and their tokens/s; needs no device.

Every figure is an estimate of the planner (`train.py --plan`). The table goes to
`docs/offloading.md`; a test compares them.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.lib.published import published_config
from jmoe.config import MachineConfig, MeshConfig, ModelConfig, TiersConfig, TrainConfig
from jmoe.models.huggingface import model_config
from jmoe.planning.training import TrainingPlan
from jmoe.run.planner import training_plan

SEQUENCE = 4096
SEQUENCES_PER_DEVICE = (8, 32)  # of a step, each in a micro-batch of its own
# products reach this share of an accelerator's data sheet
SHARE_OF_PEAK = 0.4
MODELS_PER_MACHINE = 3
PLACES = (("host", "host"), ("host", "nvme"), ("nvme", "nvme"))  # the fastest first


@dataclass(frozen=True)
class Computer:
    """A machine to plan for, with several devices of one kind."""

    name: str
    machine: MachineConfig
    devices: int = 1


def computer(
    name: str, accelerator: str, devices: int, *, peak: float, **machine: float
) -> Computer:
    """Return a machine; peak: FLOP/s of the accelerator's data sheet."""
    described = MachineConfig(
        accelerator=accelerator,  # type: ignore[arg-type]
        flops=SHARE_OF_PEAK * peak,
        link_bytes_per_s=5e10,
        **machine,  # type: ignore[arg-type]
    )
    return Computer(name, described, devices)


# of NVMe: one PCIe 4.0 drive; of host memory: 8 channels of DDR5, twice that, 2 channels
COMPUTERS = (
    computer(
        *("1 x H100, 1 TB", "h100", 1),
        peak=989e12,
        host_bytes=10**12,
        nvme_bytes=8 * 10**12,
        host_memory_bytes_per_s=2e11,
        nvme_read_bytes_per_s=6e9,
        nvme_write_bytes_per_s=5e9,
    ),
    computer(
        *("8 x H100, 2 TB", "h100", 8),
        peak=989e12,
        host_bytes=2 * 10**12,
        nvme_bytes=16 * 10**12,
        host_memory_bytes_per_s=4e11,
        nvme_read_bytes_per_s=2.4e10,
        nvme_write_bytes_per_s=2e10,
    ),
    computer(
        *("1 x RTX 5090, 192 GB, NVMe 4 TB", "rtx-5090", 1),
        peak=210e12,
        host_bytes=192 * 10**9,
        nvme_bytes=4 * 10**12,
        host_memory_bytes_per_s=7e10,
        nvme_read_bytes_per_s=6e9,
        nvme_write_bytes_per_s=5e9,
    ),
)


def models() -> dict[str, ModelConfig]:
    """Return published models by name, largest first."""
    found = {
        "OLMoE-1B-7B": published_config("olmoe", 16),
        "DeepSeek-V2-Lite": published_config("deepseek-lite", 27),
        "gpt-oss-20b": published_config("gpt-oss", 24),
        "Qwen3-30B-A3B": published_config("qwen3", 48),
        "Mixtral-8x7B": published_config("mixtral", 32),
        "gpt-oss-120b": published_config("gpt-oss", 36) | {"num_local_experts": 128},
        "Mixtral-8x22B": published_config("mixtral", 56)
        | {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48}
        | {"vocab_size": 32768},
        "Qwen3-235B-A22B": published_config("qwen3", 94)
        | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
        | {"num_attention_heads": 64},
    }
    sized = {name: model_config(fields) for name, fields in found.items()}
    return dict(sorted(sized.items(), key=lambda item: -item[1].total_and_active_parameters()[0]))


def fastest_plan(model: ModelConfig, on: Computer, sequences: int) -> TrainingPlan | None:
    """Return the plan of the fastest tiers on which the model fits; None if it fits on none.

    sequences: of a device's step.
    """
    plans = []
    for experts, optimizer in PLACES:
        for layers in (model.num_hidden_layers, 2, 1):
            tiers = TiersConfig(
                *(experts, optimizer),
                gradient_dtype="bfloat16",
                update="host",
                device_layers=layers,
            )
            config = TrainConfig(
                model=model,
                machine=on.machine,
                tiers=tiers,
                mesh=MeshConfig(expert_intra=on.devices),
                batch_size=sequences * on.devices,
                sequence_length=SEQUENCE,
                gradient_accumulation_steps=sequences,
                remat="layer",
            )
            plan = training_plan(config)
            if not plan.lacking_bytes:
                plans.append(plan)
    return min(plans, key=lambda plan: plan.step_s(), default=None)


def table_lines() -> Iterator[str]:
    """Yield the lines of a Markdown table: for each machine the largest models that fit."""
    yield (
        "| machine | model | parameters | weights, moments | host, NVMe | tokens a step |"
        " tokens/s, estimated | waits, estimated |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for on in COMPUTERS:
        rows = []
        for name, model in models().items():
            plans = {n: fastest_plan(model, on, n) for n in SEQUENCES_PER_DEVICE}
            rows.append([_row(on, name, model, p, n) for n, p in plans.items() if p is not None])
        for own in list(filter(None, rows))[:MODELS_PER_MACHINE]:
            yield from own


def _row(on: Computer, name: str, model: ModelConfig, plan: TrainingPlan, sequences: int) -> str:
    place, tokens = plan.placement, sequences * on.devices * SEQUENCE
    host, nvme = (f"{plan.needed_bytes(tier) / 1e9:,.0f} GB" for tier in ("host", "nvme"))
    waits = 1 - sum(plan.compute_s_by_pass) / plan.step_s()
    cells = (
        on.name,
        name,
        f"{model.total_and_active_parameters()[0] / 1e9:.1f} B",
        f"{place.experts}, {place.optimizer}",
        f"{host}, {nvme}",
        f"{tokens:,}",
        f"{tokens / plan.step_s():,.0f}",
        f"{100 * waits:.0f} %",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    print("\n".join(table_lines()))


if __name__ == "__main__":
    main()
