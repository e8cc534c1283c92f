"""Compile every kernel for GPUs on a machine without one: Hopper's for an H200, else Triton's.

Also compiled: the gradients, attention, and the exchange of an engine over eight H200.

    python benchmarks/kernels/aot.py                       all named shapes
    python benchmarks/kernels/aot.py --shapes olmoe tiny   some of them
    python benchmarks/kernels/aot.py --programs rotate fp8 --write
        programs whose names have one of these words; replaces their rows of
        benchmarks/results/kernels_aot.json, and keeps the others

Needs the CUDA libraries (`make setup EXTRA=cuda13`), no GPU and no driver; without them it says so
and ends with status 0. XLA refuses a Triton kernel that needs more shared memory than the GPU has.
Prints registers, spilled bytes and shared memory of every Mosaic GPU kernel, and the temporary
bytes of every program; the last line is one JSON object.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start()

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

from benchmarks import RESULTS
from benchmarks.lib.report import JsonObject

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from benchmarks.lib import ahead_of_time, report
from jmoe.inference.mesh.programs import ExchangeShape, experts_on_mesh
from jmoe.layers.attention import causal_attention
from jmoe.layers.slot_experts import (
    ExpertInputs,
    ExpertProducts,
    UnchosenInputs,
    add_expert_outputs_by_slot_table,
    choose_and_apply_experts,
)
from jmoe.mesh import BATCH, REPLICATED, make_mesh
from jmoe.offload.slot_arrays import dtype_of_stored_bits, with_transposed
from jmoe.planning.gpu_estimate import TRITON
from kernels_pallas.add_norm import RouterWeights, add_and_norm
from kernels_pallas.choose_experts import choose_experts
from kernels_pallas.compressed import stored_fields
from kernels_pallas.expert_choices import ChoiceRules, RouterLogits
from kernels_pallas.formats import FORMATS
from kernels_pallas.grouped_matmul import grouped_matmul, quantized_grouped_matmul
from kernels_pallas.grouped_matmul.fp8_inputs import has_fp8_products
from kernels_pallas.grouped_mlp import MLPWeights, grouped_mlp
from kernels_pallas.implementations import Name, trace_for_device
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.paged_attention.rotated_triton import rotate_write_and_attend
from kernels_pallas.rotary_write import Rotary
from kernels_pallas.shapes import MODELS, MoEShape
from kernels_pallas.token_permute import RowMap, combine, dispatch, sort_by_expert

Operands = tuple[object, ...]  # trees of abstract arrays
TARGETS = ("h200", "a100", "b200", "rtx-4090", "rtx-5090")
RESULT = RESULTS / "kernels_aot.json"
LATER_ROWS = "a row with a date of its own was compiled then, by the JAX that it names"
INPUTS_IN_FP8 = "inputs in fp8"  # in the name of programs that need FP8 tensor cores


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=["h200", "a100"])
    parser.add_argument("--programs", nargs="+", default=[""], help="words of programs' names")
    parser.add_argument("--write", action="store_true", help=f"into {RESULT.name}")
    return parser.parse_args()


def experts_forward(
    shape: MoEShape,
    implementation: Name,
    x_ND: jax.Array,
    sizes_E: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
) -> jax.Array:
    """Return the output of SwiGLU experts over sorted rows."""
    slots = -(-shape.num_rows * 5 // (4 * shape.num_experts) // 32) * 32
    weights = MLPWeights(w_up, w_down)
    return grouped_mlp(
        x_ND,
        sizes_E,
        weights,
        activation="swiglu",
        batched_rows_per_group=slots,
        implementation=implementation,
    )


def moe_loss(
    shape: MoEShape,
    implementation: Name,
    x_TD: jax.Array,
    weights: tuple[jax.Array, jax.Array],
    idx_TK: jax.Array,
    gate_TK: jax.Array,
) -> jax.Array:
    """Return the sum of one MoE layer's output: sort, dispatch, experts, combine."""
    order_N, rank_N = sort_by_expert(idx_TK.reshape(-1), shape.num_experts)
    sizes_E = (idx_TK.reshape(-1, 1) == jnp.arange(shape.num_experts, dtype=jnp.int32)).sum(
        0, dtype=jnp.int32
    )
    token_N, row_TK = order_N // idx_TK.shape[1], rank_N.reshape(idx_TK.shape)
    rows_ND = dispatch(x_TD, token_N, row_TK, True, implementation=implementation)
    out_ND = experts_forward(shape, implementation, rows_ND, sizes_E, *weights)
    return combine(out_ND, gate_TK, token_N, row_TK, True, implementation=implementation).sum()


