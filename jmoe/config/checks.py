"""How a bad value is refused: `ValueError` naming the field, the value and the constraint. Standard library only."""

from __future__ import annotations


def check(ok: bool, name: str, value: object, constraint: str) -> None:
    """Raise `ValueError` naming the field, the value and the constraint unless `ok`."""
    if not ok:
        raise ValueError(f"{name} = {value!r}: {constraint}")


def positive(config: object, *names: str) -> None:
    """Check that each of these fields is greater than 0."""
    for name in names:
        value = getattr(config, name)
        check(value > 0, name, value, "must be greater than 0")


def not_negative(config: object, *names: str) -> None:
    """Check that none of these fields is negative."""
    for name in names:
        value = getattr(config, name)
        check(value >= 0, name, value, "must not be negative")


def one_of(config: object, **allowed: tuple[str, ...]) -> None:
    """Check that each field named has one of its allowed values."""
    for name, values in allowed.items():
        value = getattr(config, name)
        check(value in values, name, value, f"must be one of {', '.join(values)}")
