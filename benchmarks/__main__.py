"""List the benchmarks, or run one by name.

python -m benchmarks                          prints the names and what each measures
python -m benchmarks train/step --batch 4     does what python benchmarks/train/step.py --batch 4
does
"""

import ast
import os
import sys
from pathlib import Path

from benchmarks import BENCHMARKS


def programs() -> dict[str, Path]:
    """Return every file below `benchmarks/` that is a program, by name: `train/step`."""
    files = sorted(BENCHMARKS.glob("*/*.py"))
    found = [path for path in files if '__name__ == "__main__"' in path.read_text()]
    return {f"{path.parent.name}/{path.stem}".removesuffix("/__main__"): path for path in found}


def summary(path: Path) -> str:
    """Return the first line of a program's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def main(arguments: list[str]) -> None:
    """Print the list without arguments; else replace this process by the program of that name."""
    by_name = programs()
    if not arguments or arguments[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [options]; --help after a name lists its options\n")
        width = max(map(len, by_name))
        print("\n".join(f"{name:{width}}  {summary(path)}" for name, path in by_name.items()))
    elif arguments[0] not in by_name:
        sys.exit(f"{arguments[0]}: must be a benchmark. `python -m benchmarks` lists them.")
    else:
        os.execv(sys.executable, [sys.executable, str(by_name[arguments[0]]), *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])
