"""Benchmarks, run by their paths from anywhere: `python benchmarks/training.py`; the last line of output is JSON.

A file of this folder is a program. `comm/` and `offload/` hold the measurements of those that have several, `lib/` what
programs share. `results/` holds what was measured; `render.py` writes docs/benchmarks.md from it.
"""
