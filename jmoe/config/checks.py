"""Validation of configuration fields: `ValueError` with the field, its value and the violated
constraint.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal


def check(ok: bool, name: str, value: object, constraint: str) -> None:
    """Raise ValueError `name = value: constraint` unless `ok`."""
    if not ok:
        raise ValueError(f"{name} = {value!r}: {constraint}")


def check_field(ok: bool, config: object, name: str, constraint: str) -> None:
    """Raise ValueError, as `check` does with the value of a field of `config`, unless `ok`. name:
    `field` or `section.field`.
    """
    check(ok, name, getattr(config, name.rpartition(".")[2]), constraint)


def check_positive(config: object, *names: str) -> None:
    """Raise ValueError unless each named field is greater than 0."""
    for name in names:
        check_field(getattr(config, name) > 0, config, name, "must be greater than 0")


def check_not_negative(config: object, *names: str) -> None:
    """Raise ValueError unless each named field is 0 or greater."""
    for name in names:
        check_field(getattr(config, name) >= 0, config, name, "must not be negative")


def check_positive_or_none(config: object, *names: str) -> None:
    """Raise ValueError unless each named field is None or greater than 0."""
    for name in names:
        value = getattr(config, name)
        check(value is None or value > 0, name, value, "must be greater than 0, or None")


def check_unset(config: object, section: str, names: Sequence[str], why: str) -> None:
    """Raise ValueError unless each named field has its default: no code would use another value.

    why: ends the error's constraint, e.g. "with policy = 'resident'".
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name in names:
        full = f"{section}.{name}" if section else name
        check_field(
            getattr(config, name) == defaults[name],
            config,
            full,
            f"must be {defaults[name]!r} {why}",
        )


def check_refused(config: object, refused: Mapping[str, bool], why: str) -> None:
    """Raise ValueError for the first option that is in use and not supported.

    refused: whether each option is in use, by its name, e.g. "lora.rank". why: ends the error's
    constraint, e.g. "with model.bidirectional".
    """
    for name, in_use in refused.items():
        section, _, own = name.rpartition(".")
        value = getattr(getattr(config, section) if section else config, own)
        check(not in_use, name, value, f"is not supported {why}")


MOST_STEPS = 2**31 - 1  # that a run's state counts
_FLOAT32 = 1.1754944e-38, 3.4028235e38  # the least above 0 in full precision, and the largest


def check_steps_within_limit(config: object, *names: str) -> None:
    """Raise ValueError unless each named number of steps is None or at most `MOST_STEPS`."""
    for name in names:
        value = getattr(config, name)
        check(value is None or value <= MOST_STEPS, name, value, f"must be at most {MOST_STEPS:,}")


@functools.cache
def _checkable_types(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Return {field: its allowed types} of the fields of class `kind` that `_violated_constraint`
    can check.

    A tuple field has its elements' types. Fields of other types, and unions of a Literal and
    another type, are omitted; their class checks them.
    """
    declared = {name: _union_members(hint) for name, hint in typing.get_type_hints(kind).items()}
    known = {int, float, type(None)}
    return {
        name: kinds
        for name, kinds in declared.items()
        if set(kinds) <= known or all(typing.get_origin(one) is Literal for one in kinds)
    }


def _union_members(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, nested ones too; of `tuple[T, ...]` T; else the type itself."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return sum(map(_union_members, args), ())
    return (args[0],) if origin is tuple and args[1:] == (...,) else (hint,)


def _violated_constraint(value: Any, kinds: tuple[Any, ...]) -> str:
    """Return the constraint that `value` violates, "" if it has one of the types `kinds`."""
    if typing.get_origin(kinds[0]) is Literal:
        allowed = [choice for kind in kinds for choice in typing.get_args(kind)]
        return "" if value in allowed else f"must be one of {', '.join(allowed)}"
    if value is None and type(None) in kinds:
        return ""
    if float not in kinds:
        whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return "" if whole and abs(value) < 2**63 else "must be a whole number below 2**63"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return "must be a number"
    least, most = _FLOAT32
    held = value == 0 or least <= abs(float(value)) <= most
    return (
        ""
        if held
        else f"must be a finite number that float32 holds, 0 or from {least:.2g} to {most:.2g}"
    )


def check_field_types(config: object) -> None:
    """Raise ValueError unless each field declared as a number or a Literal (or a tuple of them) has
    a value of that type.
    """
    kind: Any = type(config)
    for name, kinds in _checkable_types(kind).items():
        value = getattr(config, name)
        for one in value if isinstance(value, list | tuple) else (value,):
            constraint = _violated_constraint(one, kinds)
            check(not constraint, name, value, constraint)
