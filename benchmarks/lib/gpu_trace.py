"""Kernels of a GPU in a trace that JAX's profiler wrote."""

from collections import Counter
from pathlib import Path

from benchmarks.lib.report import JsonObject

MOST = 25  # kernels listed


def kernel_times(folder: Path, num_steps: int) -> JsonObject | None:
    """Return a step's GPU time by kernel, from a folder's newest trace; None without a GPU.

    busy_ms: time in which a stream worked. launches: kernels and copies.
    """
    from jax.profiler import ProfileData

    newest = max(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    nanoseconds, launches = Counter[str](), Counter[str]()
    for plane in ProfileData.from_file(str(newest)).planes:
        if "/device:GPU" not in plane.name:
            continue
        for event in (
            event for line in plane.lines if line.name.startswith("Stream") for event in line.events
        ):
            nanoseconds[event.name] += event.duration_ns
            launches[event.name] += 1
    if not launches:
        return None
    rows = [
        {
            "kernel": name[:80],
            "ms_a_step": round(total / 1e6 / num_steps, 4),
            "launches_a_step": round(launches[name] / num_steps, 1),
        }
        for name, total in nanoseconds.most_common(MOST)
    ]
    return {
        "busy_ms": round(nanoseconds.total() / 1e6 / num_steps, 3),
        "launches": round(launches.total() / num_steps, 1),
        "kernels": rows,
    }
