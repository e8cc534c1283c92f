"""Work between all-to-alls: where it goes, and that neither it nor what it goes between changes."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from jmoe.collectives import schedule
from jmoe.collectives.schedule import (
    MAX_CHUNK_BYTES,
    MAX_IN_FLIGHT,
    OVERLAP_OPTION,
    SCHEDULES,
    After,
    ColumnWork,
    chunk_bytes_at,
    compiler_options,
    cut_ranges,
    interleave_collectives,
)
from jmoe.mesh import ALL, BATCH, REPLICATED, make_mesh
from jmoe.planning.hlo import HloComputation, HloOperation, parse_hlo
from jmoe.run.ahead_of_time import abstract_gpu_devices, has_cuda_plugin, lower_for_device
from kernels_pallas import native
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.implementations import trace_for_device
from kernels_pallas.multiplications import count_op_multiplications
from tests.compiled import COLLECTIVES, inside_shard_map, operations, origins

MESH = make_mesh((1, 1, 8))


def test_cuts() -> None:
    assert cut_ranges(10, 4, 1000) == [(0, 10)]
    assert cut_ranges(10, 4, 16) == [(0, 3), (3, 7), (7, 10)]
    assert cut_ranges(3, 4, 1) == [(0, 1), (1, 2), (2, 3)]
    assert cut_ranges(0, 4, 16) == []


def test_chunk_bytes() -> None:
    assert chunk_bytes_at(1e6) == 20_000
    assert chunk_bytes_at(1e12) == MAX_CHUNK_BYTES
    assert chunk_bytes_at(0.1) == 1


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Attention, to the experts, experts, back, and something that the first all-to-all could
    also wait for.
    """
    x = jnp.tanh(x @ w)
    there = lax.all_to_all(x.reshape(8, -1, 16), ALL, 0, 0, tiled=True)
    out = jnp.tanh(there @ w)
    shared = x @ w @ w  # nothing waits for it
    back = lax.all_to_all(out, ALL, 0, 0, tiled=True)
    again = lax.all_to_all(back + 1, ALL, 0, 0, tiled=True)
    return again.reshape(x.shape) + shared


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("chunks", "g a g a a g g"),
        ("pipelined", "g a g a a g g"),
        ("ready", "g g g g a a a"),
        ("priority", "g g g g a a a"),
        ("fixed", "a a a g g g g"),
        ("none", None),
    ],
)
def test_interleave(name: str, order: str | None) -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 16), (16, 16)))
    rows = jnp.asarray(rng.normal(size=(8, 12)), jnp.float32)

    def body(x: jax.Array, w: jax.Array, rows: jax.Array) -> Any:
        def send(piece: jax.Array, after: After) -> jax.Array:
            return lax.all_gather(after(piece), ALL, tiled=True)

        work = [lambda after, i=i: send(rows[:, 3 * i : 3 * i + 3], after) for i in range(4)]
        return interleave_collectives(layer, (x, w), work, SCHEDULES[name], ALL, x)

    def plain(x: jax.Array, w: jax.Array, rows: jax.Array) -> Any:
        return layer(x, w), [
            lax.all_gather(rows[:, 3 * i : 3 * i + 3], ALL, tiled=True) for i in range(4)
        ]

    def sharded(f: Any) -> Any:
        specs: Any = (BATCH, REPLICATED, BATCH)
        f = jax.shard_map(
            f, mesh=MESH, in_specs=specs, out_specs=(BATCH, REPLICATED), check_vma=False
        )
        return jax.jit(f).lower(x, w, rows).compile()

    ours, expected = sharded(body), sharded(plain)
    a, b = (jax.block_until_ready(f(x, w, rows)) for f in (ours, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), a, b)
    found = " ".join(op.kind[4] for op in operations(ours.as_text()))  # all-Gather, all-To-all
    assert order is None or found == order.replace("a", "t")


