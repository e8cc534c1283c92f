"""Time grouped matmuls and the MoE layer against dense products of the same work.

    python benchmarks/kernels/speed.py
        grouped matmul against one dense matmul, MoE layer against dense FFN
    python benchmarks/kernels/speed.py --gpu
        named shapes on a Hopper GPU; with --toy one small shape on any device

On a CPU ours and the dense product run in turn, round by round; a ratio is the median of the
rounds' ratios. On a GPU the floors are the copy bandwidth and the dense bfloat16 matmul rate
measured in the same run. `lax.ragged_dot` is timed where its masked work fits; tokamax and torch
where they are installed.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from benchmarks.lib import report
from benchmarks.lib.floors import measure_call_s, measure_floors
from benchmarks.lib.report import JsonObject
from jmoe.config import MoEConfig
from jmoe.layers.experts import MLP
from jmoe.layers.moe import MoELayer
from kernels_pallas.grouped_matmul import grouped_matmul, quantize, quantized_grouped_matmul
from kernels_pallas.matmul import matmul
from kernels_pallas.shapes import CPU, MODELS, ROUTINGS, MoEShape, group_sizes
from kernels_pallas.token_permute import RowMap, combine, dispatch, sort_by_expert

RAGGED_DOT_BYTES = 16 * 2**30  # its masked copies of the rows may take so much
Call = tuple[Callable[..., object], tuple[object, ...]]


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument(
        "--toy", action="store_true", help="with --gpu: one small shape, on any device"
    )
    parser.add_argument("--rounds", type=int, default=11, help="on a CPU")
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(MODELS), default=list(MODELS), help="on a GPU"
    )
    return parser.parse_args()


def normal(seed: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return random weights drawn in `dtype`: a layer's may be many GB."""
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, dtype))()


def layer_and_gradients(
    graph: nnx.GraphDef, state: nnx.State, x: jax.Array, dy: jax.Array
) -> tuple[jax.Array, tuple[nnx.State, jax.Array]]:
    """Return a layer with its gradients for weights and input.

    The gradient of its output is an argument, so that XLA cannot simplify the backward pass.
    """

    def layer(state: nnx.State, x: jax.Array) -> jax.Array:
        out = nnx.merge(graph, state)(x)
        return (out[0] if isinstance(out, tuple) else out).astype(jnp.float32)

    y, vjp = jax.vjp(layer, state, x)
    return y, vjp(dy)


# CPU


