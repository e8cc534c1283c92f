"""What the trace of a step says about its all-to-alls: when they could have started, when they were
done, and what computed meanwhile.

The backward pass of a layer with experts exchanges twice: combine's gradients go to the experts,
those of the experts' inputs come back. Such an exchange is all of its all-to-alls: of both levels,
of all pieces, of what travels beside the rows. It is *ready* when the last matrix product or native
operation is done that the rows of its last piece come from, and *done* with its last all-to-all.
What is computed a second time for the backward pass does not count, nor do gathers and sorts: they
are put off as the all-to-all is.
"""

import contextlib
import glob
import itertools
import math
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
WHOLE = ("while", "conditional", "call")  # hold what is counted already
PARTS = (
    "all_to_all",
    "optimizer",
    "backward",
    "forward",
    "other_collectives",
)  # of a step; else it is idle
BYTES = {"u8": 1, "s8": 1, "pred": 1, "u16": 2, "s16": 2, "bf16": 2, "f16": 2}  # others: 4


class Op(NamedTuple):
    """An operation of the compiled program.

    index: the element that it takes from a tuple. native: one of jmoe's own operations of a
    training step. background: it runs on after its span has ended.
    """

    kind: str
    scopes: str
    inputs: list[str]
    num_bytes: int
    computation: str
    index: int
    loop: "Loop | None" = None  # of a loop, and of the parameter of its body
    native: bool = False
    background: bool = False


class Loop(NamedTuple):
    """The sources of a loop's values: before its first round, and in every round."""

    before: str
    rounds: list[str]


class Span(NamedTuple):
    """One run of an operation."""

    begin_ns: float
    end_ns: float
    name: str


class Exchange(NamedTuple):
    """One of the two exchanges in a layer's backward pass."""

    ready_ns: float
    done_ns: float

    @property
    def seconds(self) -> float:
        return (self.done_ns - self.ready_ns) * 1e-9


def _native_target(line: str) -> str:
    """Return the name of the native operation that a line of a program calls, or None."""
    match = re.search(r'custom_call_target="jmoe_(\w+)', line)
    return match[1] if match else ""