def test_on_a_gpu_barriers_keep_the_order() -> None:
    """Each collective waits for the one before it, chunks of one place for the all-to-all before
    them alone, and no operand is read and written to say so.
    """
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 16), (16, 16)))
    gpu: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")

    def body(x: jax.Array, w: jax.Array) -> Any:
        work = [lambda after: lax.all_gather(after(w), ALL, tiled=True)] * 4
        return interleave_collectives(layer, (x, w), work, SCHEDULES["chunks"], ALL, x)

    specs: Any = (BATCH, REPLICATED)
    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=specs, out_specs=(BATCH, REPLICATED), check_vma=False
    )
    with trace_for_device(gpu):
        traced = jax.jit(mapped).trace(x, w)
    inside = inside_shard_map(traced.jaxpr.jaxpr)
    assert not any(eqn.primitive.name == "xor" for eqn in inside.eqns)
    sent = [eqn for eqn in inside.eqns if eqn.primitive.name in ("all_gather", "all_to_all")]
    assert "".join(eqn.primitive.name[4] for eqn in sent) == "gtgttgg"
    for before, after in itertools.pairwise(sent):
        chunks = before.primitive.name == after.primitive.name == "all_gather"
        assert (before.outvars[0] in origins(inside, after.invars[0])) != chunks
    assert sent[-3].outvars[0] in origins(inside, sent[-1].invars[0])
    expected = jax.shard_map(layer, mesh=MESH, in_specs=specs, out_specs=BATCH, check_vma=False)
    y, _ = traced.lower().compile()(x, w)
    np.testing.assert_allclose(y, jax.jit(expected)(x, w), rtol=1e-6, atol=1e-6)


def test_on_a_gpu_chunks_of_successive_columns_are_one_collective() -> None:
    """Of four chunks two are gathered at each of two places; at the end the four of the reduction
    run as one.
    """
    gpu: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    rng = np.random.default_rng(0)
    x, w, rows = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 16), (16, 16), (8, 64))
    )
    cuts = cut_ranges(64, 4, 64)

    def body(x: jax.Array, w: jax.Array, rows: jax.Array) -> Any:
        def gather(piece: jax.Array) -> jax.Array:
            return lax.all_gather(piece, ALL, tiled=True)

        def reduce(piece: jax.Array) -> jax.Array:
            return lax.psum_scatter(piece, ALL)

        work = [ColumnWork("work", send, rows, *cut) for send in (gather, reduce) for cut in cuts]
        y, results = interleave_collectives(layer, (x, w), work, SCHEDULES["chunks"], ALL, x)
        return y, jnp.concatenate(results[:4], axis=1), jnp.concatenate(results[4:])

    specs: Any = (BATCH, REPLICATED, REPLICATED)
    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=specs, out_specs=(BATCH, BATCH, BATCH), check_vma=False
    )
    with trace_for_device(gpu):
        traced = jax.jit(mapped).trace(x, w, rows)
    kinds = ("all_gather", "all_to_all", "reduce_scatter")
    inside = inside_shard_map(traced.jaxpr.jaxpr)
    sent = [eqn for eqn in inside.eqns if eqn.primitive.name in kinds]
    columns = [
        eqn.primitive.name[4:6] + f"{eqn.invars[0].aval.shape[-1]}"
        for eqn in sent
        if eqn.primitive.name != "all_to_all"
    ]
    assert columns == ["ga32", "ga32", "ce64"]
    _, gathered, reduced = traced.lower().compile()(x, w, rows)
    np.testing.assert_array_equal(gathered[:8], rows)
    np.testing.assert_allclose(reduced, 8 * np.ravel(rows), rtol=1e-6)


