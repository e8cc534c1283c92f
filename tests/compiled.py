"""What a compiled program does, read from its text; and a traced one, from its jaxpr."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from jmoe.run.metrics import COMPILE_EVENT

COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The name of every program that is compiled meanwhile, or taken from the cache on disk."""
    compiled: list[str] = []
    listens = True

    def listen(event: str, duration_s: float, fun_name: str = "unnamed", **_: Any) -> None:
        if listens and event == COMPILE_EVENT:
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        listens = False


class Op(NamedTuple):
    """A collective or a matrix product: its kind and the scopes it was traced in."""

    kind: str
    scopes: str


def operations(text: str, kinds: tuple[str, ...] = COLLECTIVES) -> list[Op]:
    """All operations of these kinds in the order of the schedule, those of a loop as often as it
    runs.

    A loop without a known number of turns (tiles of overfull experts) counts as none.
    """
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%(\S+) \(", line)
        if head:
            name = "ENTRY" if head[1] else head[2]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    found = rf" ({'|'.join(kinds)})\("

    def run(computation: str) -> list[Op]:
        ops = []
        for line in bodies[computation]:
            if loop := re.search(r" while\(.*body=%(\S+?),", line):
                turns = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                ops += (int(turns[1]) if turns else 0) * run(loop[1])
            elif op := re.search(found, line):
                scopes = re.search(r'op_name="([^"]*)"', line)
                ops.append(Op(op[1], scopes[1] if scopes else ""))
        return ops

    return run("ENTRY")


def inside_shard_map(jaxpr: Any) -> Any:
    """Return the jaxpr of the one `shard_map` of a traced function, or of the function that it
    calls.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return eqn.params["jaxpr"]
        if eqn.primitive.name in ("jit", "pjit"):
            return inside_shard_map(eqn.params["jaxpr"].jaxpr)
    raise ValueError("there is no shard_map")


def origins(jaxpr: Any, var: Any) -> set[Any]:
    """Every variable that this one comes from, itself included."""
    made_by = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    found, todo = set(), [var]
    while todo:
        at = todo.pop()
        if not isinstance(at, Literal) and at not in found:
            found.add(at)
            todo += made_by[at].invars if at in made_by else []
    return found


def runs(eqn: Any, primitive: str) -> bool:
    """Whether an equation of a traced function is this primitive, or calls a function that has
    it.
    """
    if eqn.primitive.name == primitive:
        return True
    return any(runs(inner, primitive) for function in called(eqn) for inner in function.eqns)


def called(eqn: Any) -> list[Any]:
    """Return the functions that an equation calls."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns"))
    return [leaf for leaf in leaves if hasattr(leaf, "eqns")]
