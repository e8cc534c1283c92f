"""What the trace of a step says about its all-to-alls: when they could have started, when they were done, and what
computed meanwhile.

The backward pass of a layer with experts exchanges twice: combine's gradients go to the experts, those of the experts'
inputs come back. Such an exchange is all of its all-to-alls: of both levels, of all pieces, of what travels
beside the rows. It is *ready* when the rows of its last piece are computed, and *done* with its last all-to-all.
"""

import glob
import itertools
import math
import re
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")
WHOLE = ("while", "conditional", "call")  # hold what is counted already
BYTES = {"u8": 1, "s8": 1, "pred": 1, "u16": 2, "s16": 2, "bf16": 2, "f16": 2}  # others: 4


class Op(NamedTuple):
    """An operation of the compiled program."""

    kind: str
    scopes: str
    inputs: list[str]
    num_bytes: int


class Span(NamedTuple):
    """One run of an operation."""

    begin_ns: float
    end_ns: float
    name: str


class Exchange(NamedTuple):
    """One of the two of a layer's backward pass."""

    ready_ns: float
    done_ns: float

    @property
    def seconds(self) -> float:
        return (self.done_ns - self.ready_ns) * 1e-9


def operations(text: str) -> dict[str, Op]:
    """The operations of a compiled program by name."""
    found = {}
    for line in text.splitlines():
        if op := re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:, |$)", line):
            scopes = re.search(r'op_name="([^"]*)"', line)
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", op[2])
            size = sum(BYTES.get(kind, 4) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in shapes)
            found[op[1]] = Op(op[3], scopes[1] if scopes else "", re.findall(r"%([\w.-]+)", op[4]), size)
    return found


def spans(folder: str) -> list[Span]:
    """Every run of an operation in a trace, by its beginning."""
    import jax

    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    found = [
        Span(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in jax.profiler.ProfileData.from_file(path).planes
        for line in plane.lines
        for event in line.events
        if any(name == "hlo_op" for name, _ in event.stats)
    ]
    return sorted(found)


def union_s(some: list[Span], within: list[Span]) -> float:
    """Seconds of `within` in which one of `some` runs; both sorted, those of `within` do not overlap."""
    total = 0.0
    for begin, end, _ in within:
        at = begin
        for a, b, _ in some:
            if b > at and a < end:
                total += max(0.0, min(b, end) - max(a, at))
                at = max(at, min(b, end))
    return total * 1e-9


def busy_share(found: list[Span], ops: dict[str, Op]) -> float:
    """Of the time in which all-to-alls ran, the part in which something else but collectives ran too."""
    exchanges = [span for span in found if ops[span.name].kind == "all-to-all"]
    compute = [span for span in found if ops[span.name].kind not in COLLECTIVES + WHOLE]
    total = sum(end - begin for begin, end, _ in exchanges) * 1e-9
    return union_s(compute, exchanges) / total if total else 0.0


def _known_before(name: str, ops: dict[str, Op]) -> set[str]:
    """The computations behind an all-to-all's input, without those that only wait for another collective.

    What waits lies behind `interleave`'s scope "order", or belongs to the sending itself.
    """
    behind: set[str] = set()
    todo = list(ops[name].inputs)
    while todo:
        at = todo.pop()
        if at not in behind and at in ops and ops[at].kind not in COLLECTIVES:
            behind.add(at)
            todo += ops[at].inputs
    late = {at for at in behind if re.search(r"\border\b|all_to_all", ops[at].scopes)} | set(ops[name].inputs)
    while more := {at for at in behind - late if late.intersection(ops[at].inputs)}:
        late |= more
    return behind - late


def exchanges(found: list[Span], ops: dict[str, Op]) -> list[Exchange]:
    """The exchanges of the backward pass, in the order in which they were done."""
    scope = lambda span: re.findall(r"all_to_all\w*", ops[span.name].scopes)[0]  # noqa: E731
    runs = [s for s in found if ops[s.name].kind == "all-to-all" and "transpose" in ops[s.name].scopes]
    begun: dict[str, list[Span]] = {}
    for span in found:
        begun.setdefault(span.name, []).append(span)
    result = []
    for _, group in itertools.groupby(runs, lambda s: scope(s).endswith("back")):
        moved = list(group)
        most = max(ops[s.name].num_bytes for s in moved)
        rows = [s for s in moved if ops[s.name].num_bytes > most / 4]
        first_hops = [s for s in rows if scope(s) == scope(rows[0])]
        result.append(Exchange(max(_ready_ns(s, begun, ops) for s in first_hops), moved[-1].end_ns))
    return result


def _ready_ns(run: Span, begun: dict[str, list[Span]], ops: dict[str, Op]) -> float:
    """When the input of this run of an all-to-all was computed."""
    before = (s for name in _known_before(run.name, ops) for s in begun.get(name, ()))
    return max((s.end_ns for s in before if s.end_ns <= run.begin_ns), default=run.begin_ns)