def matmul_and_gradients(
    implementation: Name, x: jax.Array, w: jax.Array, sizes_E: jax.Array, *row_map: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a grouped matmul with both gradients; a row map (src_N, row_TK) reads tokens."""
    rows = RowMap(*row_map, complete=True) if row_map else None
    y_NF, vjp = jax.vjp(
        lambda x, w: grouped_matmul(x, w, sizes_E, rows=rows, implementation=implementation), x, w
    )
    return y_NF, *vjp(y_NF)


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """Yield a file with what the compiler prints below Python; it is filled when the block ends."""
    lines: list[str] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        kept = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(file.fileno(), fd)
        try:
            yield lines
        finally:
            for fd, old in zip((1, 2), kept):
                os.dup2(old, fd)
                os.close(old)
            file.seek(0)
            lines.extend(file.read().splitlines())


def kernels_in(lines: list[str]) -> list[JsonObject]:
    """Return name, registers and spilled bytes of each Mosaic GPU kernel, without repeats."""
    found: list[JsonObject] = []
    for line in lines:
        if match := re.search(r"Compiling entry function '(\w+?)(_mosaic_gpu_kernel)?'", line):
            found.append({"kernel": match[1]})
        elif match := re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line
        ):
            found[-1]["spill_bytes"] = int(match[2]) + int(match[3])
        elif match := re.search(r"Used (\d+) registers", line):
            found[-1]["registers"] = int(match[1])
    return found


def compile_for(
    device: jax.Device, function: Callable[..., object], operands: Operands
) -> JsonObject:
    """Compile `function` for a device that this machine lacks."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    abstract = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), operands
    )
    return compiled_for_cuda(device, jax.jit(function), *abstract)


def compiled_for_cuda(
    device: jax.Device, jitted: jax.stages.Wrapped, *operands: object
) -> JsonObject:
    """Compile a program for the devices of its operands, whose kernels are those of `device`."""
    started = time.perf_counter()
    with captured() as lines:
        _, lowered = ahead_of_time.lower_for_device(device, jitted, *operands)
        compiled = lowered.compile()
    targets = re.findall(r'custom_call_target="(\S+?)"', compiled.as_text() or "")
    return {
        "cudnn": sorted(target for target in targets if target.startswith("__cudnn")),
        "triton_kernels": targets.count(TRITON),
        "compile_s": round(time.perf_counter() - started, 1),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "shared_memory_bytes": [
            int(n) for line in lines for n in re.findall(r"smem_scratch_bytes=(\d+)", line)
        ],
        "kernels": kernels_in(lines),
    }


def programs(
    shape: MoEShape, implementation: Name
) -> Iterator[tuple[str, Callable[..., object], Operands]]:
    """Yield (name, function, operands) of every program to compile for a shape."""
    t, k, n = shape.num_tokens, shape.num_experts_per_tok, shape.num_rows
    d, f, e = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((e,), jnp.int32)
    up, down = of((e, d, 2 * f)), of((e, f, d))
    matmul = partial(matmul_and_gradients, implementation)
    quantized = partial(quantized_grouped_matmul, implementation=implementation)
    experts = partial(experts_forward, shape, implementation)
    yield "up projection, gradients", matmul, (of((n, d)), up, sizes)
    indices = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((t, k), jnp.int32)
    yield "up projection of tokens, gradients", matmul, (of((t, d)), up, sizes, *indices)
    yield "down projection, gradients", matmul, (of((n, f)), down, sizes)
    in_triton = implementation == "triton"  # which reads int8 alone with a scale for each column
    for dtype in (jnp.int8,) if in_triton else (jnp.int8, jnp.float8_e4m3fn):
        narrow = jax.ShapeDtypeStruct(up.shape, dtype)
        scale = jax.ShapeDtypeStruct((e, 2 * f), jnp.float32)
        yield f"up projection, {narrow.dtype}", quantized, (of((n, d)), narrow, scale, sizes)
    for kind in ("wide", *FORMATS):
        for tokens in (64, 256) if in_triton else (64,):  # by choice, sorted
            what = f"experts out of slots, {kind}, {tokens} tokens"
            yield what, *experts_in_slots(shape, kind, implementation, tokens)
    for tokens in (64, 256):  # in Triton on every GPU that multiplies fp8
        what = f"experts out of slots, fp8, {INPUTS_IN_FP8}, {tokens} tokens"
        yield what, *experts_in_slots(shape, "fp8", "triton", tokens, fp8_inputs=True)
    yield "experts out of slots that choose, 64 tokens", *experts_that_choose(shape, 64)
    yield "experts, forward", experts, (of((n, d)), sizes, up, down)
    routing = jax.ShapeDtypeStruct((t, k), jnp.int32), jax.ShapeDtypeStruct((t, k), jnp.float32)
    loss = jax.value_and_grad(partial(moe_loss, shape, implementation), (0, 1, 3))
    yield "MoE layer, gradients", loss, (of((t, d)), (up, down), *routing)


