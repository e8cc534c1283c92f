"""The order of a layer's collectives: all-to-alls have priority; other collectives run in chunks
while no all-to-all can start.

An all-to-all that queues behind a long reduction delays the whole step (Lina, USENIX ATC '23,
section 4). Reductions, and here also the gathers of the next layer's parameters, are therefore cut
into chunks that run while experts or attention compute. `interleave_collectives`, which training's
`reverse_scan.py` calls, imposes this order on the traced function of a layer; the layer's own code
is not involved.
"""

import bisect
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmoe.types import PyTree
from kernels_pallas.implementations import target_device
from kernels_pallas.multiplications import (
    count_kernel_multiplications,
    count_op_multiplications,
)
from kernels_pallas.native import delay_until_available, runs_in_background

After = Callable[[jax.Array], jax.Array]
Work = Callable[[After], jax.Array]  # runs a collective after passing its input through `After`


@dataclass(frozen=True, eq=False)
class ColumnWork:
    """A `Work`: a collective of columns `start` to `end` of `rows`, under the scope `scope`.

    collective: a function of columns of `rows`. Each column of its result, on the last axis,
    depends on the same column of `rows` alone.
    """

    scope: str
    collective: Callable[[jax.Array], jax.Array]
    rows: jax.Array
    start: int
    end: int

    def __call__(self, after: After) -> jax.Array:
        with jax.named_scope(self.scope):
            return self.collective(after(self.rows[..., self.start : self.end]))

    def is_continued_by(self, other: Work) -> TypeGuard["ColumnWork"]:
        """Return whether `other` is the same collective of the columns that follow."""
        return (
            isinstance(other, ColumnWork)
            and other.rows is self.rows
            and other.collective is self.collective
            and other.start == self.end
        )


Markers = tuple[jax.Array, ...]  # of values to wait for, see `_CollectiveOrder`

CHUNK_S = 0.02  # seconds of network time of a chunk: the longest that an all-to-all waits for one
MAX_CHUNK_BYTES = 30_000_000


@dataclass(frozen=True)
class CollectiveSchedule:
    """How a layer's all-to-alls share the network with its other collectives.

    ordered: collectives run in program order; otherwise XLA orders them. all_to_alls_first: matrix
    products that an all-to-all waits for run before other products. places: the slice of places
    that take work, out of: the layer's beginning, each point where the next all-to-all cannot start
    yet, the layer's end. chunked: work is cut into chunks. num_chunks: chunks of an all-to-all;
    experts start on the first chunk while the next is in flight.
    """

    ordered: bool
    all_to_alls_first: bool
    places: slice
    chunked: bool
    num_chunks: int


# When work runs. none: XLA decides. ready: as soon as its input is known, as data-parallel
# frameworks do. fixed: after the layer's all-to-alls. priority: after the layer's first
# all-to-alls. chunks, pipelined: Lina.
SCHEDULES = {
    "none": CollectiveSchedule(
        ordered=False, all_to_alls_first=False, places=slice(None), chunked=False, num_chunks=1
    ),
    "ready": CollectiveSchedule(
        ordered=True, all_to_alls_first=False, places=slice(1), chunked=False, num_chunks=1
    ),
    "fixed": CollectiveSchedule(
        ordered=True, all_to_alls_first=False, places=slice(-1, None), chunked=False, num_chunks=1
    ),
    "priority": CollectiveSchedule(
        ordered=True, all_to_alls_first=True, places=slice(1, 2), chunked=False, num_chunks=1
    ),
    "chunks": CollectiveSchedule(
        ordered=True, all_to_alls_first=True, places=slice(1, None), chunked=True, num_chunks=1
    ),
    "pipelined": CollectiveSchedule(
        ordered=True, all_to_alls_first=True, places=slice(1, None), chunked=True, num_chunks=2
    ),
}


# XLA's limit of collectives in flight is 1. The parts of a layer's two buffers that share a place
# would wait for each other: one of them could be hidden, the others not.
OVERLAP_OPTION = "xla_gpu_experimental_parallel_collective_overlap_limit"
MAX_IN_FLIGHT = 4


def compiler_options(schedule: CollectiveSchedule, device: jax.Device) -> dict[str, int]:
    """Return XLA's options for a program on `device` whose collectives follow `schedule`.

    On a GPU up to `MAX_IN_FLIGHT` collectives may be in flight, unless `XLA_FLAGS` has that option
    or this jaxlib does not know it. A schedule that leaves the order to XLA keeps XLA's limit: two
    all-to-alls must not be in flight at once, and only the order keeps them apart.
    """
    is_set = OVERLAP_OPTION in os.environ.get("XLA_FLAGS", "")
    if device.platform != "gpu" or not schedule.ordered or is_set:
        return {}
    return {OVERLAP_OPTION: MAX_IN_FLIGHT} if _jaxlib_knows_option(OVERLAP_OPTION) else {}


