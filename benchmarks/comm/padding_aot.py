"""Training steps with padded and with ragged exchanges, compiled for eight H100 without one.

    python benchmarks/comm/padding_aot.py
        an hour on two cores
    python benchmarks/comm/padding_aot.py --shapes olmoe --kinds ragged
        some of them

The shapes of `benchmarks/train/estimates.py` on eight devices (each layer computed again in the
backward pass), and OLMoE with four layers that keep all residuals. temporary_gb: XLA's buffers of a
device beside the state, as compiled. planned_gb: all bytes of a device by `--plan`. all_to_all_gb:
bytes that a device sends in a step's all-to-alls, padding included, under an even load; of the
ragged ones only rows. step_ms, all_to_all_ms: estimated, see `jmoe/planning/gpu_estimate.py`; the
loops over further rounds, which an even load does not enter, count nothing. Needs JAX's CUDA
libraries (`make setup EXTRA=cuda13`), no GPU and no driver. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
from dataclasses import replace

from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

from benchmarks.lib import ahead_of_time, report
from benchmarks.train.estimates import estimated_for, on_eight_gpus, planned_bytes
from jmoe.config import CommConfig
from jmoe.config.parallel import ExchangeKind
from jmoe.training.fused.step_estimate import StepEstimate, estimate_step

GPU = "h100"
SHAPES = {
    "olmoe": on_eight_gpus("olmoe", 16),
    "olmoe, 4 layers, residuals": replace(on_eight_gpus("olmoe", 4), remat="none"),
    "mixtral": on_eight_gpus("mixtral", 8),
    "qwen3": on_eight_gpus("qwen3", 12),
}
KINDS: tuple[ExchangeKind, ...] = ("flat", "ragged")


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    return parser.parse_args()


def row_of(name: str, kind: str, step: StepEstimate) -> JsonObject:
    """Return a compiled step's buffers and all-to-alls."""
    run, gpu = step.config, step.gpu
    sent = [each for each in gpu.communication if "all-to-all" in each.name]
    return {
        "shape": name,
        "layers": run.model.num_hidden_layers,
        "remat": run.remat,
        "tokens_per_device": run.batch_size * run.sequence_length // step.num_devices,
        "exchange": kind,
        "temporary_gb": round(step.memory.temporary_bytes / 1e9, 2),
        "compiled_gb": round(step.memory.num_bytes / 1e9, 2),
        "planned_gb": round(planned_bytes(run) / 1e9, 2),
        "all_to_alls": sum(each.launches for each in sent),
        "all_to_all_gb": round(sum(each.sent_bytes for each in sent) / 1e9, 2),
        "all_to_all_ms": round(1e3 * sum(each.seconds for each in sent), 1),
        "hidden_ms": round(1e3 * sum(each.hidden_s for each in sent), 1),
        "step_ms": round(1e3 * gpu.seconds, 1),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    rows = []
    for name in a.shapes:
        for kind in a.kinds:
            run = replace(SHAPES[name], comm=CommConfig(exchange=kind))
            step = estimate_step(estimated_for(run, GPU))
            rows.append(report.progress(row_of(name, kind, step)))
    result = {"benchmark": "padding_aot", "gpu": GPU, "rows": rows}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
