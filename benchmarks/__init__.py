"""Benchmarks: programs whose last line of output is a JSON object. `python -m benchmarks` lists
them.

`train/`, `serve/`, `comm/`, `offload/` and `kernels/` measure jmoe, `peers/` measures it beside
other programs, `paper/` reproduces figures of the papers. `lib/` has modules that programs share,
and the programs that run others. `results/` has the committed results; `lib/render.py` writes the
pages of docs/ from them. A program also runs by its path, from any folder: `python
benchmarks/train/step.py`.
"""

from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
RESULTS, DOCS = BENCHMARKS / "results", ROOT / "docs"
