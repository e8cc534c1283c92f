"""Time a layer's experts with exact activations and with those in 8 bits, on one core.

    python benchmarks/kernels/activations.py --isa avx2 native

64 experts of 512 x 128, 8 a token (those of `benchmarks/peers/qwen3moe_64e.json`), bfloat16 tokens,
in layers that no near cache holds. Both forms take turns in one process for each instruction set;
seconds are the process's CPU time, so that other work on the machine changes them little; medians
of the rounds, and of a round's ratios. With more than 32 tokens `exact` is what an engine runs:
XLA's form if the processor does not multiply bfloat16.

gb_per_s: of the weights that the tokens' experts have, as stored. relative_error: |int8 - exact| /
|exact| of the layer's output, with normally distributed weights and tokens.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import json
import math
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from jmoe.layers.slot_experts import ExpertInputs
from jmoe.offload.slots import HostSlots
from kernels_pallas import native
from kernels_pallas.compressed import SCALES, compress, stored_fields
from kernels_pallas.formats import FORMATS, INT8_TAKING

HIDDEN, INNER, EXPERTS, CHOICES, LAYERS = 512, 128, 64, 8, 8
DRAWN = 4  # experts drawn for a format; the others are copies
TOKENS = (1, 2, 4, 8, 32, 512)


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    sets = native.usable_instruction_sets()
    parser.add_argument("--isa", nargs="+", choices=sets, default=["native"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--here", action="store_true", help="only what $JMOE_NATIVE_ISA says")
    return parser.parse_args()


def slots_of(kind: str) -> dict[str, HostSlots]:
    """Return the same experts in slots, by how their inputs are taken."""
    fields, rng = {}, np.random.default_rng(0)
    shapes = {"w_up": (HIDDEN, 2 * INNER), "w_down": (INNER, HIDDEN)}
    for name, shape in shapes.items():
        fields |= stored_fields(FORMATS[kind], name, shape)
    records = []
    for _ in range(DRAWN):
        record: dict[str, np.ndarray] = {}
        for name, shape in shapes.items():
            w = rng.normal(size=shape) * shape[0] ** -0.5
            record[name], record[name + SCALES] = compress(w, FORMATS[kind])
        records.append(record)
    forms = {"exact": HostSlots(EXPERTS * LAYERS, fields, native=True)}
    if kind in INT8_TAKING:
        forms["int8"] = HostSlots(EXPERTS * LAYERS, fields, native=True, int8_activations=True)
    for slots in forms.values():
        for slot in range(EXPERTS * LAYERS):
            slots.write(slot, records[slot % DRAWN])
    return forms


def layers(slots: HostSlots, tokens: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Return the sum of all layers' experts."""
    y_TD = jnp.zeros((tokens[0].shape[0], HIDDEN))
    for first in range(0, EXPERTS * LAYERS, EXPERTS):
        table_E = np.arange(first, first + EXPERTS, dtype=np.int32)
        y_TD = slots.add_expert_outputs(ExpertInputs(*tokens, y_TD), table_E, "swiglu")
    return jax.block_until_ready(y_TD)


def measure(kind: str, forms: dict[str, HostSlots], num_tokens: int, rounds: int) -> JsonObject:
    """Return the row of a format and a number of tokens."""
    rng = np.random.default_rng(num_tokens)
    idx_TK = np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(num_tokens)])
    tokens = (
        jnp.asarray(rng.normal(size=(num_tokens, HIDDEN)), jnp.bfloat16),
        jnp.asarray(idx_TK, jnp.int32),
        jnp.full((num_tokens, CHOICES), 1 / CHOICES),
    )
    outputs = {name: np.asarray(layers(slots, tokens)) for name, slots in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, slots in forms.items():
            begun = time.process_time()
            layers(slots, tokens)
            seconds[name].append((time.process_time() - begun) / LAYERS)
    fields = stored_fields(FORMATS[kind], "w", (HIDDEN, 3 * INNER))  # as many weights as an expert
    expert_bytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in fields.values())
    used = len(np.unique(idx_TK)) * expert_bytes
    row: JsonObject = {
        "instruction_set": native.instruction_set(),
        "weights": kind,
        "tokens": num_tokens,
    }
    for name, taken in seconds.items():
        row[f"{name}_us"] = report.median((s * 1e6 for s in taken), 1)
        row[f"{name}_gb_per_s"] = report.median((used / s / 1e9 for s in taken), 1)
    if "int8" in forms:
        exact = outputs["exact"]
        error = np.linalg.norm(outputs["int8"] - exact) / np.linalg.norm(exact)
        row["exact_over_int8"] = report.ratio(seconds["exact"], seconds["int8"])
        row["relative_error"] = float(f"{error:.3g}")
    return report.progress(row)


def rows_here(rounds: int) -> list[JsonObject]:
    """Return the rows of this process's instruction set, measured on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    native.load()
    return [
        measure(kind, forms, num_tokens, rounds)
        for kind in FORMATS
        for forms in [slots_of(kind)]
        for num_tokens in TOKENS
    ]


def main() -> None:
    a = parse()
    if a.here:
        return report.finish({"rows": rows_here(a.rounds)})
    rows = []
    for name in a.isa:
        command = [sys.executable, __file__, "--here", "--rounds", str(a.rounds)]
        environment = {**os.environ, "JMOE_NATIVE_ISA": name}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        rows += json.loads(done.stdout.splitlines()[-1])["rows"]
    loads = [round(load, 1) for load in os.getloadavg()]
    report.finish(
        {
            "versions": report.versions("jax"),
            "options": report.options(a, "here"),
            "load_average": loads,
            "rows": rows,
        }
    )
    return None


if __name__ == "__main__":
    main()
