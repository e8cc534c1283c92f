"""Benchmarks, run by their paths from anywhere: `python benchmarks/training.py`; the last line of output is JSON.

A file of this folder is a program. One of `paper/`, which has figures of the papers, is run as a module, in the root of
the repository: `python -m benchmarks.paper.popularity`. `comm/` and `offload/` hold the measurements of programs that
have several, `lib/` what programs share. `results/` holds what was measured; `render.py` writes docs/benchmarks.md.
"""
