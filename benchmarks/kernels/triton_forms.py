"""Compare the Triton kernels with the references and with the other implementations on a GPU.

    python benchmarks/kernels/triton_forms.py         OLMoE's and gpt-oss's shapes
    python benchmarks/kernels/triton_forms.py --toy   small shapes, on a CPU in Pallas' interpreter

error: of a result against XLA's form on the same numbers in float32, over its largest magnitude.
The rows of a result that belong to no group are not compared. us: of one call, by implementation;
Hopper's kernels (`mosaic_gpu`) on a Hopper GPU alone. Last line: a JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.lib import report
from benchmarks.lib.floors import measure_call_s
from benchmarks.lib.report import JsonObject
from kernels_pallas import grouped_matmul, token_loss, token_permute
from kernels_pallas.grouped_matmul import triton as matmul_triton
from kernels_pallas.grouped_mlp import activation_triton
from kernels_pallas.grouped_mlp.by_matmul import ACTIVATIONS
from kernels_pallas.implementations import (
    call_first_supported,
    default_implementations,
    implementations_among,
)
from kernels_pallas.shapes import MODELS, MoEShape, group_sizes
from kernels_pallas.token_loss import triton as loss_triton
from kernels_pallas.token_permute import triton as permute_triton

GPT_OSS = MoEShape(8192, 2880, 2880, 32, 4)
SHAPES = {"olmoe": MODELS["olmoe"], "gpt-oss": GPT_OSS}
TOY = {"tiny": MoEShape(64, 96, 64, 4, 2)}
VOCABULARY = 50_304  # OLMoE's
PASSES = ("activation gradients", "loss gradients")  # not of Hopper's kernels
Run = Callable[..., Any]  # an array, or a tree of arrays


def draw(seed: int, dtype: Any, *shape: int) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, dtype))()


def matmuls(
    shape: MoEShape, routing: str, dtype: Any
) -> Iterator[tuple[str, Run, tuple[Any, ...]]]:
    """Yield (name, function of `implementation` and operands, operands) of the up projection and
    its gradients, whose rows are dispatched or read by index.
    """
    n, d, f, e = shape.num_rows, shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    sizes_E = jnp.asarray(group_sizes(routing, n, e))
    x, dy, w = draw(0, dtype, n, d), draw(1, dtype, n, 2 * f), draw(2, dtype, e, d, 2 * f)
    multiply = grouped_matmul.grouped_matmul

    def gradient(which: int) -> Run:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array, *, implementation: Any) -> jax.Array:
            product = partial(multiply, group_sizes_E=sizes_E, implementation=implementation)
            gradients = jax.vjp(lambda x, w: product(x, w), x, w)[1](dy)
            return gradients[which]

        return run

    order = jax.random.permutation(jax.random.key(3), n).astype(jnp.int32)
    k = shape.num_experts_per_tok
    rows = token_permute.RowMap(order // k, jnp.argsort(order).reshape(-1, k), complete=True)

    def by_index(x: jax.Array, w: jax.Array, *, implementation: Any) -> jax.Array:
        return multiply(x, w, sizes_E, rows=rows, implementation=implementation)

    yield "forward", partial(multiply, group_sizes_E=sizes_E), (x, w)
    yield "dx", gradient(0), (x, w, dy)
    yield "dw", gradient(1), (x, w, dy)
    yield "forward by index", by_index, (x[: shape.num_tokens], w)


def permutes(shape: MoEShape, dtype: Any) -> Iterator[tuple[str, Run, tuple[Any, ...]]]:
    """Yield the same of dispatch and combine."""
    n, t, k = shape.num_rows, shape.num_tokens, shape.num_experts_per_tok
    order = jax.random.permutation(jax.random.key(3), n).astype(jnp.int32)
    src_M, row_TK = order // k, jnp.argsort(order).astype(jnp.int32).reshape(t, k)
    x, y = draw(4, dtype, t, shape.hidden_size), draw(5, dtype, n, shape.hidden_size)
    weights_TK = draw(6, jnp.float32, t, k)

    def gather(x: jax.Array, *, implementation: Any) -> jax.Array:
        return token_permute.dispatch(x, src_M, row_TK, True, implementation=implementation)

    def sums(y: jax.Array, *, implementation: Any) -> jax.Array:
        return token_permute.combine(
            y, weights_TK, src_M, row_TK, True, implementation=implementation
        )

    yield "dispatch", gather, (x,)
    yield "combine", sums, (y,)


def passes(shape: MoEShape, dtype: Any) -> Iterator[tuple[str, Run, tuple[Any, ...]]]:
    """Yield the same of the kernels that make one pass over their operands."""
    n, f, t = shape.num_rows, shape.moe_intermediate_size, min(shape.num_tokens, 8192)
    h, dscaled, scale_N = draw(7, dtype, n, 2 * f), draw(8, dtype, n, f), draw(9, jnp.float32, n)
    vocabulary = min(VOCABULARY, 8 * t)
    logits_TV, weights_T = draw(10, jnp.float32, t, vocabulary), draw(11, jnp.float32, t)
    labels_T = jax.random.randint(jax.random.key(12), (t,), 0, vocabulary)

    def activation(*operands: jax.Array, implementation: Any) -> Any:
        name = "activation_gradients"
        run = partial(call_first_supported, ACTIVATIONS, implementation, name)
        return run(*operands, activation="swiglu")

    def loss(logits_TV: jax.Array, weights_T: jax.Array, *, implementation: Any) -> Any:
        operands = logits_TV, labels_T, weights_T, dtype
        return token_loss.loss_gradients(*operands, implementation=implementation)

    yield PASSES[0], activation, (h, dscaled, scale_N)
    yield PASSES[1], loss, (logits_TV, weights_T)


def implementations(what: str) -> JsonObject:
    """Return the implementations to compare by name; on a CPU Triton's in the interpreter."""
    if jax.devices()[0].platform == "gpu":
        among = implementations_among(ACTIVATIONS) if what in PASSES else default_implementations()
        return {name: name for name in among}
    interpreted: Any
    if what in PASSES:
        interpreted = SimpleNamespace(
            activation_gradients=partial(activation_triton.activation_gradients, interpret=True),
            loss_gradients=partial(loss_triton.loss_gradients, interpret=True),
        )
    elif what in ("dispatch", "combine"):
        interpreted = token_permute.Implementation(
            partial(permute_triton.gather_rows, interpret=True),
            partial(permute_triton.gather_sum, interpret=True),
        )
    else:
        interpreted = grouped_matmul.Implementation(
            partial(matmul_triton.grouped_matmul, interpret=True),
            partial(matmul_triton.weight_gradient, interpret=True),
        )
    return {"triton": interpreted, "xla": "xla"}