def attention_programs(target: str) -> Iterator[tuple[str, Callable[..., object], Operands]]:
    """Yield (name, function, operands) of attention with gradients: full, gpt-oss's and, on Hopper,
    DeepSeek's. Where XLA's form runs that one, it takes minutes to compile.
    """
    of = lambda *sizes: jax.ShapeDtypeStruct((4, 2048, *sizes), jnp.bfloat16)  # noqa: E731
    sinks = jax.ShapeDtypeStruct((64,), jnp.float32)
    plain = of(16, 128), of(16, 128), of(16, 128), None
    yield "plain", partial(attention_and_gradients, None), plain
    for window in (128, None):
        operands = of(64, 64), of(8, 64), of(8, 64), sinks
        yield f"gpt-oss, {window = }", partial(attention_and_gradients, window), operands
    if target == "h200":
        operands = of(16, 192), of(16, 192), of(16, 128), None
        yield "deepseek", partial(attention_and_gradients, None), operands


def document_programs() -> Iterator[tuple[str, Callable[..., object], Operands]]:
    """Yield (name, function, operands) of attention with gradients in rows of several documents:
    OLMoE's, gpt-oss' and DeepSeek's heads, and the largest in float32.
    """
    of = lambda *sizes: jax.ShapeDtypeStruct((4, 2048, *sizes), jnp.bfloat16)  # noqa: E731
    exact = jax.ShapeDtypeStruct((4, 2048, 4, 256), jnp.float32)
    numbers, sinks = (
        jax.ShapeDtypeStruct(sizes, dtype)
        for sizes, dtype in (((4, 2048), jnp.int32), ((64,), jnp.float32))
    )
    heads: dict[str, tuple[int | None, Operands]] = {
        "olmoe": (None, (of(16, 128), of(16, 128), of(16, 128), None)),
        "gpt-oss, window = 128": (128, (of(64, 64), of(8, 64), of(8, 64), sinks)),
        "deepseek": (None, (of(16, 192), of(16, 192), of(16, 128), None)),
        "float32": (None, (exact, exact, exact, None)),
    }
    for name, (window, operands) in heads.items():
        yield name, partial(attention_and_gradients, window), (*operands, numbers)


