"""What a compiled program does, read from its text."""

import re
from typing import NamedTuple

COLLECTIVES = ("all-to-all", "all-gather", "reduce-scatter", "all-reduce")


class Op(NamedTuple):
    """A collective or a matrix product: its kind and the scopes it was traced in."""

    kind: str
    scopes: str


def operations(text: str, kinds: tuple[str, ...] = COLLECTIVES) -> list[Op]:
    """All operations of these kinds in the order of the schedule, those of a loop as often as it runs.

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
