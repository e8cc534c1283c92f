"""Show the state of a run: `jmoe-status RUN [--json]`, where RUN is the run's output folder. Never
imports JAX.

    jmoe-status runs/mine

The exit code is 0, or 1 if the run is dead, or 2 if RUN is not the folder of a run.
"""

import dataclasses
import json
import math
import sys
from pathlib import Path

from jmoe.cluster.overview import overview_lines, read_overview
from jmoe.command_line import parse_status
from jmoe.runtime import program_name
from jmoe.types import JsonObject


def main() -> None:
    """Print the state of the run that the command line names, and exit."""
    folder, as_json = parse_status(sys.argv[1:])
    try:
        run = read_overview(Path(folder))
    except (ValueError, OSError) as error:
        print(f"{program_name()}: {error}", file=sys.stderr)
        sys.exit(2)
    if as_json:
        print(json.dumps(_without_non_finite(dataclasses.asdict(run)), indent=1, allow_nan=False))
    else:
        print(*overview_lines(run), sep="\n")
    sys.exit(1 if run.state == "dead" else 0)


def _without_non_finite(values: JsonObject) -> JsonObject:
    """Return the values with non-finite floats as text, because JSON has no such numbers."""
    return {
        name: str(v) if isinstance(v, float) and not math.isfinite(v) else v
        for name, v in values.items()
    }


if __name__ == "__main__":
    main()
