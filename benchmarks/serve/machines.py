"""Plan DeepSeek-V3 and gpt-oss-120b on three machines, and the tokens/s expected; needs no device.

Every figure is an estimate, that of `serve.py --dry-run` for a folder with `config.json` alone. The
table goes to `docs/inference.md`; a test compares them.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.published import published_config
from benchmarks.lib.report import JsonObject
from jmoe.config import MachineConfig
from jmoe.config.engine import EngineConfig, EngineMesh
from jmoe.inference.dry_run import DryRun, plan_dry_run
from jmoe.models.announced import read_announced
from jmoe.models.lazy_checkpoint import LazyCheckpoint
from jmoe.planning.serving import DecodeEstimate

MAX_BATCH, MAX_SEQ_LEN = 8, 8192


@dataclass(frozen=True)
class Computer:
    """A machine to plan for, and its devices."""

    name: str
    machine: MachineConfig
    devices: int = 1

    def options(self) -> EngineConfig:
        """Return the engine's options; several devices split the weights outside of experts."""
        mesh = EngineMesh(self.devices, dense="tensor") if self.devices > 1 else EngineMesh()
        return EngineConfig(max_batch=MAX_BATCH, max_seq_len=MAX_SEQ_LEN, mesh=mesh)


# of host memory: 16 and 8 channels of DDR5, 2 channels
COMPUTERS = (
    Computer(
        "8 x H100, 2 TB",
        MachineConfig("h100", host_bytes=2 * 10**12, host_memory_bytes_per_s=4e11),
        devices=8,
    ),
    Computer(
        "1 x H100, 1 TB",
        MachineConfig("h100", host_bytes=10**12, host_memory_bytes_per_s=2e11),
    ),
    Computer(
        "1 x RTX 5090, 192 GB",
        MachineConfig("rtx-5090", host_bytes=192 * 10**9, host_memory_bytes_per_s=7e10),
    ),
)
DEEPSEEK_V3: JsonObject = {  # deepseek-ai/DeepSeek-V3
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MODELS: dict[str, JsonObject] = {
    "DeepSeek-V3, FP8": DEEPSEEK_V3,
    "gpt-oss-120b, MXFP4": published_config("gpt-oss", 36)
    | {"num_local_experts": 128, "quantization_config": {"quant_method": "mxfp4"}},
}


Planned = tuple[str, str, DryRun | str]  # (model, machine, plan or why there is none)


def dry_run(checkpoint: LazyCheckpoint, computer: Computer) -> DryRun | str:
    """Return the plan of a model; if it does not fit, why."""
    try:
        return plan_dry_run(checkpoint, computer.options(), computer.machine)
    except ValueError as error:
        return str(error)


def rows() -> Iterator[Planned]:
    """Yield (model, machine, plan) of every model on every machine."""
    with tempfile.TemporaryDirectory() as folder:
        for model, fields in MODELS.items():
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            with LazyCheckpoint(folder, announced=read_announced(Path(folder))) as checkpoint:
                for computer in COMPUTERS:
                    yield model, computer.name, dry_run(checkpoint, computer)


def table_lines(planned: list[Planned]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield (
        "| model | machine | experts | on a device | tokens/s of 1 sequence, its longest term |"
        f" tokens/s of {MAX_BATCH} sequences, their longest term |"
    )
    yield "|---|---|---|---|---|---|"
    for model, machine, plan in planned:
        if isinstance(plan, str):
            yield f"| {model} | {machine} | refused: `{plan}` | | | |"
            continue
        memory = plan.memory
        share = min(1.0, memory.num_devices * memory.expert_slots / memory.model.num_experts)
        cells = (
            *(model, machine, f"{memory.policy}, {100 * share:.0f} % on devices"),
            f"{memory.device_bytes / 1e9:.1f} GB",
            *map(_step_text, plan.steps),
        )
        yield f"| {' | '.join(cells)} |"


def _step_text(step: DecodeEstimate) -> str:
    term = step.longest_term
    longest = f"{term.name} {1e3 * term.seconds:.3g} of {1e3 * step.seconds:.3g} ms"
    rate = f"{step.tokens_per_s:,.{0 if step.tokens_per_s >= 100 else 1}f}"
    return f"{rate} ({step.policy}; {longest})"


def main() -> None:
    """Print the table, then the figures as a JSON object."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    planned = list(rows())
    print("\n".join(table_lines(planned)))
    figures = {
        f"{model} on {machine}": (
            plan if isinstance(plan, str) else [step.tokens_per_s for step in plan.steps]
        )
        for model, machine, plan in planned
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
