"""Bytes that experts' records move: where their files are memory, and where replicas share them.
Nothing is timed.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import Session, config_of
from jmoe.config import MeshConfig
from jmoe.memory.direct_io import choose_io
from jmoe.mesh import make_mesh

MEMORY = Path("/dev/shm")  # a tmpfs


def measure_mapped(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Train with records on a disk and in files in memory; the losses must be the same."""
    rows, losses = [], []
    with tempfile.TemporaryDirectory(prefix="jmoe-mapped-", dir=MEMORY) as memory:
        for place in (folder, Path(memory)):
            session = Session(config_of(a, place, experts="nvme", optimizer="nvme"))
            losses.append([session.step(number).loss for number in range(a.steps)])
            stats = session.program.expert_stats()
            kinds = {
                "weights": stats.weights,
                "moments": stats.moments,
                "gradients": stats.gradients,
            }
            row: JsonObject = {"files": choose_io(place)}
            row |= {
                f"{kind}_read_into_host_memory_a_step": s.nvme.num_bytes // a.steps
                for kind, s in kinds.items()
            }
            row |= {
                f"{kind}_handed_out_a_step": s.host.num_bytes // a.steps
                for kind, s in kinds.items()
            }
            rows.append(report.progress(row))
            session.program.close()
    return {"steps": a.steps, "same_losses": losses[0] == losses[1], "rows": rows}


def measure_replicas(a: argparse.Namespace, folder: Path) -> JsonObject:
    """Train the same steps with 1, 2 and 4 replicas of every expert, on a device each.

    loss_off_one: largest relative difference of a loss from that of one replica, in the first step,
    the first ten, and all. Sums in another order are rounded differently; all later differences
    follow from that.
    """
    jax.config.update("jax_num_cpu_devices", 4)
    rows = []
    for dtype in ("float32", "bfloat16"):
        losses: dict[int, NDArray[np.float64]] = {}
        for replicas in (1, 2, 4):
            mesh = MeshConfig(replicas, 1, 1)
            config = config_of(
                a, folder / f"{dtype}-{replicas}", mesh, experts="nvme", optimizer="nvme"
            )
            config = replace(config, compute_dtype=dtype)
            session = Session(config, make_mesh((replicas, 1, 1), jax.devices()[:replicas]))
            steps = [session.step(number) for number in range(a.steps)]
            stats = session.program.expert_stats()
            losses[replicas] = np.array([step.loss for step in steps])
            off = np.abs(losses[replicas] / losses[1] - 1)
            row = {
                "compute_dtype": dtype,
                "replicas": replicas,
                "last_loss": round(steps[-1].loss, 4),
                "loss_off_one": [float(f"{off[:number].max():.2g}") for number in (1, 10, a.steps)],
                "read_bytes_a_step": sum(step.read_bytes for step in steps) // a.steps,
                "written_bytes_a_step": sum(step.written_bytes for step in steps) // a.steps,
                "updates_a_step": stats.updates // a.steps,
            }
            rows.append(report.progress(row))
            session.program.close()
    return {"steps": a.steps, "rows": rows}
