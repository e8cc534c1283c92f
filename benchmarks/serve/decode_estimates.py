"""Estimate decoding steps on GPUs without one: the cache read in place, or contexts copied first.

    python benchmarks/serve/decode_estimates.py                    prints and writes nothing
    python benchmarks/serve/decode_estimates.py --write            replaces these rows of
        benchmarks/results/decode_estimates.json and keeps the others
    python benchmarks/serve/decode_estimates.py --models olmoe --targets h100 --batches 1
    python benchmarks/serve/decode_estimates.py --kv-cache-dtypes fp8 --attention paged_attention

Whole models, all experts on the device: OLMoE and DeepSeek-V2-Lite in bfloat16, gpt-oss-20b with
experts in mxfp4. Needs JAX's CUDA libraries (`make setup EXTRA=cuda13`), no GPU and no driver.
step_ms: estimated, see `jmoe/planning/gpu_estimate.py`; attention_ms: the part outside experts and
head: attention, its projections and the router. floor_ms: the weights that a step reads and the
keys and values that it attends to, at the rate of a copy. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import itertools
import json
import math
import time
from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject
from jmoe.runtime import hide_devices

if __name__ == "__main__":
    hide_devices()

import jax
import jax.numpy as jnp

from benchmarks.lib import ahead_of_time, report
from benchmarks.lib.published import published_config
from jmoe.config import ModelConfig
from jmoe.config.engine import EngineConfig
from jmoe.config.tiers import ACCELERATORS
from jmoe.inference.engine_estimate import _StepEstimator
from jmoe.inference.kv_cache import BLOCK, cache_value_dtype, empty_caches
from jmoe.models.huggingface import model_config
from jmoe.planning.gpu_estimate import gpu_rates
from jmoe.planning.roofline import distinct_experts
from kernels_pallas.compressed import stored_fields
from kernels_pallas.formats import FORMATS
from kernels_pallas.paged_attention.api import MODULES

RESULT = RESULTS / "decode_estimates.json"
# layers, and the format of the experts
MODELS: dict[str, tuple[int, str | None]] = {
    "olmoe": (16, None),
    "gpt-oss": (24, "mxfp4"),
    "deepseek-lite": (27, None),
}
TARGETS, BATCHES, CONTEXTS = ("h100", "rtx-4090"), (1, 8, 64), (1000, 32000)
ATTENTION = ("paged_attention", "by copies")  # how a step reads the cache
CACHES: tuple[Literal["auto", "fp8"], ...] = ("auto", "fp8")  # `EngineConfig.kv_cache_dtype`
Step = tuple[str, str, str, Literal["auto", "fp8"], int, int]
Fields = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["olmoe", "gpt-oss"])
    parser.add_argument("--targets", nargs="+", choices=tuple(ACCELERATORS), default=TARGETS)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=ATTENTION)
    parser.add_argument("--kv-cache-dtypes", nargs="+", choices=CACHES, default=["auto"])
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    return parser.parse_args()


def expert_fields(config: ModelConfig, expert_format: str | None) -> Fields:
    """Return (shape, dtype) of each array of an expert in a slot."""
    d, f = config.hidden_size, config.moe_intermediate_size
    fields: Fields = {}
    for name, shape in {"w_up": (d, 2 * f), "w_down": (f, d)}.items():
        if expert_format is None:
            fields[name] = shape, np.dtype(np.uint16)
        else:
            fields |= stored_fields(FORMATS[expert_format], name, shape)
    if config.mlp_bias:
        fields |= {"b_up": ((2 * f,), np.dtype(np.uint16)), "b_down": ((d,), np.dtype(np.uint16))}
    return fields


class Estimator(_StepEstimator):
    """An estimator that compiles equal programs once, for all of a model's steps on a GPU."""

    compiled: dict[Any, Any]

    def _compile(self, function: Any, *operands: Any) -> Any:
        leaves, structure = jax.tree.flatten(operands)
        sizes = tuple((x.shape, x.dtype) if hasattr(x, "dtype") else x for x in leaves)
        key = function, structure, sizes
        if key not in self.compiled:
            self.compiled[key] = super()._compile(function, *operands)
        return self.compiled[key]


