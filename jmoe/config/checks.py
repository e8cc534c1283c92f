"""How a bad value is refused: `ValueError` naming the field, the value and the constraint. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, Literal


def check(ok: bool, name: str, value: object, constraint: str) -> None:
    """Raise `ValueError` naming the field, the value and the constraint unless `ok`."""
    if not ok:
        raise ValueError(f"{name} = {value!r}: {constraint}")


def check_field(ok: bool, config: object, name: str, constraint: str) -> None:
    """Check a field of `config` as `check` does. name: of the field, or `section.field`."""
    check(ok, name, getattr(config, name.rpartition(".")[2]), constraint)


def positive(config: object, *names: str) -> None:
    """Check that each of these fields is greater than 0."""
    for name in names:
        check_field(getattr(config, name) > 0, config, name, "must be greater than 0")


def not_negative(config: object, *names: str) -> None:
    """Check that none of these fields is negative."""
    for name in names:
        check_field(getattr(config, name) >= 0, config, name, "must not be negative")


def positive_or_none(config: object, *names: str) -> None:
    """Check that each of these fields is None or greater than 0."""
    for name in names:
        value = getattr(config, name)
        check(value is None or value > 0, name, value, "must be greater than 0, or None")


def unset(config: object, section: str, names: Sequence[str], why: str) -> None:
    """Check that each of these fields has its default, as nothing would honour another value; why: as in `check`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}  # type: ignore[arg-type]
    for name in names:
        full = f"{section}.{name}" if section else name
        check_field(getattr(config, name) == defaults[name], config, full, f"must be {defaults[name]!r} {why}")


@functools.cache
def _choices(kind: Any) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(kind)
    return {name: _values(hint) for name, hint in hints.items() if _values(hint)}


def _values(hint: Any) -> tuple[str, ...]:
    """Return the values of a Literal, or of a union of them; nothing for any other type."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    parts = [_values(part) for part in typing.get_args(hint)] if typing.get_origin(hint) is typing.Union else []
    return sum(parts, ()) if all(parts) else ()


def literals(config: object) -> None:
    """Check that each field declared as a Literal has one of its values."""
    kind: Any = type(config)
    for name, values in _choices(kind).items():
        value = getattr(config, name)
        check(value in values, name, value, f"must be one of {', '.join(values)}")
