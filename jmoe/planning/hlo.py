"""Parser for the text of an optimized XLA module: operations with shapes, loops and bytes.

`compiled.as_text()` of JAX returns such a text. Each operation of the entry computation, and of the
computations it calls, runs as one or a few kernels. The computations that fusions call tell what
each kernel reads, computes and writes.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ITEM_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5}
ITEM_BYTES |= dict.fromkeys(("s8", "u8", "f8e4m3fn", "f8e5m2", "f8e8m0fnu"), 1)
ITEM_BYTES |= dict.fromkeys(("s16", "u16", "bf16", "f16"), 2)
ITEM_BYTES |= dict.fromkeys(("s32", "u32", "f32"), 4) | dict.fromkeys(("s64", "u64", "f64"), 8)

_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+(?:fnu?)?)?)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_OPERATION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_ELEMENTS = ("bitcast", "reshape", "transpose", "convert", "copy", "bitcast-convert")


@dataclass(frozen=True)
class HloArray:
    """Dtype and shape of an array, in XLA's names (`bf16`)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> float:
        return ITEM_BYTES[self.dtype] * self.num_elements


@dataclass(frozen=True)
class HloOperation:
    """One line of a computation. results: output arrays. inside: text between the parentheses;
    attributes: text after them.
    """

    name: str
    kind: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> float:
        """Return the total bytes of all results."""
        return sum(array.num_bytes for array in self.results)

    @property
    def num_elements(self) -> int:
        """Return the total number of elements of all results."""
        return sum(array.num_elements for array in self.results)

    def attribute(self, name: str) -> str:
        """Return the value of attribute `name`, a single word; "" without the attribute."""
        match = re.search(rf'\b{name}="?%?([\w.$\-]+)', self.attributes)
        return match[1] if match else ""

    def attribute_integers(self, name: str) -> tuple[int, ...]:
        """Return the integers in the braces or brackets after `name=` or after the JSON key `name`;
        () without them.
        """
        match = re.search(rf'\b{name}"?[=:]\s*[{{\[]([^}}\]]*)[}}\]]', self.attributes)
        return tuple(int(n) for n in re.findall(r"\d+", match[1])) if match else ()

    @property
    def scope(self) -> str:
        """Return the operation's `op_name` (from `jax.named_scope` and function names); "" without
        one.
        """
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def known_trip_count(self) -> int | None:
        """Return the trip count of a loop, or None if XLA does not know it."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(match[1]) if match else None


class HloComputation(dict[str, HloOperation]):
    """Operations of a computation by name, in execution order."""

    @property
    def root(self) -> HloOperation:
        return next(operation for operation in self.values() if operation.is_root)

    @property
    def parameters(self) -> list[HloOperation]:
        """Return the parameters in the order of the caller's operands."""
        parameters = [operation for operation in self.values() if operation.kind == "parameter"]
        return sorted(parameters, key=lambda operation: int(operation.inside))

    def users_of(self, name: str) -> Iterator[HloOperation]:
        """Yield the operations with `name` among their operands."""
        return (operation for operation in self.values() if name in operation.operands)

    def read_bytes(self) -> float:
        """Return the bytes that a fusion reads; for a parameter that is only sliced, the bytes of
        the slices.
        """
        return sum(self._parameter_read_bytes(parameter) for parameter in self.parameters)

    def _parameter_read_bytes(self, parameter: HloOperation) -> float:
        """Return the bytes that are read of a parameter: of its slices if no one reads more."""
        whole, ahead, bytes_read = parameter.num_bytes, [parameter], 0.0
        while ahead:
            source = ahead.pop()
            for user in self.users_of(source.name):
                first = user.operands[0] == source.name
                if first and user.kind in _SLICES:
                    bytes_read += user.num_bytes
                elif (
                    user.kind in _SAME_ELEMENTS
                    and user.num_elements == source.num_elements
                    and not user.is_root
                ):
                    ahead.append(user)
                elif not (first and user.kind in ("dynamic-update-slice", "scatter")):
                    return whole
        return min(whole, bytes_read)

    def written_bytes(self) -> float:
        """Return the bytes that a fusion writes; for a result that is updated in place, the bytes
        of the update.
        """
        root = self.root
        names = root.operands if root.kind == "tuple" else (root.name,)
        return sum(self._result_written_bytes(self[name]) for name in names)

    def _result_written_bytes(self, result: HloOperation) -> float:
        """Return the bytes that are written of a result: of the update if it is in place."""
        made = result
        while made.kind in _SAME_ELEMENTS and made.operands[0] in self:
            made = self[made.operands[0]]
        if made.kind == "dynamic-update-slice":
            return self[made.operands[1]].num_bytes
        if made.kind == "scatter":  # the old rows are read, then written with the updates
            return 2 * self[made.operands[-1]].num_bytes
        return result.num_bytes


@dataclass(frozen=True)
class HloModule:
    """All computations by name, and the entry computation."""

    computations: dict[str, HloComputation]
    entry: HloComputation

    def called_computation(self, operation: HloOperation, *names: str) -> HloComputation:
        """Return the computation named by the first of these attributes that the operation has."""
        return next(self.computations[called] for n in names if (called := operation.attribute(n)))

    def branch_computations(self, operation: HloOperation) -> list[HloComputation]:
        """Return the branch computations of a conditional."""
        match = re.search(r"branch_computations=\{([^}]*)\}", operation.attributes)
        names = _NAME.findall(match[1]) if match else []
        names = names or [
            operation.attribute(f"{which}_computation") for which in ("true", "false")
        ]
        return [self.computations[name] for name in names]


def dot_flops(operation: HloOperation, left: HloArray) -> float:
    """Return the FLOPs of a matrix product, `dot` or a library call. left: the first operand."""
    contracted = operation.attribute_integers(
        "lhs_contracting_dims"
    ) or operation.attribute_integers("lhs_contracting_dimensions")
    return 2.0 * operation.results[0].num_elements * math.prod(left.shape[n] for n in contracted)


def parse_hlo(text: str) -> HloModule:
    """Return the module that `text` describes. Raises `ValueError` if `text` has no ENTRY
    computation.
    """
    computations: dict[str, HloComputation] = {}
    current: HloComputation | None = None
    entry: HloComputation | None = None
    for line in text.splitlines():
        if line.startswith("}"):
            current = None
        elif current is None and (match := _COMPUTATION.match(line)):
            computations[match[2]] = current = HloComputation()
            entry = current if match[1] else entry
        elif current is not None and (operation := _parse_operation(line)):
            current[operation.name] = operation
    if entry is None:
        raise ValueError("module: must be the text of an XLA module, with an ENTRY computation")
    return HloModule(computations, entry)


def _parse_operation(line: str) -> HloOperation | None:
    """Return the operation of a line, None for another line."""
    match = _OPERATION.match(line)
    if match is None:
        return None
    depth, end = 1, 0
    while depth and end < len(match[5]):
        depth += {"(": 1, ")": -1}.get(match[5][end], 0)
        end += 1
    inside, attributes = match[5][: end - 1], match[5][end:]
    results = tuple(_parse_arrays(match[3]))
    return HloOperation(
        match[2],
        match[4],
        results,
        tuple(_NAME.findall(inside)),
        inside,
        attributes,
        bool(match[1]),
    )


def _parse_arrays(text: str) -> Iterable[HloArray]:
    """Yield the arrays of a result's type, such as `(f32[2,3], s32[])`."""
    for dtype, sizes in _ARRAY.findall(text):
        if dtype in ITEM_BYTES:  # otherwise a token or an opaque value
            yield HloArray(dtype, tuple(int(n) for n in sizes.split(",") if n))