def relative_error(found: jax.Array, expected: jax.Array) -> float:
    """Return the largest error over the largest magnitude."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())


def compared(what: str, run: Run, operands: tuple[Any, ...]) -> JsonObject:
    """Return the error and the time of each implementation that supports the case."""
    wide = [x.astype(jnp.float32) for x in operands]
    expected = jax.tree.leaves(jax.jit(partial(run, implementation="xla"))(*wide))
    row: JsonObject = {"what": what}
    for name, implementation in implementations(what).items():
        call = jax.jit(partial(run, implementation=implementation))
        try:
            found = jax.tree.leaves(call(*operands))
        except NotImplementedError as why:
            row[name] = f"not supported: {why}"
            continue
        error = max(map(relative_error, found, expected))
        row[f"{name}_error"] = float(f"{error:.2g}")
        row[f"{name}_us"] = round(1e6 * measure_call_s(call, *operands), 1)
    return row


def main() -> None:
    """Compare every operation of every shape and dtype."""
    parser = report.parser(__doc__)
    parser.add_argument("--toy", action="store_true", help="small shapes")
    a = parser.parse_args()
    rows = []
    for name, shape in (TOY if a.toy else SHAPES).items():
        for dtype in (jnp.bfloat16, jnp.float32):
            about = {"shape": name, "dtype": jnp.dtype(dtype).name}
            for what, run, operands in [*permutes(shape, dtype), *passes(shape, dtype)]:
                rows.append(report.progress(about | compared(what, run, operands)))
            for routing in ("balanced", "skewed"):
                for what, run, operands in matmuls(shape, routing, dtype):
                    row = about | {"routing": routing} | compared(what, run, operands)
                    rows.append(report.progress(row))
    report.finish({"rows": rows} | report.device_and_versions())


if __name__ == "__main__":
    main()