@functools.cache
def _jaxlib_knows_option(name: str) -> bool:
    try:
        jax.jit(lambda: 1, compiler_options={name: 1}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def cut_ranges(width: int, element_bytes: int, limit_bytes: int) -> list[tuple[int, int]]:
    """Return [(start, stop), ...] that cut `width` elements into the fewest even ranges of at most
    `limit_bytes` each.
    """
    count = min(width, -(-width * element_bytes // max(1, limit_bytes)))
    return list(
        itertools.pairwise(round(i * width / count) for i in range(count + 1 if count else 0))
    )


def _can_carry_dependence(x: jax.Array | ShapedArray) -> bool:
    """Return whether x holds numbers, through whose bits a dependence can be added."""
    return jnp.issubdtype(x.dtype, jnp.number) and x.size > 0


Operand = int | Literal  # a name of the program, or a constant


class _Equation(NamedTuple):
    """An equation of the traced function. Its inputs are names (int) or literals.

    deferred: the equation is independent of the all-to-all before it and starts only once that
    all-to-all can start.
    """

    eqn: JaxprEqn
    inputs: list[Operand]
    outputs: list[int]
    scope: str
    deferred: bool = False

    @property
    def is_all_to_all(self) -> bool:
        """Whether the equation is an all-to-all, or a loop with one."""
        return _contains_all_to_all(self.eqn)

    @property
    def has_inner_functions(self) -> bool:
        """Whether the equation is a loop, a conditional or another call."""
        return bool(_inner_functions(self.eqn))


# The last three move keys and values of sequences that are split over devices: attention waits for
# them as experts wait for all-to-alls, so they have the same priority.
_ALL_TO_ALLS = ("all_to_all", "ragged_all_to_all", "all_gather", "reduce_scatter", "ppermute")
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "remat2",
    "checkpoint",
    "custom_vjp_call",
    "custom_jvp_call",
)


class _ClosedJaxpr(Protocol):
    """A traced function with its constants: `ClosedJaxpr`, which JAX 0.12 merged into `Jaxpr`."""

    @property
    def jaxpr(self) -> Jaxpr: ...

    @property
    def consts(self) -> list[PyTree]: ...

    @property
    def eqns(self) -> list[JaxprEqn]: ...


def _inner_functions(eqn: JaxprEqn) -> list[_ClosedJaxpr]:
    """Return the traced functions (jaxprs) among an equation's parameters, such as a loop's body,
    in any supported version of JAX.
    """
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    return [leaf for leaf in leaves if hasattr(leaf, "eqns")]


def _shaped_array_of(var: Var | Literal) -> ShapedArray:
    assert isinstance(var.aval, ShapedArray), var.aval
    return var.aval


def _contains_all_to_all(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name in _ALL_TO_ALLS:
        return True
    return any(
        _contains_all_to_all(inner) for function in _inner_functions(eqn) for inner in function.eqns
    )


def _kernel_name(eqn: JaxprEqn) -> str:
    """Return the name of the Pallas kernel that an equation launches; "" if it launches none."""
    name = str(eqn.params.get("name") or eqn.params.get("name_and_src_info") or "").split()
    return name[0] if name and name[0].endswith("_kernel") else ""


def _num_multiplications(eqn: JaxprEqn) -> int:
    """Return the number of multiplications in an equation's matrix products, native operations and
    Pallas kernels; for a conditional, those of the most expensive branch.
    """
    if eqn.primitive.name == "while":  # tiles of overloaded experts: none when tokens are balanced
        return 0
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        left, out = _shaped_array_of(eqn.invars[0]), _shaped_array_of(eqn.outvars[0])
        return math.prod((*out.shape, *(left.shape[dim] for dim in summed)))
    shapes = [
        _shaped_array_of(var).shape for var in eqn.invars if isinstance(var.aval, ShapedArray)
    ]
    if eqn.primitive.name == "ffi_call":
        return count_op_multiplications(eqn.params["target_name"], shapes)
    if name := _kernel_name(eqn):
        return count_kernel_multiplications(name, shapes, _shaped_array_of(eqn.outvars[0]).shape)
    inner = (sum(map(_num_multiplications, function.eqns)) for function in _inner_functions(eqn))
    return int(eqn.params.get("length", 1)) * max(inner, default=0)


class _Program:
    """A traced function as one list of equations. Calls that contain an all-to-all are inlined."""

    def __init__(self, closed: _ClosedJaxpr) -> None:
        self._names = itertools.count()
        self.constants: dict[int, jax.Array] = {}
        self.equations: list[_Equation] = []
        self.inputs = [next(self._names) for _ in closed.jaxpr.invars]
        self.outputs = self._inline(closed.jaxpr, closed.consts, self.inputs, "")
        self.equations = self._used_equations()

    def _inline(
        self, jaxpr: Jaxpr, consts: Sequence[jax.Array], inputs: Sequence[Operand], scope: str
    ) -> list[Operand]:
        """Append a function's equations to the program; return its outputs as operands."""
        names: dict[Var, Operand] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            names[var] = name = next(self._names)
            self.constants[name] = value

        def read(v: Var | Literal) -> Operand:
            return v if isinstance(v, Literal) else names[v]

        for eqn in jaxpr.eqns:
            read_by = [read(v) for v in eqn.invars]
            inner = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
            if eqn.primitive.name in _CALLS and _contains_all_to_all(eqn):
                (function,) = (
                    f for name, f in eqn.params.items() if name in ("jaxpr", "call_jaxpr")
                )
                jaxpr_inside = getattr(function, "jaxpr", function)
                consts_inside = getattr(function, "consts", ())
                outputs = self._inline(jaxpr_inside, consts_inside, read_by, inner)
            else:
                made = [next(self._names) for _ in eqn.outvars]
                self.equations.append(_Equation(eqn, read_by, made, inner))
                outputs = [*made]
            names.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _used_equations(self) -> list[_Equation]:
        """Return the equations whose results are used.

        XLA cannot remove unused collectives here, since every later collective depends on them.
        """
        read, used = {v for v in self.outputs if not isinstance(v, Literal)}, []
        for equation in reversed(self.equations):
            if read.intersection(equation.outputs) or not equation.outputs:
                used.append(equation)
                read.update(name for name in equation.inputs if not isinstance(name, Literal))
        return used[::-1]

    def products_by_work_place(self) -> dict[int, list[int]]:
        """Return {place: indices of the equations whose matrix products overlap with work there}.

        A place is the index of the equation before which the work may run.

        The places are the beginning, the all-to-alls that wait for a product, and the end.
        """
        place, begin = 0, 0
        places: dict[int, list[int]] = {place: []}
        left = {
            i for i, equation in enumerate(self.equations) if _num_multiplications(equation.eqn)
        }
        for at, equation in enumerate(self.equations):
            if not equation.is_all_to_all:
                continue
            products = sorted(self._dependencies_of(at) & left)
            if products and products[-1] >= begin:
                place = at
            places.setdefault(place, []).extend(products)
            left.difference_update(products)
            begin = at + 1
        return places | {len(self.equations): sorted(left)}

    def places_beside_all_to_alls(self, places: dict[int, list[int]]) -> set[int]:
        """Return the places whose products run while an all-to-all is in flight: none of them
        depends on the last all-to-all before the place. The end, where nothing is delayed, is
        never among them.
        """
        all_to_alls = [i for i, equation in enumerate(self.equations) if equation.is_all_to_all]
        latest = self._latest_all_to_alls()
        beside = set()
        for place, products in places.items():
            before = [at for at in all_to_alls if at < place < len(self.equations)]
            if before and products and all(latest[i] < before[-1] for i in products):
                beside.add(place)
        return beside

    def operands_to_wait_for(self, products: list[int]) -> list[int]:
        """Return the values that the work in front of `products` should wait for: they become known
        when the product that waits for the last all-to-all can start.

        They are its inputs that depend on an all-to-all or, if none does, its latest input; [] if
        every product is deferred.
        """
        latest = self._latest_all_to_alls()
        products = [i for i in products if not self.equations[i].deferred]
        if not products:
            return []
        first = self.equations[max(products, key=lambda i: (latest[i], -i))]
        known = {
            name: at for at, equation in enumerate(self.equations) for name in equation.outputs
        }
        inputs = zip(first.inputs, first.eqn.invars, strict=True)
        numbers = [
            name
            for name, var in inputs
            if not isinstance(name, Literal) and _can_carry_dependence(_shaped_array_of(var))
        ]
        waiting = [name for name in numbers if name in known and latest[known[name]] >= 0]
        return waiting or [max(numbers, key=lambda name: known.get(name, -1))]

    def native_operands(self, products: list[int]) -> list[int]:
        """Return the names of the inputs and outputs of the native operations (FFI calls) among the
        equations with the indices `products`.
        """
        equations = [
            self.equations[i]
            for i in products
            if self.equations[i].eqn.primitive.name == "ffi_call"
        ]
        names = [
            x
            for equation in equations
            for x in (*equation.inputs, *equation.outputs)
            if not isinstance(x, Literal)
        ]
        return list(dict.fromkeys(names))

    def _latest_all_to_alls(self) -> list[int]:
        """Return for each equation the index of the last all-to-all that it is or depends on; -1
        without one.
        """
        waits_for: dict[int, int] = {}
        latest = []
        for at, equation in enumerate(self.equations):
            waits = max(
                (waits_for.get(x, -1) for x in equation.inputs if not isinstance(x, Literal)),
                default=-1,
            )
            latest.append(at if equation.is_all_to_all else waits)
            waits_for.update(dict.fromkeys(equation.outputs, latest[-1]))
        return latest

    def move_all_to_alls_first(self) -> None:
        """Reorder the equations so that a product runs after the first all-to-all that it could
        delay: one from which it is independent in both directions.

        All-to-alls without a product between them form one exchange.
        """
        first = next(
            (at for at, equation in enumerate(self.equations) if equation.is_all_to_all), 0
        )
        begins, latest = {first, *self.products_by_work_place()}, self._latest_all_to_alls()
        order: list[int] = []
        deferred: set[int] = set()
        left = set(range(len(self.equations)))

        def take_equations(indices: set[int]) -> None:
            order.extend(sorted(indices & left))
            left.difference_update(indices)

        for at, equation in enumerate(self.equations):
            if equation.is_all_to_all:
                take_equations(self._dependencies_of(at))
                take_equations({at})
                if at in begins:
                    others = {i for i in left if latest[i] < at}
                    deferred |= {i for i in others if _num_multiplications(self.equations[i].eqn)}
                    take_equations(others)
        take_equations(set(left))
        self.equations = [self.equations[i]._replace(deferred=i in deferred) for i in order]

    def _dependencies_of(self, index: int) -> set[int]:
        """Return the indices of the equations on which equation `index` depends, directly or
        through others.
        """

        def names_of(i: int) -> set[Operand]:
            return {x for x in self.equations[i].inputs if not isinstance(x, Literal)}

        names, needed = names_of(index), set()
        for i in reversed(range(index)):
            if names.intersection(self.equations[i].outputs):
                needed.add(i)
                names |= names_of(i)
        return needed


def _join_columns(chunks: Sequence[Work]) -> list[tuple[Work, int]]:
    """Return (work, number of chunks that it joins): chunks of successive columns joined."""
    joined: list[tuple[Work, int]] = []
    for chunk in chunks:
        last, count = joined[-1] if joined else (chunk, 0)
        if isinstance(last, ColumnWork) and last.is_continued_by(chunk):
            joined[-1] = replace(last, end=chunk.end), count + 1
        else:
            joined.append((chunk, 1))
    return joined


class _CollectiveOrder:
    """A chain of data dependences that makes every collective wait for the previous one; on a GPU
    the chunks of one place wait together for the collective before them (`run_chunks`).

    On a GPU an `optimization_barrier` of an operand and of what it waits for carries a dependence
    and moves no bytes. XLA drops an input of a barrier whose output is unused, unless that input
    has other users: so the barriers read results that the program uses, no value made for them.
    XLA:CPU drops barriers: there the bits of an array are XORed with an integer that is always 0,
    which XLA cannot know.

    last: what the next collective waits for, see `markers_of`.
    """

    def __init__(self, axes: tuple[str, ...], start_after: jax.Array) -> None:
        self.uses_barriers = target_device().platform == "gpu"
        if not self.uses_barriers:
            self._zero = lax.axis_index(axes) // lax.axis_size(axes)
        self.last = self.markers_of(start_after)

    def delay_until_last_collective(self, x: jax.Array) -> jax.Array:
        """Return x with a data dependence on the last collective's result."""
        return self.delay_until(x, self.last)

    def delay_until(self, x: jax.Array, markers: Markers) -> jax.Array:
        """Return x with a data dependence on the values that `markers` stand for (see
        `markers_of`), so that x is available only once they are.
        """
        if self.uses_barriers:
            delayed: jax.Array = lax.optimization_barrier((x, *markers))[0]
            return delayed
        words = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        with jax.named_scope("order"):
            return lax.bitcast_convert_type(
                lax.bitcast_convert_type(x, words) ^ self._combine_zeros(markers).astype(words),
                x.dtype,
            )

    def markers_of(self, y: jax.Array) -> Markers:
        """Return markers of y for `delay_until`, which then waits for y: y itself on a GPU;
        elsewhere an int32 0 that XLA cannot know before y is computed.
        """
        if self.uses_barriers:
            return (y,)
        words = jnp.dtype(f"uint{8 * y.dtype.itemsize}")
        with jax.named_scope("order"):
            first = y[(slice(0, 1),) * y.ndim].reshape(())
            return (lax.bitcast_convert_type(first, words).astype(jnp.int32) & self._zero,)

    @staticmethod
    def _combine_zeros(zeros: Markers) -> jax.Array:
        """Return an int32 0 that is known once all these int32 zeros are."""
        return functools.reduce(operator.or_, zeros)

    def hold_memory(self, arrays: list[jax.Array], result: jax.Array, *, at_end: bool) -> jax.Array:
        """Return `result`, and keep XLA from reusing the memory of `arrays` before the last
        collective is done. The next collective waits for `arrays`.

        at_end: no collective follows, so `result` itself waits for `arrays`.
        """
        if not arrays:
            return result
        self.last = (delay_until_available(self._combine_zeros(self.last), arrays),)
        return self.delay_until_last_collective(result) if at_end else result

    def set_last_collective(self, y: jax.Array) -> jax.Array:
        """Make every later collective wait for y, the result of the last one. Return y, which the
        program must use in place of y.

        On a GPU that is a barrier's output, which all users of y read. Otherwise XLA may let them
        read what y was reshaped from, and y would have no other user.
        """
        y = lax.optimization_barrier(y) if self.uses_barriers else y
        self.last = self.markers_of(y)
        return y

    def run_chunks(self, chunks: Sequence[Work]) -> list[jax.Array]:
        """Return the results of `chunks`, which all run before the next collective starts.

        On a GPU no chunk waits for another, and chunks of successive columns run as one collective.
        The first of these chunks then has the columns of all in its result, the others have none.
        Elsewhere each chunk waits for the one before it.
        """
        if not self.uses_barriers:
            return [
                self.set_last_collective(run(self.delay_until_last_collective)) for run in chunks
            ]
        results: list[jax.Array] = []
        ran: list[jax.Array] = []
        for joined, count in _join_columns(chunks):
            ran.append(lax.optimization_barrier(joined(self.delay_until_last_collective)))
            results += [ran[-1], *[ran[-1][..., :0]] * (count - 1)]
        self.last = tuple(ran)
        return results

    def also_wait_for(self, y: jax.Array) -> None:
        """Make later collectives wait for y as well as for the last collective."""
        self.last += self.markers_of(y)


def _assign_work(
    work: Sequence[Work], places: dict[int, int], schedule: CollectiveSchedule
) -> dict[int, list[int]]:
    """Return {place: indices of the work that runs there}, in proportion to the multiplications
    that can hide it.
    """
    chosen = list(places)[schedule.places]
    ends = list(itertools.accumulate(places[place] for place in chosen))
    shares: dict[int, list[int]] = {place: [] for place in chosen}
    for i in range(len(work)):
        hidden = (i + 0.5) / len(work) * ends[-1]
        shares[chosen[min(bisect.bisect_left(ends, hidden), len(chosen) - 1)]].append(i)
    return shares


def interleave_collectives(
    function: Callable[..., PyTree],
    args: tuple[PyTree, ...],
    work: Sequence[Work],
    schedule: CollectiveSchedule,
    axes: tuple[str, ...],
    start_after: jax.Array,
) -> tuple[PyTree, list[jax.Array]]:
    """Return (function(*args), results of `work`), with all collectives in the order of `schedule`,
    inside `shard_map` over `axes`.

    Work is dealt to the places where the next all-to-all cannot start yet, in proportion to the
    multiplications there. Products that hide an all-to-all, as in the schedule `pipelined`, count
    only if there are no others. Collectives depend on the previous ones, see `_CollectiveOrder`.

    work: functions that each run one of the other collectives. start_after: no work starts before
    this value is known. Without it XLA would gather the parameters of all layers at once, or keep
    those gathered in the forward pass for the backward pass.
    """
    order = _CollectiveOrder(axes, start_after)
    if not schedule.ordered:
        return function(*args), [send(order.delay_until_last_collective) for send in work]
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    program = _Program(closed)
    if schedule.all_to_alls_first:
        program.move_all_to_alls_first()
    places = program.products_by_work_place()
    hides = {
        place: sum(_num_multiplications(program.equations[i].eqn) for i in some)
        for place, some in places.items()
    }
    beside = program.places_beside_all_to_alls(places)
    if any(count for place, count in hides.items() if place not in beside):
        hides |= dict.fromkeys(beside, 0)
    shares = _assign_work(work, hides, schedule)
    run = _InterleavedRun(program, order, places, shares, work, jax.tree.leaves(args))
    out, results = run.evaluate()
    return jax.tree.unflatten(jax.tree.structure(shape), out), results


class _InterleavedRun:
    """One run of a program's equations in which the other collectives, `work`, run at their places.

    order: makes each collective wait for the previous one. places: {place: indices of the equations
    whose products overlap with work there}. shares: {place: indices of the work that runs there},
    see `_assign_work`.
    """

    def __init__(
        self,
        program: _Program,
        order: _CollectiveOrder,
        places: dict[int, list[int]],
        shares: dict[int, list[int]],
        work: Sequence[Work],
        operands: Sequence[jax.Array],
    ) -> None:
        self._program, self._order, self._work = program, order, work
        self._places, self._shares = places, shares
        self._values = dict(zip(program.inputs, operands, strict=True)) | program.constants
        self._results: dict[int, jax.Array] = {}

    def evaluate(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return (the program's outputs, the results of the work)."""
        order, program = self._order, self._program
        can_start = order.last
        for at, equation in enumerate(program.equations):
            operands = [self._read_value(x) for x in equation.inputs]
            self._run_work(at)
            if equation.is_all_to_all:
                # its rows, and the buffer that a ragged one writes, which should not be made early
                waiting = (
                    [self._index_of_smallest_array(operands)]
                    if equation.has_inner_functions
                    else [0, 1]
                )
                can_start = order.markers_of(operands[waiting[0]])
                for i in waiting[: len(operands)]:
                    operands[i] = order.delay_until_last_collective(operands[i])
            if equation.deferred:
                smallest = self._index_of_smallest_array(operands)
                operands[smallest] = order.delay_until(operands[smallest], can_start)
            with jax.named_scope(equation.scope):
                outputs = equation.eqn.primitive.bind(
                    *operands, **equation.eqn.primitive.get_bind_params(equation.eqn.params)
                )
            outputs = outputs if equation.eqn.primitive.multiple_results else [outputs]
            if equation.is_all_to_all:
                outputs = [order.set_last_collective(outputs[0]), *outputs[1:]]
            self._values.update(zip(equation.outputs, outputs, strict=True))
        self._run_work(len(program.equations))
        results = [self._results[i] for i in range(len(self._work))]
        return [self._read_value(x) for x in program.outputs], results

    @staticmethod
    def _index_of_smallest_array(operands: Sequence[PyTree]) -> int:
        """Return the index of the smallest operand that can carry a dependence."""
        arrays = (i for i, x in enumerate(operands) if jnp.ndim(x) and _can_carry_dependence(x))
        return min(arrays, key=lambda i: int(operands[i].nbytes))

    def _read_value(self, x: PyTree) -> PyTree:
        return x.val if isinstance(x, Literal) else self._values[x]

    def _run_work(self, place: int) -> None:
        """Run the collectives assigned to a place, and keep their results."""
        order, program, share = self._order, self._program, self._shares.get(place, ())
        if not share:
            return
        # XLA:CPU starts ready operations in order, and a collective blocks those behind it: let
        # the products start first. A GPU computes beside the collectives.
        if not order.uses_barriers:
            for operand in program.operands_to_wait_for(self._places[place]):
                order.also_wait_for(self._values[operand])
        self._results.update(zip(share, order.run_chunks([self._work[i] for i in share])))
        if runs_in_background():
            begun = [i for i in self._places[place] if i < place]
            arrays = [self._values[x] for x in program.native_operands(begun)]
            at_end = place == len(program.equations)
            self._results[share[-1]] = order.hold_memory(
                arrays, self._results[share[-1]], at_end=at_end
            )


def chunk_bytes_at(bytes_per_s: float) -> int:
    """Return the bytes of a chunk that takes `CHUNK_S` at this bandwidth, at most
    `MAX_CHUNK_BYTES`.
    """
    return max(1, min(MAX_CHUNK_BYTES, round(CHUNK_S * bytes_per_s)))
