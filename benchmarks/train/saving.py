"""Measure what a save costs a run whose experts are on NVMe.

    python benchmarks/train/saving.py --folder /mnt/nvme/scratch

Runs `train.py` in this process with a router that sends nothing to half of the experts, and a
checkpoint every --every steps. Of each save: seconds that training waits in `Run.save`, bytes of
records written meanwhile, bytes of the records whose weights or moments have another version than
in the save before, and bytes of all records. The first save follows steps like all others, but
everything has changed since the start.

Prints one JSON object as its last line.
"""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[2])  # for `benchmarks` and `jmoe`
    from benchmarks.lib import script

    script.start(reexec=True)

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import train
from benchmarks.lib import report
from benchmarks.lib.report import JsonObject
from benchmarks.offload.session import LIBRARY, MODULES, add_model_options, expert_bytes, model_of
from jmoe.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    TiersConfig,
    TrainConfig,
)
from jmoe.memory.version_store import Version, VersionStore
from jmoe.training.session import Session
from jmoe.training.state import TrainState

AWAY = -100.0  # no expert with such a bias is chosen


def config_of(a: argparse.Namespace, folder: Path) -> TrainConfig:
    records = a.layers * a.experts * expert_bytes(a)
    return TrainConfig(
        model=model_of(a),
        optimizer=OptimizerConfig(schedule="constant", warmup_steps=0),
        data=DataConfig(
            path=tuple(str(LIBRARY / f"{name}.py") for name in MODULES), held_out_bytes=20_000
        ),
        batch_size=a.batch_size,
        sequence_length=a.sequence_length,
        num_steps=a.every * a.saves,
        checkpoint=CheckpointConfig(every_steps=a.every),
        evaluation=EvaluationConfig(every_steps=0, sample_tokens=0),
        tiers=TiersConfig(
            experts="nvme",
            optimizer="nvme",
            gradients=a.gradients,
            host_cache_bytes=int(a.cache * records),
        ),
        output_dir=str(folder / "run"),
    )


class MeasuredSave:
    """Wraps `Session.save` and records its cost."""

    def __init__(self) -> None:
        self.save, self.rows = Session.save, list[JsonObject]()
        self.versions: dict[str, set[str]] = {}

    def __call__(self, run: Session, step: int, state: TrainState) -> None:
        stores = run.trainer.records.stores if run.trainer.records is not None else {}
        written = sum(store.stats().written_bytes for store in stores.values())
        begun = time.perf_counter()
        self.save(run, step, state)
        save_s = time.perf_counter() - begun
        written = sum(store.stats().written_bytes for store in stores.values()) - written
        run.checkpoints.wait_for_save()
        changed = records = 0
        for name, store in stores.items():
            pinned = versions_of(store, step)
            if name != "gradients":
                changed += len(pinned - self.versions.get(name, set())) * store.layout.record_bytes
                records += len(pinned) * store.layout.record_bytes
            self.versions[name] = pinned
        row = {"step": step, "save_s": round(save_s, 4), "written_bytes": written}
        self.rows.append(report.progress(row | {"changed_bytes": changed, "all_bytes": records}))


def versions_of(store: VersionStore, step: int) -> set[str]:
    """Return the files that are pinned for a step."""
    found: list[Path] = []
    for pins in (store.path / "pins").rglob(str(step)):
        found += [path for path in pins.iterdir() if Version.parse_or_none(path.name)]
    return {path.name for path in found}


def main() -> None:
    parser = report.parser(__doc__)
    add_model_options(parser, layers=4)
    parser.add_argument(
        "--folder", help="where the run and its records are; a temporary folder if not given"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--every", type=int, default=100, help="steps between saves")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument(
        "--cache", type=float, default=0.25, help="share of the records that host memory holds"
    )
    parser.add_argument("--gradients", choices=("host", "nvme"), default="host")
    a = parser.parse_args()
    measured, start = MeasuredSave(), Session.start_or_resume

    def start_with_idle_experts(run: Session) -> TrainState:
        state = start(run)
        away = AWAY * (np.arange(a.experts) % 2).astype(np.float32)
        return dataclasses.replace(
            state, router_bias=jax.tree.map(lambda b: b + away, state.router_bias)
        )

    Session.start_or_resume = start_with_idle_experts  # type: ignore[method-assign]
    Session.save = lambda run, step, state: measured(run, step, state)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        train.run_training(config_of(a, Path(folder)))
    result = {"benchmark": "saving", "options": report.options(a, "folder"), "saves": measured.rows}
    report.finish(result | {"versions": report.versions("jax", "jaxlib")})


if __name__ == "__main__":
    main()
