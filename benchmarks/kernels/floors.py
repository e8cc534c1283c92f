"""Time a device's copies, dense products and packing: the limits of everything else.

    python benchmarks/kernels/floors.py
        copies in memory and over the host's link, a dense product
    python benchmarks/kernels/floors.py collectives
        packing and unpacking; --toy: small sizes, on any device

Collectives: the exchange of tokens for their experts, there and back, the fused gather of a layer's
attention, and the reduction of its gradients, on a mesh of one device. Their floor is the time that
copying their bytes takes.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.comm import exchange
from benchmarks.lib import report
from benchmarks.lib.floors import measure_call_s, measure_floors
from benchmarks.lib.report import JsonObject
from jmoe.collectives.fusion import ShardInBuffer, gather_parameters_fused_local
from jmoe.mesh import BATCH, hierarchy, make_mesh
from jmoe.planning.exchange import plan_exchange

SHAPES = ((2, 8, 8192), (8, 64, 8192), (8, 128, 8192))  # choices, experts, tokens
TOY_SHAPES = ((2, 4, 64),)
MATRICES, TOY_MATRICES = ((2048, 6144), (2048, 2048)), ((64, 192), (64, 64))  # of attention


def exchanges(shape: tuple[int, int, int], bytes_per_s: float) -> list[JsonObject]:
    """Time an exchange with one device: to the experts and back, and with its backward pass."""
    k, num_experts, num_tokens = shape
    plan = plan_exchange(
        "flat", num_nodes=1, devices_per_node=1, num_experts=num_experts, num_experts_per_tok=k
    )
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    operands = exchange.draw(mesh, 0, shape)
    # tokens read and written; rows written and read, there and back
    rows_bytes = 2 * exchange.HIDDEN_SIZE * (2 * num_tokens + 4 * num_tokens * k)
    return [
        {
            "collective": f"exchange, top-{k} of {num_experts}",
            "direction": direction,
            "s": measure_call_s(
                exchange.make_program(plan, mesh, num_experts, 1.0, direction), *operands
            ),
            "floor_s": (1 if direction == "forward" else 3) * rows_bytes / bytes_per_s,
        }
        for direction in exchange.DIRECTIONS
    ]


def fused(matrices: tuple[tuple[int, int], ...], bytes_per_s: float) -> list[JsonObject]:
    """Time the gather of float32 shards into a bfloat16 buffer, and its gradients' reduction."""
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    levels = hierarchy(mesh, hierarchical=False)
    entries = tuple(ShardInBuffer(shape, 0, jnp.bfloat16) for shape in matrices)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    shards = [draw(jax.random.key(0), shape, jnp.float32) for shape in matrices]
    grads = [draw(jax.random.key(0), shape, jnp.bfloat16) for shape in matrices]

    def reduce(shards: list[jax.Array], grads: list[jax.Array]) -> list[jax.Array]:
        return jax.vjp(lambda w: gather_parameters_fused_local(w, entries, levels), shards)[1](
            grads
        )

    gather = partial(gather_parameters_fused_local, entries=entries, hierarchy=levels)
    on_mesh = partial(jax.shard_map, mesh=mesh, in_specs=BATCH, out_specs=BATCH, check_vma=False)
    # four bytes of an element in float32, two in bfloat16
    moved_bytes = 6 * sum(entry.num_elements for entry in entries)
    calls = {"gather": (gather, (shards,)), "reduce": (reduce, (shards, grads))}
    return [
        {
            "collective": "fused buffer of an attention layer",
            "direction": direction,
            "s": measure_call_s(jax.jit(on_mesh(call)), *operands),
            "floor_s": moved_bytes / bytes_per_s,
        }
        for direction, (call, operands) in calls.items()
    ]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", nargs="?", choices=("floors", "collectives"), default="floors")
    parser.add_argument("--toy", action="store_true")
    a = parser.parse_args()
    found = measure_floors(a.toy)
    result: JsonObject = {"floors": found}
    if a.what == "collectives":
        rows = [
            row
            for shape in (TOY_SHAPES if a.toy else SHAPES)
            for row in exchanges(shape, found["bytes_per_s"])
        ]
        result["rows"] = rows + fused(TOY_MATRICES if a.toy else MATRICES, found["bytes_per_s"])
    report.finish(result | report.device_and_versions())


if __name__ == "__main__":
    main()
