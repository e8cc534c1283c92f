"""Estimate steps with experts in fp8, with exact inputs and with inputs in fp8.

For GPUs that are not here; `EngineConfig.expert_activations` rounds the inputs.

    python benchmarks/serve/fp8_estimates.py             prints and writes nothing
    python benchmarks/serve/fp8_estimates.py --write     replaces `inputs_in_fp8` of
        benchmarks/results/decode_estimates.json

OLMoE, all experts on the device: a step of 64 single tokens with 1,000 tokens before each, and one
of 8 prompts of 512 tokens. Needs JAX's CUDA libraries (`make setup EXTRA=cuda13`), no GPU and no
driver. step_ms: estimated, see `jmoe/planning/gpu_estimate.py`; experts_ms: the products with
experts, and what rounds their inputs. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import itertools
import json
import time
from datetime import date
from typing import Literal

from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

import jax

from benchmarks.lib import ahead_of_time, report
from benchmarks.serve.decode_estimates import RESULT, make_estimator
from jmoe.config.engine import EngineConfig

MODEL = "olmoe"
TARGETS = ("h100", "rtx-4090")
# (rows, tokens of each, tokens before them)
STEPS = {"64 single tokens": (64, 1, 1000), "8 prompts of 512": (8, 512, 0)}
INPUTS: tuple[Literal["exact", "fp8"], ...] = ("exact", "fp8")


def estimate(target: str, step: str, inputs: Literal["exact", "fp8"]) -> JsonObject:
    """Return the estimate of a step of `STEPS` on a GPU."""
    begun = time.perf_counter()
    rows, width, context = STEPS[step]
    options = EngineConfig(expert_activations=inputs)
    estimator = make_estimator(MODEL, target, rows, context + width, options, expert_format="fp8")
    found = estimator.estimate_step(rows, width, context)
    # a program of its own in a step of several tokens a row, else kernels of a layer's program
    experts = [k for k in found.gpu.kernels if k.name.startswith("experts:")] or [
        k for k in found.gpu.kernels if "grouped_matmul" in k.name
    ]
    return {
        "model": MODEL,
        "gpu": target,
        "step": step,
        "inputs": inputs,
        "step_ms": round(1e3 * found.seconds, 2),
        "experts_ms": round(1e3 * sum(k.seconds for k in experts), 2),
        "launches": found.gpu.launches,
        "slowest": "; ".join(
            f"{1e3 * k.seconds:.2f} ms in {k.launches}: {k.name}" for k in experts[:3]
        ),
        "date": f"{date.today()}",
        "compile_s": round(time.perf_counter() - begun),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    a = parser.parse_args()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    rows = []
    for target in a.targets:
        jax.clear_caches()  # functions that were traced for another GPU have its kernels
        kinds = itertools.product([target], STEPS, INPUTS)
        rows += [report.progress(estimate(*kind)) for kind in kinds]
    result = json.loads(RESULT.read_text()) | {"inputs_in_fp8": rows}
    if a.write:
        report.write(result, RESULT)
    report.finish(result)


if __name__ == "__main__":
    main()
