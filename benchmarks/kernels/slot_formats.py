"""Time a layer's experts in every format of expert slots.

    python benchmarks/kernels/slot_formats.py    OLMoE's sizes: 64 experts of 2048 x 1024, 8 a token
    python benchmarks/kernels/slot_formats.py --toy        on any device

us: of the kernel for the device and of the plain XLA form, medians of twenty calls;
relative_difference: between their results, |a - b| / |b|. used_bytes_per_s: of the weights that the
tokens' experts have, by the kernel.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import statistics
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.layers.slot_experts import ExpertInputs, add_expert_outputs_by_slot_table
from kernels_pallas.compressed import SCALES, compress
from kernels_pallas.formats import FORMATS
from kernels_pallas.implementations import default_implementations

EXPERTS, HIDDEN, INNER, CHOICES = 64, 2048, 1024, 8
TOY = (8, 256, 128, 2)
TOKENS = (1, 8, 64, 2048)
DRAWN = 4  # experts drawn; the others are copies
CALLS = 20


def slots_of(name: str, sizes: tuple[int, ...], rng: np.random.Generator) -> dict[str, jax.Array]:
    """Return the slots of a layer's experts by array, in a format or "bfloat16"."""
    experts, hidden, inner, _ = sizes
    slots = {}
    for key, (rows, columns) in {"w_up": (hidden, 2 * inner), "w_down": (inner, hidden)}.items():
        drawn = [
            (rng.standard_normal((rows, columns)) * rows**-0.5).astype(np.float32)
            for _ in range(DRAWN)
        ]
        repeats = experts // DRAWN
        if name == "bfloat16":
            slots[key] = jnp.asarray(
                np.stack([w.astype(jnp.bfloat16).view(np.uint16) for w in drawn] * repeats)
            )
            continue
        values, scales = zip(*(compress(w, FORMATS[name]) for w in drawn), strict=True)
        slots[key], slots[key + SCALES] = (
            jnp.asarray(np.stack(values * repeats)),
            jnp.asarray(np.stack(scales * repeats)),
        )
    return slots


def measure(
    slots: dict[str, jax.Array], sizes: tuple[int, ...], tokens: int, rng: np.random.Generator
) -> Any:
    """Return the figures of this number of tokens with random choices."""
    experts, hidden, _, k = sizes
    idx_TK = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    h_TD = jnp.asarray(rng.standard_normal((tokens, hidden)), jnp.bfloat16)
    weights_TK = jnp.full((tokens, k), 1 / k, jnp.float32)
    y_TD = jnp.zeros((tokens, hidden), jnp.float32)
    routed = ExpertInputs(h_TD, jnp.asarray(idx_TK), weights_TK, y_TD)
    table_E = jnp.asarray(rng.permutation(experts), jnp.int32)
    row: JsonObject = {"tokens": tokens}
    results = {}
    for name in default_implementations():
        tile_rows = min(64, tokens)
        run = jax.jit(
            partial(
                add_expert_outputs_by_slot_table,
                activation="swiglu",
                tile_rows=tile_rows,
                implementation=name,
            )
        )
        try:
            results[name] = jax.block_until_ready(run(routed, slots, table_E))
        except NotImplementedError:  # the kernel does not read this format
            continue
        seconds = []
        for _ in range(CALLS):
            begun = time.perf_counter()
            jax.block_until_ready(run(routed, slots, table_E))
            seconds.append(time.perf_counter() - begun)
        row[f"{name}_us"] = round(1e6 * statistics.median(seconds), 1)
    used_bytes = sum(w.nbytes for w in slots.values()) * np.unique(idx_TK).size / experts
    best, *others = results
    row["used_bytes_per_s"] = round(used_bytes / (row[f"{best}_us"] / 1e6))
    if others:
        kernel, plain = results[best], results["xla"]
        row["relative_difference"] = float(jnp.linalg.norm(kernel - plain) / jnp.linalg.norm(plain))
    return row


def main() -> None:
    """Measure every format at every number of tokens."""
    parser = report.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="small sizes")
    a = parser.parse_args()
    sizes = TOY if a.toy else (EXPERTS, HIDDEN, INNER, CHOICES)
    rng, rows = np.random.default_rng(0), []
    for name in ("bfloat16", *FORMATS):
        slots = slots_of(name, sizes, rng)
        for tokens in TOKENS[: 2 if a.toy else None]:
            rows.append(report.progress({"format": name} | measure(slots, sizes, tokens, rng)))
    report.finish({"sizes": sizes, "rows": rows} | report.device_and_versions())


if __name__ == "__main__":
    main()