def test_options_of_a_program_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several collectives in flight where they have an order and the user set no limit."""
    gpu: Any = SimpleNamespace(platform="gpu", compute_capability="9.0")
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_options(SCHEDULES["chunks"], gpu) == {OVERLAP_OPTION: MAX_IN_FLIGHT}
    assert compiler_options(SCHEDULES["none"], gpu) == {}
    assert compiler_options(SCHEDULES["chunks"], jax.devices()[0]) == {}
    monkeypatch.setenv("XLA_FLAGS", f"--{OVERLAP_OPTION}=2")
    assert compiler_options(SCHEDULES["chunks"], gpu) == {}


@pytest.mark.parametrize(
    ("capability", "dtype"), [("9.0", jnp.bfloat16), ("8.0", jnp.bfloat16), ("9.0", jnp.float32)]
)
def test_products_of_kernels_count(capability: str, dtype: Any) -> None:
    """Kernels of Hopper and of Triton: forward, and both products backward."""
    gpu: Any = SimpleNamespace(platform="gpu", compute_capability=capability)
    x, w = jnp.zeros((512, 256), dtype), jnp.zeros((4, 256, 384), dtype)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return grouped_matmul(x, w, jnp.full(4, 128, jnp.int32)).astype(jnp.float32).sum()

    with trace_for_device(gpu):
        closed = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w)
    counted = sum(schedule._num_multiplications(eqn) for eqn in closed.eqns)
    assert counted == 3 * 512 * 256 * 384


def test_attention_of_cudnn_counts() -> None:
    """Half of all scores, from 2 rows of 5 positions with 4 heads of 16 and 32 values."""
    shapes = [(2, 5, 4, 16), (2, 5, 2, 16), (2, 5, 2, 32)]
    forward = count_op_multiplications("__cudnn$fmhaSoftmax", shapes)
    backward = count_op_multiplications("__cudnn$fmhaSoftmaxBackward", shapes)
    assert forward == 2 * 4 * 15 * (16 + 32) and backward == 2 * 4 * 15 * (3 * 16 + 2 * 32)


def test_a_loop_with_all_to_alls_keeps_its_place() -> None:
    """How often it runs is known only then, as in a ragged exchange: other collectives wait for
    the whole loop, and the loop for those before it.
    """

    def looping(x: jax.Array, w: jax.Array) -> jax.Array:
        there = lax.all_to_all(jnp.tanh(x @ w).reshape(8, -1, 16), ALL, 0, 0, tiled=True)

        def run_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return lax.all_to_all(jnp.tanh(carry[0] @ w), ALL, 0, 0, tiled=True), carry[1] + 1

        rounds = 1 + (lax.pmax(there, ALL).max() > 0).astype(jnp.int32)
        out, _ = lax.while_loop(lambda carry: carry[1] < rounds, run_round, (there, jnp.int32(0)))
        return lax.all_to_all(out, ALL, 0, 0, tiled=True).reshape(x.shape)

    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((256, 16), (16, 16)))

    def body(x: jax.Array, w: jax.Array) -> Any:
        work = [lambda after: lax.all_gather(after(w), ALL, tiled=True)] * 4
        return interleave_collectives(looping, (x, w), work, SCHEDULES["chunks"], ALL, x)

    specs: Any = (BATCH, REPLICATED)
    mapped, plain = (
        jax.jit(jax.shard_map(f, mesh=MESH, in_specs=specs, out_specs=out, check_vma=False))
        for f, out in ((body, (BATCH, REPLICATED)), (looping, BATCH))
    )
    inside = inside_shard_map(mapped.trace(x, w).jaxpr.jaxpr)
    kinds = ("all_gather", "all_to_all", "while")
    sent = [eqn for eqn in inside.eqns if eqn.primitive.name in kinds]
    assert Counter(eqn.primitive.name for eqn in sent)["while"] == 1
    for before, after in itertools.pairwise(sent):
        behind = set().union(*(origins(inside, x) for x in after.invars))
        assert before.outvars[0] in behind
    y, _ = mapped(x, w)
    np.testing.assert_allclose(y, plain(x, w), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not has_cuda_plugin(), reason="JAX's CUDA libraries are not installed")
@pytest.mark.usefixtures("full_compilation")
@pytest.mark.parametrize(("name", "num_gathers"), [("chunks", 2), ("fixed", 1)])
def test_a_program_compiled_for_a_gpu_keeps_the_order(
    monkeypatch: pytest.MonkeyPatch, name: str, num_gathers: int
) -> None:
    """XLA drops what a barrier waits for if nothing else uses it: here every all-to-all of the
    optimized program still waits for the collective before it, and every other collective for the
    all-to-all before it. A place has one collective of each kind.
    """
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    devices = abstract_gpu_devices("h100", 1, 8)

    def body(x: jax.Array, w: jax.Array, rows: jax.Array) -> Any:
        def gather(piece: jax.Array) -> jax.Array:
            return lax.all_gather(piece, ALL, tiled=True)

        def reduce(piece: jax.Array) -> jax.Array:
            return lax.psum_scatter(piece, ALL)

        work = [
            ColumnWork("work", send, rows, start, start + 512)
            for send in (gather, reduce)
            for start in (0, 512)
        ]
        y, results = interleave_collectives(layer, (x, w), work, SCHEDULES[name], ALL, x)
        return y, jnp.concatenate(results[:2], axis=1), jnp.concatenate(results[2:])

    specs: Any = (BATCH, REPLICATED, REPLICATED)
    mapped = jax.shard_map(
        body, mesh=make_mesh((1, 1, 8), devices), in_specs=specs, out_specs=BATCH, check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2048, 16), (16, 16), (8, 1024))]
    options = compiler_options(SCHEDULES[name], devices[0])
    _, lowered = lower_for_device(devices[0], jax.jit(mapped, compiler_options=options), *shapes)
    program = parse_hlo(lowered.compile().as_text() or "").entry
    sent = [op for op in program.values() if op.kind.removesuffix("-start") in COLLECTIVES]
    kinds = [op.kind.removesuffix("-start") for op in sent]
    expected = {"all-gather": num_gathers, "all-to-all": 3, "reduce-scatter": 1}
    assert Counter(kinds) == expected
    assert program.parameters[0].name in _names_behind(program, sent[0]), "begins before x is known"
    for i, after in enumerate(sent):
        others = (j for j in range(i) if (kinds[j] == "all-to-all") != (kinds[i] == "all-to-all"))
        for j in others:
            assert sent[j].name in _names_behind(program, after), (sent[j].name, after.name)


def _names_behind(program: HloComputation, operation: HloOperation) -> set[str]:
    """Return the names of all operations on which this one depends."""
    found, todo = set(), [*operation.operands]
    while todo:
        name = todo.pop()
        if name in program and name not in found:
            found.add(name)
            todo += program[name].operands
    return found


@pytest.mark.parametrize("experts", ["products", "native"])
def test_work_is_hidden_behind_experts(experts: str) -> None:
    """Whether they are matrix products or one native operation: between the two all-to-alls."""
    zeros = [jnp.zeros(shape, jnp.bfloat16) for shape in ((256, 16), (1, 16, 256), (1, 256, 16))]

    def run(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        there = lax.all_to_all(x.reshape(8, -1, 16), ALL, 0, 0, tiled=True).reshape(x.shape)
        if experts == "native":
            out = native.grouped_mlp(
                native.GroupedRows(there, None, jnp.full(1, len(x), jnp.int32)),
                (w_up, w_down, None, None),
            )[0]
        else:
            out = there @ w_up[0] @ w_down[0]
        return lax.all_to_all(out.reshape(8, -1, 16), ALL, 0, 0, tiled=True)

    def body(*args: jax.Array) -> Any:
        work = [lambda after: lax.all_gather(after(args[0]), ALL, tiled=True)] * 4
        return interleave_collectives(run, args, work, SCHEDULES["chunks"], ALL, args[0])

    specs: Any = (BATCH, REPLICATED, REPLICATED)
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=BATCH, check_vma=False)
    kinds = [
        eqn.primitive.name for eqn in inside_shard_map(jax.make_jaxpr(mapped)(*zeros).jaxpr).eqns
    ]
    order = [kind[4] for kind in kinds if kind in ("all_gather", "all_to_all")]
    assert "".join(order) == "tggggt"


@pytest.mark.parametrize(("attention", "order"), [(True, "ggttttgg"), (False, "ttggtggt")])
def test_work_waits_while_experts_hide_an_all_to_all(attention: bool, order: str) -> None:
    """The experts' first product runs beside the second all-to-all, their second beside the one
    back: gathers run beside attention, and beside the experts only where there is nothing else.
    """
    zeros = [jnp.zeros(shape, jnp.float32) for shape in ((256, 16), (16, 16))]

    def send(rows: jax.Array) -> jax.Array:
        return lax.all_to_all(rows.reshape(8, -1, 16), ALL, 0, 0, tiled=True).reshape(rows.shape)

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ w) if attention else x
        there = [send(rows) for rows in jnp.split(x, 2)]
        y = jnp.concatenate([send(rows @ w) for rows in there])
        return y @ w if attention else y

    def body(*args: jax.Array) -> Any:
        work = [lambda after: lax.all_gather(after(args[0]), ALL, tiled=True)] * 4
        return interleave_collectives(run, args, work, SCHEDULES["pipelined"], ALL, args[0])

    mapped = jax.shard_map(
        body, mesh=MESH, in_specs=(BATCH, REPLICATED), out_specs=BATCH, check_vma=False
    )
    traced = inside_shard_map(jax.make_jaxpr(mapped)(*zeros).jaxpr)
    kinds = [eqn.primitive.name for eqn in traced.eqns]
    found = [kind[4] for kind in kinds if kind in ("all_gather", "all_to_all")]
    assert "".join(found) == order


def test_memory_of_an_operation_in_the_background_is_held_until_work_is_done() -> None:
    """All that it reads and writes: until the last work is known, for which the next all-to-all
    waits too.
    """
    zeros = [jnp.zeros(shape, jnp.bfloat16) for shape in ((256, 16), (1, 16, 256), (1, 256, 16))]

    def run(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        there = lax.all_to_all(x.reshape(8, -1, 16), ALL, 0, 0, tiled=True).reshape(x.shape)
        out = native.grouped_mlp(
            native.GroupedRows(there, None, jnp.full(1, len(x), jnp.int32)),
            (w_up, w_down, None, None),
        )[0]
        return lax.all_to_all(out.reshape(8, -1, 16), ALL, 0, 0, tiled=True)

    def body(*args: jax.Array) -> Any:
        work = [lambda after: lax.all_gather(after(args[0]), ALL, tiled=True)] * 4
        with native.allow_native_training(True, background=True):
            return interleave_collectives(run, args, work, SCHEDULES["chunks"], ALL, args[0])

    specs: Any = (BATCH, REPLICATED, REPLICATED)
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=BATCH, check_vma=False)
    inside = inside_shard_map(jax.make_jaxpr(mapped)(*zeros).jaxpr)
    experts, hold = (eqn for eqn in inside.eqns if eqn.primitive.name == "ffi_call")
    gathers = [eqn for eqn in inside.eqns if eqn.primitive.name == "all_gather"]
    _, back = (eqn for eqn in inside.eqns if eqn.primitive.name == "all_to_all")
    held = [x for x in (*experts.invars, *experts.outvars) if not isinstance(x, Literal)]
    assert hold.params["target_name"] == "jmoe_hold" and {*held} == {*hold.invars[1:]}
    assert gathers[-1].outvars[0] in origins(inside, hold.invars[0])
    assert hold.outvars[0] in origins(inside, back.invars[0])


@pytest.mark.parametrize(("name", "deferred"), [("chunks", True), ("ready", False)])
def test_a_product_that_no_all_to_all_waits_for_begins_when_one_can(
    name: str, deferred: bool
) -> None:
    def body(x: jax.Array, w: jax.Array) -> Any:
        return interleave_collectives(layer, (x, w), [], SCHEDULES[name], ALL, x)

    specs: Any = (BATCH, REPLICATED)
    mapped = jax.shard_map(body, mesh=MESH, in_specs=specs, out_specs=(BATCH, []), check_vma=False)
    closed = jax.make_jaxpr(mapped)(jnp.zeros((256, 16)), jnp.zeros((16, 16)))
    inside = inside_shard_map(closed.jaxpr)
    there, back, _ = (eqn for eqn in inside.eqns if eqn.primitive.name == "all_to_all")
    (attended,) = (x for x in origins(inside, there.invars[0]) if _made_by(inside, x) == "tanh")
    products = [eqn for eqn in inside.eqns if eqn.primitive.name == "dot_general"]
    shared = [p for p in products if p.outvars[0] not in origins(inside, back.invars[0])]
    assert len(shared) == 2
    origins_of = [origins(inside, p.invars[0]) | origins(inside, p.invars[1]) for p in shared]
    waits = [any(_made_by(inside, x) == "and" for x in found) for found in origins_of]
    assert waits == [deferred, deferred]
    assert all(attended in found and there.outvars[0] not in found for found in origins_of)


def _made_by(jaxpr: Any, var: Any) -> str:
    return next((eqn.primitive.name for eqn in jaxpr.eqns if var in eqn.outvars), "")