def attention_and_gradients(
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks_H: jax.Array | None,
    documents_BS: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Return causal attention and all of its gradients."""
    options: dict[str, Any] = {"window": window, "documents_BS": documents_BS}
    o_BSHe, vjp = jax.vjp(
        lambda q, k, v, sinks_H: causal_attention(q, k, v, sinks_H=sinks_H, **options),
        *(q, k, v, sinks_H),
    )
    return o_BSHe, *vjp(o_BSHe)


def cache_programs() -> Iterator[tuple[str, Callable[..., object], Operands]]:
    """Yield (name, function, operands) of attention over a cache in blocks: single tokens of OLMoE,
    gpt-oss and DeepSeek-V3 (latents).
    """
    of = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    heads = {"olmoe": (16, 16, 128, 128), "gpt-oss": (8, 64, 64, 64)}
    heads["deepseek"] = (1, 128, 576, 512)
    for name, (g, h, d, e) in heads.items():
        for rows in (1, 64):
            k = of(jnp.uint16, 2048, g, 128, d)
            v = None if name == "deepseek" else of(jnp.uint16, 2048, g, 128, e)
            places = of(jnp.int32, rows, 256), of(jnp.int32, rows, 1)
            function = partial(paged_attention, scale=1.0, value_dim=e, implementation="triton")
            operands = of(jnp.bfloat16, rows, 1, h, d), k, v, *places
            yield f"{name}'s cache, {rows} tokens", function, operands
            if v is not None:
                qkv = of(jnp.bfloat16, rows, 1, (h + 2 * g) * d)
                rotary = Rotary(np.ones(d // 2, np.float32))
                rotated = partial(rotate_write_and_attend, rotary=rotary, scale=1.0)
                what = f"{name}'s cache, {rows} tokens that the kernel rotates and writes"
                yield what, rotated, (qkv, (k, v), *places)


def few_token_programs() -> Iterator[tuple[str, Callable[..., object], Operands]]:
    """Yield (name, function, operands) of residual, norm, router and choice of experts of OLMoE,
    gpt-oss and DeepSeek-V3.
    """
    softmax, sigmoid = (
        ChoiceRules("softmax", 8, False),
        ChoiceRules("sigmoid", 8, True, 2.5, 8, 4, 2),
    )
    sizes = {"olmoe": (2048, 64, softmax), "gpt-oss": (2880, 32, softmax)}
    sizes["deepseek"] = (7168, 256, sigmoid)
    for name, (d, e, rules) in sizes.items():
        for tokens in (1, 64):
            x, y, scale, kernel = (
                jax.ShapeDtypeStruct(shape, dtype)
                for shape, dtype in (
                    ((tokens, d), jnp.bfloat16),
                    ((tokens, d), jnp.float32),
                    ((d,), jnp.bfloat16),
                    ((d, e), jnp.bfloat16),
                )
            )
            yield f"{name}'s router, {tokens} tokens", partial(route, rules), (x, y, scale, kernel)


def route(
    rules: ChoiceRules, x_TD: jax.Array, y_TD: jax.Array, scale_D: jax.Array, kernel_DE: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the residual sum, its norm, and the experts and weights that a router chooses."""
    router = RouterWeights(kernel_DE)
    x_TD, h_TD, logits_TE = add_and_norm(x_TD, y_TD, scale_D, 1e-5, bias_D=scale_D, router=router)
    assert logits_TE is not None
    positions_T = jnp.zeros(x_TD.shape[0], jnp.int32)
    logits = RouterLogits(logits_TE, rules, positions_T=positions_T, end=1)
    return x_TD, h_TD, *choose_experts(logits)


def experts_in_slots(
    shape: MoEShape, kind: str, implementation: Name, t: int, *, fp8_inputs: bool = False
) -> tuple[Callable[..., object], Operands]:
    """Return (function, operands) of experts for t tokens, with two slots an expert. With
    fp8_inputs slots hold matrices transposed.
    """
    k = shape.num_experts_per_tok
    d = shape.hidden_size
    f = shape.moe_intermediate_size
    e = shape.num_experts
    matrices, slots = {"w_up": (d, 2 * f), "w_down": (f, d)}, {}
    for name, (inner, columns) in matrices.items():
        shape_KN = (inner, columns)
        bits = {name: (shape_KN, jnp.dtype(jnp.uint16))}
        fields = stored_fields(FORMATS[kind], name, shape_KN) if kind in FORMATS else bits
        if fp8_inputs:
            fields = with_transposed(fields, (name,))
        slots |= {
            n: jax.ShapeDtypeStruct((2 * e, *sizes), dtype) for n, (sizes, dtype) in fields.items()
        }
    of = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)  # noqa: E731
    routed = (
        of(jnp.bfloat16, t, d),
        of(jnp.int32, t, k),
        of(jnp.float32, t, k),
        of(jnp.float32, t, d),
    )
    options: dict[str, Any] = {
        "activation": "swiglu",
        "tile_rows": 64,
        "implementation": implementation,
        "fp8_inputs": fp8_inputs,
    }
    return partial(add_expert_outputs_by_slot_table, **options), (
        ExpertInputs(*routed),
        slots,
        of(jnp.int32, e),
    )


def experts_that_choose(shape: MoEShape, t: int) -> tuple[Callable[..., object], Operands]:
    """Return (function, operands) of wide experts for t tokens, chosen in their first product."""
    (_, (routed, slots, table_E)) = experts_in_slots(shape, "wide", "triton", t)
    assert isinstance(routed, ExpertInputs)
    rules = ChoiceRules("softmax", shape.num_experts_per_tok, True)
    logits_TE = jax.ShapeDtypeStruct((t, shape.num_experts), jnp.float32)
    positions_T = jax.ShapeDtypeStruct((t,), jnp.int32)
    logits = RouterLogits(logits_TE, rules, positions_T=positions_T, end=1)
    products = ExpertProducts("swiglu")
    function = partial(choose_and_apply_experts, products=products, tile_rows=t)
    return function, (UnchosenInputs(routed.h_TD, logits, None), slots, table_E)