def alternate(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call in each round; the calls take turns."""
    for f, operands in calls.values():
        jax.block_until_ready(f(*operands))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (f, operands) in calls.items():
            started = time.perf_counter()
            jax.block_until_ready(f(*operands))
            times[name].append(time.perf_counter() - started)
    return times


def ratios(times: dict[str, list[float]], of: str) -> dict[str, dict[str, float]]:
    return {
        name: {
            "ms": report.median((1e3 * s for s in seconds), 2),
            "ratio": report.ratio(seconds, times[of], 2),
        }
        for name, seconds in times.items()
    }


def matmul_on_cpu(dtype: DTypeLike, rounds: int) -> JsonObject:
    """Time the grouped matmul and its gradients beside a dense one of equal FLOPs."""
    t, d, f, e = CPU.num_tokens, CPU.hidden_size, CPU.moe_intermediate_size, CPU.num_experts
    x, w, dy = normal(0, (t, d), dtype), normal(1, (e, d, f), dtype), normal(2, (t, f), dtype)

    def both(
        multiply: Callable[..., jax.Array],
        x: jax.Array,
        w: jax.Array,
        dy: jax.Array,
        *sizes: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y, vjp = jax.vjp(lambda x, w: multiply(x, w, *sizes).astype(dtype), x, w)
        return y, vjp(dy)

    one, many = jax.jit(lambda x, w: matmul(x, w).astype(dtype)), jax.jit(grouped_matmul)
    one_both, many_both = jax.jit(partial(both, matmul)), jax.jit(partial(both, grouped_matmul))
    forward: dict[str, Call] = {"dense": (one, (x, w[0]))}
    backward: dict[str, Call] = {"dense": (one_both, (x, w[0], dy))}
    uneven = np.random.default_rng(0).multinomial(t, np.full(e, 1 / e)).astype(np.int32)
    for routing, sizes in [(r, group_sizes(r, t, e)) for r in ROUTINGS] + [("random", uneven)]:
        forward[routing] = many, (x, w, jnp.asarray(sizes))
        backward[routing] = many_both, (x, w, dy, jnp.asarray(sizes))
    return {
        "forward": ratios(alternate(forward, rounds), "dense"),
        "forward_backward": ratios(alternate(backward, rounds), "dense"),
    }


def layer_on_cpu(dtype: DTypeLike, rounds: int, k: int = 2) -> JsonObject:
    """Time a MoE layer with random routing beside a dense FFN with as many active parameters."""
    t, d, f, e = CPU.num_tokens, CPU.hidden_size, CPU.moe_intermediate_size, CPU.num_experts
    modules = {
        "dense": MLP(d, k * f, rngs=nnx.Rngs(1)),
        "moe": MoELayer(MoEConfig(d, e, k, f), rngs=nnx.Rngs(0)),
    }
    x, dy = normal(3, (t, d), dtype), normal(4, (t, d), jnp.float32)
    calls: dict[str, Call] = {}
    for name, module in modules.items():
        graph, state = nnx.split(module)
        calls[name] = jax.jit(partial(layer_and_gradients, graph)), (state, x, dy)
    return ratios(alternate(calls, rounds), "dense")


def on_cpu(a: argparse.Namespace) -> JsonObject:
    results: JsonObject = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        results[name] = matmul_on_cpu(dtype, a.rounds) | {
            "moe_layer": {"forward_backward": layer_on_cpu(dtype, a.rounds)}
        }
        grouped = ("forward", "forward_backward")
        layer = results[name]["moe_layer"]["forward_backward"]
        tables = {f"grouped matmul {what}": results[name][what] for what in grouped} | {
            "layer": layer
        }
        for what, table in tables.items():
            row = "  ".join(
                f"{routing} {v['ms']} ms ({v['ratio']})" for routing, v in table.items()
            )
            print(f"{name} {what}: {row}", flush=True)
    return results


# GPU


def peers(x: jax.Array, w: jax.Array, sizes: jax.Array) -> dict[str, float]:
    """Return the seconds of the forward product by other libraries that are installed and fit."""
    found = {}
    if x.shape[0] * max(x.shape[1], w.shape[2]) * w.shape[0] * x.dtype.itemsize < RAGGED_DOT_BYTES:
        found["ragged_dot"] = measure_call_s(jax.jit(jax.lax.ragged_dot), x, w, sizes)
    if find_spec("tokamax"):
        import tokamax

        found["tokamax"] = measure_call_s(jax.jit(tokamax.ragged_dot), x, w, sizes)
    if find_spec("torch"):
        found |= torch_grouped_mm(x.shape, w.shape, np.cumsum(np.asarray(sizes)))
    return found


def torch_grouped_mm(x: tuple[int, ...], w: tuple[int, ...], ends: np.ndarray) -> dict[str, float]:
    import torch

    if not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm"):
        return {}
    make = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    operands = make(x), make(w), torch.tensor(ends, dtype=torch.int32, device="cuda")
    torch._grouped_mm(operands[0], operands[1], offs=operands[2])
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        torch._grouped_mm(operands[0], operands[1], offs=operands[2])
    torch.cuda.synchronize()
    return {"torch": (time.perf_counter() - started) / 10}


def permutes_on_gpu(shape: MoEShape, floor: dict[str, float]) -> dict[str, dict[str, float]]:
    """Time sort, dispatch and combine; the floor is the time that moving their bytes takes."""
    t = shape.num_tokens
    k = shape.num_experts_per_tok
    n = shape.num_rows
    d = shape.hidden_size
    e = shape.num_experts
    logits = jax.random.normal(jax.random.key(1), (t, e))
    weights_TK, idx_TK = jax.lax.top_k(logits, k)
    sort = jax.jit(lambda idx: sort_by_expert(idx.reshape(-1), e))
    order_N, rank_N = sort(idx_TK)
    token_N, row_TK = order_N // k, rank_N.reshape(t, k)
    x, y = normal(2, (t, d), jnp.bfloat16), normal(3, (n, d), jnp.bfloat16)
    calls: dict[str, tuple[Callable[..., object], tuple[jax.Array, ...], int]] = {
        "sort": (sort, (idx_TK,), 4 * 3 * n),
        "dispatch": (
            jax.jit(partial(dispatch, complete=True)),
            (x, token_N, row_TK),
            2 * d * (t + n),
        ),
        "combine": (
            jax.jit(partial(combine, complete=True)),
            (y, weights_TK, token_N, row_TK),
            d * (2 * n + 4 * t),
        ),
    }
    return {
        name: {"s": measure_call_s(f, *operands, repeat=50), "floor_s": size / floor["bytes_per_s"]}
        for name, (f, operands, size) in calls.items()
    }


def dispatched_matmul(x_TD: jax.Array, w: jax.Array, sizes: jax.Array, rows: RowMap) -> jax.Array:
    return grouped_matmul(dispatch(x_TD, rows.src_M, rows.row_TK, rows.complete), w, sizes)


def matmul_by_index(x_TD: jax.Array, w: jax.Array, sizes: jax.Array, rows: RowMap) -> jax.Array:
    return grouped_matmul(x_TD, w, sizes, rows=rows)


def matmuls_on_gpu(
    shape: MoEShape, routing: str, floor: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Time the up projection and its gradients.

    Rows are dispatched or read by index; weights are bfloat16 or have 8 bits.
    """
    n, d, f, e = shape.num_rows, shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    sizes = jnp.asarray(group_sizes(routing, n, e))
    x, dy, w = (
        normal(i, s, jnp.bfloat16) for i, s in enumerate(((n, d), (n, 2 * f), (e, d, 2 * f)))
    )
    used = int((sizes > 0).sum())

    def gradient(which: int) -> Callable[..., jax.Array]:
        def run(x: jax.Array, w: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
            return jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)[1](dy)[which]

        return jax.jit(run)

    def least(weight_bytes: int) -> float:
        moved = 2 * n * (d + 2 * f) + weight_bytes * used * d * 2 * f
        return max(2 * n * d * 2 * f / floor["flops_per_s"], moved / floor["bytes_per_s"])

    found = {
        "forward": {"s": measure_call_s(jax.jit(grouped_matmul), x, w, sizes), "floor_s": least(2)}
        | peers(x, w, sizes),
        "dx": {"s": measure_call_s(gradient(0), x, w, dy, sizes), "floor_s": least(2)},
        "dw": {"s": measure_call_s(gradient(1), x, w, dy, sizes), "floor_s": least(2)},
    }
    del dy
    order = jax.random.permutation(jax.random.key(3), n).astype(jnp.int32)
    k = shape.num_experts_per_tok
    tokens = (
        x[: shape.num_tokens],
        w,
        sizes,
        RowMap(order // k, jnp.argsort(order).reshape(-1, k), complete=True),
    )
    for name, multiply in (
        ("dispatch and forward", dispatched_matmul),
        ("forward by index", matmul_by_index),
    ):
        found[name] = {"s": measure_call_s(jax.jit(multiply), *tokens), "floor_s": least(2)}
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        narrow, scale = jax.jit(partial(quantize, dtype=dtype))(w)
        operands = x, narrow, scale, sizes
        found[narrow.dtype.name] = {
            "s": measure_call_s(jax.jit(quantized_grouped_matmul), *operands),
            "floor_s": least(1),
        }
    return found


def layer_on_gpu(shape: MoEShape) -> dict[str, dict[str, float]]:
    """Time a MoE layer; the floor is a dense FFN with as many active parameters."""
    d, f, k = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts_per_tok
    x = normal(0, (shape.num_tokens, d), jnp.bfloat16)
    dy = normal(2, (shape.num_tokens, d), jnp.float32)
    times = {}

    def weights(path: KeyPath, a: jax.Array) -> jax.Array:
        dtype = jnp.float32 if "router" in jax.tree_util.keystr(path) else jnp.bfloat16
        return normal(1, a.shape, dtype) * jnp.asarray(0.02, dtype)

    makers: dict[str, Callable[[], nnx.Module]] = {
        "floor_s": lambda: MLP(d, k * f, rngs=nnx.Rngs(0)),
        "s": lambda: MoELayer(MoEConfig(d, shape.num_experts, k, f), rngs=nnx.Rngs(0)),
    }
    for name, make in makers.items():
        graph, state = nnx.split(nnx.eval_shape(make))
        state = jax.tree_util.tree_map_with_path(weights, state)
        times[name] = measure_call_s(
            jax.jit(partial(layer_and_gradients, graph)), state, x, dy, repeat=5
        )
    return {"forward_backward": times}


def on_gpu(a: argparse.Namespace) -> JsonObject:
    floor = measure_floors(a.toy)
    print(
        f"copy {floor['bytes_per_s'] / 1e9:.0f} GB/s, dense bfloat16 "
        f"{floor['flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    results: JsonObject = {"floors": floor, "shapes": {}}
    for name in ["tiny"] if a.toy else a.shapes:
        shape = MODELS[name]
        found: JsonObject = permutes_on_gpu(shape, floor)
        for routing in ("balanced", "skewed"):
            for what, row in matmuls_on_gpu(shape, routing, floor).items():
                found[f"matmul {routing} {what}"] = row
        found["layer"] = layer_on_gpu(shape)["forward_backward"]
        results["shapes"][name] = found
        for what, row in found.items():
            others = "".join(
                f", {k} {1e6 * v:.0f}" for k, v in row.items() if k not in ("s", "floor_s")
            )
            share = row["floor_s"] / row["s"]
            print(
                f"{name} {what}: {1e6 * row['s']:.0f} us, floor {1e6 * row['floor_s']:.0f} "
                f"({share:.0%}){others}",
                flush=True,
            )
    return results


def main() -> int:
    a = parse()
    device = jax.devices()[0]
    if a.gpu and not a.toy and (device.platform != "gpu" or device.compute_capability != "9.0"):
        print(
            f"--gpu: the default device must be a Hopper GPU, not {device.device_kind}",
            file=sys.stderr,
        )
        return 1
    report.finish((on_gpu(a) if a.gpu else on_cpu(a)) | report.device_and_versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
