"""Presets that the papers' figures compare with: `tiny` with slower communication.

The orders of collectives that Lina compares with are `--comm.schedule none | ready | fixed |
priority` of any preset.
"""

from dataclasses import replace

from jmoe.config import CommConfig
from jmoe.configs.text import tiny

# DDP: every device has all dense parameters, their gradients are all-reduced.
tiny_replicated = replace(tiny, comm=CommConfig(shard_dense=False, embedding="replicated"))
# ZeRO-3 as most implement it: a collective for every parameter.
tiny_unfused = replace(tiny, comm=CommConfig(schedule="none", fuse_dense=False))
# Collectives that do not know nodes.
tiny_flat = replace(tiny, comm=CommConfig(exchange="flat", hierarchical=False))
# Gradients reduced in the order in which they are known, in buckets of 25 MiB (PyTorch's DDP).
tiny_buckets = replace(tiny, comm=CommConfig(schedule="ready", bucket_bytes=25 << 20))