def engine_exchange(shape: MoEShape, devices: list[jax.Device], kind: str = "wide") -> JsonObject:
    """Compile the exchange and experts of an engine over several GPUs, 256 tokens a device.

    kind: the experts' format, or wide.
    """
    mesh = make_mesh((1, 1, len(devices)), devices)
    tokens = 256 * len(devices)
    k = shape.num_experts_per_tok

    def of(spec: PartitionSpec, dtype: DTypeLike, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))

    d, f, e = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
    x_TD, y_TD = of(BATCH, jnp.bfloat16, tokens, d), of(BATCH, jnp.float32, tokens, d)
    routed = ExpertInputs(
        x_TD, of(BATCH, jnp.int32, tokens, k), of(BATCH, jnp.float32, tokens, k), y_TD
    )
    weights = {}
    for name, shape_KN in {"w_up": (d, 2 * f), "w_down": (f, d)}.items():
        bits = {name: (shape_KN, np.dtype(np.uint16))}
        fields = stored_fields(FORMATS[kind], name, shape_KN) if kind in FORMATS else bits
        for stored, (sizes, dtype) in fields.items():
            weights[stored] = of(BATCH, dtype_of_stored_bits(dtype), e, *sizes)
    exchange = ExchangeShape(256 * k * 5 // 4, e // len(devices), "swiglu", ragged=True)
    return compiled_for_cuda(
        devices[0],
        experts_on_mesh,
        mesh,
        exchange,
        routed,
        of(REPLICATED, jnp.int32, e, 1),
        weights,
    )


def described(program: JsonObject) -> str:
    """Return what compiling a program told, a line a kernel."""
    size = program["temp_bytes"] / 2**20
    most = max(program["shared_memory_bytes"], default=0)
    lines = [
        f"{program['program']}: {program['compile_s']} s, {size:.1f} MiB of temporaries, at most"
        f" {most} bytes of shared memory a block"
    ]
    lines += [f"    {target}" for target in program["cudnn"]]
    lines += [f"    {program['triton_kernels']} kernels in Triton"] * bool(
        program["triton_kernels"]
    )
    lines += [
        "    {kernel}: {registers} registers, {spill_bytes} bytes spilled".format(**kernel)
        for kernel in program["kernels"]
    ]
    return "\n".join(lines)


def main() -> None:
    a = parse()
    if ahead_of_time.skip_without_cuda_libraries():
        return
    results = []
    for target in a.targets:
        (device,) = ahead_of_time.abstract_gpu_devices(target)
        implementation: Name = "mosaic_gpu" if target == "h200" else "triton"
        chosen = [("attention", each) for each in attention_programs(target)]
        chosen += [("attention within documents", each) for each in document_programs()]
        chosen += [("attention over a cache", each) for each in cache_programs()]
        chosen += [("layers of few tokens", each) for each in few_token_programs()]
        chosen += [(n, each) for n in a.shapes for each in programs(MODELS[n], implementation)]
        with trace_for_device(device):
            no_fp8 = not has_fp8_products()
        for name, (what, function, operands) in chosen:
            if not any(word in what for word in a.programs) or (no_fp8 and INPUTS_IN_FP8 in what):
                continue
            result = compile_for(device, function, operands)
            results.append({"target": target, "shape": name, "program": what, **result})
            print(f"{target} {name} {described(results[-1])}", flush=True)
    if "h200" in a.targets and any(word in "ragged exchange" for word in a.programs):
        devices = ahead_of_time.abstract_gpu_devices("h200", 1, 8)
        for name in a.shapes:
            if MODELS[name].num_experts % len(devices):
                continue
            for kind in ("wide", *FORMATS):
                result = engine_exchange(MODELS[name], devices, kind)
                what = f"ragged exchange, experts {kind}"
                results.append({"target": "8 x h200", "shape": name, "program": what, **result})
                size = result["temp_bytes"] / 2**20
                print(
                    f"8 x h200 {name} {what}: {result['compile_s']} s, {size:.1f} MiB of"
                    " temporaries"
                )
    if a.write:
        write_rows(results)
    report.finish({"jax": jax.__version__, "programs": results})


def write_rows(rows: list[JsonObject]) -> None:
    """Replace rows of the committed result, or add them."""
    result = json.loads(RESULT.read_text())
    now = {"date": f"{date.today()}", "jax": jax.__version__}
    key = lambda row: (row["target"], row["shape"], row["program"])  # noqa: E731
    newest = {key(row): row for row in [*result["programs"], *({**row, **now} for row in rows)]}
    notes = [*result["notes"], *({LATER_ROWS} - set(result["notes"]))]
    report.write(result | {"notes": notes, "programs": list(newest.values())}, RESULT)


if __name__ == "__main__":
    main()