def make_estimator(
    model: str,
    target: str,
    batch: int,
    context: int,
    options: EngineConfig | None = None,
    *,
    expert_format: str | None = None,
) -> Estimator:
    """Return the estimator of an engine whose experts are all on the device.

    options: of the engine, but for its sizes. expert_format: None for the one of `MODELS`.
    """
    layers, usual_format = MODELS[model]
    expert_format = expert_format or usual_format
    config = model_config(published_config(model, layers) | {"max_position_embeddings": 131072})
    fields = expert_fields(config, expert_format)
    checkpoint: Any = SimpleNamespace(
        config=config, dtype=jnp.dtype(jnp.bfloat16), expert_fields=fields
    )
    memory: Any = SimpleNamespace(
        policy="resident", expert_tier=None, expert_slots=config.num_moe_layers * config.num_experts
    )
    max_seq_len = -(-(context + 1) // BLOCK) * BLOCK
    options = replace(options or EngineConfig(), max_batch=batch, max_seq_len=max_seq_len)
    (device,) = ahead_of_time.abstract_gpu_devices(target)
    estimator = Estimator(checkpoint, options, memory, target, device)
    estimator.compiled = {}
    return estimator


def bytes_of(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def weight_bytes(estimator: Estimator, batch: int) -> tuple[float, float]:
    """Return the bytes of the weights that a step reads, and of all weights."""
    config = estimator._config
    one_expert = bytes_of(estimator._slots) / estimator._memory.expert_slots
    chosen = distinct_experts(config.num_experts, config.num_experts_per_tok, batch)
    layers = bytes_of([arrays for _, arrays in estimator._layers])
    table = config.vocab_size * config.hidden_size * 2
    outside = bytes_of(estimator._embed_and_head[1])
    read = layers + outside - table + config.num_moe_layers * chosen * one_expert
    return read, layers + outside + bytes_of(estimator._slots)


def cache_bytes(estimator: Estimator, batch: int, context: int) -> tuple[float, float]:
    """Return the bytes of the keys and values that a step attends to, and of all tokens' ones."""
    config, dtype = estimator._config, cache_value_dtype(estimator._options, estimator._dtype)
    shapes = jax.eval_shape(lambda: empty_caches(config, 1, dtype))
    of_token = [bytes_of(cache) / BLOCK for cache in shapes]
    windows = [layer.window or context for layer in config.layers]
    read = sum(n * min(context, w) for n, w in zip(of_token, windows, strict=True))
    return batch * read, batch * context * sum(of_token)


def estimate(step: Step, longest: int, compiled: dict[Any, Any]) -> JsonObject:
    """Return the estimate of a step beside the floor of its bytes.

    step: (model, GPU, attention, format of the cache, batch, context). longest: tokens of a
    sequence, for which the cache is made. compiled: programs of steps of that model, GPU, attention
    and format.
    """
    model, target, attention, kind, batch, context = step
    begun = time.perf_counter()
    kept = {name: path for name, path in MODULES.items() if name == "xla"}
    modules = dict(MODULES) if attention == "paged_attention" else kept
    with mock.patch.dict(MODULES, modules, clear=True):
        options = EngineConfig(kv_cache_dtype=kind)
        estimator = make_estimator(model, target, batch, longest, options)
        estimator.compiled = compiled
        found = estimator.estimate_step(batch, 1, context)
    weights, all_weights = weight_bytes(estimator, batch)
    attended, cache = cache_bytes(estimator, batch, context)
    floor_s = (weights + attended) / gpu_rates(target).copy_bytes_per_s
    held = all_weights + cache
    layers = [k for k in found.gpu.kernels if k.name.startswith(("layer", "dense layer"))]
    parts = [k for k in layers if "grouped_matmul" not in k.name]
    layer_launches = sum(k.launches for k in layers) / estimator._config.num_hidden_layers
    return {
        "model": model,
        "gpu": target,
        "batch": batch,
        "context": context,
        "attention": attention,
        "kv_cache_dtype": kind,
        "step_ms": round(1e3 * found.seconds, 2),
        "floor_ms": round(1e3 * floor_s, 2),
        "floor_of_step": round(floor_s / found.seconds, 2),
        "attention_ms": round(1e3 * sum(k.seconds for k in parts), 2),
        "launches": found.gpu.launches,
        "launches_a_layer": round(layer_launches, 1),
        "held_gb": round(held / 1e9, 1),
        "fits": held < 0.9 * ACCELERATORS[target].device_bytes,
        "slowest": "; ".join(
            f"{1e3 * k.seconds:.2f} ms in {k.launches}: {k.name}" for k in found.gpu.kernels[:3]
        ),
        "date": f"{date.today()}",
        "compile_s": round(time.perf_counter() - begun),
    }


KEY = ("model", "gpu", "batch", "context", "attention", "kv_cache_dtype")


def result_with(rows: list[JsonObject]) -> JsonObject:
    """Return the whole result with these rows in place of committed ones of the same step."""
    committed = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": []}
    newest = {tuple(row[key] for key in KEY): row for row in [*committed["rows"], *rows]}
    return {
        "benchmark": "decoding steps on GPUs that are not here: estimated, none measured",
        "command": "python benchmarks/serve/decode_estimates.py --write",
        "date": f"{date.today()}",
        "machine": "CPU cores alone: compiled with the CUDA 13 libraries, run nowhere",
        "notes": [
            "estimated: a kernel's bytes or FLOPs at shares of a GPU's rates, and 2.5 us a launch; "
            "the shares that paged_attention and grouped_matmul in Triton reach (0.8 of a copy) are"
            " assumed, also for experts in mxfp4, which are decoded in registers",
            "launches: of each kind of layer compiled alone; the engine runs up to 32 layers "
            "in one program",
            "by copies: the blocks of each row's context are copied to one array in each layer, or "
            "a loop runs over them where the copies would exceed the cache",
            "fits: weights and cache in 0.9 of the GPU's memory; the other rows only tell how "
            "steps grow",
            "inputs_in_fp8: experts in fp8, with exact inputs and with expert_activations = fp8 "
            "(python benchmarks/serve/fp8_estimates.py --write). exact: on an H100 the kernel for "
            "Hopper, which decodes experts in shared memory, for prompts; else the one in Triton, "
            "which decodes in registers. The share that it reaches of the FP8 rate (0.7) is "
            "assumed, as of the bfloat16 rate",
        ],
        "rows": list(newest.values()),
        "inputs_in_fp8": committed.get("inputs_in_fp8", []),
        "versions": report.versions("jax", "jaxlib"),
    }


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    rows = []
    kinds = itertools.product(a.models, a.targets, a.attention, a.kv_cache_dtypes)
    for model, target, attention, cache in kinds:
        jax.clear_caches()  # functions that were traced for another GPU have its kernels
        compiled: dict[Any, Any] = {}
        for sizes in itertools.product(a.batches, a.contexts):
            step = model, target, attention, cache, *sizes
            rows.append(report.progress(estimate(step, max(a.contexts), compiled)))
    result = result_with(rows)
    if a.write:
        report.write(result, RESULT)
    report.finish(result)


if __name__ == "__main__":
    main()