def operations(text: str) -> dict[str, Op]:
    """Return the operations of a compiled program by name."""
    found: dict[str, Op] = {}
    parameters: dict[str, str] = {}  # of computations
    results: dict[str, list[str]] = {}
    bodies: dict[str, str] = {}  # of loops
    fused: dict[str, str] = {}  # what fusions without scopes compute
    computation = ""
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%(\S+) \(.*{$", line):
            computation = header[1]
        if match := re.match(r"\s+(ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:, |$)", line):
            root, name, types, kind, given = match.groups()
            scopes, index = re.search(r'op_name="([^"]*)"', line), re.search(r", index=(\d+)", line)
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", types)
            size = sum(
                BYTES.get(item, 4) * math.prod(map(int, filter(None, dims.split(","))))
                for item, dims in shapes
            )
            inputs = re.findall(r"%([\w.-]+)", given)
            place = computation, int(index[1]) if index else 0
            target = _native_target(line)
            native = target.startswith(("causal_attention", "grouped_mlp"))
            background = native and "background = true" in line
            named = target if target == "hold" else kind
            scope = scopes[1] if scopes else ""
            found[name] = Op(
                named, scope, inputs, size, *place, native=native, background=background
            )
            if kind == "parameter":
                parameters[computation] = name
            if root:
                results[computation] = inputs
            if (
                kind == "fusion"
                and not scopes
                and (calls := re.search(r", calls=%([\w.-]+)", line))
            ):
                fused[name] = calls[1]
            if kind == "while" and (body := re.search(r", body=%([\w.-]+)", line)):
                bodies[name] = body[1]
    inside: dict[str, str] = {}
    for op in found.values():
        inside[op.computation] = f"{inside.get(op.computation, '')} {op.scopes}"
    for name, called in fused.items():
        found[name] = found[name]._replace(scopes=inside[called].strip())
    for name, body in bodies.items():
        loop = Loop(found[name].inputs[0], results[body])
        for at in (name, parameters[body]):
            found[at] = found[at]._replace(loop=loop)
    return found


@contextlib.contextmanager
def recording(ops: dict[str, Op], module: str = "") -> Iterator[list[Span]]:
    """Fill a list, when the block ends, with every run of these operations, sorted by start.

    module: the program's name, if other programs run whose operations may have the same names.
    """
    import jax

    from kernels_pallas import native

    background = any(op.background for op in ops.values())
    if background:
        native.start_recording_background()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    found: list[Span] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        found += [span for span in _spans(folder, module) if span.name in ops]
    if background:
        found[:] = with_background(found, ops, native.stop_recording_background())


def with_background(
    found: list[Span], ops: dict[str, Op], seconds: list[tuple[float, float]]
) -> list[Span]:
    """Return the spans, background operations from the start of their thread to their end.

    seconds: (waited for a thread, ran) of each background operation of one device, in the order in
    which they were started.
    """
    started = [at for at, span in enumerate(found) if ops[span.name].background]
    moved = list(found)
    for at, (waited, ran) in zip(started, seconds, strict=True):
        begin = found[at].begin_ns + waited * 1e9
        moved[at] = found[at]._replace(begin_ns=begin, end_ns=begin + ran * 1e9)
    return sorted(moved)


def _spans(folder: str, module: str) -> list[Span]:
    """Return every run of an operation, sorted by start; `module` selects one program."""
    import jax

    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    found = [
        Span(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in jax.profiler.ProfileData.from_file(path).planes
        for line in plane.lines
        for event in line.events
        if "hlo_op" in (stats := dict(event.stats)) and module in ("", stats["hlo_module"])
    ]
    return sorted(found)


def union_s(some: list[Span], within: list[Span]) -> float:
    """Return the seconds of `within` in which one of `some` runs; sorted, `within` disjoint."""
    total = 0.0
    for begin, end, _ in within:
        at = begin
        for a, b, _ in some:
            if b > at and a < end:
                total += max(0.0, min(b, end) - max(a, at))
                at = max(at, min(b, end))
    return total * 1e-9


def busy_share(found: list[Span], ops: dict[str, Op]) -> float:
    """Return the share of all-to-all time in which something other than a collective runs."""
    exchanges = [span for span in found if ops[span.name].kind == "all-to-all"]
    compute = [span for span in found if ops[span.name].kind not in COLLECTIVES + WHOLE]
    total = sum(end - begin for begin, end, _ in exchanges) * 1e-9
    return union_s(compute, exchanges) / total if total else 0.0


def idle_share(found: list[Span], ops: dict[str, Op]) -> float:
    """Return the share of a step, first to last operation, in which a collective runs alone."""
    whole = [Span(found[0].begin_ns, max(span.end_ns for span in found), "")]
    running = [span for span in found if ops[span.name].kind not in WHOLE]
    compute = [span for span in running if ops[span.name].kind not in COLLECTIVES]
    return (union_s(running, whole) - union_s(compute, whole)) / union_s(whole, whole)


def part(op: Op) -> str:
    """Return the part of a step that an operation belongs to, as `parts_s` names them."""
    if op.kind == "all-to-all":
        return "all_to_all"
    if op.kind in COLLECTIVES:
        return "other_collectives"
    if "optimizer" in op.scopes:
        return "optimizer"
    return "backward" if "transpose(" in op.scopes else "forward"


def parts_s(found: list[Span], ops: dict[str, Op]) -> dict[str, float]:
    """Return a step's seconds by part; where parts overlap, the first of `PARTS` counts."""
    changes = sorted(
        (at, step, part(ops[span.name]))
        for span in found
        if ops[span.name].kind not in WHOLE
        for at, step in ((span.begin_ns, 1), (span.end_ns, -1))
    )
    total, running = dict.fromkeys((*PARTS, "idle"), 0.0), dict.fromkeys(PARTS, 0)
    for (at, step, name), (following, _, _) in itertools.pairwise(changes):
        running[name] += step
        counts = next((name for name in PARTS if running[name]), "idle")
        total[counts] += (following - at) * 1e-9
    return total


def layers_s(found: list[Span], ops: dict[str, Op]) -> dict[str, float]:
    """Return the seconds from the layers' first operation to their last, forward and backward."""
    inside = [
        span for span in found if re.search(r"\b(attention|moe|mlp)\b", ops[span.name].scopes)
    ]
    result = {}
    for name, backward in (("forward", False), ("backward", True)):
        of_pass = [span for span in inside if ("transpose(" in ops[span.name].scopes) == backward]
        begin, end = min(s.begin_ns for s in of_pass), max(s.end_ns for s in of_pass)
        result[name] = (end - begin) * 1e-9
    return result


class QueueGain(NamedTuple):
    """The most that a queue which starts collectives at run time could save of a step's seconds.

    resting_s: no collective runs, though one that runs later has its input. inverted_s: all-to-alls
    whose input is known wait for other collectives that begin after that.
    """

    resting_s: float
    inverted_s: float


def queue_gain(found: list[Span], ops: dict[str, Op]) -> QueueGain:
    """Return the bound on what a run-time queue could save of a traced step.

    Such a queue differs from a static order only in what the link carries next. It saves nothing
    while a collective that it would not have started later is under way, since none can be
    interrupted.
    """
    begun = _spans_by_name(found)
    runs = [span for span in found if ops[span.name].kind in COLLECTIVES]
    ready = [_ready_ns(span, begun, ops) for span in runs]
    waiting = _merged(
        Span(known, run.begin_ns, "")
        for known, run in zip(ready, runs, strict=True)
        if known < run.begin_ns
    )
    resting_s = union_s(waiting, waiting) - union_s(runs, waiting)
    late = [
        [
            other
            for other in runs
            if ops[other.name].kind != "all-to-all" and known <= other.begin_ns < run.begin_ns
        ]
        for known, run in zip(ready, runs, strict=True)
        if ops[run.name].kind == "all-to-all"
    ]
    inverted = _merged(span for some in late for span in some)
    return QueueGain(resting_s, union_s(inverted, inverted))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint spans that cover the same time, sorted."""
    result: list[Span] = []
    for span in sorted(spans):
        if result and span.begin_ns <= result[-1].end_ns:
            end_ns = max(result[-1].end_ns, span.end_ns)
            result[-1] = result[-1]._replace(end_ns=end_ns)
        else:
            result.append(span)
    return result


def _spans_by_name(found: list[Span]) -> dict[str, list[Span]]:
    begun: dict[str, list[Span]] = {}
    for span in found:
        begun.setdefault(span.name, []).append(span)
    return begun


def _sources(name: str, ops: dict[str, Op]) -> list[tuple[str, bool]]:
    """Return (operation read, whether in the loop's previous round), through tuples and loops."""
    op = ops[name]
    held = ops.get(op.inputs[0]) if op.kind == "get-tuple-element" else None
    if held is None:
        return [(at, False) for at in op.inputs]
    if held.loop is not None:
        begin = ops[held.loop.before]
        first = begin.inputs[op.index] if begin.kind == "tuple" else held.loop.before
        return [(held.loop.rounds[op.index], held.kind == "parameter"), (first, False)]
    return [(held.inputs[op.index] if held.kind == "tuple" else op.inputs[0], False)]


def _known_before(name: str, ops: dict[str, Op]) -> set[tuple[str, bool]]:
    """(product behind an all-to-all's input, whether its run of the loop's round before counts).

    Without those that only wait for another collective: what waits lies behind the scope "order" of
    `interleave_collectives`, or belongs to the sending itself. A native operation that the input
    comes from counts: it is not computed in parts.
    """
    behind: set[tuple[str, bool]] = set()
    todo = [(at, False) for at in ops[name].inputs]
    while todo:
        at, before = todo.pop()
        if (at, before) not in behind and at in ops and ops[at].kind not in (*COLLECTIVES, "hold"):
            behind.add((at, before))
            todo += [
                (source, before or earlier)
                for source, earlier in _sources(at, ops)
                if not before or not earlier
            ]
    here = {at for at, before in behind if not before}
    late = {at for at in here if re.search(r"\border\b|all_to_all", ops[at].scopes)}
    if ops[name].kind == "all-to-all":  # whose input belongs to the sending
        late |= set(ops[name].inputs)
    while more := {at for at in here - late if late.intersection(ops[at].inputs)}:
        late |= more
    wanted = {(at, before) for at, before in behind if before or at not in late or ops[at].native}
    return {(at, before) for at, before in wanted if _is_product(ops[at])}


def _is_product(op: Op) -> bool:
    return (
        op.kind == "dot" or op.native or "dot_general" in op.scopes
    ) and "rematted" not in op.scopes


def exchanges(found: list[Span], ops: dict[str, Op]) -> list[Exchange]:
    """Return the exchanges of the backward pass, sorted by end."""
    scope = lambda span: re.findall(r"all_to_all\w*", ops[span.name].scopes)[0]  # noqa: E731
    runs = [
        s for s in found if ops[s.name].kind == "all-to-all" and "transpose" in ops[s.name].scopes
    ]
    begun = _spans_by_name(found)
    result = []
    for _, group in itertools.groupby(runs, lambda s: scope(s).endswith("back")):
        moved = list(group)
        most = max(ops[s.name].num_bytes for s in moved)
        rows = [s for s in moved if ops[s.name].num_bytes > most / 4]
        first_hops = [s for s in rows if scope(s) == scope(rows[0])]
        result.append(Exchange(max(_ready_ns(s, begun, ops) for s in first_hops), moved[-1].end_ns))
    return result


def _ready_ns(run: Span, begun: dict[str, list[Span]], ops: dict[str, Op]) -> float:
    """Return when the input of this run of an all-to-all had been computed."""
    here, number = ops[run.name].computation, begun[run.name].index(run)
    ends = []
    for name, before in _known_before(run.name, ops):
        runs = begun.get(name, [])
        if ops[name].computation == here and len(runs) == len(begun[run.name]):
            runs = runs[: max(0, number + 1 - before)]
        ends += [s.end_ns for s in runs if s.end_ns <= run.begin_ns][-1:]
    return max(ends, default=run.begin_ns)
