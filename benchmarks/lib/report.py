"""The result of a benchmark: rows on stderr as they come, one JSON object as the last line of
stdout.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]  # of a result, as it is printed or read back


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring as it stands."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def options(a: argparse.Namespace, *hidden: str) -> JsonObject:
    """Return the options as JSON has them, without the hidden ones."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items() if k not in hidden}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of these packages and of Python."""
    return {name: version(name) for name in packages} | {"python": sys.version.split()[0]}


def device_and_versions() -> JsonObject:
    """Return the device and the versions of JAX and Python, as a result names them."""
    import jax

    return {"device": jax.devices()[0].device_kind, "versions": versions("jax", "jaxlib")}


def progress(row: JsonObject) -> JsonObject:
    """Show a row on stderr and return it."""
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def finish(result: object) -> None:
    """Print the result, the last line of stdout."""
    print(json.dumps(result), flush=True)


def write(result: object, path: Path) -> None:
    """Write a result as `benchmarks/results` has them."""
    path.write_text(json.dumps(result, indent=1) + "\n")


def median(values: Iterable[float], digits: int = 4) -> float:
    """Return the rounded median."""
    return round(statistics.median(values), digits)


def ratio(first: Sequence[float], other: Sequence[float], digits: int = 3) -> float:
    """Return the median, round by round, of first / other."""
    return median((f / o for f, o in zip(first, other, strict=True)), digits)
